"""Tokens drawn in the capture: those that the noise over the whole vocabulary would draw."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from noise import add_noise, noise_of
from oracle_capture import (
    EMPTY,
    GREEDY,
    KEPT,
    NONE,
    NONFINITE,
    OVERFLOW,
    SKIP,
    TOP,
    Row,
    allowed_error,
    log_softmax,
    poison,
    read_rows,
)

from rollout.kernels.launch import CHUNK, SPARSE, TAKE_BLOCK, CaptureScratch
from rollout.kernels.support_capture import StepOutput, capture_step
from rollout.kernels.support_cut import SupportCut
from rollout.kernels.token_draw import TokenDraw, tokens_reference

INF = math.inf
SEEDS = [5, -9, 2**40 + 3, 0, -(2**63)]
POSITIONS = [0, 3, 70_000, 1, 2]

pytestmark = [
    # numpy, which interprets the kernels here, warns where a GPU computes NaN on purpose
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]


def draw(
    logits: torch.Tensor,
    kinds: list[int],
    *,
    capacity: int | None = None,
    spare_rows: int = 2,
    given: list[int] | None = None,
    after: torch.Tensor | None = None,
) -> tuple[list[int], list[Row], StepOutput]:
    """Run a step of more rows than logits on poisoned buffers; it draws what is not given.

    Or on the buffers of a step before it, of the logits `after`.
    """
    n, vocab = logits.shape
    device = logits.device
    rows = n + spare_rows
    out = StepOutput.allocate(
        max_rows=rows,
        vocab_size=vocab,
        capacity=logits.numel() if capacity is None else capacity,
        top=3,
        draws=1,
        device=device,
    )
    poison(out)
    for scores in (out.scratch.best_score, out.scratch.chunk_best):
        scores.fill_(2**63 - 1)
    out.sampled_ids.fill_(-77)
    if given is not None:
        out.sampled_ids.copy_(torch.tensor(given))

    def of_rows(values: list[int]) -> torch.Tensor:
        return torch.tensor((values * rows)[:rows], dtype=torch.int64, device=device)

    for step in (logits,) if after is None else (after, logits):
        capture_step(
            step,
            out.sampled_ids,
            torch.tensor(kinds + [SKIP] * spare_rows, dtype=torch.int8, device=device),
            out,
            top=3,
            draws=1,
            seeds=of_rows([1]),
            positions=of_rows([2]),
            draw=TokenDraw(
                add_noise=add_noise,
                seeds=of_rows(SEEDS),
                lead=of_rows([position - 2 for position in POSITIONS]),
                untruncated=not {TOP, NONE, GREEDY}.isdisjoint(kinds),
            )
            if given is None
            else None,
            impl="triton",
        )
    return out.sampled_ids.tolist(), read_rows(out, n), out


def expected(logits: torch.Tensor, kinds: list[int] | None = None) -> list[int]:
    """The tokens of rows that all have one."""
    n, vocab = logits.shape
    noise = noise_of((SEEDS * n)[:n], (POSITIONS * n)[:n], vocab)
    noise[[kind == GREEDY for kind in kinds or [KEPT] * n]] = 0.0
    return tokens_reference(logits.to(noise.device), noise).tolist()


def logits_of(rows: int, vocab: int, kept: list[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab + sum(kept))
    logits = torch.randn(rows, vocab, generator=generator) * 3.0
    for row, count in zip(logits, kept, strict=True):
        row[torch.randperm(vocab, generator=generator)[count:]] = -INF
    return logits.to(dtype)


# narrow rows, rows of one chunk and of several, the widest that is packed whole and one more
WIDTHS = [
    (70, [1, 2, 33, 69, 70]),
    (2 * CHUNK + 100, [1, SPARSE, SPARSE + 1, 3000, 2 * CHUNK + 100]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("vocab", "kept"), WIDTHS)
def test_tokens_are_those_of_the_whole_vocabulary(
    vocab: int, kept: list[int], dtype: torch.dtype
) -> None:
    logits = logits_of(5, vocab, kept, dtype)
    tokens, rows, _ = draw(logits, [KEPT] * 5)
    assert tokens == [*expected(logits), 0, 0]
    for token, row, values, count in zip(tokens, rows, logits, kept, strict=False):
        exact = log_softmax(values)
        assert (row.count, row.flags) == (count, 0)
        assert row.ids == (values > -INF).nonzero().flatten().tolist()
        assert np.all(np.abs(row.logprobs - exact[row.ids]) <= allowed_error(exact[row.ids]))
        assert np.float32(row.sampled).tobytes() == row.logprobs[row.ids.index(token)].tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab", [1, 70, 2 * CHUNK + 100])
def test_rows_of_all_kinds_in_one_step(vocab: int, dtype: torch.dtype) -> None:
    kinds = [TOP, GREEDY, NONE, KEPT, SKIP, GREEDY, TOP, NONE, KEPT]
    kept = [vocab, vocab, vocab, (vocab + 1) // 2, vocab, 1, vocab, (vocab + 3) // 4, vocab]
    logits = logits_of(len(kinds), vocab, kept, dtype)
    tokens, rows, out = draw(logits, kinds)
    wanted = expected(logits, kinds)
    wanted[4] = 0  # nobody's
    assert tokens == [*wanted, 0, 0]
    # all else is as if they had come from elsewhere
    _, same, other = draw(logits, kinds, given=tokens)
    assert torch.equal(out.header, other.header)
    assert torch.equal(out.entries, other.entries)
    assert [row.ids for row in rows] == [row.ids for row in same]


@pytest.mark.parametrize("kind", [KEPT, TOP, NONE, GREEDY])
@pytest.mark.parametrize("kept", [100, SPARSE + 1])
def test_a_step_forgets_the_scores_of_the_one_before(kind: int, kept: int) -> None:
    logits = logits_of(3, CHUNK + 50, [kept] * 3, torch.float32)
    tokens, _, _ = draw(logits, [kind] * 3, after=logits.flip(1) + 1000.0)
    assert tokens[:3] == expected(logits, [kind] * 3)


def test_more_rows_than_one_program_takes() -> None:
    n = TAKE_BLOCK + 2
    logits = logits_of(n, 3, [1 + i % 3 for i in range(n)], torch.float32)
    tokens, _, _ = draw(logits, [KEPT] * n)
    assert tokens[:n] == expected(logits)


@pytest.mark.parametrize("kind", [TOP, NONE, GREEDY])
def test_the_lowest_of_equal_sums_over_all_ids(kind: int) -> None:
    vocab = 2 * CHUNK
    noise = noise_of(SEEDS[:1], POSITIONS[:1], vocab)[0].cpu()
    logits = torch.zeros(1, vocab)
    best = torch.tensor([vocab - 1, CHUNK + 5, 4097, 4096, 700])
    logits[0, best] = 80.0 if kind == GREEDY else 128.0 - noise[best]
    total = logits[0] + (0.0 if kind == GREEDY else noise)
    tied = (total == total.max()).nonzero().flatten()
    assert tied.numel() > 1
    tokens, _, _ = draw(logits, [kind])
    assert tokens[0] == int(tied[0])


def test_the_lowest_of_equal_sums_is_drawn() -> None:
    # sums that are equal in any order of blocks and chunks: noise that the logits undo
    vocab = 2 * CHUNK
    noise = noise_of(SEEDS[:1], POSITIONS[:1], vocab)[0].cpu()
    for kept in (400, 6000):
        logits = torch.full((1, vocab), -INF)
        ids = torch.arange(vocab - 1, vocab - 2 * kept, -2)
        logits[0, ids] = 64.0 - noise[ids]
        total = logits[0] + noise
        tokens, _, _ = draw(logits, [KEPT])
        assert int((total == 64.0).sum()) > 1
        assert tokens[0] == int((total == total.max()).nonzero()[0])


@pytest.mark.parametrize("kept", [100, 5000])
def test_rows_that_do_not_fit_have_tokens(kept: int) -> None:
    logits = logits_of(3, CHUNK, [kept] * 3, torch.float32)
    tokens, rows, out = draw(logits, [KEPT] * 3, capacity=2 * kept - 1)
    assert tokens == [*expected(logits), 0, 0]
    assert [row.flags for row in rows] == [0, OVERFLOW, OVERFLOW]
    assert (out.entries[kept:] == -77).all()
    for token, row, values in zip(tokens, rows, logits, strict=False):
        exact = log_softmax(values)[token]
        assert abs(row.sampled - exact) <= allowed_error(exact)


@pytest.mark.parametrize("kind", [KEPT, TOP, NONE, GREEDY])
def test_rows_without_a_token_have_id_0(kind: int) -> None:
    logits = logits_of(5, 600, [3, 600, 600, 5, 4], torch.float32)
    logits[1, 599] = torch.nan
    logits[2, 0] = INF
    logits[3] = -INF
    tokens, rows, _ = draw(logits, [kind, kind, kind, kind, SKIP])
    assert tokens == [expected(logits[:1], [kind])[0], 0, 0, 0, 0, 0, 0]
    assert [row.flags for row in rows] == [0, NONFINITE, NONFINITE, EMPTY, 0]
    assert [math.isnan(row.sampled) for row in rows] == [False, True, True, True, False]


def test_what_could_not_be_drawn_is_refused() -> None:
    out = StepOutput.allocate(max_rows=2, vocab_size=5, capacity=9, top=0, draws=0, device="cpu")
    ids = torch.zeros(2, dtype=torch.int64)
    kinds = torch.zeros(2, dtype=torch.int8)

    def run(lead: torch.Tensor, impl: str) -> None:
        capture_step(
            torch.zeros(2, 5),
            ids,
            kinds,
            out,
            top=0,
            draws=0,
            seeds=ids,
            positions=ids,
            draw=TokenDraw(add_noise=add_noise, seeds=ids, lead=lead),
            impl=impl,  # type: ignore[arg-type]
        )

    with pytest.raises(ValueError, match=r"draw\.lead: got \[1\] torch\.int64"):
        run(ids[:1], "triton")
    with pytest.raises(ValueError, match="the reference can't run"):
        run(ids, "reference")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", [TOP, NONE, GREEDY])
def test_a_full_untruncated_step_on_the_gpu(kind: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(kind)
    logits = (torch.randn(512, 151_936, device="cuda", generator=generator) * 3.0).to(dtype)
    tokens, _, _ = draw(logits, [kind] * 512)
    assert tokens[:512] == expected(logits, [kind] * 512)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [89_000, 9_300_000])
def test_a_full_step_on_the_gpu(kept: int) -> None:
    rows, vocab = 512, 151_936
    generator = torch.Generator("cuda").manual_seed(kept)
    logits = torch.randn(rows, vocab, device="cuda", generator=generator) * 3.0
    dropped = torch.rand(rows, vocab, device="cuda", generator=generator) > kept / (rows * vocab)
    logits[dropped] = -INF
    logits[:, 5] = 0.0
    tokens, read, _ = draw(logits, [KEPT] * rows)
    wanted = expected(logits)
    assert tokens[:rows] == wanted
    exact = torch.log_softmax(logits.double(), dim=-1).gather(
        1, torch.tensor(wanted, device="cuda")[:, None]
    )
    found = torch.tensor([row.sampled for row in read], dtype=torch.float64, device="cuda")
    error = (found - exact[:, 0]).abs()
    assert torch.all(error <= 5e-7 + 2.0**-23 * exact[:, 0].abs())


@pytest.mark.parametrize(
    ("draws", "memory", "top_k", "message"),
    [
        (2, True, torch.int32, "draws: got 2, expected 0"),
        (0, False, torch.int32, "draw.cut: got one, expected none"),
        (0, True, torch.int64, r"draw.cut.top_k: got \[2\] torch.int64, .* torch.int32"),
    ],
)
def test_cuts_that_would_go_wrong_are_refused(
    draws: int, memory: bool, top_k: torch.dtype, message: str
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scratch = CaptureScratch.allocate(
        max_rows=2, vocab_size=8, top=0, draws=draws, cut=memory, device=device
    )
    out = StepOutput.allocate(
        max_rows=2, vocab_size=8, capacity=8, top=0, draws=draws, device=device, scratch=scratch
    )
    rows = torch.zeros(2, dtype=torch.int64, device=device)
    cut = SupportCut(top_k=rows.to(top_k), top_p=torch.full((2,), 0.5, device=device))
    draw = TokenDraw(add_noise=add_noise, seeds=rows, lead=rows, cut=cut)
    with pytest.raises(ValueError, match=message):
        capture_step(
            torch.zeros(2, 8, device=device),
            rows.clone(),
            torch.ones(2, dtype=torch.int8, device=device),
            out,
            top=0,
            draws=draws,
            seeds=rows,
            positions=rows,
            draw=draw,
        )
