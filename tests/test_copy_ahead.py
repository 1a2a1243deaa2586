"""How much is copied ahead: enough, not much too much, and seldom another amount."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.capture.copy_ahead import LEAST, CopyAhead


@pytest.mark.parametrize("mean", [10, 5_000, 89_000, 2_000_000])
def test_like_steps_find_one_amount_that_is_enough(mean: int) -> None:
    """A new amount is a new launch; one that is too small leaves the rest to the slow way."""
    needs = np.random.default_rng(0).normal(mean, 0.03 * mean, 2000).astype(int).tolist()
    ahead = CopyAhead(16 * 2**20)
    amounts = [ahead.after(need) for need in needs]
    short = [need > amount for need, amount in zip(needs[1:], amounts, strict=False)]
    assert sum(short) <= 2
    assert len(set(amounts)) <= 3
    assert amounts[-1] <= max(1.5 * mean, LEAST)


def test_it_rises_at_once_and_falls_late() -> None:
    ahead = CopyAhead(2**24)
    assert ahead.after(0) == LEAST
    high = ahead.after(1_000_000)
    assert 1_000_000 < high <= 1_400_000
    assert ahead.after(200_000) == high
    low = ahead.after(100_000)
    assert 100_000 < low <= 140_000
    assert ahead.after(0) == LEAST


def test_it_never_passes_the_buffers() -> None:
    assert CopyAhead(100).after(0) == 100
    assert CopyAhead(100).after(10**12) == 100
    assert CopyAhead(2**20).after(2**20 - 1) == 2**20
