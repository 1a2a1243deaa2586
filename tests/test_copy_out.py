"""A step arrives on the host whole, with exactly the entries that were stored."""

from __future__ import annotations

import pytest
import torch

from rollout.kernels.copy_out import COPY_BLOCK, COPY_PROGRAMS, copy_out
from rollout.kernels.step_output import StepOutput

CPU_AND_GPU = [
    ("reference", "cpu"),
    ("triton", "cpu"),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
]


def step_with(entries: int, capacity: int, rows: int, device: str) -> StepOutput:
    """Make a step of random bits whose rows need so many entries in all."""
    out = StepOutput.allocate(
        max_rows=rows + 3, vocab_size=100, capacity=capacity, top=0, draws=3, device=device
    )
    generator = torch.Generator().manual_seed(entries)
    out.header.copy_(torch.randint(0, 256, out.header.shape, generator=generator))
    out.entries.copy_(torch.randint(-(2**62), 2**62, out.entries.shape, generator=generator))
    out.offsets[rows] = entries
    return out


@pytest.mark.parametrize(("impl", "device"), CPU_AND_GPU)
@pytest.mark.parametrize("guess", ["none", "less", "right", "more", "all"])
@pytest.mark.parametrize(
    ("entries", "capacity", "rows"),
    [
        (0, 10, 1),
        (1, 10, 5),
        (COPY_BLOCK, COPY_BLOCK, 2),
        (COPY_BLOCK + 1, 3 * COPY_BLOCK, 700),
        (COPY_PROGRAMS * COPY_BLOCK + 77, 2 * COPY_PROGRAMS * COPY_BLOCK, 33),
        (10**12, 5000, 4),  # past the capacity, and past 32 bits
    ],
)
def test_everything_stored_arrives_and_nothing_else(
    impl: str, device: str, entries: int, capacity: int, rows: int, guess: str
) -> None:
    stored = min(entries, capacity)
    ahead = {
        "none": 0,
        "less": stored // 2 + 1,
        "right": stored,
        "more": stored + 5,
        "all": capacity,
    }[guess]
    ahead = min(ahead, capacity)
    out = step_with(entries, capacity, rows, device)
    pin = device == "cuda"
    header = torch.full(out.header.shape, 77, dtype=torch.uint8, pin_memory=pin)
    host = torch.full((capacity,), -77, pin_memory=pin)
    ready = torch.zeros(1, dtype=torch.int64, pin_memory=pin)
    number = torch.tensor([2**40 + 5], device=device)
    copy_out(out, rows, header, host, ready, number, ahead=ahead, impl=impl)  # type: ignore[arg-type]
    if pin:
        torch.cuda.synchronize()
    assert torch.equal(header, out.header.cpu())
    assert torch.equal(host[:stored], out.entries[:stored].cpu())
    assert torch.all(host[max(stored, ahead) :] == -77)
    assert ready.item() == number.item()


@pytest.mark.parametrize("wrong", ["header", "entries"])
def test_buffers_of_another_size_are_refused(wrong: str) -> None:
    out = step_with(3, 10, 2, "cpu")
    header = torch.zeros(out.header.numel() + 8 * (wrong == "header"), dtype=torch.uint8)
    host = torch.zeros(10 + (wrong == "entries"), dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"host_{wrong}: got .* expected"):
        copy_out(out, 2, header, host, torch.zeros(1, dtype=torch.int64), out.offsets[:1], ahead=0)


@pytest.mark.parametrize("ahead", [-1, 11])
def test_a_guess_past_the_buffer_is_refused(ahead: int) -> None:
    out = step_with(3, 10, 2, "cpu")
    header, host = torch.zeros_like(out.header), torch.zeros_like(out.entries)
    with pytest.raises(ValueError, match=f"ahead: got {ahead}, expected 0 to 10"):
        copy_out(out, 2, header, host, out.offsets[:1].clone(), out.offsets[:1], ahead=ahead)
