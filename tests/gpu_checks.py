"""Checks of the capture on a CUDA engine, each a process of its own: `python gpu_checks.py NAME`.

A process each, since vLLM reads its environment once and keeps the device's memory until it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_jobs import (
    SeenLogits,
    commit_files,
    commit_keys,
    make_job,
    read_commit_file,
    read_rejected,
    read_rows,
    seen_logits,
    unpack,
    write_prompts,
)
from tiny_model import make_tiny_model

from rollout.capture.core import CaptureCore
from rollout.pipeline import generate
from rollout.work import rollout_seed

KINDS: list[dict[str, Any]] = [
    {"top_p": 0.95},
    {"top_k": 20},
    {"min_p": 0.1},
    {"top_p": 0.8, "top_k": 50, "temperature": 0.6},
    {"temperature": 0.0, "n": 1},
]

ENGINE = {
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 2 * 2**30,
    "gpu_memory_utilization": 0.3,  # several checks may share a device
    "enforce_eager": True,
}


def engine_facts(output: Path) -> dict[str, Any]:
    """What the first commit record says of the engine."""
    facts: dict[str, Any] = read_commit_file(commit_files(output)[0])["engine"]
    return facts


def check_draws(seen: SeenLogits, facts: dict[str, Any], tokens: int) -> None:
    """The capture drew all tokens or none, and those that vLLM would have drawn.

    Where it truncated them too, vLLM's are of what a sort keeps.
    """
    by_capture = facts["tokens_drawn_by"] == "capture"
    assert bool(seen.cuts) == (facts["truncated_by"] == "capture")
    # rows past an end were drawn too, and count nowhere
    assert seen.drawn >= tokens if by_capture else seen.drawn == 0
    assert seen.drawn_otherwise == 0


def check_truncation(facts: dict[str, Any]) -> None:
    """Whoever draws the tokens truncates, in a job that records no draws."""
    assert facts["truncated_by"] == facts["tokens_drawn_by"]


def exact(folder: Path) -> None:
    """Every stored support against the masked logits, for all kinds in one batch; in-process."""
    from test_generate_exact import check_against_sampler

    model = make_tiny_model(folder / "model", vocab_size=4000, dtype=torch.bfloat16)
    rows = [{"id": str(i), "prompt": f"p{i}", "sampling": KINDS[i % 5]} for i in range(60)]
    prompts = write_prompts(folder / "p.jsonl", rows)
    job = make_job(
        model,
        prompts,
        folder / "out",
        model={"dtype": "bfloat16"},
        sampling={"n": 4, "max_tokens": 24, "top_p": 0.9},
        engine=ENGINE,
    )
    with seen_logits() as seen:
        summary = generate(job, show_progress=False)
    stored = read_rows(folder / "out")
    assert len(stored) == 48 * 4 + 12, len(stored)
    tokens = check_against_sampler(stored, seen)
    facts = engine_facts(folder / "out")
    print(
        f"exact: {tokens} tokens of {len(stored)} rollouts, {seen.drawn} drawn by the capture, "
        f"{seen.drawn_otherwise} of them otherwise than by vLLM, {len(seen.cuts)} truncated by it, "
        f"{seen.at_border} of them at the border otherwise than by a sort, {facts}"
    )
    assert summary.rollouts_failed == 0
    assert seen.at_border <= tokens // 100
    check_truncation(facts)
    check_draws(seen, facts, tokens)


def untruncated(folder: Path) -> None:
    """Top entries, tail mass and draws against the sampler's logits, in float64; in-process."""
    model = make_tiny_model(folder / "model", vocab_size=4000, dtype=torch.bfloat16)
    rows = [{"id": str(i), "prompt": f"p{i}"} for i in range(32)]
    job = make_job(
        model,
        write_prompts(folder / "p.jsonl", rows),
        folder / "out",
        model={"dtype": "bfloat16"},
        sampling={"n": 4, "max_tokens": 24},
        capture={"top": 128, "draws": 8},
        engine=ENGINE,
    )
    with seen_logits() as seen:
        summary = generate(job, show_progress=False)
    check_draws(seen, engine_facts(folder / "out"), summary.tokens)
    by_request = {key[0][: key[0].rindex("-") + 1]: key[0] for key in seen.rows}
    worst = {"logprob": 0.0, "tail": 0.0, "draw": 0.0}
    for row in read_rows(folder / "out"):
        internal = by_request[row["request"]]
        draws = np.array(row["draw_entries"], np.uint64).reshape(-1, 8)
        for position in range(len(row["token_ids"])):
            log_q = seen.rows[internal, position].double().log_softmax(-1).cpu().numpy()
            start, end = row["support_offsets"][position : position + 2]
            ids, logprobs = unpack(row["support_entries"][start:end])
            assert ids.size == 128
            kth = np.sort(log_q)[-128]
            assert (log_q[ids] >= kth).all()
            worst["logprob"] = max(worst["logprob"], float(np.abs(logprobs - log_q[ids]).max()))
            tail = np.exp(np.delete(log_q, ids)).sum()
            worst["tail"] = max(worst["tail"], abs(row["tail_mass"][position] / tail - 1))
            drawn, drawn_logprobs = unpack(draws[position].tolist())
            error = float(np.abs(drawn_logprobs - log_q[drawn]).max())
            worst["draw"] = max(worst["draw"], error)
    print(f"untruncated: largest errors {worst}, {engine_facts(folder / 'out')}")
    assert worst["logprob"] < 3e-6
    assert worst["draw"] < 3e-6
    assert worst["tail"] < 1e-5


