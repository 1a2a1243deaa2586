"""The last id that a cut row keeps, searched for among the row's candidates.

A pass over the candidates tells of several keys at once how many ids reach each, or what mass they
have, and so leaves a fraction of the keys between which the cut may be; a few passes leave one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels import launch
from rollout.kernels.cut_order import (
    ID_BITS,
    LISTED,
    NO_LIMIT,
    UNCUT,
    cut_key,
    key_logit,
)
from rollout.kernels.launch import CaptureScratch
from rollout.kernels.tile_ops import exp_nonpositive, key_value, order_key

# N rows of logits, M >= N rows of the step, V vocabulary, P keys that a pass tries

_FIXED = tl.constexpr(1099511627776.0)  # 2**40, of a weight of 1: sums of integers have no order
_NARROW = tl.constexpr(64)
"""Logits that float32 has between two, below which keys between them are tried evenly."""


def launch_cut_search(
    logits: torch.Tensor,  # [N, V]
    kinds: torch.Tensor,  # [M]
    top_k: torch.Tensor,  # [M]
    top_p: torch.Tensor,  # [M]
    scratch: CaptureScratch,
    distance: torch.Tensor | None,  # [1]
) -> None:
    """Find the cut of the listed and the wide rows among their candidates.

    Args:
        logits: [N, V] float32, bfloat16 or float16.
        kinds: [M] int8.
        top_k: [M] int32, see `SupportCut`.
        top_p: [M] float32.
        scratch: the working memory, after `launch_cut_head` and `launch_cut_wide`.
        distance: [1] int64 or None, see `capture_step`.
    """
    unit = launch.row_unit(logits)
    start, distance = scratch.start(logits, distance)
    for few in (True, False):
        _search_kernel[(kinds.shape[0],)](
            start,
            distance,
            top_k,
            top_p,
            scratch.cut_state,
            scratch.bracket,
            scratch.bracket_mass,
            scratch.bracket_count,
            scratch.bracket_keys,
            scratch.cut_value,
            scratch.cut_id,
            scratch.cut_bound,
            scratch.chunk_max,
            scratch.chunk_sum,
            scratch.chunk_count,
            logits.stride(0) // unit,
            logits.shape[1] // unit,
            launch.ceil_div(logits.shape[1], launch.CHUNK),
            scratch.chunk_max.stride(0),
            UNIT=unit,
            BLOCK_C=scratch.chunk_start.shape[1],
            FEW=few,
            LIMIT=launch.CUT_FEW,
            PIVOTS=launch.CUT_SEARCH_PIVOTS,
            BLOCK=launch.CUT_FEW_BLOCK if few else launch.CUT_SEARCH_BLOCK,
            LIST=launch.CUT_LIST,
            num_warps=1 if few else launch.CUT_SEARCH_WARPS,
        )


@triton.jit
def _candidates(row_ptr, keys_ptr, whole, at, live):
    """Return the logits and the keys of candidates by their places; of dead ones anything."""
    if whole:
        value = tl.load(row_ptr + at, mask=live, other=-float("inf")).to(tl.float32)
        key = cut_key(value, at)
    else:
        key = tl.load(keys_ptr + at, mask=live, other=0)
        value, _ids = key_logit(key)
    return value, key


@triton.jit
def _tally(
    row_ptr,
    keys_ptr,
    whole,
    number,
    largest,
    pivots,
    bottom,
    above,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Go through the candidates once.

    Args:
        row_ptr: the row's logits.
        keys_ptr: its list of candidates.
        whole: whether all ids are candidates, and not those of the list.
        number: how many there are.
        largest: the row's maximum.
        pivots: [P] int64, keys.
        bottom: a key.
        above: a higher one.
        BY_MASS: whether the mass is asked for.
        BLOCK: candidates at a time.

    Returns:
        [P] int32, the candidates that reach each pivot; [P] int64, their fixed-point mass; and of
        the keys in [bottom, above) the lowest and the highest, or `above` and `bottom - 1`.
    """
    PIVOTS: tl.constexpr = pivots.shape[0]
    count = tl.zeros([PIVOTS, BLOCK], tl.int32)
    mass = tl.zeros([PIVOTS, BLOCK], tl.int64)
    lowest = tl.zeros([1, BLOCK], tl.int64) + above
    highest = tl.zeros([1, BLOCK], tl.int64) + bottom - 1
    for first in range(0, number, BLOCK):
        at = first + tl.arange(0, BLOCK)[None, :]
        live = at < number
        value, key = _candidates(row_ptr, keys_ptr, whole, at, live)
        reached = live & (key >= pivots[:, None])
        count += reached.to(tl.int32)
        if BY_MASS:
            weight = exp_nonpositive(tl.where(live, value - largest, 0.0)) * _FIXED
            # rounded, since many small ones would be missed together
            mass += tl.where(reached, (weight + 0.5).to(tl.int64), 0)
        inside = live & (key >= bottom) & (key < above)
        lowest = tl.minimum(lowest, tl.where(inside, key, above))
        highest = tl.maximum(highest, tl.where(inside, key, bottom - 1))
    return tl.sum(count, axis=1), tl.sum(mass, axis=1), tl.min(lowest), tl.max(highest)


