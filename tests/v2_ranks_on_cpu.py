"""Check the V2 runner's ranks without a GPU: `python v2_ranks_on_cpu.py`, a process of its own.

Two of them share the model, each in a process that has this one's stand-ins (`v2_on_cpu`). Noise of
the second is another one's: it would go on from other tokens if it drew by itself.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import v2_on_cpu  # noqa: F401  before anything of vLLM's
from engine_jobs import make_job, read_rows, write_prompts
from gpu_checks import KINDS, engine_facts
from tiny_model import make_tiny_model
from vllm import SamplingParams
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.sample.states import SamplingStates

from rollout.agreement import agree
from rollout.pipeline import generate

os.environ |= {
    # ranks would each ask for a memory node of their own
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # layers of a shared model are compiled, with the help of Triton's driver
    "TORCHDYNAMO_DISABLE": "1",
}

stock_add = SamplingStates.add_request


def add_request(self: SamplingStates, index: int, params: SamplingParams) -> bool:
    """Give the requests of a rank that follows other seeds."""
    needs_processing: bool = stock_add(self, index, params)
    if get_tp_group().rank_in_group:
        self.seeds.np[index] = ~self.seeds.np[index]
    return needs_processing


SamplingStates.add_request = add_request


def main(folder: Path) -> None:
    """Sample all kinds on two ranks, and compare with the whole model."""
    model = make_tiny_model(folder / "model", logit_scale=1.0)
    rows = [{"id": str(i), "prompt": f"p{i}", "sampling": KINDS[i % 5]} for i in range(10)]
    job = make_job(
        model,
        write_prompts(folder / "p.jsonl", rows),
        folder / "out",
        sampling={"n": 2, "max_tokens": 8, "top_p": 0.9, "ignore_eos": True},
        engine={"tensor_parallel_size": 2, "max_num_seqs": 8},
    )
    summary = generate(job, show_progress=False)
    assert summary.rollouts_failed == 0, summary.reasons
    stored = read_rows(folder / "out")
    assert len(stored) == 8 * 2 + 2
    facts = engine_facts(folder / "out")
    assert facts["runner"] == "v2"
    assert (facts["tokens_drawn_by"], facts["truncated_by"]) == ("capture", "capture")
    report = agree(folder / "out", model)
    assert report.tokens == summary.tokens
    assert report.largest_deviation < 1e-4, report.largest_deviation
    print(f"{summary.tokens} tokens of {len(stored)} rollouts on two ranks")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