def count_calls(owner: type, name: str) -> Any:
    """Count from now on, in the engine's process too, which is forked from this one."""
    counter = multiprocessing.get_context("fork").Value("q", 0)
    stock = getattr(owner, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counter.value += 1
        return stock(self, *args, **kwargs)

    setattr(owner, name, counted)
    return counter


def alignment(folder: Path) -> None:
    """200,000 tokens with preemption, chunked prefill, n 8, stops and all kinds mixed; no sync."""
    os.environ["VLLM_GPU_SYNC_CHECK"] = "error"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # or it would not count
    torch.set_num_threads(1)  # a fork of a process with a pool of torch's threads hangs
    model = make_tiny_model(folder / "model", vocab_size=4000, dtype=torch.bfloat16)
    rows = [
        {"id": str(i), "prompt": "x" * (20 + i % 200), "sampling": KINDS[i % 5]} for i in range(260)
    ]
    job = make_job(
        model,
        write_prompts(folder / "p.jsonl", rows),
        folder / "out",
        model={"dtype": "bfloat16"},
        sampling={
            "n": 8,
            "max_tokens": 200,
            "top_p": 0.9,
            "stop_token_ids": list(range(7, 4000, 100)),  # one in 500 tokens or so
            "ignore_eos": True,
        },
        engine=ENGINE
        | {
            "max_num_seqs": 256,
            "max_model_len": 512,
            "num_gpu_blocks_override": 2500,
            "max_num_batched_tokens": 512,
            "enable_prefix_caching": False,
        },
        capture={"support_capacity": 2**22},
    )
    from vllm.v1.core.sched.scheduler import Scheduler

    start, preemptions = time.monotonic(), count_calls(Scheduler, "_preempt_request")
    recorded, drawn = count_calls(CaptureCore, "on_step"), count_calls(CaptureCore, "on_draw")
    summary = generate(job, show_progress=False)
    stored = read_rows(folder / "out")
    assert summary.rollouts_failed == 0, summary.reasons
    assert len(stored) == 208 * 8 + 52
    assert preemptions.value >= 20
    facts = engine_facts(folder / "out")
    by_capture = facts["tokens_drawn_by"] == "capture"
    check_truncation(facts)
    assert (drawn.value if by_capture else recorded.value) > 1000
    assert (recorded.value if by_capture else drawn.value) == 0
    tokens = sum(len(row["token_ids"]) for row in stored)
    reasons = {row["finish_reason"] for row in stored}
    print(
        f"alignment: {tokens} tokens, {len(stored)} rollouts, {preemptions.value} preemptions, "
        f"{drawn.value} of {recorded.value + drawn.value} steps drawn by the capture, "
        f"{summary.replaced_rows} rows replaced, finish {reasons}, "
        f"{time.monotonic() - start:.0f} s, sync check error, {facts}"
    )
    assert facts["async_scheduling"] is True
    assert tokens >= 200_000
    assert reasons == {"stop", "length"}


def processed(folder: Path) -> None:
    """The same seeded sequences with vLLM's own processed logprobs."""
    model = make_tiny_model(folder / "model", vocab_size=4000, dtype=torch.bfloat16)
    rows = [{"id": str(i), "prompt_token_ids": [40 + i] * 9} for i in range(32)]
    sampling = {"top_k": 20, "top_p": 0.95, "max_tokens": 48, "seed": 5, "ignore_eos": True}
    job = make_job(
        model,
        write_prompts(folder / "p.jsonl", rows),
        folder / "out",
        model={"dtype": "bfloat16"},
        sampling=sampling,
        engine=ENGINE,
    )
    generate(job, show_progress=False)
    facts = engine_facts(folder / "out")
    check_truncation(facts)
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        dtype="bfloat16",
        logprobs_mode="processed_logprobs",
        max_logprobs=64,  # ties at the last place may keep more than top_k
        generation_config="vllm",
        max_model_len=256,
        **ENGINE,
    )
    (commit,) = commit_files(folder / "out")
    keys = commit_keys(read_commit_file(commit))
    stored = read_rows(folder / "out")
    params = [
        SamplingParams(
            top_k=20,
            top_p=0.95,
            max_tokens=48,
            ignore_eos=True,
            logprobs=64,
            seed=rollout_seed(5, key, index),
        )
        for key, index in keys
    ]
    outputs = llm.generate([{"prompt_token_ids": r["prompt_token_ids"]} for r in stored], params)
    # V1 sorts small batches in 0.26, and which of equal logits at the border are kept goes by that:
    # another batch may keep others of them; the capture keeps the lowest ids of them
    compared, positions, at_border, worst, equal = 0, 0, 0, 0.0, 0
    for row, output in zip(stored, outputs, strict=True):
        completion = output.outputs[0]
        equal += list(completion.token_ids) == row["token_ids"]
        for position, (ours, theirs) in enumerate(
            zip(row["token_ids"], completion.token_ids, strict=False)
        ):
            start, end = row["support_offsets"][position : position + 2]
            ids, logprobs = unpack(row["support_entries"][start:end])
            finite = {
                token: item.logprob
                for token, item in completion.logprobs[position].items()
                if np.isfinite(item.logprob)
            }
            assert len(finite) < 64
            ours_by_id = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
            others = set(ours_by_id) ^ set(finite)
            for kept in (ours_by_id, finite):
                for token in others & set(kept):
                    assert kept[token] - min(kept.values()) <= 2e-6, (position, token, kept)
            positions += 1
            at_border += bool(others)
            # where the sets differ, the normalisers may too
            for token, logprob in () if others else ours_by_id.items():
                error = abs(logprob - finite[token])
                assert error <= 2e-6 + 2.0**-23 * abs(logprob), (position, error, logprob)
                worst = max(worst, error)
                compared += 1
            if ours != theirs:  # another token: the prefixes differ from here on
                break
    print(
        f"processed: {compared} logprobs, largest difference {worst:.2e}, {at_border} of "
        f"{positions} tokens with others at the border, {equal} of 32 sequences equal, truncated "
        f"by the {facts['truncated_by']}"
    )
    assert at_border <= positions // 20
    assert compared > 1000
    assert equal >= 16, f"{equal} of 32 sequences are equal"


def overflow(folder: Path) -> None:
    """A capacity that is too small fails rollouts by name; the engine lives."""
    model = make_tiny_model(folder / "model", vocab_size=4000, dtype=torch.bfloat16)
    rows = [{"id": str(i), "prompt": f"p{i}"} for i in range(32)]
    job = make_job(
        model,
        write_prompts(folder / "p.jsonl", rows),
        folder / "out",
        model={"dtype": "bfloat16"},
        sampling={"top_p": 0.9, "max_tokens": 32},
        capture={"support_capacity": 20_000},
        engine=ENGINE,
    )
    summary = generate(job, show_progress=False)
    failed = read_rejected(folder / "out")
    print(f"overflow: {summary.rollouts_failed} failed, {summary.rollouts_committed} committed")
    assert summary.reconciles
    assert 0 < len(failed) == summary.rollouts_failed
    assert summary.rollouts_committed > 0
    assert {row["reason"] for row in failed} == {"support_overflow"}


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check for check in (exact, untruncated, alignment, processed, overflow)
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        CHECKS[sys.argv[1]](Path(folder))
