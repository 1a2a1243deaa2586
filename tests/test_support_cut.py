"""Top-k and top-p decided by the capture: kept sets, their logprobs, tokens drawn among them."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from cut_cases import TIED, normal, random_cut, random_logits, tied
from oracle_capture import (
    EMPTY,
    GREEDY,
    KEPT,
    NONE,
    NONFINITE,
    OVERFLOW,
    SKIP,
    TOP,
)
from oracle_cut import DEVICE, CutStep, allowed_cut, check_row, check_rows, check_step, run_step

from rollout.kernels.launch import CHUNK, CUT_LIST
from rollout.kernels.support_capture import StepOutput
from rollout.kernels.support_cut import SupportCut, cut_reference

INF = math.inf
LARGEST = 3e38
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
TOP_P = [1e-6, 0.1, 0.95, 0.9999999, 1.0]
BOTH = [(0, 0.95), (20, 1.0), (2000, 0.9), (0, 1.0), (1, 0.1), (0, 1e-45), (50, 0.999), (2, 0.6)]
"""Cuts of eight rows."""

pytestmark = [
    # numpy, which interprets the kernels here, warns where a GPU computes NaN or inf on purpose
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]


def check(logits: torch.Tensor, cuts: list[tuple[int, float]]) -> list[list[int]]:
    """Run and check a step of KEPT rows; return the ids."""
    step = CutStep.of(logits, cuts)
    tokens, rows, out = run_step(step)
    check_step(step, tokens, rows, out)
    return [row.ids for row in rows]


def test_cuts_worked_out_by_hand() -> None:
    # probabilities 1/8, 1/2, 1/8, 1/4
    logits = torch.tensor([-3.0, -1.0, -3.0, -2.0]).expand(9, 4) * math.log(2.0)
    cuts = [(0, p) for p in (0.4, 0.6, 0.74, 0.76, 0.88)]
    cuts += [(2, 0.66), (2, 0.67), (3, 1.0), (3, 0.9)]
    wanted = [[1], [1, 3], [1, 3], [0, 1, 3], [0, 1, 2, 3], [1], [1, 3], [0, 1, 3], [0, 1, 3]]
    assert check(logits.contiguous(), cuts) == wanted


@DTYPES
def test_every_top_k_with_every_top_p(dtype: torch.dtype) -> None:
    vocab = 300
    cuts = list(product([1, 2, 20, vocab - 1, vocab, vocab + 5, 2**31 - 1, 0], TOP_P))
    if dtype != torch.float32:
        cuts = cuts[::3]
    check(normal(len(cuts), vocab, seed=1, dtype=dtype), cuts)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (CHUNK, torch.bfloat16),
        (CHUNK + 1, torch.float16),
        (20_000, torch.float32),
    ],
)
def test_rows_of_one_chunk_and_of_several(vocab: int, dtype: torch.dtype) -> None:
    logits = normal(8, vocab, seed=vocab, dtype=dtype)
    check(logits, BOTH)
    check(logits[:2], [(vocab - 1, 1.0), (vocab + 5, 0.9999999)])


@pytest.mark.parametrize("name", TIED)
def test_equal_logits_are_cut_between_ids(name: str) -> None:
    vocab = 300
    cuts = [(k, 1.0) for k in (1, vocab // 5, vocab // 2 + 1, vocab - 1)]
    cuts += [(0, 0.03), (0, 0.51), (vocab // 3, 0.7)]
    check(tied(name, vocab).expand(len(cuts), vocab).contiguous(), cuts)


@pytest.mark.parametrize(
    ("name", "vocab", "cut"),
    [
        ("halves", 5000, (4500, 0.9)),
        ("close", CHUNK + 50, (0, 0.6)),
        # more equal ones than a list of candidates holds; others out of reach below one far above
        ("equal", CUT_LIST + 50, (0, 0.6)),
        ("far", CUT_LIST + 50, (30_000, 1.0)),
    ],
)
def test_many_equal_logits_are_cut_between_ids(
    name: str, vocab: int, cut: tuple[int, float]
) -> None:
    check(tied(name, vocab)[None], [cut])


def test_among_equal_logits_the_lowest_ids_stay() -> None:
    assert check(torch.full((1, CHUNK + 9), 3.0), [(CHUNK + 1, 1.0)]) == [[*range(CHUNK + 1)]]
    # nothing here is near enough to a boundary for the tolerance
    kept = check(torch.full((2, 5000), -3.0), [(3001, 0.4), (7, 0.5)])
    assert kept == [[*range(n)] for n in (1201, 4)]


def test_ties_of_coarse_values_on_a_wide_row() -> None:
    logits = normal(2, 20_000, seed=5, dtype=torch.bfloat16)
    check(logits, [(333, 1.0), (2049, 1.0)])


def check_beside_boundaries(logits: torch.Tensor, top_k: int) -> None:
    """Cut a row [1, V] 3e-6 before and behind the mass ahead of some ids: no tolerance there."""
    weights = np.sort(np.exp(logits[0].double().numpy()))[::-1][: top_k or None]
    mass = np.cumsum(weights) / weights.sum()
    ranks = [1, 300, 900]
    cuts = [(top_k, float(mass[r - 1] + beside)) for r in ranks for beside in (-3e-6, 3e-6)]
    kept = check(logits.expand(len(cuts), -1).contiguous(), cuts)
    assert [len(ids) for ids in kept] == [n for r in ranks for n in (r, r + 1)]


@pytest.mark.parametrize(("vocab", "top_k"), [(CHUNK + 1, 0), (2000, 1000)])
def test_a_p_beside_a_boundary_decides_it(vocab: int, top_k: int) -> None:
    check_beside_boundaries(normal(1, vocab, seed=12), top_k)


def test_half_of_the_mass_in_many_small_shares() -> None:
    # 1e-4 each: a sum that loses digits is off by ids
    vocab = 5001
    logits = torch.zeros(3, vocab)
    logits[:, 4321] = math.log(vocab - 1)
    kept = check(logits, [(0, 0.75001), (1001, 0.90001), (0, 0.4)])
    # the large share is 5/6 of what the second row's top_k leaves
    assert [len(ids) for ids in kept] == [2502, 402, 1]


def test_ids_masked_before_stay_masked() -> None:
    vocab = CHUNK + 100
    logits = normal(8, vocab, seed=3, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    logits[torch.rand(8, vocab, generator=generator) < 0.99] = -INF
    logits[:, 11] = 1.0
    finite = int((logits[0] > -INF).sum())
    cuts = [(finite, 1.0), (finite + 1, 1.0), (vocab - 1, 0.95), (finite - 1, 1.0), (0, 0.9999999)]
    check(logits, [*cuts, (0, 1.0), (0, 0.3), (5000, 1.0)])


def test_rows_of_one_finite_id() -> None:
    vocab = CHUNK + 9
    for at in (0, CHUNK - 1, vocab - 1):
        logits = torch.full((5, vocab), -INF)
        logits[:, at] = torch.tensor([0.0, -0.0, -31.4, -LARGEST, LARGEST])
        kept = check(logits, [(1, 1.0), (0, 0.1), (5, 0.9), (0, 1.0), (vocab, 1e-45)])
        assert kept == [[at]] * 5


def test_one_id_with_all_the_mass() -> None:
    vocab = CHUNK + 300
    logits = normal(8, vocab, seed=4) * 0.1 - 100.0
    logits[:, 8195] = 5.0
    kept = check(logits, [(0, 0.95), (0, 0.5), (7, 0.95), (7, 1.0), (0, 1.0), (2, 0.1)])
    assert [len(ids) for ids in kept] == [1, 1, 1, 7, vocab, 1, 1, 1]


def test_logits_at_the_ends_of_float32() -> None:
    vocab = 400
    generator = torch.Generator().manual_seed(6)
    signs = torch.randint(0, 2, (3, vocab), generator=generator) * 2.0 - 1.0
    sizes = torch.rand(4, vocab, generator=generator)
    logits = torch.cat(
        [signs * torch.tensor([[1e30], [LARGEST], [LARGEST]]) * sizes[:3], sizes[3:] - 1e30]
    )
    logits[2, :5] = torch.tensor([LARGEST, -LARGEST, LARGEST, 0.0, 1.0])
    rows = torch.cat([logits] * 3)
    cuts = [(9, 1.0)] * 4 + [(0, 0.95)] * 4 + [(vocab - 1, 1.0)] * 4
    check(rows, cuts)
    low = torch.full((4, 70), -LARGEST)
    low[:, 60] = torch.tensor([-1e38, 0.0, 1.0, -LARGEST])
    check(low, [(2, 1.0), (2, 0.9), (0, 0.9)])


@pytest.mark.parametrize(
    ("dtype", "tiny"),
    [
        pytest.param(torch.float32, 1.4e-45, id="fp32"),
        pytest.param(torch.float16, 6e-8, id="fp16"),
        # Triton's interpreter takes its subnormals for other numbers
        pytest.param(torch.bfloat16, 9.2e-41, id="bf16", marks=pytest.mark.gpu),
    ],
)
def test_subnormals_are_ordered_and_zeros_are_equal(dtype: torch.dtype, tiny: float) -> None:
    cycle = [tiny, -0.0, 0.0, -tiny, 2 * tiny, 0.0, -0.0, -2 * tiny]
    logits = torch.tensor(cycle * 8, dtype=dtype).expand(7, 64).contiguous()
    kept = check(logits, [(k, 1.0) for k in (3, 9, 17, 20, 49, 57, 63)])
    assert kept[0] == [4, 12, 20]
    assert kept[2] == sorted([*range(4, 64, 8), *range(0, 64, 8), 1])


@DTYPES
def test_views_of_wider_rows(dtype: torch.dtype) -> None:
    padded = normal(2, CHUNK + 40, seed=7, dtype=dtype).to(DEVICE)
    for vocab in (CHUNK + 17, 600):
        padded[:, vocab:] = 90.0  # what a kernel sees that takes the stride for the vocabulary
        check(padded[:, :vocab], BOTH)


def test_rows_start_at_any_element() -> None:
    storage = normal(1, 3 * 601 + 3, seed=2).flatten().to(DEVICE)
    for start in (0, 1, 2, 3):
        check(storage[start : start + 3 * 601].view(3, 601), [(0, 0.95), (20, 1.0), (300, 0.9)])


def mixed_step() -> CutStep:
    kinds = [TOP, KEPT, GREEDY, NONE, KEPT, SKIP, KEPT, TOP]
    logits = normal(len(kinds), CHUNK + 77, seed=8, dtype=torch.bfloat16)
    return CutStep.of(logits, [(5, 0.5), (0, 0.9), (1, 1.0)], kinds=kinds)


def test_rows_of_other_kinds_are_not_cut() -> None:
    step = mixed_step()
    before = step.logits.clone()
    tokens, rows, out = run_step(step, top=4, spare_rows=5)
    check_step(step, tokens, rows, out)
    assert torch.equal(step.logits, before)
    others, uncut, _ = run_step(step, cut=False, top=4, spare_rows=5)
    for i, kind in enumerate(step.kinds):
        if kind != KEPT:
            assert tokens[i] == others[i]
            for name in ("count", "ids", "bits", "sampled", "tail", "flags"):
                assert getattr(rows[i], name) == getattr(uncut[i], name), (kind, name)


def test_broken_rows_are_flagged_as_without_a_cut() -> None:
    vocab = CHUNK + 33
    logits = normal(7, vocab, seed=10)
    logits[1, vocab - 1] = torch.nan
    logits[2, 5] = INF
    logits[3] = -INF
    logits[4] = torch.nan
    logits[5, [0, 1]] = torch.tensor([torch.nan, INF])
    for cuts in ([(20, 0.9)], [(1, 1.0), (0, 0.1)]):
        step = CutStep.of(logits, cuts)
        tokens, rows, _ = run_step(step)
        broken = [NONFINITE, NONFINITE, EMPTY, NONFINITE, NONFINITE]
        assert [row.flags for row in rows] == [0, *broken, 0]
        for row in rows[1:6]:
            assert (row.count, row.tail) == (0, 0.0)
            assert math.isnan(row.sampled)
        assert tokens[1:6] == [0] * 5
        for i in (0, 6):
            values, noise = step.values()[i], step.noise()[i]
            check_row(rows[i], tokens[i], values, noise, step.top_k[i], step.top_p[i])


def test_a_row_is_cut_alike_in_any_batch() -> None:
    logits = normal(5, CHUNK + 200, seed=11)
    logits[3] = (logits[3] * 2.0).round() / 2
    # decided by sums that are close to each other at every boundary
    cuts = [(0, 0.95), (0, 0.9999999), (20, 0.9), (0, 0.7), (700, 0.8)]
    step = CutStep.of(logits, cuts)
    tokens, rows, _ = run_step(step)

    def part(ids: list[int]) -> None:
        others = CutStep.of(
            logits[ids],
            [(step.top_k[i], step.top_p[i]) for i in ids],
            requests=ids,
        )
        found, again, _ = run_step(others, spare_rows=len(ids) % 3)
        assert found[: len(ids)] == [tokens[i] for i in ids]
        for i, row in zip(ids, again, strict=True):
            assert (row.ids, row.bits) == (rows[i].ids, rows[i].bits)

    part([2, 0, 1, 4, 3])
    part([3, 3, 1])


def test_buffers_that_steps_left_behind() -> None:
    out: StepOutput | None = None
    for seed, vocab in enumerate([CHUNK + 900, 300, CHUNK + 900, 1]):
        logits = normal(4, vocab, seed=seed)
        # widths on both sides of what is packed whole, in rows that differ from step to step
        cuts = [(0, 0.95), (600, 1.0), (3, 0.9), (0, 1.0)]
        step = CutStep.of(logits, cuts[seed % 4 :] + cuts[: seed % 4])
        # twice, as the second finds what the first left of the same rows
        for _ in range(1 + seed % 2):
            tokens, rows, out = run_step(step, out=out, spare_rows=2)
            check_rows(step, tokens, rows)


@pytest.mark.parametrize("top_k", [100, 5000])
def test_rows_that_do_not_fit_have_tokens(top_k: int) -> None:
    step = CutStep.of(normal(4, CHUNK + 1, seed=13), [(top_k, 1.0), (top_k, 1.0), (0, 0.9)])
    tokens, rows, out = run_step(step, capacity=2 * top_k - 1)
    check_rows(step, tokens, rows)
    assert [row.flags for row in rows] == [0, OVERFLOW, OVERFLOW, OVERFLOW]
    assert (out.entries[top_k:] == -77).all()


def test_random_steps_on_the_same_buffers() -> None:
    generator = np.random.default_rng(2026)
    out = StepOutput.allocate(
        max_rows=8, vocab_size=9000, capacity=60_000, top=3, draws=0, device=DEVICE
    )
    for _ in range(24):
        rows = int(generator.integers(1, 7))
        vocab = [1, 2, 31, 33, 257, 300, 900, 900, CHUNK + 8][generator.integers(9)]
        dtype = [torch.float32, torch.bfloat16, torch.float16][generator.integers(3)]
        step = CutStep.of(
            torch.from_numpy(random_logits(generator, rows, vocab)).to(dtype),
            [random_cut(generator, vocab) for _ in range(rows)],
            kinds=generator.choice([KEPT, KEPT, KEPT, TOP, GREEDY, NONE, SKIP], rows).tolist(),
            requests=generator.integers(1000, size=rows).tolist(),
        )
        spare_rows = int(generator.integers(3))
        tokens, found, _ = run_step(step, out=out, spare_rows=spare_rows, top=3)
        check_rows(step, tokens, found)


@DTYPES
def test_the_reference_cuts_by_the_rule(dtype: torch.dtype) -> None:
    generator = np.random.default_rng(7)
    for vocab in (1, 2, 50, 700, 9000):
        logits = torch.from_numpy(random_logits(generator, 12, vocab)).to(dtype)
        cuts = [random_cut(generator, vocab) for _ in range(12)]
        cut = SupportCut(
            # also of rows that have no logits
            top_k=torch.tensor([k for k, _ in cuts] + [1], dtype=torch.int32),
            top_p=torch.tensor([p for _, p in cuts] + [0.5]),
        )
        masked = cut_reference(logits, cut)
        assert masked.dtype == torch.float32
        for row, values, (top_k, top_p) in zip(masked, logits.float(), cuts, strict=True):
            kept = (row > -INF).nonzero().flatten()
            order, shortest, longest = allowed_cut(values.numpy(), top_k, top_p)
            assert shortest <= kept.numel() <= longest
            assert kept.tolist() == sorted(order[: kept.numel()].tolist())
            assert torch.equal(row[kept], values[kept])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_full_step_on_the_gpu(dtype: torch.dtype) -> None:
    vocab = 151_936
    logits = normal(512, vocab, seed=20, dtype=dtype)
    cuts = [*BOTH, (20_000, 0.99), (vocab - 1, 0.5), (50, 1.0), (0, 0.1), (0, 0.9999999)]
    check(logits, cuts)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [0, 30_000])
@pytest.mark.parametrize("seed", [20, 22], ids=["flat", "steep"])
def test_a_p_beside_a_boundary_decides_it_on_the_gpu(seed: int, top_k: int) -> None:
    check_beside_boundaries(normal(1, 151_936, seed=seed), top_k)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TIED)
def test_full_rows_of_equal_logits_on_the_gpu(name: str) -> None:
    vocab = 151_936
    cuts = [(1, 1.0), (77_777, 1.0), (0, 0.51), (0, 0.1), (100_000, 0.9), (0, 0.95)]
    check(tied(name, vocab).expand(64, vocab).contiguous(), cuts)


@pytest.mark.gpu
def test_a_full_step_of_masked_rows_on_the_gpu() -> None:
    generator = torch.Generator().manual_seed(21)
    logits = normal(512, 151_936, seed=21)
    share = torch.rand(512, 1, generator=generator) ** 4
    logits[torch.rand(logits.shape, generator=generator) > share] = -INF
    logits[:, 5] = 0.0
    check(logits, BOTH)
