"""Weighted sums of gathered rows over the segments of two CSR matrices, in one launch.

A program does the first TILE entries of one segment. What a segment holds beyond them is done
before by programs of its own, TILE entries each, whose partial sums the first program adds in
order: balanced whatever the lengths, free of atomics, the same bits in every run. Segments without
entries are written as zeros by the same launch, so the weight's gradient needs no clearing.
"""

from __future__ import annotations

import triton
import triton.language as tl

# N rows, E entries of all rows, M source rows, H hidden size, S segments


@triton.jit
def _num_tiles(offsets_ptr, skip_ptr, segment, inside, TILE: tl.constexpr, HAS_SKIP: tl.constexpr):
    start = tl.load(offsets_ptr + segment, mask=inside, other=0)
    end = tl.load(offsets_ptr + segment + 1, mask=inside, other=0)
    tiles = tl.maximum(end - start - 1, 0) // TILE
    if HAS_SKIP:
        tiles = tl.where(tl.load(skip_ptr + segment, mask=inside, other=-1) >= 0, 0, tiles)
    return tiles


@triton.jit
def count_tiles_kernel(
    row_offsets_ptr,
    id_offsets_ptr,
    id_skip_ptr,
    tiles_ptr,
    num_row_segments,
    num_segments,
    TILE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the tiles of each segment beyond its first.

    Args:
        row_offsets_ptr: [S1 + 1] int64, segments of the first matrix.
        id_offsets_ptr: [S2 + 1] int64, segments of the second.
        id_skip_ptr: [S2] int32, segments with 0 or more have none; unused without HAS_SKIP.
        tiles_ptr: [S1 + S2] int64, written.
        num_row_segments: S1.
        num_segments: S1 + S2.
        TILE: entries of a tile.
        HAS_SKIP: whether there is a skip list.
        BLOCK: segments of one program.
    """
    segment = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = segment < num_row_segments
    is_id = (segment < num_segments) & ~is_row
    tiles = _num_tiles(row_offsets_ptr, id_skip_ptr, segment, is_row, TILE=TILE, HAS_SKIP=False)
    tiles += _num_tiles(
        id_offsets_ptr,
        id_skip_ptr,
        segment - num_row_segments,
        is_id,
        TILE=TILE,
        HAS_SKIP=HAS_SKIP,
    )
    tl.store(tiles_ptr + segment, tiles, mask=segment < num_segments)


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
def _sum_tile(
    partials_ptr,
    tile_ends_ptr,
    source_ptr,
    index_ptr,
    coefficients_ptr,
    offsets_ptr,
    source_stride,
    num_sources,
    place,
    segment,
    tile,
    column,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    start = tl.load(offsets_ptr + segment)
    end = tl.load(offsets_ptr + segment + 1)
    # tiles count from the segment's second TILE entries
    left = tl.load(tile_ends_ptr + place) - tile
    begin = start + ((end - start - 1) // TILE - left + 1) * TILE
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
def overflow_sum_kernel(
    partials_ptr,
    tile_ends_ptr,
    row_source_ptr,
    row_index_ptr,
    row_coefficients_ptr,
    row_offsets_ptr,
    id_source_ptr,
    id_index_ptr,
    id_coefficients_ptr,
    id_offsets_ptr,
    row_source_stride,
    id_source_stride,
    num_row_sources,
    num_id_sources,
    num_row_segments,
    num_segments,
    search_steps,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum the tiles beyond the first of every segment; arguments as `segment_sum_kernel`'s.

    Args:
        partials_ptr: [tiles, H] fp32, written.
        tile_ends_ptr: [S1 + S2] int64, inclusive prefix sums of the segments' tiles.
        row_source_ptr: [M1, H].
        row_index_ptr: [E] int32.
        row_coefficients_ptr: [E] fp32.
        row_offsets_ptr: [S1 + 1] int64.
        id_source_ptr: [M2, H].
        id_index_ptr: [E] int32.
        id_coefficients_ptr: [E] fp32.
        id_offsets_ptr: [S2 + 1] int64.
        row_source_stride: of a source row, in elements.
        id_source_stride: likewise.
        num_row_sources: M1.
        num_id_sources: M2.
        num_row_segments: S1.
        num_segments: S1 + S2.
        search_steps: bits of num_segments.
        WIDTH: H.
        TILE: entries of a tile.
        UNROLL: gathered rows in flight.
        BLOCK_H: columns of one program.
    """
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
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    if low < num_row_segments:
        _sum_tile(
            partials_ptr,
            tile_ends_ptr,
            row_source_ptr,
            row_index_ptr,
            row_coefficients_ptr,
            row_offsets_ptr,
            row_source_stride,
            num_row_sources,
            low,
            low,
            tile,
            column,
            WIDTH=WIDTH,
            TILE=TILE,
            UNROLL=UNROLL,
            BLOCK_H=BLOCK_H,
        )
    else:
        _sum_tile(
            partials_ptr,
            tile_ends_ptr,
            id_source_ptr,
            id_index_ptr,
            id_coefficients_ptr,
            id_offsets_ptr,
            id_source_stride,
            num_id_sources,
            low,
            low - num_row_segments,
            tile,
            column,
            WIDTH=WIDTH,
            TILE=TILE,
            UNROLL=UNROLL,
            BLOCK_H=BLOCK_H,
        )


@triton.jit
def _sum_segment(
    total,
    out_ptr,
    partials_ptr,
    tile_ends_ptr,
    source_ptr,
    index_ptr,
    coefficients_ptr,
    offsets_ptr,
    source_stride,
    num_sources,
    place,
    segment,
    column,
    WIDTH: tl.constexpr,
    HAS_TILES: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
):
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
        last = tl.load(tile_ends_ptr + place)
        for tile in range(last - (end - start - 1) // TILE, last):
            total += tl.load(partials_ptr + tile * WIDTH + column, mask=column < WIDTH, other=0.0)
    tl.store(out_ptr + segment * WIDTH + column, total, mask=column < WIDTH)


@triton.jit
def segment_sum_kernel(
    row_out_ptr,
    id_out_ptr,
    row_base_ptr,
    id_skip_ptr,
    partials_ptr,
    tile_ends_ptr,
    row_source_ptr,
    row_index_ptr,
    row_coefficients_ptr,
    row_offsets_ptr,
    id_source_ptr,
    id_index_ptr,
    id_coefficients_ptr,
    id_offsets_ptr,
    row_source_stride,
    id_source_stride,
    num_row_sources,
    num_id_sources,
    num_row_segments,
    WIDTH: tl.constexpr,
    HAS_TILES: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    ADDS_IDS: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum every segment of both matrices and write it.

    Args:
        row_out_ptr: [S1, H], written.
        id_out_ptr: [S2, H], written but for the skipped segments.
        row_base_ptr: [S1, H] fp32, added; unused without HAS_BASE.
        id_skip_ptr: [S2] int32, segments with 0 or more are left; unused without HAS_SKIP.
        partials_ptr: [tiles, H] fp32 from `overflow_sum_kernel`; unused without HAS_TILES.
        tile_ends_ptr: [S1 + S2] int64, inclusive prefix sums; unused without HAS_TILES.
        row_source_ptr: [M1, H].
        row_index_ptr: [E] int32.
        row_coefficients_ptr: [E] fp32.
        row_offsets_ptr: [S1 + 1] int64.
        id_source_ptr: [M2, H].
        id_index_ptr: [E] int32.
        id_coefficients_ptr: [E] fp32.
        id_offsets_ptr: [S2 + 1] int64.
        row_source_stride: of a source row, in elements.
        id_source_stride: likewise.
        num_row_sources: M1.
        num_id_sources: M2.
        num_row_segments: S1.
        WIDTH: H.
        HAS_TILES: whether a segment can have more than TILE entries.
        HAS_BASE: whether there is a base.
        HAS_SKIP: whether there is a skip list.
        ADDS_IDS: whether the second matrix' sums are added to what `id_out_ptr` holds.
        TILE: entries of a tile.
        UNROLL: gathered rows in flight.
        BLOCK_H: columns of one program.
    """
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_H,), tl.float32)
    if place < num_row_segments:
        if HAS_BASE:
            total = tl.load(row_base_ptr + place * WIDTH + column, mask=column < WIDTH, other=0.0)
        _sum_segment(
            total,
            row_out_ptr,
            partials_ptr,
            tile_ends_ptr,
            row_source_ptr,
            row_index_ptr,
            row_coefficients_ptr,
            row_offsets_ptr,
            row_source_stride,
            num_row_sources,
            place,
            place,
            column,
            WIDTH=WIDTH,
            HAS_TILES=HAS_TILES,
            TILE=TILE,
            UNROLL=UNROLL,
        )
    else:
        segment = place - num_row_segments
        if HAS_SKIP and tl.load(id_skip_ptr + segment) >= 0:
            return
        if ADDS_IDS:
            if tl.load(id_offsets_ptr + segment) == tl.load(id_offsets_ptr + segment + 1):
                return
            total = tl.load(
                id_out_ptr + segment * WIDTH + column, mask=column < WIDTH, other=0.0
            ).to(tl.float32)
        _sum_segment(
            total,
            id_out_ptr,
            partials_ptr,
            tile_ends_ptr,
            id_source_ptr,
            id_index_ptr,
            id_coefficients_ptr,
            id_offsets_ptr,
            id_source_stride,
            num_id_sources,
            place,
            segment,
            column,
            WIDTH=WIDTH,
            HAS_TILES=HAS_TILES,
            TILE=TILE,
            UNROLL=UNROLL,
        )
