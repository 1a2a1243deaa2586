"""The cut of rows that keep many ids: two more reads of their logits leave a short list.

The first takes the mass, and if need be the count, at and above some pivots, which leaves a bracket
between two of them; the second lists the ids within the bracket.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels import launch
from rollout.kernels.cut_order import NO_LIMIT, WIDE_ROW, cut_key, load_chunk, row_cut
from rollout.kernels.launch import CaptureScratch
from rollout.kernels.tile_ops import (
    exp_nonpositive,
    id_in_chunk,
    key_value,
    nth_set_bit,
    order_key,
    popcount,
    word_of_rank,
)

# N rows of logits, M >= N rows of the step, V vocabulary, C chunks of CHUNK ids, P pivots


def launch_cut_wide(
    logits: torch.Tensor,  # [N, V]
    kinds: torch.Tensor,  # [M]
    top_k: torch.Tensor,  # [M]
    top_p: torch.Tensor,  # [M]
    scratch: CaptureScratch,
    distance: torch.Tensor | None,  # [1]
) -> None:
    """Find the bracket of the wide rows, and list the ids within it.

    Args:
        logits: [N, V] float32, bfloat16 or float16.
        kinds: [M] int8.
        top_k: [M] int32, see `SupportCut`.
        top_p: [M] float32.
        scratch: the working memory, after `launch_cut_head`.
        distance: [1] int64 or None, see `capture_step`.
    """
    rows, vocab_size = kinds.shape[0], logits.shape[1]
    unit = launch.row_unit(logits)
    chunks = launch.ceil_div(vocab_size, launch.CHUNK)
    start, distance = scratch.start(logits, distance)
    row_units, vocab_units = logits.stride(0) // unit, vocab_size // unit
    chunk_stride = scratch.chunk_max.stride(0)
    wide = 16 // logits.element_size()
    _pivot_kernel[(chunks, rows)](
        start,
        distance,
        kinds,
        top_k,
        top_p,
        scratch.cut_state,
        scratch.bracket,
        scratch.cut_pivots,
        scratch.pivot_mass,
        scratch.pivot_count,
        row_units,
        vocab_units,
        chunk_stride,
        UNIT=unit,
        WIDE=wide,
        CHUNK=launch.CHUNK,
        GROUP=launch.GROUP,
        PIVOTS=launch.CUT_PIVOTS,
        num_warps=launch.CUT_READ_WARPS,
    )
    _bracket_kernel[(rows,)](
        kinds,
        top_k,
        top_p,
        scratch.cut_state,
        scratch.cut_pivots,
        scratch.pivot_mass,
        scratch.pivot_count,
        scratch.bracket,
        scratch.bracket_mass,
        scratch.bracket_count,
        vocab_units * unit,
        chunks,
        chunk_stride,
        BLOCK_C=scratch.chunk_start.shape[1],
        PIVOTS=launch.CUT_PIVOTS,
        num_warps=1,
    )
    _gather_kernel[(chunks, rows)](
        start,
        distance,
        scratch.cut_state,
        scratch.bracket,
        scratch.bracket_count,
        scratch.bracket_keys,
        row_units,
        vocab_units,
        UNIT=unit,
        WIDE=wide,
        CHUNK=launch.CHUNK,
        GROUP=launch.GROUP,
        BLOCK=launch.PACK_BLOCK_SPARSE,
        LIST=launch.CUT_LIST,
        num_warps=launch.CUT_READ_WARPS,
    )


@triton.jit(
    do_not_specialize=[
        "distance_ptr",
        "kinds_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "row_units",
        "vocab_units",
        "chunk_stride",
    ]
)
def _pivot_kernel(
    logits_ptr,
    distance_ptr,
    kinds_ptr,
    top_k_ptr,
    top_p_ptr,
    state_ptr,
    bracket_ptr,
    pivots_ptr,
    pivot_mass_ptr,
    pivot_count_ptr,
    row_units,
    vocab_units,
    chunk_stride,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if tl.load(state_ptr + row) != WIDE_ROW:
        return
    top_k, _p, _cut = row_cut(kinds_ptr, top_k_ptr, top_p_ptr, row, vocab_units * UNIT)
    largest = tl.load(bracket_ptr + row * 3 + 2)
    value = load_chunk(
        logits_ptr, distance_ptr, row, row_units, vocab_units, UNIT, WIDE, CHUNK, GROUP
    )
    power = exp_nonpositive(value - largest)
    at = (row * chunk_stride + chunk) * PIVOTS
    pivots_ptr += row * PIVOTS
    for place in tl.static_range(PIVOTS):
        above = value >= tl.load(pivots_ptr + place)
        mass = tl.sum(tl.sum(tl.where(above, power, 0.0), axis=0), axis=0)
        tl.store(pivot_mass_ptr + at + place, mass)
    if top_k < NO_LIMIT:
        for index in range(PIVOTS):
            reached = value >= tl.load(pivots_ptr + index)
            count = tl.sum(tl.sum(reached.to(tl.int32), axis=0), axis=0)
            tl.store(pivot_count_ptr + at + index, count)


@triton.jit
def _at(values, index, outside):
    """Return values[index] of a vector, or `outside` where there is no such index."""
    place = tl.arange(0, values.shape[0])
    found = tl.sum(tl.where(place == index, values, 0), axis=0)
    return tl.where((index >= 0) & (index < values.shape[0]), found, outside)


@triton.jit(
    do_not_specialize=[
        "kinds_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "vocab_size",
        "num_chunks",
        "chunk_stride",
    ]
)
def _bracket_kernel(
    kinds_ptr,
    top_k_ptr,
    top_p_ptr,
    state_ptr,
    pivots_ptr,
    pivot_mass_ptr,
    pivot_count_ptr,
    bracket_ptr,
    bracket_mass_ptr,
    bracket_count_ptr,
    vocab_size,
    num_chunks,
    chunk_stride,
    BLOCK_C: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(state_ptr + row) != WIDE_ROW:
        return
    top_k, top_p, _cut = row_cut(kinds_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    total = tl.load(bracket_mass_ptr + row * 2)
    chunk = tl.arange(0, BLOCK_C)[:, None]
    index = tl.arange(0, PIVOTS)
    at = (row * chunk_stride + chunk) * PIVOTS + index[None, :]
    present = (chunk < num_chunks) & (index[None, :] >= 0)
    masses = tl.load(pivot_mass_ptr + at, mask=present, other=0.0).to(tl.float64)
    # [PIVOTS], at and above each
    masses = tl.sum(masses, axis=0)
    counts = tl.zeros([PIVOTS], tl.int32)
    pivots = tl.load(pivots_ptr + row * PIVOTS + index)
    # high: the last pivot above the cut; low: the first one that is not
    reaches_k = tl.full((), PIVOTS, tl.int32)
    kept_mass = total
    if top_k < NO_LIMIT:
        counts = tl.sum(tl.load(pivot_count_ptr + at, mask=present, other=0), axis=0)
        reaches_k = tl.sum((counts < top_k).to(tl.int32), axis=0)
        # at least that is kept by top_k
        kept_mass = _at(masses, reaches_k - 1, 0.0)
    reaches_p = tl.full((), PIVOTS, tl.int32)
    if top_p < 1.0:
        target = top_p.to(tl.float64) * kept_mass
        reaches_p = tl.sum((masses < target).to(tl.int32), axis=0)
    first = tl.minimum(reaches_k, reaches_p)
    # where no pivot reaches k, all ids that are not masked are candidates
    least = key_value(order_key(tl.full((), -float("inf"), tl.float32)) + 1)
    if top_k < NO_LIMIT:
        low = _at(pivots, reaches_k, least)
    else:
        first = tl.minimum(first, PIVOTS - 1)
        low = _at(pivots, first, least)
    high = _at(pivots, first - 1, float("inf"))
    mass_above = _at(masses, first - 1, 0.0)
    count_above = _at(counts, first - 1, 0)
    tl.store(bracket_ptr + row * 3, low)
    tl.store(bracket_ptr + row * 3 + 1, high)
    tl.store(bracket_mass_ptr + row * 2 + 1, mass_above)
    tl.store(bracket_count_ptr + row * 2 + 1, count_above)


@triton.jit(do_not_specialize=["distance_ptr", "row_units", "vocab_units"])
def _gather_kernel(
    logits_ptr,
    distance_ptr,
    state_ptr,
    bracket_ptr,
    bracket_count_ptr,
    keys_ptr,
    row_units,
    vocab_units,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if tl.load(state_ptr + row) != WIDE_ROW:
        return
    low = tl.load(bracket_ptr + row * 3)
    high = tl.load(bracket_ptr + row * 3 + 1)
    value = load_chunk(
        logits_ptr, distance_ptr, row, row_units, vocab_units, UNIT, WIDE, CHUNK, GROUP
    )
    inside = (value >= low) & (value < high)
    WORDS: tl.constexpr = CHUNK // GROUP
    across = tl.arange(0, GROUP // WIDE)[:, None]
    column = tl.arange(0, WORDS * WIDE)[None, :]
    bits = tl.sum(inside.to(tl.int32) << (across * WIDE + column % WIDE), axis=0)
    words = tl.sum(tl.reshape(bits, [WORDS, WIDE]), axis=1).to(tl.uint32, bitcast=True)
    upto = tl.cumsum(popcount(words), axis=0)
    number = tl.max(upto, axis=0)
    if number == 0:
        return
    # the order within the list is of no account
    start = tl.atomic_add(bracket_count_ptr + row * 2, number)
    chunk_ptr = logits_ptr + (tl.load(distance_ptr) + row * row_units) * UNIT + chunk * CHUNK
    for first in range(0, number, BLOCK):
        rank = first + tl.arange(0, BLOCK)
        word, before = word_of_rank(upto, rank, WORDS)
        bit = nth_set_bit(tl.gather(words, word, 0), rank - before)
        place = id_in_chunk(word, bit, WORDS, WIDE)
        live = (rank < number) & (start + rank < LIST)
        found = tl.load(chunk_ptr + place, mask=live, other=0.0).to(tl.float32)
        key = cut_key(found, chunk * CHUNK + place)
        tl.store(keys_ptr + row * LIST + start + rank, key, mask=live)
