"""Both gradients of the sparse head as weighted sums of gathered rows.

They are out[s] = sum of coefficient_e * source[index_e] over the segments of a CSR matrix: over
rows with the weight as source, and over ids, after a sort by id, with the hidden states as source.
One launch does both, so that the end of one fills the gaps of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from rollout.kernels.head_config import (
    ENTRY_BLOCK,
    SUM_BLOCK,
    SUM_UNROLL,
    SUM_WARPS,
    sum_tile,
    width_block,
)
from rollout.kernels.segment_kernels import (
    count_tiles_kernel,
    overflow_sum_kernel,
    segment_sum_kernel,
)

# N rows, E entries of all rows, M source rows, H hidden size, S segments


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentSum:
    """One matrix: out[s] = sum over segment s of coefficient_e * source[index_e]."""

    source: torch.Tensor
    """[M, H] bf16, fp16 or fp32, unit stride along H."""
    index: torch.Tensor
    """[E] int32; entries with an index of M or more add nothing."""
    coefficients: torch.Tensor
    """[E] fp32."""
    offsets: torch.Tensor
    """[S + 1] int64, segment s in offsets[s]:offsets[s + 1]."""
    out: torch.Tensor
    """[S, H] contiguous, written."""


def segment_sums(
    by_row: SegmentSum | None,
    by_id: SegmentSum | None,
    *,
    num_rows: int,
    row_base: torch.Tensor | None = None,  # [S, H]
    id_skip: torch.Tensor | None = None,  # [S]
    adds_ids: bool = False,
) -> None:
    """Write the sums of one or two matrices of the same H and dtype.

    Extra memory: at most two rows of fp32 partial sums for each of the N rows.

    Args:
        by_row: the first matrix, whose long segments start first.
        by_id: the second.
        num_rows: N, which bounds the extra memory.
        row_base: fp32 contiguous, added to the first matrix' sums.
        id_skip: int32; segments of the second matrix with a value of 0 or more stay unwritten.
        adds_ids: add the second matrix' sums to its `out`.
    """
    sums = [one for one in (by_row, by_id) if one is not None]
    if not sums:
        return
    width = sums[0].out.shape[1]
    row, by = by_row or sums[0], by_id or sums[0]
    num_row_segments = 0 if by_row is None else by_row.out.shape[0]
    num_segments = sum(one.out.shape[0] for one in sums)
    tile = sum_tile(num_rows, sums[0].index.shape[0])
    num_tiles = sum(one.index.shape[0] // tile for one in sums)
    block = width_block(width, SUM_BLOCK)
    columns = triton.cdiv(width, block)
    tile_ends, partials = None, None
    sources = (
        row.source,
        row.index,
        row.coefficients,
        row.offsets,
        by.source,
        by.index,
        by.coefficients,
        by.offsets,
        row.source.stride(0),
        by.source.stride(0),
        row.source.shape[0],
        by.source.shape[0],
        num_row_segments,
    )
    if num_tiles:
        tiles = torch.empty(num_segments, dtype=torch.int64, device=row.out.device)
        count_tiles_kernel[(triton.cdiv(num_segments, ENTRY_BLOCK),)](
            row.offsets,
            by.offsets,
            id_skip,
            tiles,
            num_row_segments,
            num_segments,
            TILE=tile,
            HAS_SKIP=id_skip is not None,
            BLOCK=ENTRY_BLOCK,
        )
        tile_ends = tiles.cumsum(0)
        partials = torch.empty(num_tiles, width, dtype=torch.float32, device=row.out.device)
        overflow_sum_kernel[(num_tiles, columns)](
            partials,
            tile_ends,
            *sources,
            num_segments,
            num_segments.bit_length(),
            WIDTH=width,
            TILE=tile,
            UNROLL=SUM_UNROLL,
            BLOCK_H=block,
            num_warps=SUM_WARPS,
        )
    segment_sum_kernel[(num_segments, columns)](
        row.out,
        by.out,
        row_base,
        id_skip,
        partials,
        tile_ends,
        *sources,
        WIDTH=width,
        HAS_TILES=num_tiles > 0,
        HAS_BASE=row_base is not None,
        HAS_SKIP=id_skip is not None,
        ADDS_IDS=adds_ids,
        TILE=tile,
        UNROLL=SUM_UNROLL,
        BLOCK_H=block,
        num_warps=SUM_WARPS,
    )
