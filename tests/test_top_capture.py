"""Heads and tails of untruncated rows, against a sort and a float64 sum of the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle_capture import (
    KEPT,
    OVERFLOW,
    TOP,
    Row,
    allowed_error,
    capture,
    head,
    log_softmax,
    tail_mass,
)

from rollout.kernels.launch import CHUNK, GROUP

IMPLS = ["reference", "triton"]


def assert_head(row: Row, logits: torch.Tensor, top: int) -> None:
    """Compare a TOP row with the sort and the sum of the rest."""
    ids = head(logits, top)
    exact = log_softmax(logits)[ids]
    assert row.ids == ids
    assert row.flags == 0
    assert np.all(np.abs(row.logprobs - exact) <= allowed_error(exact))
    expected = tail_mass(logits, ids)
    assert abs(row.tail - expected) <= 1e-5 * expected


def random_logits(rows: int, vocab: int, *, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * spread


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "top"), [(5, 1), (507, 16), (2 * CHUNK + 77, 100)])
def test_heads_of_random_rows(impl: str, dtype: torch.dtype, vocab: int, top: int) -> None:
    # bfloat16 has many equal logits at the edge of the head
    logits = random_logits(3, vocab).to(dtype)
    rows, _ = capture(logits, [TOP] * 3, [1, 2, 3], impl=impl, top=top)
    for row, values in zip(rows, logits, strict=True):
        assert row.count == top
        assert_head(row, values, top)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("top", [1, 31, 32, 33, 64])
def test_of_equal_ids_the_lowest_are_taken(impl: str, top: int) -> None:
    vocab = CHUNK + 64
    equal = torch.zeros(vocab)
    # the same maximum in every group, and more of it in the last one
    peaks = torch.zeros(vocab)
    peaks[GROUP // 2 :: GROUP] = 3.0
    peaks[-GROUP:] = 3.0
    # an upper group outbids, lower groups tie
    mixed = torch.zeros(vocab)
    mixed[[7, 40, 41, 900, CHUNK + 3, CHUNK + 5]] = 2.0
    mixed[[CHUNK + 4, 902]] = 2.5
    zeros = torch.zeros(vocab)
    zeros[::2] = -0.0
    logits = torch.stack([equal, peaks, mixed, zeros])
    rows, _ = capture(logits, [TOP] * 4, [0] * 4, impl=impl, top=top)
    for row, values in zip(rows, logits, strict=True):
        assert_head(row, values, top)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("values", ["ascending", "descending", "clustered", "huge", "negative"])
def test_heads_wherever_they_lie(impl: str, values: str) -> None:
    vocab, top = 1500, 20
    row = {
        "ascending": torch.arange(vocab) * 0.01,
        "descending": torch.arange(vocab) * -0.01,
        # all of the head in one group, and the bound far below the rest
        "clustered": torch.where(torch.arange(vocab) // GROUP == 9, 50.0, -1e4)
        + torch.arange(vocab) * 1e-2,
        "huge": torch.arange(vocab) * 1e30 - 7e32,
        "negative": -1e-38 * torch.arange(1, vocab + 1),
    }[values]
    logits = row[None].float()
    (recorded,), _ = capture(logits, [TOP], [0], impl=impl, top=top)
    assert_head(recorded, logits[0], top)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mass", [1e-1, 1e-3, 1e-6, 1e-9, 1e-12])
def test_a_small_tail_is_summed_and_not_subtracted(impl: str, mass: float) -> None:
    vocab, top = 3000, 8
    tail = random_logits(1, vocab, spread=1.0).double()[0]
    tail[:top] = -torch.inf
    head_logits = torch.linspace(4.0, 5.0, top, dtype=torch.float64)
    shift = torch.logsumexp(head_logits, 0) - torch.logsumexp(tail, 0)
    logits = tail + shift + np.log(mass / (1 - mass))
    logits[:top] = head_logits
    (row,), _ = capture(logits[None].float(), [TOP], [0], impl=impl, top=top)
    expected = tail_mass(logits.float(), list(range(top)))
    assert expected == pytest.approx(mass, rel=1e-2)
    assert abs(row.tail - expected) <= 1e-5 * expected


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kept", [1, 9, 10, 11])
def test_masked_ids_are_in_neither_head_nor_tail(impl: str, kept: int) -> None:
    logits = torch.full((1, 700), -torch.inf)
    logits[0, torch.arange(kept) * 61] = torch.arange(kept) * 0.5
    (row,), _ = capture(logits, [TOP], [0], impl=impl, top=10)
    assert row.count == min(kept, 10)
    assert_head(row, logits[0], 10)
    assert (row.tail == 0.0) == (kept <= 10)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_head_as_wide_as_the_vocabulary(impl: str) -> None:
    logits = random_logits(2, 70)
    rows, _ = capture(logits, [TOP] * 2, [0, 1], impl=impl, top=70)
    for row, values in zip(rows, logits, strict=True):
        assert_head(row, values, 70)
        assert row.tail == 0.0


@pytest.mark.parametrize("impl", IMPLS)
def test_heads_take_part_in_the_overflow_rule(impl: str) -> None:
    logits = random_logits(4, 400)
    kinds = [TOP, KEPT, TOP, TOP]
    logits[1, 30:] = -torch.inf
    rows, out = capture(logits, kinds, [0] * 4, impl=impl, top=10, capacity=50)
    assert [row.count for row in rows] == [10, 30, 10, 10]
    assert [row.flags for row in rows] == [0, 0, 0, OVERFLOW]
    assert_head(rows[2], logits[2], 10)
    assert torch.all(out.entries[50:] == -77)
    # the mass of the tail needs no room
    assert abs(rows[3].tail - tail_mass(logits[3], head(logits[3], 10))) <= 1e-5


@pytest.mark.parametrize("impl", IMPLS)
def test_no_head_at_all(impl: str) -> None:
    logits = random_logits(2, 100)
    rows, _ = capture(logits, [KEPT, KEPT], [0, 0], impl=impl, top=0)
    assert [row.tail for row in rows] == [0.0, 0.0]
