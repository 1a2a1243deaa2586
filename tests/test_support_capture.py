"""Kept sets, logprobs, flags and the overflow rule, against float64 and a recount of the mask."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracle_capture import (
    EMPTY,
    GREEDY,
    KEPT,
    NONE,
    NONFINITE,
    OVERFLOW,
    SAMPLED_MISSING,
    SKIP,
    TOP,
    Row,
    allowed_error,
    capture,
    log_softmax,
    poison,
)

from rollout.kernels import launch
from rollout.kernels.launch import CHUNK
from rollout.kernels.support_capture import RowFlag, RowKind, StepOutput, capture_step

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = math.inf

pytestmark = [
    # numpy, which interprets the kernels here, warns where a GPU computes NaN on purpose
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]


def masked_logits(
    rows: int, vocab: int, share: float, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 4.0
    logits[torch.rand(rows, vocab, generator=generator) >= share] = -INF
    logits[:, vocab // 2] = 1.0
    return logits.to(dtype)


def assert_kept(row: Row, logits: torch.Tensor, sampled: int) -> None:
    """Compare a KEPT row with a recount of the mask and float64."""
    expected = [i for i, value in enumerate(logits.tolist()) if value > -INF]
    exact = log_softmax(logits)[expected]
    assert row.ids == expected
    assert row.count == len(expected)
    assert row.flags == 0
    assert np.all(np.abs(row.logprobs - exact) <= allowed_error(exact))
    assert np.float32(row.sampled).tobytes() == row.logprobs[expected.index(sampled)].tobytes()
    assert row.tail == 0.0


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("vocab", [1, 63, 507, CHUNK, 2 * CHUNK + 19])
def test_kept_rows_equal_the_mask(impl: str, dtype: torch.dtype, vocab: int) -> None:
    logits = torch.cat(
        [
            masked_logits(1, vocab, 1.0, dtype=dtype),
            masked_logits(1, vocab, 0.3, seed=1, dtype=dtype),
            masked_logits(1, vocab, 0.002, seed=2, dtype=dtype),
        ]
    )
    rows, _ = capture(logits, [KEPT] * 3, [vocab // 2] * 3, impl=impl)
    for row, values in zip(rows, logits, strict=True):
        assert_kept(row, values, vocab // 2)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_a_view_of_wider_rows_gives_what_its_copy_gives(impl: str, dtype: torch.dtype) -> None:
    padded = masked_logits(8, 520, 0.5, dtype=dtype)
    padded[:, 500:] = 90.0  # what a kernel sees that takes the stride for the vocabulary
    view = padded[:, :500]
    kinds = [KEPT, TOP] * 4
    of_view, _ = capture(view, kinds, [250] * 8, impl=impl, top=7, draws=3)
    of_copy, _ = capture(view.contiguous(), kinds, [250] * 8, impl=impl, top=7, draws=3)
    for first, second, values in zip(of_view, of_copy, view, strict=True):
        assert (first.ids, first.bits, first.tail) == (second.ids, second.bits, second.tail)
        assert first.draw_ids == second.draw_ids
        assert first.count == (int((values > -INF).sum()) if first.tail == 0.0 else 7)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_rows_may_start_at_any_element(impl: str) -> None:
    storage = masked_logits(1, 3 * 601 + 3, 0.5).flatten()
    for start in (0, 1, 2, 3):
        logits = storage[start : start + 3 * 601].view(3, 601)
        logits[:, 300] = 2.0
        rows, _ = capture(logits, [KEPT] * 3, [300] * 3, impl=impl)
        for row, values in zip(rows, logits, strict=True):
            assert_kept(row, values, 300)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_finite_logit_is_kept_however_low(impl: str) -> None:
    logits = torch.full((1, 100), -INF)
    logits[0, [3, 40, 99]] = torch.tensor([2.0, -1e30, -3e38])
    (row,), _ = capture(logits, [KEPT], [3], impl=impl)
    assert row.ids == [3, 40, 99]
    assert row.bits[0] == 0
    assert row.logprobs[1:].tolist() == pytest.approx([-1e30, -3e38], rel=1e-6)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_one_id_has_logprob_plus_zero(impl: str) -> None:
    logits = torch.full((3, 70), -INF)
    logits[0, 5] = 0.0
    logits[1, 5] = -0.0
    logits[2, 69] = -31.4
    rows, _ = capture(logits, [KEPT] * 3, [5, 5, 69], impl=impl, draws=2)
    for row, token in zip(rows, [5, 5, 69], strict=True):
        assert (row.ids, row.bits, row.flags) == ([token], [0], 0)
        assert math.copysign(1.0, row.sampled) == 1.0
        assert row.draw_ids == [token, token]
        assert row.draw_logprobs.view(np.uint32).tolist() == [0, 0]


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_equal_zeros_of_both_signs(impl: str) -> None:
    logits = torch.zeros(1, 64)
    logits[0, ::2] = -0.0
    (row,), _ = capture(logits, [KEPT], [1], impl=impl)
    assert set(row.bits) == {int(np.float32(-math.log(64)).view(np.uint32))}


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("kind", [KEPT, GREEDY, TOP, NONE], ids=["kept", "greedy", "top", "none"])
def test_broken_rows_are_flagged_and_pack_nothing(impl: str, kind: int) -> None:
    vocab = CHUNK + 33
    good = masked_logits(1, vocab, 0.01)[0]
    nan, infinite, empty = good.clone(), good.clone(), torch.full((vocab,), -INF)
    nan[vocab - 1] = torch.nan
    infinite[10] = INF
    logits = torch.stack([good, nan, infinite, empty, torch.full((vocab,), torch.nan), good])
    rows, out = capture(logits, [kind] * 6, [vocab // 2] * 6, impl=impl, top=4, draws=2)
    assert [row.flags for row in rows] == [0, NONFINITE, NONFINITE, EMPTY, NONFINITE, 0]
    for row in rows[1:5]:
        assert (row.count, row.draw_ids) == (0, [0, 0])
        assert math.isnan(row.sampled)
        assert math.isnan(row.tail) if kind == TOP else row.tail == 0.0
    # the rows around them are as if they were not there
    assert (rows[0].ids, rows[0].bits) == (rows[5].ids, rows[5].bits)
    assert out.offsets[6] == 2 * rows[0].count


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_each_kind_of_row(impl: str) -> None:
    logits = masked_logits(5, 300, 0.5)
    logits[2] = torch.randn(300, generator=torch.Generator().manual_seed(3))
    rows, out = capture(
        logits, [SKIP, KEPT, GREEDY, TOP, NONE], [150] * 5, impl=impl, top=6, draws=1
    )
    skip, kept, greedy, top, none = rows
    assert (skip.count, skip.sampled, skip.flags, skip.draw_ids) == (0, 0.0, 0, [0])
    assert_kept(kept, logits[1], 150)
    assert (greedy.ids, greedy.bits, greedy.sampled) == ([150], [0], 0.0)
    assert (greedy.draw_ids, greedy.draw_logprobs.tolist()) == ([150], [0.0])
    assert (top.count, none.count) == (6, 0)
    exact = log_softmax(logits[4])[150]
    assert abs(none.sampled - exact) <= allowed_error(exact)
    assert out.counts[:5].tolist() == [0, kept.count, 1, 6, 0]


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_sampled_id_outside_the_kept_set_is_flagged(impl: str) -> None:
    logits = masked_logits(1, 200, 0.5)[0].repeat(9, 1)
    logits[:, 7] = -INF
    kinds = [KEPT, GREEDY, NONE] * 3
    rows, _ = capture(logits, kinds, [7, 7, 7, 200, 200, 200, -1, -1, -1], impl=impl)
    for row, kind in zip(rows, kinds, strict=True):
        assert (row.flags, row.sampled) == (SAMPLED_MISSING, -INF)
        assert row.count == (int((logits[0] > -INF).sum()) if kind == KEPT else 0)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("capacity", [1, 99, 100, 129, 130, 131, 230, 231, 1000])
def test_a_row_fits_by_the_inclusive_prefix_sum(impl: str, capacity: int) -> None:
    counts = [100, 0, 30, 100, 1, 40]
    logits = torch.full((6, CHUNK + 100), -INF)
    for i, count in enumerate(counts):
        logits[i, 50 : 50 + max(count, 1)] = torch.linspace(0, 1, max(count, 1))
    kinds = [KEPT, SKIP, KEPT, KEPT, GREEDY, KEPT]
    rows, out = capture(logits, kinds, [50] * 6, impl=impl, capacity=capacity, draws=1)
    ends = np.cumsum(counts)
    assert out.counts[:6].tolist() == counts
    assert out.offsets[1:7].tolist() == ends.tolist()
    for row, count, end in zip(rows, counts, ends, strict=True):
        # a row of no entries loses nothing
        assert row.flags == (OVERFLOW if end > capacity and count else 0)
        assert len(row.ids) == (0 if row.flags else count)
        assert row.draw_ids != [-77]
    written = max([end for end, row in zip(ends, rows, strict=True) if not row.flags], default=0)
    # nothing of a row that does not fit, not even its first entries
    assert torch.all(out.entries[written:] == -77)
    for row, values, kind in zip(rows, logits, kinds, strict=True):
        if kind == KEPT and not row.flags:
            assert_kept(row, values, 50)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_every_number_of_rows(impl: str, rows: int) -> None:
    logits = masked_logits(rows, 90, 0.4)
    recorded, out = capture(logits, [KEPT] * rows, [45] * rows, impl=impl)
    for row, values in zip(recorded, logits, strict=True):
        assert_kept(row, values, 45)
    # rows beyond the step are left alone
    assert torch.all(out.counts[rows:] == -77)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("counts", [(511, 512), (513, 1), (3000, 5000), (1200, 0)])
def test_rows_about_the_limit_of_a_sparse_row(impl: str, counts: tuple[int, int]) -> None:
    logits = torch.full((2, 2 * CHUNK), -INF)
    generator = torch.Generator().manual_seed(9)
    for part, count in enumerate(counts):
        ids = part * CHUNK + torch.randperm(CHUNK, generator=generator)[:count]
        logits[0, ids] = torch.randn(count, generator=generator)
    logits[1, ::7] = 0.25
    sampled = int(logits[0].argmax())
    rows, _ = capture(logits, [KEPT, KEPT], [sampled, 0], impl=impl)
    assert_kept(rows[0], logits[0], sampled)
    assert_kept(rows[1], logits[1], 0)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_logprobs_are_exact_over_a_wide_vocabulary(impl: str) -> None:
    vocab = 151_936
    generator = torch.Generator().manual_seed(5)
    peak = torch.zeros(vocab)
    peak[77] = 8.0  # all other terms are equal: rounding errors add up with one sign
    random = torch.randn(vocab, generator=generator) * 3.0
    logits = torch.stack([random, random, random, peak, peak])
    sampled = [0, int(random.argmax()), vocab - 1, 77, 78]
    rows, _ = capture(logits, [NONE] * 5, sampled, impl=impl, capacity=1)
    for row, values, token in zip(rows, logits, sampled, strict=True):
        exact = log_softmax(values)[token]
        assert abs(row.sampled - exact) <= allowed_error(exact)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_step_of_no_rows(impl: str) -> None:
    _, out = capture(torch.empty(0, 50), [], [], impl=impl, capacity=1)
    assert out.offsets[0] == 0


def test_buffers_serve_steps_of_any_size_in_turn() -> None:
    out = StepOutput.allocate(
        max_rows=6, vocab_size=700, capacity=5000, top=0, draws=0, device="cpu"
    )
    for rows, vocab in ((6, 700), (2, 300), (5, 700)):
        logits = masked_logits(rows, vocab, 0.4, seed=rows)
        ids = torch.full((rows,), vocab // 2)
        capture_step(
            logits,
            ids,
            torch.full((rows,), KEPT, dtype=torch.int8),
            out,
            top=0,
            draws=0,
            seeds=ids,
            positions=ids,
            impl="triton",
        )
        kept = (logits > -INF).sum(dim=1)
        assert torch.equal(out.counts[:rows].long(), kept)
        assert torch.equal(out.offsets[1 : rows + 1], kept.cumsum(0))


@pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("reference", "cpu"),
        ("triton", "cpu"),
        pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_rows_beyond_the_logits_are_nothing(impl: str, device: str) -> None:
    """A launch of fixed size covers steps of any; what lies behind their logits is not read."""
    kinds = [KEPT, TOP, GREEDY, NONE, KEPT]
    n, more, vocab = len(kinds), 4, 700
    # behind the logits what would be flagged
    buffer = torch.full((n + more, vocab), torch.nan)
    buffer[:n] = masked_logits(n, vocab, 0.4)
    logits = buffer.to(device)[:n]
    outs = []
    for rows in (n, n + more):
        out = StepOutput.allocate(
            max_rows=n + more, vocab_size=vocab, capacity=5000, top=7, draws=2, device=device
        )
        poison(out)
        capture_step(
            logits,
            torch.full((rows,), vocab // 2, device=device),
            torch.tensor(kinds + [SKIP] * (rows - n), dtype=torch.int8, device=device),
            out,
            top=7,
            draws=2,
            seeds=torch.arange(rows, device=device),
            positions=torch.arange(rows, device=device),
            impl=impl,  # type: ignore[arg-type]
        )
        outs.append(out)
    exact, padded = outs
    total = int(exact.offsets[n])
    assert total > 100
    for name in ("counts", "offsets", "sampled_logprobs", "tail_mass", "flags", "draws"):
        assert torch.equal(getattr(padded, name)[:n], getattr(exact, name)[:n]), name
    assert torch.equal(padded.entries[:total], exact.entries[:total])
    assert padded.offsets[n:].tolist() == [total] * (more + 1)
    for name in ("counts", "sampled_logprobs", "flags", "draws"):
        assert not getattr(padded, name)[n:].any(), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("dtype", "skipped", "unit"),
    [
        (torch.float32, 0, 4),
        (torch.float32, 1, 1),  # starts at no multiple of 16 bytes
        (torch.bfloat16, 0, 8),
    ],
)
def test_logits_are_where_the_device_is_told(
    device: str, dtype: torch.dtype, skipped: int, unit: int
) -> None:
    """A launch made for other logits records those that its distance leads to."""
    kinds = torch.tensor([KEPT, TOP, GREEDY, NONE], dtype=torch.int8, device=device)
    n, vocab = len(kinds), 704
    logits, elsewhere = (
        torch.full((skipped + n * vocab,), torch.nan, dtype=dtype, device=device)[skipped:].view(
            n, vocab
        )
        for _ in range(2)
    )
    logits.copy_(masked_logits(n, vocab, 0.4))
    assert launch.row_unit(logits) == unit
    outs = []
    for given, told in ((logits, False), (elsewhere, True)):
        out = StepOutput.allocate(
            max_rows=n, vocab_size=vocab, capacity=5000, top=7, draws=2, device=device
        )
        poison(out)
        behind = launch.distance(logits, launch.row_unit(logits), out.scratch.anchor.data_ptr())
        capture_step(
            given,
            torch.full((n,), vocab // 2, device=device),
            kinds,
            out,
            top=7,
            draws=2,
            seeds=torch.arange(n, device=device),
            positions=torch.arange(n, device=device),
            distance=torch.tensor([behind], device=device) if told else None,
            impl="triton",
        )
        outs.append(out)
    here, there = outs
    assert int(here.offsets[n]) > 100
    assert torch.equal(there.header, here.header)
    assert torch.equal(there.entries, here.entries)


def test_slots_share_the_scratch() -> None:
    first = StepOutput.allocate(
        max_rows=4, vocab_size=100, capacity=10, top=2, draws=1, device="cpu"
    )
    second = StepOutput.allocate(
        max_rows=4, vocab_size=100, capacity=10, top=2, draws=1, device="cpu", scratch=first.scratch
    )
    assert second.scratch.mask_words.data_ptr() == first.scratch.mask_words.data_ptr()
    assert second.entries.data_ptr() != first.entries.data_ptr()
    assert first.num_bytes == 4 * 4 + 5 * 8 + 3 * 4 * 4 + 10 * 8 + 4 * 8 + 4 * 8


def test_the_numbers_of_kinds_and_flags() -> None:
    assert [int(kind) for kind in RowKind] == [SKIP, KEPT, GREEDY, TOP, NONE]
    assert [int(flag) for flag in RowFlag] == [NONFINITE, EMPTY, OVERFLOW, SAMPLED_MISSING]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 50, dtype=torch.float64)}, "float64, expected"),
        ({"logits": torch.zeros(100)}, r"got \[100\]"),
        ({"logits": torch.zeros(50, 2).T}, "elements apart, expected 1"),
        ({"logits": torch.zeros(2, CHUNK + 1)}, f"expected at most {CHUNK}"),
        ({"sampled_ids": torch.zeros(2, dtype=torch.int32)}, "sampled_ids: got"),
        ({"kinds": torch.zeros(1, dtype=torch.int8)}, "kinds: got 1, expected at least 2"),
        ({"kinds": torch.zeros(2)}, "kinds: got"),
        ({"seeds": torch.zeros(4, dtype=torch.int64)[::2]}, "seeds: got"),
        ({"positions": torch.zeros(2)}, "positions: got"),
        ({"top": 5}, "top: got 5"),
        ({"draws": 2}, "draws: got 2, expected 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    out = StepOutput.allocate(max_rows=2, vocab_size=50, capacity=10, top=4, draws=1, device="cpu")
    ids = torch.zeros(2, dtype=torch.int64)
    arguments: dict[str, object] = {
        "logits": torch.zeros(2, 50),
        "sampled_ids": ids,
        "kinds": ids.to(torch.int8),
        "seeds": ids,
        "positions": ids,
        "top": 4,
        "draws": 1,
    }
    with pytest.raises(ValueError, match=message):
        capture_step(out=out, **{**arguments, **change})  # type: ignore[arg-type]


def test_more_rows_than_the_buffers_have_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows, expected at most 2"):
        capture(torch.zeros(3, 10), [KEPT] * 3, [0] * 3, impl="reference", spare_rows=-1)


@pytest.mark.parametrize(
    "sizes", [{"max_rows": 0}, {"vocab_size": 0}, {"capacity": 0}, {"draws": -1}, {"top": 1025}]
)
def test_sizes_out_of_range_are_refused(sizes: dict[str, int]) -> None:
    usual = {"max_rows": 1, "vocab_size": 9, "capacity": 1, "top": 0, "draws": 0}
    with pytest.raises(ValueError, match="expected"):
        StepOutput.allocate(device="cpu", **{**usual, **sizes})  # type: ignore[arg-type]
