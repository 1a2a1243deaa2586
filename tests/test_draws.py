"""Draws: which random bits, which ids for them, their distribution and their independence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle_capture import GREEDY, KEPT, NONE, TOP, allowed_error, capture, log_softmax, philox

from rollout.kernels.draws import DOMAIN, draw_bits
from rollout.kernels.launch import CHUNK

IMPLS = ["reference", "triton"]

FALSE_ALARM = 1e-6
"""Chance that a statistical test here fails though the draws are right, were the seed not fixed."""


def random_logits(rows: int, vocab: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 3.0


def chi_square_bound(degrees: int) -> float:
    """Approximate the chi-square quantile of 1 - FALSE_ALARM (Wilson and Hilferty)."""
    normal = 4.7534  # of the standard normal distribution
    return float(degrees * (1 - 2 / (9 * degrees) + normal * np.sqrt(2 / (9 * degrees))) ** 3)


def test_philox_is_the_published_one() -> None:
    # known answers of the authors' Random123 distribution
    assert philox(0, (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    full = 0xFFFFFFFF
    assert philox((full << 32) | full, (full, full, full, full)) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


def test_bits_are_a_function_of_seed_position_and_index() -> None:
    seeds = [0, 1, -1, 2**62 + 12345, -(2**63)]
    positions = [0, 3, 2**31 - 1, 2**31 + 5, 7]
    words = draw_bits(torch.tensor(seeds), torch.tensor(positions), 3)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for draw in range(3):
            block = philox(seed & (2**64 - 1), (position, draw, 0, DOMAIN))
            assert words[row, draw].tolist() == block


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [KEPT, TOP, NONE], ids=["kept", "top", "none"])
def test_a_draw_inverts_the_cumulative_distribution(
    impl: str, dtype: torch.dtype, kind: int
) -> None:
    vocab, num_draws = CHUNK + 500, 13
    logits = random_logits(3, vocab).to(dtype)
    logits[:, ::3] = -torch.inf
    seeds, positions = [5, -6, 2**60], [0, 9, 2**31]
    rows, _ = capture(
        logits,
        [kind] * 3,
        [1] * 3,
        impl=impl,
        top=4,
        draws=num_draws,
        seeds=seeds,
        positions=positions,
    )
    for i, row in enumerate(rows):
        exact = log_softmax(logits[i])
        upper = np.cumsum(np.exp(exact))
        for draw, token in enumerate(row.draw_ids):
            block = philox(seeds[i] & (2**64 - 1), (positions[i], draw, 0, DOMAIN))
            uniform = ((block[0] >> 5) * 2**26 + (block[1] >> 6)) / 2**53
            assert upper[token] - np.exp(exact[token]) - 1e-6 <= uniform <= upper[token] + 1e-6
        expected = exact[row.draw_ids]
        assert np.all(np.abs(row.draw_logprobs - expected) <= allowed_error(expected))


@pytest.mark.parametrize("impl", IMPLS)
def test_draws_repeat_in_any_batch_and_change_with_the_seed(impl: str) -> None:
    logits = random_logits(1, 900)
    batch = logits.repeat(4, 1)
    alone, _ = capture(logits, [NONE], [0], impl=impl, draws=6, seeds=[8], positions=[5])
    rows, _ = capture(
        batch, [NONE] * 4, [3] * 4, impl=impl, draws=9, seeds=[7, 8, 8, 8], positions=[5, 5, 6, 5]
    )
    assert rows[1].draw_ids[:6] == alone[0].draw_ids
    assert rows[3].draw_ids == rows[1].draw_ids
    assert len({tuple(row.draw_ids) for row in rows[:3]}) == 3


@pytest.mark.parametrize(("impl", "count"), [("reference", 80), ("triton", 2)])
def test_the_frequencies_are_those_of_the_distribution(impl: str, count: int) -> None:
    vocab, num_draws = 50, 250
    logits = random_logits(1, vocab, seed=4) * 0.5
    rows, _ = capture(
        logits.expand(count, vocab).contiguous(),
        [NONE] * count,
        [0] * count,
        impl=impl,
        draws=num_draws,
        seeds=list(range(count)),
    )
    total = count * num_draws
    expected = np.exp(log_softmax(logits[0])) * total
    seen = np.bincount(np.concatenate([row.draw_ids for row in rows]), minlength=vocab)
    common = expected >= 5
    seen = np.append(seen[common], seen[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    assert ((seen - expected) ** 2 / expected).sum() < chi_square_bound(len(expected) - 1)


@pytest.mark.parametrize(("impl", "count"), [("reference", 2000), ("triton", 100)])
def test_draws_are_independent_of_each_other(impl: str, count: int) -> None:
    q = np.array([0.2, 0.3, 0.5])
    logits = torch.log(torch.tensor(q)).float().expand(count, 3).contiguous()
    rows, _ = capture(
        logits,
        [NONE] * count,
        [0] * count,
        impl=impl,
        draws=2,
        seeds=[1] * count,
        positions=list(range(count)),
    )
    table = np.zeros((3, 3))
    for row in rows:
        table[row.draw_ids[0], row.draw_ids[1]] += 1
    expected = q[:, None] * q[None, :] * count
    assert ((table - expected) ** 2 / expected).sum() < chi_square_bound(8)


def test_draws_are_independent_of_a_token_sampled_with_the_same_seed() -> None:
    # an engine's sampler that keys Philox by the same seed counts with a last word of 0
    count = 4000
    seeds = torch.arange(count)
    q = np.array([0.25, 0.25, 0.5])
    words = draw_bits(seeds, torch.zeros(count, dtype=torch.int64), 1)
    drawn = np.searchsorted(np.cumsum(q), words[:, 0, 0].numpy() / 2**32, side="right")
    sampled = np.searchsorted(
        np.cumsum(q), [philox(seed, (0, 0, 0, 0))[0] / 2**32 for seed in range(count)], side="right"
    )
    table = np.zeros((3, 3))
    np.add.at(table, (drawn, sampled), 1)
    expected = q[:, None] * q[None, :] * count
    assert ((table - expected) ** 2 / expected).sum() < chi_square_bound(8)


@pytest.mark.parametrize("impl", IMPLS)
def test_ids_without_probability_are_never_drawn(impl: str) -> None:
    logits = torch.full((2, 600), -torch.inf)
    logits[0, [100, 599]] = 0.0
    logits[1] = -1e30  # finite, so kept, with probability 0
    logits[1, [0, 333]] = 1.0
    rows, _ = capture(logits, [KEPT, KEPT], [100, 0], impl=impl, draws=60)
    assert set(rows[0].draw_ids) == {100, 599}
    assert set(rows[1].draw_ids) == {0, 333}


@pytest.mark.parametrize("impl", IMPLS)
def test_a_greedy_row_draws_its_token(impl: str) -> None:
    (row,), _ = capture(random_logits(1, 90), [GREEDY], [17], impl=impl, draws=5)
    assert row.draw_ids == [17] * 5
    assert row.draw_logprobs.tolist() == [0.0] * 5
