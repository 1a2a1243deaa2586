"""Weighted sums of gathered rows over the segments of a CSR matrix.

Both gradients of the sparse head are such sums, out[s] = sum of coefficient_e * source[index_e]:
over rows with the weight as source, and over ids, after a sort by id, with the hidden states as
source. A program does the first TILE entries of one segment. What a segment holds beyond them is
done before by programs of its own, TILE entries each, whose partial sums the first program adds in
order: balanced whatever the lengths, free of atomics, the same bits in every run. Segments without
entries are written as zeros by the same launch, so the weight's gradient needs no clearing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels.head_config import (
    ENTRY_BLOCK,
    SUM_BLOCK,
    SUM_UNROLL,
    SUM_WARPS,
    sum_tile,
    width_block,
)

# N rows, E entries of all rows, M source rows, H hidden size, S segments


@triton.jit
def _count_tiles_kernel(
    offsets_ptr,
    skip_ptr,
    tiles_ptr,
    num_segments,
    TILE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    segment = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = segment < num_segments
    start = tl.load(offsets_ptr + segment, mask=inside, other=0)
    end = tl.load(offsets_ptr + segment + 1, mask=inside, other=0)
    tiles = tl.maximum(end - start - 1, 0) // TILE
    if HAS_SKIP:
        tiles = tl.where(tl.load(skip_ptr + segment, mask=inside, other=-1) >= 0, 0, tiles)
    tl.store(tiles_ptr + segment, tiles, mask=inside)


@triton.jit
def _add_rows(
    total,
    source_ptr,
    index_ptr,
    coefficients_ptr,
    source_stride,
    num_sources,
    start,
    end,
    column,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    lane = tl.arange(0, UNROLL).to(tl.int64)
    index = tl.load(index_ptr + start + lane, mask=start + lane < end, other=num_sources)
    coefficient = tl.load(coefficients_ptr + start + lane, mask=start + lane < end, other=0.0)
    for begin in range(start, end, UNROLL):
        # [UNROLL, BLOCK_H]
        source = tl.load(
            source_ptr + index.to(tl.int64)[:, None] * source_stride + column[None, :],
            mask=(index < num_sources)[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        # the next step's indices are under way while this step's rows are
        ahead = begin + UNROLL + lane
        index = tl.load(index_ptr + ahead, mask=ahead < end, other=num_sources)
        coefficient_ahead = tl.load(coefficients_ptr + ahead, mask=ahead < end, other=0.0)
        total += tl.sum(source.to(tl.float32) * coefficient[:, None], 0)
        coefficient = coefficient_ahead
    return total


@triton.jit
def _overflow_sum_kernel(
    source_ptr,
    index_ptr,
    coefficients_ptr,
    offsets_ptr,
    tile_ends_ptr,
    partials_ptr,
    source_stride,
    num_sources,
    num_segments,
    search_steps,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    if tile >= tl.load(tile_ends_ptr + num_segments - 1):
        return
    # the first segment whose tiles end behind this one
    low = tile * 0
    high = tile * 0 + num_segments - 1
    for _ in range(search_steps):
        middle = (low + high) // 2
        behind = tl.load(tile_ends_ptr + middle) > tile
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, tl.minimum(middle + 1, high))
    start = tl.load(offsets_ptr + low)
    end = tl.load(offsets_ptr + low + 1)
    behind = tl.load(tile_ends_ptr + low) - tile
    # tiles count from the segment's second TILE entries
    begin = start + ((end - start - 1) // TILE - behind + 1) * TILE
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = _add_rows(
        tl.zeros((BLOCK_H,), tl.float32),
        source_ptr,
        index_ptr,
        coefficients_ptr,
        source_stride,
        num_sources,
        begin,
        tl.minimum(begin + TILE, end),
        column,
        WIDTH=WIDTH,
        UNROLL=UNROLL,
    )
    tl.store(partials_ptr + tile * WIDTH + column, total, mask=column < WIDTH)


@triton.jit
def _segment_sum_kernel(
    source_ptr,
    index_ptr,
    coefficients_ptr,
    offsets_ptr,
    tile_ends_ptr,
    partials_ptr,
    base_ptr,
    skip_ptr,
    out_ptr,
    source_stride,
    num_sources,
    WIDTH: tl.constexpr,
    HAS_TILES: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    segment = tl.program_id(0).to(tl.int64)
    if HAS_SKIP and tl.load(skip_ptr + segment) >= 0:
        return
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    known = column < WIDTH
    total = tl.zeros((BLOCK_H,), tl.float32)
    if HAS_BASE:
        total = tl.load(base_ptr + segment * WIDTH + column, mask=known, other=0.0)
    start = tl.load(offsets_ptr + segment)
    end = tl.load(offsets_ptr + segment + 1)
    total = _add_rows(
        total,
        source_ptr,
        index_ptr,
        coefficients_ptr,
        source_stride,
        num_sources,
        start,
        tl.minimum(start + TILE, end),
        column,
        WIDTH=WIDTH,
        UNROLL=UNROLL,
    )
    if HAS_TILES and end - start > TILE:
        last = tl.load(tile_ends_ptr + segment)
        for tile in range(last - (end - start - 1) // TILE, last):
            total += tl.load(partials_ptr + tile * WIDTH + column, mask=known, other=0.0)
    tl.store(out_ptr + segment * WIDTH + column, total, mask=known)


def segment_sum(
    source: torch.Tensor,  # [M, H]
    index: torch.Tensor,  # [E]
    coefficients: torch.Tensor,  # [E]
    offsets: torch.Tensor,  # [S + 1]
    out: torch.Tensor,  # [S, H]
    *,
    num_rows: int,
    base: torch.Tensor | None = None,  # [S, H]
    skip: torch.Tensor | None = None,  # [S]
) -> None:
    """Write out[s] = base[s] + sum over segment s of coefficient_e * source[index_e].

    Extra memory: at most `num_rows` + 1 rows of fp32 partial sums.

    Args:
        source: [M, H] bf16, fp16 or fp32, unit stride along H.
        index: [E] int32; entries with an index of M or more add nothing.
        coefficients: [E] fp32.
        offsets: [S + 1] int64, segment s in offsets[s]:offsets[s + 1].
        out: [S, H] contiguous, every row written but the skipped ones.
        num_rows: N, which bounds the extra memory.
        base: [S, H] fp32, contiguous.
        skip: [S] int32, segments with a value of 0 or more are left alone.
    """
    num_segments, width = out.shape
    tile = sum_tile(num_rows, index.shape[0])
    block = width_block(width, SUM_BLOCK)
    num_tiles = index.shape[0] // tile
    columns = triton.cdiv(width, block)
    tile_ends, partials = None, None
    if num_tiles:
        tiles = torch.empty(num_segments, dtype=torch.int64, device=out.device)
        _count_tiles_kernel[(triton.cdiv(num_segments, ENTRY_BLOCK),)](
            offsets,
            skip,
            tiles,
            num_segments,
            TILE=tile,
            HAS_SKIP=skip is not None,
            BLOCK=ENTRY_BLOCK,
        )
        tile_ends = tiles.cumsum(0)
        partials = torch.empty(num_tiles, width, dtype=torch.float32, device=out.device)
        _overflow_sum_kernel[(num_tiles, columns)](
            source,
            index,
            coefficients,
            offsets,
            tile_ends,
            partials,
            source.stride(0),
            source.shape[0],
            num_segments,
            num_segments.bit_length(),
            WIDTH=width,
            TILE=tile,
            UNROLL=SUM_UNROLL,
            BLOCK_H=block,
            num_warps=SUM_WARPS,
        )
    _segment_sum_kernel[(num_segments, columns)](
        source,
        index,
        coefficients,
        offsets,
        tile_ends,
        partials,
        base,
        skip,
        out,
        source.stride(0),
        source.shape[0],
        WIDTH=width,
        HAS_TILES=num_tiles > 0,
        HAS_BASE=base is not None,
        HAS_SKIP=skip is not None,
        TILE=tile,
        UNROLL=SUM_UNROLL,
        BLOCK_H=block,
        num_warps=SUM_WARPS,
    )
