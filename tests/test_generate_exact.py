"""What the job stores is what the sampler drew from: a real engine, every kind of truncation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_jobs import SeenLogits, make_job, read_rows, seen_logits, unpack, write_prompts
from oracle_cut import allowed_cut
from tiny_model import make_tiny_model, reference_model

from rollout.pipeline import generate

pytestmark = pytest.mark.engine

TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.1},
    "top_p top_k temperature": {"top_p": 0.8, "top_k": 50, "temperature": 0.6},
    "greedy": {"temperature": 0.0, "n": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def check_against_sampler(rows: list[dict[str, Any]], seen: SeenLogits) -> int:
    """Compare every stored token with the sampler's own masked logits; returns the tokens."""
    by_request = {key[0][: key[0].rindex("-") + 1]: key[0] for key in seen.rows}
    tokens = 0
    for row in rows:
        offsets, entries = row["support_offsets"], row["support_entries"]
        assert len(offsets) == len(row["token_ids"]) + 1
        for position, token in enumerate(row["token_ids"]):
            key = (by_request[row["request"]], position)
            assert seen.sampled[key] == token
            ids, logprobs = unpack(entries[offsets[position] : offsets[position + 1]])
            sampled_logprob = np.float32(row["sampled_logprobs"][position])
            tokens += 1
            if row["temperature"] == 0.0:
                assert ids.tolist() == [token]
                assert logprobs.tolist() == [0.0] == [sampled_logprob]
                continue
            masked = seen.rows[key].double()
            if key in seen.cuts:
                seen.at_border += int(torch.isfinite(masked).sum()) != ids.size
                masked = keeping(seen, key, ids.size)
            kept = torch.isfinite(masked).nonzero().flatten()
            assert torch.equal(torch.tensor(sorted(ids.tolist())), kept)
            exact = masked.log_softmax(-1).numpy()[ids]
            assert np.all(np.abs(logprobs - exact) <= 5e-7 + 2.0**-23 * np.abs(exact))
            assert abs(np.log(np.exp(logprobs.astype(np.float64)).sum())) <= 1e-5
            assert logprobs[ids == token].tolist() == [sampled_logprob]
            # most probable first, ties by id: ascending packed value
            assert entries[offsets[position] : offsets[position + 1]] == sorted(
                entries[offsets[position] : offsets[position + 1]]
            )
    return tokens


def keeping(seen: SeenLogits, key: tuple[str, int], count: int) -> torch.Tensor:
    """The masked logits of a row that the capture truncated, if it may keep as many ids as it did.

    Its sums are float32: an id at the border is kept or not by the last millionth of the mass.
    """
    logits, top_k, top_p = seen.cuts[key]
    order, shortest, longest = allowed_cut(logits.numpy(), top_k, top_p)
    assert shortest <= count <= longest, (key, count, shortest, longest)
    kept = torch.from_numpy(order[:count].copy())
    masked = torch.full(logits.shape, -torch.inf, dtype=torch.float64)
    masked[kept] = logits[kept].double()
    return masked


def check_replay(rows: list[dict[str, Any]], model: torch.nn.Module) -> None:
    """Replay through the same weights in float32: ratio 1; without the support: the kept mass."""
    unreplayed, kept_mass = [], []
    for row in rows:
        if row["temperature"] == 0.0:
            continue
        prompt, completion = row["prompt_token_ids"], row["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0].float()
        for position, token in enumerate(completion):
            z = logits[len(prompt) + position - 1] / row["temperature"]
            start, end = row["support_offsets"][position : position + 2]
            ids, _ = unpack(row["support_entries"][start:end])
            log_q = row["sampled_logprobs"][position]
            replayed = z[token] - z[torch.from_numpy(ids)].logsumexp(0)
            assert abs(float(replayed - log_q)) < 1e-3
            log_p = z.log_softmax(-1)
            unreplayed.append(float((log_p[token] - log_q).exp()))
            kept_mass.append(float(log_p[torch.from_numpy(ids)].exp().sum()))
    np.testing.assert_allclose(unreplayed, kept_mass, rtol=2e-3)


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_stored_support_is_what_the_sampler_kept(name: str, model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": f"prompt {i}"} for i in range(6)])
    sampling = {"n": 4, "max_tokens": 12} | TRUNCATIONS[name]
    with seen_logits() as seen:
        summary = generate(
            make_job(model, prompts, tmp_path / "out", sampling=sampling), show_progress=False
        )
    rows = read_rows(tmp_path / "out")
    assert len(rows) == summary.rollouts_committed == 6 * sampling["n"]
    assert check_against_sampler(rows, seen) == sum(len(row["token_ids"]) for row in rows)
    check_replay(rows, reference_model(model))


def test_a_batch_that_mixes_all_kinds(model: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{name} {i}", "sampling": values, "id": f"{name} {i}"}
        for i in range(3)
        for name, values in TRUNCATIONS.items()
    ]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    job = make_job(
        model, prompts, tmp_path / "out", sampling={"n": 2, "max_tokens": 16, "top_p": 0.9}
    )
    with seen_logits() as seen:
        generate(job, show_progress=False)
    stored = read_rows(tmp_path / "out")
    assert len(stored) == 3 * (4 * 2 + 1)
    assert {row["temperature"] for row in stored} == {0.0, np.float32(0.6), 1.0}
    check_against_sampler(stored, seen)
    check_replay(stored, reference_model(model))


def test_preemption_chunked_prefill_and_stops_misalign_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = []
    stock_preempt = Scheduler._preempt_request

    def preempt(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return stock_preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
    # 20 blocks of 32 tokens for 16 requests of up to 190 tokens: the scheduler must preempt
    kinds = list(TRUNCATIONS.values())
    rows = [
        {"prompt": "x" * (20 + 2 * i), "sampling": kinds[i % len(kinds)] | {"n": 1}}
        for i in range(40)
    ]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    job = make_job(
        model,
        prompts,
        tmp_path / "out",
        # two of these stop no row once in five hundred runs
        sampling={"max_tokens": 90, "stop_token_ids": list(range(40, 46)), "ignore_eos": True},
        engine={
            "num_gpu_blocks_override": 20,
            "block_size": 32,
            "max_num_batched_tokens": 32,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": False,
        },
    )
    with seen_logits() as seen:
        summary = generate(job, show_progress=False)
    stored = read_rows(tmp_path / "out")
    tokens = check_against_sampler(stored, seen)
    assert summary.rollouts_failed == 0
    assert len(stored) == 40
    assert tokens >= 1800
    assert len(preempted) >= 5
    assert seen.discarded > 0, "no prefill was split over steps"
    assert {row["finish_reason"] for row in stored} == {"stop", "length"}
