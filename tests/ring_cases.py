"""Steps for the ring and what must come of them, and stand-ins for CUDA's streams and events."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from noise import add_noise, noise_of
from spool_blocks import entries_of

from rollout.capture import copy_ahead, ring
from rollout.capture.batch import BatchRows, RowCut, RowNoise
from rollout.capture.launch_graphs import LaunchGraphs
from rollout.capture.request import GREEDY, KEPT, NONE, SKIP, TOP, CaptureSettings
from rollout.kernels.support_cut import SupportCut, cut_reference
from rollout.kernels.token_draw import tokens_reference
from rollout.spool import StoredStep

VOCAB = 50


class Event:
    """Stands in for a CUDA event whose work is done at once."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """Stands in for a CUDA stream."""

    def __init__(self, *_: Any) -> None: ...

    def wait_event(self, _event: Event) -> None: ...


def do_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a ring be made and filled on the CPU; the copies are real."""
    stock = torch.zeros

    def unpinned(*args: Any, pin_memory: bool = False, **kw: Any) -> Any:
        return stock(*args, **kw)

    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(ring, "_pin", lambda _memory: None)
    monkeypatch.setattr(ring, "_unpin", lambda _memory: None)
    monkeypatch.setattr(LaunchGraphs, "run", lambda _self, _key, launch: launch())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(ring.RingRecorder, "_launch_stream", lambda _self: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _stream: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)


def copy_by_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step take the way of those whose copies take long."""
    monkeypatch.setattr(ring, "_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(copy_ahead, "LEAST", 6)  # of 15: the rest goes the other way


def make_recorder(
    capacity: int = 400, slots: int = 3, draws_tokens: bool = False, draws: int = 2
) -> ring.RingRecorder:
    settings = CaptureSettings(support_capacity=capacity, top=4, draws=draws)
    return ring.RingRecorder(
        settings,
        device=torch.device("cpu"),
        max_rows=8,
        vocab_size=VOCAB,
        slots=slots,
        add_noise=add_noise if draws_tokens else None,
    )


def step_of(seed: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor, BatchRows]:
    """A step with each kind of row; a KEPT row keeps ids below 10."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, VOCAB, generator=generator)
    kinds = np.array([KEPT, GREEDY, TOP, NONE, SKIP][:rows], np.int8)
    logits[kinds == KEPT, 10:] = -torch.inf
    sampled = torch.randint(0, 10, (rows,), generator=generator)
    return (
        logits,
        sampled,
        BatchRows(
            request_ids=[f"r{i}" for i in range(rows)],
            positions=np.full(rows, seed, np.int32),
            kinds=kinds,
            seeds=np.arange(rows, dtype=np.int64),
        ),
    )


def check_block(block: StoredStep, seed: int, draws: int = 2) -> None:
    """Compare a written step with the logits that it was made of."""
    logits, sampled, rows = step_of(seed)
    log_q = logits.double().log_softmax(-1).numpy()
    assert block.step == seed
    assert block.request_ids == rows.request_ids
    assert block.positions.tolist() == rows.positions.tolist()
    assert block.sampled.tolist() == sampled.tolist()
    assert block.counts.tolist() == [10, 1, 4, 0, 0]
    entries = entries_of(block)
    assert block.need == entries.size == 15
    ids = (entries & np.uint64(0xFFFFFFFF)).astype(int)
    logprobs = (entries >> np.uint64(32)).astype(np.uint32).view(np.float32)
    assert sorted(ids[:10]) == list(range(10))
    np.testing.assert_allclose(logprobs[:10], log_q[0, ids[:10]], atol=1e-6)
    assert (ids[10], logprobs[10]) == (int(sampled[1]), 0.0)
    assert sorted(ids[11:]) == sorted(np.argsort(-log_q[2])[:4].tolist())
    np.testing.assert_allclose(block.sampled_logprobs[3], log_q[3, sampled[3]], atol=1e-6)
    assert block.draws.shape == (5, draws)