@triton.jit
def _shorten(row_ptr, keys_ptr, whole, number, bottom, above, BLOCK: tl.constexpr):
    """Make the list that of the candidates in [bottom, above), and return how many they are."""
    # a list is overwritten from its start, no further than it has been read
    kept = tl.full((), 0, tl.int32)
    for first in range(0, number, BLOCK):
        at = first + tl.arange(0, BLOCK)
        live = at < number
        _value, key = _candidates(row_ptr, keys_ptr, whole, at, live)
        inside = live & (key >= bottom) & (key < above)
        upto = tl.cumsum(inside.to(tl.int32), axis=0)
        tl.store(keys_ptr + kept + upto - 1, key, mask=inside)
        kept += tl.max(upto, axis=0)
    # other threads read what this one has stored
    tl.debug_barrier()
    return kept


@triton.jit
def _between(bottom, above, PIVOTS: tl.constexpr):
    """Return [PIVOTS] int64 keys above the one and below the other, which is higher by 2 or more.

    Most divide the distance of the logits, as candidates lie; two divide that of the keys, which
    ends soon whatever the logits are.
    """
    index = tl.arange(0, PIVOTS)
    low = (bottom >> ID_BITS).to(tl.int32)
    high = ((above - 1) >> ID_BITS).to(tl.int32)
    part = (index + 1).to(tl.float32) / (PIVOTS - 1)
    # a difference of logits may be more than float32 holds
    logit = key_value(low) * (1.0 - part) + key_value(high) * part
    narrow = high.to(tl.int64) - low.to(tl.int64) < _NARROW
    parts = tl.where(narrow, PIVOTS + 1, 3)
    step = (above - bottom + parts - 1) // parts
    by_key = bottom + step * tl.where(narrow, index + 1, index - (PIVOTS - 3))
    pivots = tl.where(
        narrow | (index >= PIVOTS - 2), by_key, order_key(logit).to(tl.int64) << ID_BITS
    )
    return tl.minimum(tl.maximum(pivots, bottom + 1), above - 1)


