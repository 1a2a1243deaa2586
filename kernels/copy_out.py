"""A step's buffers to the host: exactly the entries that there are, without the host's asking.

A kernel knows how many there are and copies them, which keeps its multiprocessors, for as long as
the stores take over the bus, from kernels that want all of them. The copy engines need the number
from the host, which can only guess it: steps are much like the ones before. So where there are
many, the first entries, as many as the caller guesses, go by a copy engine, and the kernel copies
what there is beyond them. Where there are few, the kernel copies all, since graphs of kernels alone
were launched faster than those with a copy engine's part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels.launch import Impl, choose_impl
from rollout.kernels.step_output import StepOutput

# 19.6 GB/s on an H200, November 2026; 32 to 132 programs get in each other's way: 14 to 16 GB/s
COPY_PROGRAMS = 16
COPY_BLOCK = 2048
COPY_WARPS = 8


def copy_out(
    out: StepOutput,
    num_rows: int,
    host_header: torch.Tensor,  # [B]
    host_entries: torch.Tensor,  # [capacity]
    ready: torch.Tensor,  # [1]
    number: torch.Tensor,  # [1]
    *,
    ahead: int,
    impl: Impl | None = None,
) -> None:
    """Queue the copy of one step to the host, on the current stream.

    Entries are copied up to the capacity: those of rows flagged OVERFLOW were not written, so what
    stands after the last row that fitted is old.

    Args:
        out: the buffers of the step.
        num_rows: rows of the step, N.
        host_header: [B] uint8, pinned; the copy of `out.header`, whose size is a multiple of 8.
        host_entries: [capacity] int64, pinned.
        ready: [1] int64, pinned; becomes `number` after everything else has arrived.
        number: [1] int64, on the device like `out`.
        ahead: entries that a copy engine takes, filled or not; the rest is the kernel's.
        impl: overrides the choice by device, for tests.

    Raises:
        ValueError: sizes or dtypes disagree.
    """
    if host_header.numel() != out.header.numel() or host_header.dtype != torch.uint8:
        raise ValueError(
            f"host_header: got {host_header.numel()} {host_header.dtype}, "
            f"expected {out.header.numel()} torch.uint8"
        )
    if host_entries.numel() != out.entries.numel() or host_entries.dtype != torch.int64:
        raise ValueError(
            f"host_entries: got {host_entries.numel()} {host_entries.dtype}, "
            f"expected {out.entries.numel()} torch.int64"
        )
    if not 0 <= ahead <= out.entries.numel():
        raise ValueError(f"ahead: got {ahead}, expected 0 to {out.entries.numel()}")
    if ahead:
        host_entries[:ahead].copy_(out.entries[:ahead], non_blocking=True)
    if choose_impl(out.counts, impl) == "reference":
        stored = min(int(out.offsets[num_rows]), host_entries.numel())
        host_header.copy_(out.header)
        host_entries[ahead:stored] = out.entries[ahead:stored]
        ready.copy_(number)
        return
    _copy_out_kernel[(COPY_PROGRAMS,)](
        out.offsets,
        out.header.view(torch.int64),
        out.entries,
        host_header.view(torch.int64),
        host_entries,
        num_rows,
        out.header.numel() // 8,
        ahead,
        out.entries.numel(),
        BLOCK=COPY_BLOCK,
        PROGRAMS=COPY_PROGRAMS,
        num_warps=COPY_WARPS,
    )
    # a kernel of its own: it starts when all programs of the other one have written
    _ready_kernel[(1,)](ready, number, num_warps=1)


@triton.jit(do_not_specialize=["num_rows", "header_words", "ahead", "capacity"])
def _copy_out_kernel(
    offsets_ptr,
    header_ptr,
    entries_ptr,
    host_header_ptr,
    host_entries_ptr,
    num_rows,
    header_words,
    ahead,
    capacity,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    for start in range(program * BLOCK, header_words, PROGRAMS * BLOCK):
        mask = start + index < header_words
        words = tl.load(header_ptr + start + index, mask=mask)
        tl.store(host_header_ptr + start + index, words, mask=mask)
    stored = tl.minimum(tl.load(offsets_ptr + num_rows), capacity)
    for start in range(ahead + program * BLOCK, stored, PROGRAMS * BLOCK):
        mask = start + index < stored
        entries = tl.load(entries_ptr + start + index, mask=mask)
        tl.store(host_entries_ptr + start + index, entries, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["ready_ptr", "number_ptr"])
def _ready_kernel(ready_ptr, number_ptr):
    tl.store(ready_ptr, tl.load(number_ptr))