def noise_for(seed: int, *, cut: bool) -> RowNoise:
    """By what the tokens of 4 rows are drawn."""
    of_rows = np.arange(seed, seed + 4)
    return RowNoise(
        seeds=of_rows,
        lead=np.full(4, 9 - seed, np.int64),
        untruncated=seed % 2 == 0,
        cut=RowCut(
            # one of them alone, neither, or both
            top_k=np.array([VOCAB, VOCAB, 12, 3], np.int32)[of_rows % 4],
            top_p=np.array([0.8, 1.0, 0.6, 1.0], np.float32)[of_rows % 4],
        )
        if cut
        else None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToDraw:
    """A step whose tokens are drawn by the capture."""

    logits: torch.Tensor
    rows: BatchRows
    masked: torch.Tensor
    """[N, V] what the tokens are drawn from."""
    tokens: list[int]

    def check(self, block: StoredStep) -> None:
        """Compare it with what was written."""
        kinds = self.rows.kinds
        assert block.kinds.tolist() == kinds.tolist()
        assert block.sampled.tolist() == self.tokens
        kept = (self.masked > -torch.inf).sum(dim=1).tolist()
        counts = {SKIP: 0, GREEDY: 1, TOP: 4, NONE: 0}
        expected = [counts.get(kind, kept[i]) for i, kind in enumerate(kinds.tolist())]
        assert block.counts.tolist() == expected
        log_q = self.masked.double().log_softmax(-1).numpy()
        of_tokens = log_q[range(len(kinds)), self.tokens]
        of_tokens[(kinds == SKIP) | (kinds == GREEDY)] = 0.0
        np.testing.assert_allclose(block.sampled_logprobs, of_tokens, atol=1e-6)
        entries, start = entries_of(block), 0
        for row, count in enumerate(expected):
            packed, start = entries[start : start + count], start + count
            if kinds[row] == KEPT:
                ids = (packed & np.uint64(0xFFFFFFFF)).astype(int)
                logprobs = (packed >> np.uint64(32)).astype(np.uint32).view(np.float32)
                assert sorted(ids) == np.flatnonzero(log_q[row] > -np.inf).tolist()
                np.testing.assert_allclose(logprobs, log_q[row, ids], atol=1e-6)


def step_to_draw(seed: int, *, cut: bool = False, noise: RowNoise | None = None) -> ToDraw:
    """A step of rows that are drawn here, in odd steps of KEPT ones alone.

    They come masked, or, if `cut`, are truncated here too.
    """
    rows = step_of(seed, 4)[2]
    noise = noise or noise_for(seed, cut=cut)
    kinds = np.array([KEPT, GREEDY, TOP, NONE] if noise.untruncated else [KEPT, KEPT, SKIP, KEPT])
    kept = torch.from_numpy(kinds == KEPT)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, VOCAB, generator=generator)
    masked = logits.clone()
    if noise.cut is None:
        logits[kept, 10:] = masked[kept, 10:] = -torch.inf
    else:
        logits[kept, 40:] = -torch.inf  # as by min-p, which vLLM applies in any case
        top_k, top_p = torch.from_numpy(noise.cut.top_k), torch.from_numpy(noise.cut.top_p)
        masked[kept] = cut_reference(logits, SupportCut(top_k=top_k, top_p=top_p))[kept]
    positions = (seed + noise.lead).tolist()
    of_ids = noise_of(noise.seeds.tolist(), positions, VOCAB).cpu()
    of_ids[kinds == GREEDY] = 0.0
    tokens = tokens_reference(masked, of_ids)
    tokens[kinds == SKIP] = 0
    return ToDraw(
        logits=logits,
        rows=dataclasses.replace(rows, kinds=kinds.astype(np.int8), noise=noise),
        masked=masked,
        tokens=tokens.tolist(),
    )
