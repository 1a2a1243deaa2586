"""The capture kernels as compiled for the GPU, at the sizes of a real step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from noise import add_noise
from oracle_capture import (
    EMPTY,
    GREEDY,
    KEPT,
    NONE,
    NONFINITE,
    SAMPLED_MISSING,
    SKIP,
    TOP,
    capture,
    poison,
)

from rollout.kernels import draws as draws_module
from rollout.kernels import pack_support, row_stats, token_draw, top_capture
from rollout.kernels.support_capture import StepOutput, capture_step
from rollout.kernels.token_draw import TokenDraw

pytestmark = pytest.mark.gpu

INF = float("inf")
MASK_32 = (1 << 32) - 1


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Make every wait for the device an error."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def mixed_step(rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
    """Make logits with every kind of row and every kind of damage, on the CPU."""
    generator = torch.Generator().manual_seed(rows + vocab)
    logits = torch.randn(rows, vocab, generator=generator) * 3.0
    kinds = [(KEPT, TOP, GREEDY, NONE, SKIP, KEPT)[i % 6] for i in range(rows)]
    logits[::6][torch.rand(logits[::6].shape, generator=generator) < 0.9] = -INF
    logits[5::6][torch.rand(logits[5::6].shape, generator=generator) < 0.999] = -INF
    logits[:, 3 % vocab] = 1.0
    if rows > 12:
        logits[6, 1] = torch.nan
        logits[7, vocab - 1] = INF
        logits[8] = -INF
        logits[9, 3] = -INF
    return logits.to(dtype), kinds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "vocab", "offset"),
    [(1, 1, 0), (13, 507, 0), (13, 4099, 3), (40, 200_003, 0), (1024, 8193, 1), (25, 151_936, 0)],
)
def test_the_gpu_records_what_the_reference_does(
    dtype: torch.dtype, rows: int, vocab: int, offset: int
) -> None:
    logits, kinds = mixed_step(rows, vocab, dtype)
    # a view into wider rows that starts anywhere
    storage = torch.full((rows, vocab + offset), 77.0, dtype=dtype)
    storage[:, offset:] = logits
    arguments = {"kinds": kinds, "sampled": [3 % vocab] * rows, "top": 5, "draws": 3}
    expected, _ = capture(logits, impl="reference", **arguments)  # type: ignore[arg-type]
    rows_on_gpu, _ = capture(storage.cuda()[:, offset:], impl="triton", **arguments)  # type: ignore[arg-type]
    for row, reference in zip(rows_on_gpu, expected, strict=True):
        assert (row.count, row.flags, row.ids) == (reference.count, reference.flags, reference.ids)
        assert row.draw_ids == reference.draw_ids
        assert row.logprobs == pytest.approx(reference.logprobs, rel=2.4e-7, abs=1e-6)
        assert row.draw_logprobs == pytest.approx(reference.draw_logprobs, rel=2.4e-7, abs=1e-6)
        assert row.sampled == pytest.approx(reference.sampled, rel=2.4e-7, abs=1e-6, nan_ok=True)
        assert row.tail == pytest.approx(reference.tail, rel=1e-5, nan_ok=True)
    if rows > 12:
        assert [row.flags for row in rows_on_gpu[6:10]] == [
            NONFINITE,
            NONFINITE,
            EMPTY,
            SAMPLED_MISSING,
        ]


@pytest.mark.parametrize("kept", [89_000, 9_300_000])
def test_a_full_step_against_float64(kept: int) -> None:
    rows, vocab = 512, 151_936
    generator = torch.Generator("cuda").manual_seed(kept)
    logits = torch.randn(rows, vocab, device="cuda", generator=generator) * 3.0
    dropped = torch.rand(rows, vocab, device="cuda", generator=generator) > kept / (rows * vocab)
    logits[dropped] = -INF
    logits[:, 5] = 0.0
    ids = torch.full((rows,), 5, device="cuda")
    out = StepOutput.allocate(
        max_rows=rows, vocab_size=vocab, capacity=1 << 24, top=0, draws=0, device="cuda"
    )
    poison(out)
    kinds = torch.full((rows,), KEPT, dtype=torch.int8, device="cuda")
    capture_step(logits, ids, kinds, out, top=0, draws=0, seeds=ids, positions=ids)
    mask = logits > -INF
    assert torch.equal(out.counts.long(), mask.sum(dim=1))
    assert torch.equal(out.offsets[1:], mask.sum(dim=1).cumsum(dim=0))
    packed = out.entries[: int(out.offsets[rows])]
    row = torch.repeat_interleave(torch.arange(rows, device="cuda"), out.counts.long())
    keys = row * vocab + (packed & MASK_32)
    assert torch.equal(keys.sort().values, mask.flatten().nonzero().flatten())
    exact = torch.log_softmax(logits.double(), dim=-1).flatten()[keys]
    error = ((packed >> 32).to(torch.int32).view(torch.float32).double() - exact).abs()
    assert torch.all(error <= 5e-7 + 2.0**-23 * exact.abs())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.usefixtures("no_sync")
def test_steps_neither_wait_nor_compile_nor_allocate() -> None:
    kernels = [
        row_stats._chunk_stats_kernel,
        row_stats._row_stats_kernel,
        pack_support._pack_kernel,
        top_capture._top_kernel,
        draws_module._draws_kernel,
        token_draw._take_tokens_kernel,
    ]
    vocab = 32_000
    out = StepOutput.allocate(
        max_rows=256, vocab_size=vocab, capacity=1 << 20, top=20, draws=2, device="cuda"
    )
    steps = []
    for rows in (256, 1, 16, 17, 100, 255):
        logits = torch.randn(rows, vocab, device="cuda")
        logits[:, 100:] = -INF
        ids = torch.zeros(rows + 3, dtype=torch.int64, device="cuda")
        kinds = torch.full((rows + 3,), KEPT, dtype=torch.int8, device="cuda")
        # starts at any alignment
        steps.append((logits, ids[3:], kinds[3:]))

    def run(step: int) -> None:
        logits, ids, kinds = steps[step]
        for draw in (None, TokenDraw(add_noise=add_noise, seeds=ids, lead=ids)):
            capture_step(
                logits, ids, kinds, out, top=20, draws=2, seeds=ids, positions=ids, draw=draw
            )

    run(0)
    compiled = [sum(len(cache[0]) for cache in k.device_caches.values()) for k in kernels]
    assert all(number >= 1 for number in compiled)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for step in range(1, len(steps)):
        run(step)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert compiled == [sum(len(cache[0]) for cache in k.device_caches.values()) for k in kernels]


def test_a_step_can_be_captured_in_a_graph() -> None:
    logits = torch.randn(8, 5000, device="cuda")
    ids = torch.zeros(8, dtype=torch.int64, device="cuda")
    kinds = torch.full((8,), KEPT, dtype=torch.int8, device="cuda")
    out = StepOutput.allocate(
        max_rows=8, vocab_size=5000, capacity=40_000, top=0, draws=1, device="cuda"
    )
    arguments = {"top": 0, "draws": 1, "seeds": ids, "positions": ids}
    capture_step(logits, ids, kinds, out, **arguments)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        capture_step(logits, ids, kinds, out, **arguments)  # type: ignore[arg-type]
    logits[:, 1000:] = -INF
    graph.replay()
    assert out.counts.tolist() == [1000] * 8
