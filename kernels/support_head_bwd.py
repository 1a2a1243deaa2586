"""Backward kernels of the sparse head: gradients of the logits, and weighted sums of gathered rows.

Both gradients are the same sum over a CSR matrix, out[s] = sum of coefficient_e * source[index_e]:
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

from rollout.kernels.head_config import SUM_UNROLL, SUM_WARPS, row_block, sum_tile, width_block

# N rows, E entries of all rows, V vocabulary, H hidden size, S segments


@triton.jit
def _logit_grads_kernel(
    logprobs_ptr,
    grad_entries_ptr,
    grad_targets_ptr,
    offsets_ptr,
    positions_ptr,
    scale_ptr,
    coefficients_ptr,
    HAS_ENTRIES: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets_ptr + row)
    end = tl.load(offsets_ptr + row + 1)
    if end - start < 2:
        if end > start:
            tl.store(coefficients_ptr + start, 0.0)
    else:
        position = tl.load(positions_ptr + row)
        scale = tl.load(scale_ptr + row)
        grad_target = 0.0
        if HAS_TARGETS:
            grad_target = tl.load(grad_targets_ptr + row)
        total = tl.zeros((BLOCK,), tl.float32)
        if HAS_ENTRIES:
            for begin in range(start, end, BLOCK):
                entry = begin + tl.arange(0, BLOCK).to(tl.int64)
                total += tl.load(grad_entries_ptr + entry, mask=entry < end, other=0.0)
        mass = tl.sum(total)
        if HAS_TARGETS:
            mass += tl.where(position < 0, 0.0, grad_target)
        for begin in range(start, end, BLOCK):
            entry = begin + tl.arange(0, BLOCK).to(tl.int64)
            inside = entry < end
            logprob = tl.load(logprobs_ptr + entry, mask=inside, other=0.0)
            grad = -tl.exp(logprob) * mass
            if HAS_ENTRIES:
                grad += tl.load(grad_entries_ptr + entry, mask=inside, other=0.0)
            if HAS_TARGETS:
                grad += tl.where(entry == position, grad_target, 0.0)
            tl.store(coefficients_ptr + entry, grad * scale, mask=inside)


@triton.jit
def _add_rows(
    total,
    source_ptr,
    index_ptr,
    coefficients_ptr,
    order_ptr,
    source_stride,
    num_sources,
    start,
    end,
    column,
    WIDTH: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    UNROLL: tl.constexpr,
):
    for begin in range(start, end, UNROLL):
        slot = begin + tl.arange(0, UNROLL).to(tl.int64)
        inside = slot < end
        entry = slot
        if HAS_ORDER:
            entry = tl.load(order_ptr + slot, mask=inside, other=0).to(tl.int64)
        index = tl.load(index_ptr + entry, mask=inside, other=num_sources).to(tl.int64)
        coefficient = tl.load(coefficients_ptr + entry, mask=inside, other=0.0)
        # [UNROLL, BLOCK_H]
        source = tl.load(
            source_ptr + index[:, None] * source_stride + column[None, :],
            mask=(index < num_sources)[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        total += tl.sum(source.to(tl.float32) * coefficient[:, None], 0)
    return total


@triton.jit
def _overflow_sum_kernel(
    source_ptr,
    index_ptr,
    coefficients_ptr,
    order_ptr,
    offsets_ptr,
    tile_ends_ptr,
    partials_ptr,
    source_stride,
    num_sources,
    num_segments,
    search_steps,
    WIDTH: tl.constexpr,
    HAS_ORDER: tl.constexpr,
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
        order_ptr,
        source_stride,
        num_sources,
        begin,
        tl.minimum(begin + TILE, end),
        column,
        WIDTH=WIDTH,
        HAS_ORDER=HAS_ORDER,
        UNROLL=UNROLL,
    )
    tl.store(partials_ptr + tile * WIDTH + column, total, mask=column < WIDTH)


@triton.jit
def _segment_sum_kernel(
    source_ptr,
    index_ptr,
    coefficients_ptr,
    order_ptr,
    offsets_ptr,
    tile_ends_ptr,
    partials_ptr,
    base_ptr,
    skip_ptr,
    out_ptr,
    source_stride,
    num_sources,
    WIDTH: tl.constexpr,
    HAS_ORDER: tl.constexpr,
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
        order_ptr,
        source_stride,
        num_sources,
        start,
        tl.minimum(start + TILE, end),
        column,
        WIDTH=WIDTH,
        HAS_ORDER=HAS_ORDER,
        UNROLL=UNROLL,
    )
    if HAS_TILES and end - start > TILE:
        last = tl.load(tile_ends_ptr + segment)
        for tile in range(last - (end - start - 1) // TILE, last):
            total += tl.load(partials_ptr + tile * WIDTH + column, mask=known, other=0.0)
    tl.store(out_ptr + segment * WIDTH + column, total, mask=known)


def logit_grads(
    logprobs: torch.Tensor,  # [E]
    grad_entries: torch.Tensor | None,  # [E]
    grad_targets: torch.Tensor | None,  # [N]
    support_offsets: torch.Tensor,  # [N + 1]
    positions: torch.Tensor,  # [N]
    inverse_temperature: torch.Tensor,  # [N]
) -> torch.Tensor:
    """Return the gradient of the loss with respect to every entry's dot product.

    Args:
        logprobs: [E] fp32, the forward's result.
        grad_entries: [E] fp32, or None for zeros.
        grad_targets: [N] fp32, or None for zeros.
        support_offsets: [N + 1] int64.
        positions: [N] int64, each row's target entry, or -1.
        inverse_temperature: [N] fp32.

    Returns:
        [E] fp32; exactly 0 in single-entry rows.
    """
    num_rows = positions.shape[0]
    coefficients = torch.empty_like(logprobs)
    block, warps = row_block(num_rows, logprobs.shape[0])
    _logit_grads_kernel[(num_rows,)](
        logprobs,
        grad_entries,
        grad_targets,
        support_offsets,
        positions,
        inverse_temperature,
        coefficients,
        HAS_ENTRIES=grad_entries is not None,
        HAS_TARGETS=grad_targets is not None,
        BLOCK=block,
        num_warps=warps,
    )
    return coefficients


def segment_sum(
    source: torch.Tensor,  # [M, H]
    index: torch.Tensor,  # [E]
    coefficients: torch.Tensor,  # [E]
    offsets: torch.Tensor,  # [S + 1]
    out: torch.Tensor,  # [S, H]
    *,
    num_rows: int,
    order: torch.Tensor | None = None,  # [E]
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
        order: [E] the entry at each place of the segments; the places themselves when None.
        base: [S, H] fp32, contiguous.
        skip: [S] int32, segments with a value of 0 or more are left alone.
    """
    num_segments, width = out.shape
    tile = sum_tile(num_rows, index.shape[0])
    block = width_block(width, 2048)
    num_tiles = index.shape[0] // tile
    columns = triton.cdiv(width, block)
    tile_ends, partials = None, None
    if num_tiles:
        tiles = (offsets.diff() - 1).clamp_(min=0).div_(tile, rounding_mode="floor")
        if skip is not None:
            tiles.masked_fill_(skip >= 0, 0)
        tile_ends = tiles.cumsum(0)
        partials = torch.empty(num_tiles, width, dtype=torch.float32, device=out.device)
        _overflow_sum_kernel[(num_tiles, columns)](
            source,
            index,
            coefficients,
            order,
            offsets,
            tile_ends,
            partials,
            source.stride(0),
            source.shape[0],
            num_segments,
            num_segments.bit_length(),
            WIDTH=width,
            HAS_ORDER=order is not None,
            TILE=tile,
            UNROLL=SUM_UNROLL,
            BLOCK_H=block,
            num_warps=SUM_WARPS,
        )
    _segment_sum_kernel[(num_segments, columns)](
        source,
        index,
        coefficients,
        order,
        offsets,
        tile_ends,
        partials,
        base,
        skip,
        out,
        source.stride(0),
        source.shape[0],
        WIDTH=width,
        HAS_ORDER=order is not None,
        HAS_TILES=num_tiles > 0,
        HAS_BASE=base is not None,
        HAS_SKIP=skip is not None,
        TILE=tile,
        UNROLL=SUM_UNROLL,
        BLOCK_H=block,
        num_warps=SUM_WARPS,
    )
