"""Synthetic rollouts for tests and benchmarks of the dataset: real shapes, made-up numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.rows import PlanEntry, Rejection, RolloutRow
from rollout.schema.entries import pack_entries
from rollout.schema.records import DatasetRecord, fingerprint_of

VOCAB = 151_936


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float32]:
    """Float32 logprobs of float64 logits."""
    top = logits.max()
    logprobs: NDArray[np.float64] = logits - (top + np.log(np.exp(logits - top).sum()))
    return logprobs.astype(np.float32)


def make_row(
    prompt: str = "p0",
    sample_index: int = 0,
    *,
    lengths: list[int] | None = None,
    kind: str = "kept",
    draws: int = 0,
    seed: int = 0,
    vocab: int = VOCAB,
    **fields: Any,
) -> RolloutRow:
    """One rollout whose token i keeps lengths[i] ids, listed by ascending id.

    A support of one id has logprob exactly 0. A top row moves a tenth of its mass to the tail.
    """
    rng = np.random.default_rng([seed, sample_index, *prompt.encode()])
    lengths = [1, 5, 1, 40] if lengths is None else lengths
    tokens = len(lengths)
    offsets = np.zeros(tokens + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    parts, chosen, sampled = [], [], []
    for length in lengths:
        ids = np.sort(rng.choice(vocab, length, replace=False))
        logprobs = log_softmax(rng.normal(0, 3, length))
        if kind == "top":
            logprobs += np.float32(np.log(0.9))
        pick = int(rng.integers(length))
        chosen.append(ids[pick])
        sampled.append(logprobs[pick])
        parts.append(pack_entries(ids, logprobs))
    entries = np.concatenate(parts) if parts else np.empty(0, np.uint64)
    drawn = pack_entries(
        rng.integers(0, vocab, tokens * draws), -rng.exponential(2, tokens * draws)
    )
    listed = kind != "none"
    values: dict[str, Any] = {
        "prompt_key": prompt,
        "rollout_id": f"{prompt}.{sample_index}",
        "group_id": f"g.{prompt}",
        "prompt_id": f"user {prompt}",
        "sample_index": sample_index,
        "group_size": 4,
        "prompt_token_ids": rng.integers(0, vocab, 7).astype(np.int32),
        "token_ids": np.array(chosen, np.int32),
        "sampled_logprobs": np.array(sampled, np.float32),
        "temperature": 1.0,
        "support_kind": kind,
        "support_offsets": offsets if listed else None,
        "support_entries": entries if listed else None,
        "tail_mass": np.full(tokens, 0.1, np.float32) if kind == "top" else None,
        "draw_entries": drawn if draws else None,
        "finish_reason": "stop",
    }
    return RolloutRow(**(values | fields))


def realistic_rows(count: int, *, tokens: int = 1024, seed: int = 0) -> list[RolloutRow]:
    """Kept supports as a model with a bf16 head makes them: mean 174 a token, half singletons.

    Widths are log-normal with a heavy tail, low ids are more common, and the logits of a support
    take few distinct values.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        widths = np.exp(rng.normal(3.75, 1.95, tokens)).astype(np.int64).clip(1, 80_000)
        widths[rng.random(tokens) < 0.3] = 1
        owner = np.repeat(np.arange(tokens), widths)
        ids = (VOCAB * rng.random(owner.size) ** 3).astype(np.int64)
        # one number for both, so that a repeated id is dropped and the rest is in id order
        owner, ids = np.divmod(np.unique(owner * VOCAB + ids), VOCAB)
        offsets = np.zeros(tokens + 1, np.int64)
        np.cumsum(np.bincount(owner, minlength=tokens), out=offsets[1:])
        logits = np.round(-rng.exponential(4, ids.size) * 4) / 4
        norm = np.log(np.add.reduceat(np.exp(logits), offsets[:-1]))
        logprobs = np.minimum((logits - norm[owner]).astype(np.float32), 0)
        rows.append(
            RolloutRow(
                prompt_key=f"p{index // 8}",
                rollout_id=f"r{index}",
                group_id=f"g{index // 8}",
                prompt_id=f"{index // 8}",
                sample_index=index % 8,
                group_size=8,
                prompt_token_ids=rng.integers(0, VOCAB, 200).astype(np.int32),
                token_ids=ids[offsets[:-1]].astype(np.int32),
                sampled_logprobs=logprobs[offsets[:-1]],
                temperature=1.0,
                support_kind="kept",
                support_offsets=offsets,
                support_entries=pack_entries(ids, logprobs),
                finish_reason="stop",
                text="word " * tokens,
            )
        )
    return rows


def make_rejection(prompt: str = "p9", sample_index: int | None = None, **fields: Any) -> Rejection:
    """A rejection of a whole prompt, or of one rollout."""
    values: dict[str, Any] = {
        "prompt_key": prompt,
        "sample_index": sample_index,
        "file": "prompts.jsonl",
        "line": 3,
        "stage": "render" if sample_index is None else "capture",
        "reason": "prompt_too_long" if sample_index is None else "support_capacity",
        "detail": "for people",
    }
    return Rejection(**(values | fields))


def make_record(**inputs: Any) -> DatasetRecord:
    """A dataset's record with these fingerprint inputs beside a model."""
    values = {"model": "tiny", "sampling": {"temperature": 1.0}} | inputs
    return DatasetRecord(
        fingerprint=fingerprint_of(values),
        fingerprint_inputs=values,
        provenance={"version": "0.1.0"},
    )


def plan(unit: str, *prompts: str) -> list[PlanEntry]:
    """Plan these prompts for one unit."""
    return [PlanEntry(prompt_key=key, prompt_id=f"user {key}", unit=unit) for key in prompts]
