"""Check ranks that share a model, on CUDA: `python ranks_on_gpu.py [STAGES]`, its own process.

Two ranks a stage. Where there are fewer devices than ranks, all of them use the first one: NCCL
takes two ranks of a device only if they say that they are on different hosts. So they do.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from engine_jobs import make_job, write_prompts
from gpu_checks import ENGINE, KINDS, check_truncation, engine_facts
from tiny_model import make_tiny_model

from rollout import engine_args
from rollout.agreement import agree
from rollout.pipeline import generate

STAGES = int(sys.argv[1]) if len(sys.argv) > 1 else 1
SHARED = torch.cuda.device_count() < 2 * STAGES

os.environ["VLLM_GPU_SYNC_CHECK"] = "error"
if SHARED:
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"  # between devices
    engine_args.check_devices = lambda _: None  # type: ignore[assignment, attr-defined]

if SHARED and __name__ == "__mp_main__":  # a process that vLLM has started
    from rollout.capture.gpu_worker import GPUCaptureWorker

    stock_init = GPUCaptureWorker.init_device

    def init_device(self: Any) -> Any:
        """Put a rank on the first device, by itself on what NCCL takes for a host."""
        os.environ["NCCL_HOSTID"] = f"host-{self.rank}"
        self.local_rank = 0
        return stock_init(self)

    GPUCaptureWorker.init_device = init_device  # type: ignore[method-assign]


def main(folder: Path) -> None:
    """All go on from the same tokens, drawn on one of them; no sync."""
    model = make_tiny_model(folder / "model", vocab_size=4000, dtype=torch.bfloat16)
    rows = [{"id": str(i), "prompt": f"p{i}", "sampling": KINDS[i % 5]} for i in range(60)]
    job = make_job(
        model,
        write_prompts(folder / "p.jsonl", rows),
        folder / "out",
        model={"dtype": "bfloat16"},
        sampling={"n": 8, "max_tokens": 48, "top_p": 0.9, "ignore_eos": True},
        engine=ENGINE
        | {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": STAGES,
            "distributed_executor_backend": "mp",
            "disable_custom_all_reduce": SHARED,
            "enforce_eager": False,
        },
    )
    summary = generate(job, show_progress=False)
    assert summary.rollouts_failed == 0, summary.reasons
    facts = engine_facts(folder / "out")
    report = agree(folder / "out", model)
    print(
        f"ranks: {report.tokens} tokens of {summary.rollouts_committed} rollouts, {STAGES} x 2 "
        f"ranks on {torch.cuda.device_count()} devices, within {report.largest_deviation:.2g} of "
        f"the whole model, {facts}"
    )
    check_truncation(facts)
    assert facts["tokens_drawn_by"] == ("capture" if facts["runner"] == "v2" else "engine")
    assert report.tokens == summary.tokens == (48 * 8 + 12) * 48
    # bfloat16; on the CPU a rank that goes on from other tokens makes it 4.9 (`v2_ranks_on_cpu`)
    assert report.largest_deviation < 0.25


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
