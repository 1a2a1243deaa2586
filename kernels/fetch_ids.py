"""The sampled ids of a step, from wherever the sampler put them.

A launch that is to be the same at every step can't name an address that changes from step to step.
So the address travels in memory, with the rest of what the host knows of the step.
"""

from __future__ import annotations

import ctypes

import torch
import triton
import triton.language as tl

from rollout.kernels.launch import Impl, ceil_div, choose_impl

FETCH_BLOCK = 512
FETCH_WARPS = 4


def fetch_ids(
    source: torch.Tensor,  # [2]
    out: torch.Tensor,  # [R]
    *,
    impl: Impl | None = None,
) -> None:
    """Copy ids from an address that only the device looks up, on the current stream.

    Args:
        source: [2] int64, contiguous: the address of N int64 ids on the same device, and N <= R.
            They must stay there until the stream has come so far.
        out: [R] int64, contiguous; those past N become 0.
        impl: overrides the choice by device, for tests.

    Raises:
        ValueError: sizes or dtypes disagree.
    """
    for name, tensor, size in (("source", source, 2), ("out", out, out.numel())):
        if tensor.shape != (size,) or tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: got {list(tensor.shape)} {tensor.dtype}, "
                f"expected contiguous [{size}] torch.int64"
            )
    if choose_impl(out, impl) == "reference":
        address, count = source.tolist()
        out.zero_()
        ctypes.memmove(out.data_ptr(), address, 8 * count)
        return
    _fetch_ids_kernel[(ceil_div(out.numel(), FETCH_BLOCK),)](
        source, out, out.numel(), BLOCK=FETCH_BLOCK, num_warps=FETCH_WARPS
    )


@triton.jit(do_not_specialize=["num_out"])
def _fetch_ids_kernel(source_ptr, out_ptr, num_out, BLOCK: tl.constexpr):
    ids_ptr = tl.load(source_ptr).to(tl.pointer_type(tl.int64))
    count = tl.load(source_ptr + 1)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + index, mask=index < count, other=0)
    tl.store(out_ptr + index, ids, mask=index < num_out)
