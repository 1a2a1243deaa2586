"""Check the V2 runner's adapter without a GPU: `python v2_on_cpu.py`, a process of its own.

vLLM's V2 runner wants Triton with a CPU backend; here its kernels run in Triton's interpreter,
behind a stand-in for that backend. The capture's own kernels run as their reference.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

from triton.backends import backends

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

import torch
import vllm.v1.sample.ops.topk_topp_sampler as sampler_ops
from vllm.platforms.cpu import CpuPlatform

import rollout.capture.core as core
from rollout.kernels.support_capture import capture_step


def by_reference(*args: Any, **kwargs: Any) -> None:
    """Run the capture's reference, and its kernels only in steps that draw: they are slow here."""
    capture_step(*args, **kwargs, impl="reference" if kwargs["draw"] is None else "triton")


def masked_by_torch(logits: torch.Tensor, k: Any, p: Any, **_: Any) -> torch.Tensor:
    """Mask as vLLM does on the CPU; its Triton kernel needs more than the interpreter has."""
    masked: torch.Tensor = sampler_ops.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)
    return masked


def check_and_update_config(vllm_config: Any) -> None:
    """Keep the scheduling that a GPU has: the CPU platform turns the asynchronous one off."""
    stock_check(vllm_config)
    vllm_config.scheduler_config.async_scheduling = True


stock_check = CpuPlatform.check_and_update_config
CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
core.capture_step = by_reference  # type: ignore[attr-defined]
sampler_ops.apply_top_k_top_p_triton = masked_by_torch


def main(folder: Path) -> None:
    """Sample all kinds in one batch and compare with the sampler's own logits."""
    from engine_jobs import make_job, read_rows, seen_logits, write_prompts
    from gpu_checks import KINDS, check_draws, engine_facts
    from test_generate_exact import check_against_sampler
    from tiny_model import make_tiny_model
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from rollout.pipeline import generate

    model = make_tiny_model(folder / "model")
    rows = [
        {"id": str(i), "prompt": "x" * (5 + 9 * i), "sampling": KINDS[i % 5]} for i in range(10)
    ]
    job = make_job(
        model,
        write_prompts(folder / "p.jsonl", rows),
        folder / "out",
        sampling={"n": 2, "max_tokens": 24, "top_p": 0.9, "stop_token_ids": list(range(0, 320, 9))},
        engine={"max_num_seqs": 8, "max_num_batched_tokens": 32, "enable_chunked_prefill": True},
    )
    scheduled = []
    stock_schedule = AsyncScheduler.schedule

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled.append(1)
        return stock_schedule(self, *args, **kwargs)

    AsyncScheduler.schedule = schedule
    with seen_logits() as seen:
        summary = generate(job, show_progress=False)
    assert scheduled, "the asynchronous scheduler did not run"
    assert summary.rollouts_failed == 0, summary.reasons
    stored = read_rows(folder / "out")
    assert len(stored) == 8 * 2 + 2
    tokens = check_against_sampler(stored, seen)
    facts = engine_facts(folder / "out")
    assert facts["runner"] == "v2"
    assert (facts["tokens_drawn_by"], facts["truncated_by"]) == ("capture", "capture")
    check_draws(seen, facts, tokens)
    assert seen.discarded > 0, "no prefill was split over steps"
    # a stop is seen one step late: the step in flight samples once more, and that must not count
    assert len(seen.rows) > tokens, "no row past an end: the stops came from max_tokens alone"
    # all but the greedy kind are truncated: the job has a top-p
    truncated = sum(len(row["token_ids"]) for row in stored if row["temperature"] > 0.0)
    assert len(seen.cuts) >= truncated > 0
    # sums of float32 decide otherwise than those of float64 once in some hundred runs
    assert seen.at_border <= 1
    print(
        f"{tokens} tokens of {len(stored)} rollouts on the V2 runner, {seen.drawn} drawn, "
        f"{len(seen.cuts)} truncated"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