@triton.jit
def _find(
    row_ptr,
    keys_ptr,
    whole,
    number,
    largest,
    bottom,
    above,
    need,
    unknown,
    mutable,
    last,
    BY_MASS: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
):
    """Find the cut between two keys.

    Args:
        row_ptr: the row's logits.
        keys_ptr: its list of candidates.
        whole: whether all ids are candidates, and not those of the list.
        number: how many there are.
        largest: the row's maximum.
        bottom: a key that enough candidates reach.
        above: a higher one, that not enough reach.
        need: int64, the count or the mass that is enough.
        unknown: whether there may be candidates above that.
        mutable: whether candidates may be taken off the list.
        last: whether those above the cut may, too.
        BY_MASS: whether it is a mass and not a count.
        PIVOTS: keys that a pass tries.
        BLOCK: candidates at a time.
        LIST: candidates that a list holds.

    Returns:
        A key that enough candidates reach, and no fewer do; `whole` and `number`, of those left.
    """
    # of candidates: at most these reach bottom, these reach above
    upto = number
    fewer = tl.full((), 0, tl.int32)
    have = tl.full((), 0, tl.int64)  # of what is needed, above
    while (above - bottom > 1) & (upto - fewer > 1):
        pivots = _between(bottom, above, PIVOTS)
        pivots = tl.where(unknown & (tl.arange(0, PIVOTS) == PIVOTS - 1), above, pivots)
        unknown = False
        counts, masses, lowest, highest = _tally(
            row_ptr, keys_ptr, whole, number, largest, pivots, bottom, above, BY_MASS, BLOCK
        )
        amounts = masses if BY_MASS else counts.to(tl.int64)
        enough = amounts >= need
        upto = tl.minimum(upto, tl.min(tl.where(enough, counts, number), axis=0))
        fewer = tl.maximum(fewer, tl.max(tl.where(enough, 0, counts), axis=0))
        have = tl.maximum(have, tl.max(tl.where(enough, 0, amounts), axis=0))
        # among equal logits no pivot divides the candidates before the bracket is theirs alone
        bottom = tl.maximum(lowest, tl.max(tl.where(enough, pivots, bottom), axis=0))
        above = tl.minimum(highest + 1, tl.min(tl.where(enough, above, pivots), axis=0))
        left = upto - tl.where(last, fewer, 0)
        if mutable & (number > 2 * BLOCK) & (left <= number // 2) & (left <= LIST):
            ceiling = tl.where(last, above, 0x7FFFFFFFFFFFFFFF)
            number = _shorten(row_ptr, keys_ptr, whole, number, bottom, ceiling, BLOCK)
            whole = False
            upto = number
            if last:
                need -= have
                have *= 0
                fewer *= 0
    return bottom, whole, number


@triton.jit(
    do_not_specialize=[
        "distance_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "row_units",
        "vocab_units",
        "num_chunks",
        "chunk_stride",
    ]
)
def _search_kernel(
    logits_ptr,
    distance_ptr,
    top_k_ptr,
    top_p_ptr,
    state_ptr,
    bracket_ptr,
    bracket_mass_ptr,
    bracket_count_ptr,
    keys_ptr,
    cut_value_ptr,
    cut_id_ptr,
    cut_bound_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    chunk_count_ptr,
    row_units,
    vocab_units,
    num_chunks,
    chunk_stride,
    UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    FEW: tl.constexpr,
    LIMIT: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(state_ptr + row)
    number = tl.load(bracket_count_ptr + row * 2)
    if state == UNCUT:
        if FEW:
            tl.store(cut_value_ptr + row, -float("inf"))
            tl.store(cut_id_ptr + row, NO_LIMIT)
        return
    if (number <= LIMIT) != FEW:
        return
    vocab_size = vocab_units * UNIT
    low = tl.load(bracket_ptr + row * 3)
    high = tl.load(bracket_ptr + row * 3 + 1)
    largest = tl.load(bracket_ptr + row * 3 + 2)
    total = tl.load(bracket_mass_ptr + row * 2)
    # of many equal logits, for one, the list does not hold all
    whole = number > LIST
    unknown = whole
    number = tl.where(whole, vocab_size, number)
    mass_above = tl.where(whole, 0.0, tl.load(bracket_mass_ptr + row * 2 + 1))
    count_above = tl.where(whole, 0, tl.load(bracket_count_ptr + row * 2 + 1))
    row_ptr = logits_ptr + (tl.load(distance_ptr) + row * row_units) * UNIT
    keys_ptr += row * LIST
    bottom = order_key(low).to(tl.int64) << ID_BITS
    above = tl.minimum(order_key(high).to(tl.int64), order_key(largest).to(tl.int64) + 1) << ID_BITS
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    # what a listed row keeps is packed from its list
    mutable = state != LISTED
    if (top_k > 0) & (top_k < vocab_size):
        need = (top_k - count_above).to(tl.int64)
        bottom, whole, number = _find(
            row_ptr,
            keys_ptr,
            whole,
            number,
            largest,
            bottom,
            above,
            need,
            unknown,
            mutable,
            top_p >= 1.0,
            False,
            PIVOTS,
            BLOCK,
            LIST,
        )
        kept = tl.zeros([1], tl.int64) + bottom
        _count, mass, _low, _high = _tally(
            row_ptr, keys_ptr, whole, number, largest, kept, bottom, above, True, BLOCK
        )
        total = mass_above + tl.sum(mass, axis=0).to(tl.float64) / _FIXED
    if top_p < 1.0:
        need = ((top_p.to(tl.float64) * total - mass_above) * _FIXED).to(tl.int64)
        need = tl.maximum(need, 1)
        bottom, whole, number = _find(
            row_ptr,
            keys_ptr,
            whole,
            number,
            largest,
            bottom,
            above,
            need,
            unknown,
            mutable,
            True,
            True,
            PIVOTS,
            BLOCK,
            LIST,
        )
    if state == LISTED:
        # all that is kept is in the list: what the pass over the logits would find
        kept = tl.zeros([1], tl.int64) + bottom
        counts, masses, _low, _high = _tally(
            row_ptr, keys_ptr, whole, number, largest, kept, bottom, above, True, BLOCK
        )
        count = tl.sum(counts, axis=0)
        sums = (tl.sum(masses, axis=0).to(tl.float64) / _FIXED).to(tl.float32)
        chunk = tl.arange(0, BLOCK_C)
        first = (chunk == 0) & (chunk < num_chunks)
        at = row * chunk_stride + chunk
        tl.store(chunk_max_ptr + at, tl.where(first, largest, -float("inf")), chunk < num_chunks)
        tl.store(chunk_sum_ptr + at, tl.where(first, sums, 0.0), chunk < num_chunks)
        tl.store(chunk_count_ptr + at, tl.where(first, count, 0), chunk < num_chunks)
        tl.store(cut_bound_ptr + row, bottom)
        return
    # keys between those of the negative logits and of 0.0 are of -0.0, which no id has
    bottom = tl.where((bottom >> ID_BITS) == -1, 0, bottom)
    least, last = key_logit(bottom)
    tl.store(cut_value_ptr + row, least)
    tl.store(cut_id_ptr + row, last)
