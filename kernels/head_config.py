"""Block sizes of the head kernels, and which path a batch of a given shape takes.

Everything here is a function of shapes known on the host, so that no launch waits for the device.
Measured on one NVIDIA H200 in 2026-11 with torch 2.11 and triton 3.6, 16384 tokens, H 2048,
V 151936, bf16; jobs/bench/lm_head.py repeats it.
"""

from __future__ import annotations

import torch

DOT_TILE = 8
"""Entries of one program of the sampled product: 8 take 0.10 ms of a batch of short supports, 16
0.12, 32 0.15, and all the same of one of 128 ids a token."""

DOT_WARPS = 4
"""Warps of one program of the sampled product."""

SUM_UNROLL = 4
"""Gathered rows that one program of the segment sums has in flight."""

SUM_WARPS = 4
"""Warps of one program of the segment sums."""

SUM_BLOCK = 1024
"""Columns of one program of the segment sums. All programs of one block of columns run before those
of the next, so that their part of the gathered matrix stays in the cache: 1024 take 1.25 ms for the
weight's gradient of 128 ids a token, 2048 1.48."""

MIN_SUM_TILE = 64
"""Entries of a segment that one program sums, at least."""

ENTRY_BLOCK = 1024
"""Entries of one program of the elementwise kernels."""

MIN_HOT_MEAN = 48
"""Mean support from which a dense block of hot ids pays for its sort and its products."""

MIN_HOT_ROWS = 1024
"""Rows below which a batch has too little work for a dense block."""

HOT_BLOCK = 2048
"""Ids of the dense block, at most: 128 Zipf ids a token take 4.7 ms without it, 3.7 with 1024 or
2048."""

DENSE_BLOCK_ELEMENTS = 1 << 27
"""Logits of one block of the dense head, at most, unless N * H is more."""

WIDE_BLOCK_ELEMENTS = 1 << 25
"""Logits of one block of the wide rows, at most, unless N * H is more."""

WIDE_SHARE = 48
"""A support of more than V / WIDE_SHARE ids is cheaper by the product with the whole weight.

At 48, 96 and 192 supports of mean 174 take 4.4, 4.5 and 5.1 ms, of mean 4000 35, 37 and 41 ms.
"""


def hot_block(num_rows: int, num_entries: int, vocab: int, width: int, dtype: torch.dtype) -> int:
    """Return the ids of the dense block for a batch of this shape; 0 for none.

    The block never holds more than H ids, so that its [N, block] matrices fit N * H elements.
    Only 16-bit weights have one: fp32 products run off the tensor cores.
    """
    if dtype not in (torch.bfloat16, torch.float16) or num_entries < MIN_HOT_MEAN * max(
        num_rows, MIN_HOT_ROWS
    ):
        return 0
    return min(HOT_BLOCK, width, vocab)


def row_blocks(num_rows: int, num_entries: int) -> dict[str, int]:
    """Return the launch options of a kernel with one program a row, in steps of BLOCK entries."""
    if num_entries <= 32 * num_rows:
        return {"BLOCK": 128, "num_warps": 1}
    if num_entries <= 1024 * num_rows:
        return {"BLOCK": 1024, "num_warps": 4}
    return {"BLOCK": 4096, "num_warps": 8}


def width_block(width: int, limit: int) -> int:
    """Return the columns of one block: a power of two up to `limit` that wastes few lanes."""
    block = limit
    while block > 128 and width % block:
        block //= 2
    if width % block and width < limit:
        return max(16, 1 << (width - 1).bit_length())
    return block


def sum_tile(num_rows: int, num_entries: int) -> int:
    """Return the entries that one program sums, such that partial sums fit N rows."""
    mean = max(1, num_entries // max(1, num_rows))
    return max(MIN_SUM_TILE, 1 << mean.bit_length())
