"""The cut of rows whose candidates are in many words, with sizes at which few ids are many."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cut_cases import normal, random_cut, random_logits
from oracle_cut import CutStep, check_step, run_step

from rollout.kernels import launch
from rollout.kernels.cut_order import LISTED, WIDE_ROW

INF = float("inf")

pytestmark = [
    # numpy, which interprets the kernels here, warns where a GPU computes NaN or inf on purpose
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rows of more than 32 words wide, and let lists overflow at 1,024 candidates."""
    sizes = {"CHUNK": 1024, "CUT_WORDS": 32, "CUT_LIST": 1024, "CUT_LIST_BLOCK": 16}
    # the interpreter takes as long for a block of any size
    blocks = {"CUT_FEW": 512, "CUT_SEARCH_BLOCK": 256, "PACK_BLOCK_SPARSE": 1024}
    for name, value in (sizes | blocks).items():
        monkeypatch.setattr(launch, name, value)


def check(logits: torch.Tensor, cuts: list[tuple[int, float]]) -> tuple[list[int], list[int]]:
    """Run and check a step of KEPT rows; return the states of the rows and their candidates."""
    step = CutStep.of(logits, cuts)
    tokens, rows, out = run_step(step)
    check_step(step, tokens, rows, out)
    scratch, n = out.scratch, logits.shape[0]
    return scratch.cut_state[:n].tolist(), scratch.bracket_count[:n, 0].tolist()


@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0, 60.0])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.6])
def test_a_k_of_more_words_than_are_listed(spread: float, top_p: float) -> None:
    top_k = [33, 40, 100, 700, 1500, 2900, 2999]
    logits = normal(1, 3000, seed=int(spread), dtype=torch.float32) * spread / 3.0
    states, candidates = check(
        logits.expand(len(top_k), -1).contiguous(), [(k, top_p) for k in top_k]
    )
    assert states == len(top_k) * [WIDE_ROW.value]
    assert min(candidates) < 1024  # pivots left fewer than all


def test_a_k_among_what_a_mask_has_left() -> None:
    # 300 ids in 90 words
    logits = torch.full((3000,), -INF)
    left = torch.arange(0, 3000, 10)
    logits[left] = normal(1, 300, seed=4, dtype=torch.float32)[0]
    cuts = [(k, p) for k in (1, 40, 299, 300, 301, 2000) for p in (1.0, 0.8)]
    states, _ = check(logits.expand(len(cuts), -1).contiguous(), cuts)
    assert WIDE_ROW.value in states
    assert LISTED.value in states


def test_more_candidates_than_the_list_holds() -> None:
    equal = torch.full((3000,), -2.5)
    far = torch.where(
        torch.arange(3000) == 1234, 1e30, normal(1, 3000, seed=5, dtype=torch.float32)
    )
    logits = torch.stack([equal, equal, equal, far[0], far[0]])
    states, candidates = check(logits, [(2000, 1.0), (0, 0.4), (1999, 0.7), (2500, 1.0), (0, 0.5)])
    assert states[:4] == 4 * [WIDE_ROW.value]
    assert min(candidates[:4]) > 1024


def test_one_candidate_more_than_the_list_holds() -> None:
    # negative: the key read beyond the list, 0, is then above all of them
    states, candidates = check(torch.full((2, 1025), -2.5), [(1000, 1.0), (0, 0.4)])
    assert states == 2 * [WIDE_ROW.value]
    assert candidates == 2 * [1025]


def test_a_zero_among_subnormals_is_the_last_that_is_kept() -> None:
    steps = torch.arange(3000) % 8 - 4
    steps = torch.where(steps >= 0, steps + 1, steps)  # -4 to -1 and 1 to 4
    steps[2990] = 0
    logits = (steps.double() * 2.0**-149).float()
    states, _ = check(logits[None], [(int((steps > 0).sum()) + 1, 1.0)])
    assert states == [WIDE_ROW.value]


def test_a_k_at_a_distance_that_float32_does_not_hold() -> None:
    generator = torch.Generator().manual_seed(1)
    low = -3e38 * (0.5 + 0.5 * torch.rand(3000, generator=generator))
    logits = torch.where(torch.arange(3000) < 20, 3e38, low)
    top_k = [10, 40, 700, 2999]
    states, _ = check(logits.expand(len(top_k), -1).contiguous(), [(k, 1.0) for k in top_k])
    assert states[1:] == 3 * [WIDE_ROW.value]


def test_random_steps() -> None:
    generator = np.random.default_rng(8)
    states: list[int] = []
    for _ in range(20):
        vocab = int(generator.choice([1025, 1100, 2048, 3000, 5000]))
        rows = int(generator.integers(1, 6))
        logits = torch.from_numpy(random_logits(generator, rows, vocab)).float()
        cuts = [random_cut(generator, vocab) for _ in range(rows)]
        states += check(logits, cuts)[0]
    assert {LISTED.value, WIDE_ROW.value} <= set(states)
