"""What the host knows of a step, and the sampled ids from wherever the sampler put them.

A launch that is to be the same at every step can't name an address that changes from step to step,
so the ids' address travels in memory, with the rest. A kernel reads it all over the bus, since
graphs of kernels alone were launched faster than those with a copy engine's part.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
import triton
import triton.language as tl

from rollout.kernels.launch import Impl, ceil_div, choose_impl

SOURCE_WORD: Final = 1
"""Which 8 bytes of what the host hands over are the address of the sampled ids."""
COUNT_WORD: Final = 2
"""Which 8 bytes are the number of sampled ids."""
FETCH_BLOCK: Final = 512
FETCH_WARPS: Final = 4


def fetch_step(
    host: torch.Tensor,  # [W]
    device: torch.Tensor,  # [W]
    ids: torch.Tensor,  # [R]
    *,
    impl: Impl | None = None,
) -> None:
    """Copy the host's words, and the ids that they point to, on the current stream.

    Args:
        host: [W] int64, pinned, contiguous: word `SOURCE_WORD` is the address of N int64 ids on the
            device, `COUNT_WORD` is N <= R. Both memories must stay as they are until the stream has
            come so far.
        device: [W] int64, contiguous, becomes what `host` is.
        ids: [R] int64, contiguous; those past N become 0.
        impl: overrides the choice by device, for tests.

    Raises:
        ValueError: sizes or dtypes disagree.
    """
    words = max(device.numel(), COUNT_WORD + 1)
    for name, tensor, size in (
        ("host", host, words),
        ("device", device, words),
        ("ids", ids, ids.numel()),
    ):
        if tensor.shape != (size,) or tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: got {list(tensor.shape)} {tensor.dtype}, "
                f"expected contiguous [{size}] torch.int64"
            )
    if choose_impl(ids, impl) == "reference":
        device.copy_(host)
        ids.zero_()
        source, count = int(host[SOURCE_WORD]), int(host[COUNT_WORD])
        ctypes.memmove(ids.data_ptr(), source, 8 * count)
        return
    blocks = ceil_div(max(words, ids.numel()), FETCH_BLOCK)
    _fetch_step_kernel[(blocks,)](
        host,
        device,
        ids,
        words,
        ids.numel(),
        SOURCE=SOURCE_WORD,
        COUNT=COUNT_WORD,
        BLOCK=FETCH_BLOCK,
        num_warps=FETCH_WARPS,
    )


@triton.jit(do_not_specialize=["num_words", "num_ids"])
def _fetch_step_kernel(
    host_ptr,
    device_ptr,
    ids_ptr,
    num_words,
    num_ids,
    SOURCE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(host_ptr + index, mask=index < num_words)
    source_ptr = tl.load(host_ptr + SOURCE).to(tl.pointer_type(tl.int64))
    count = tl.load(host_ptr + COUNT)
    tl.store(device_ptr + index, words, mask=index < num_words)
    ids = tl.load(source_ptr + index, mask=index < count, other=0)
    tl.store(ids_ptr + index, ids, mask=index < num_ids)
