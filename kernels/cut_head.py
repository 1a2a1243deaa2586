"""The cut of rows that keep few ids: a list of candidates from one read of the logits.

The read leaves the maximum of each word, the 32 ids that a thread holds. The maxima alone say where
the cut is at the lowest: k of them are k ids, and where their own mass reaches p that of all ids
does. So the cut is among the ids that reach this bound, and they are in the few words whose maximum
does. Where these words are too many, or their maxima's mass too little, the row is a wide one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels import launch
from rollout.kernels.cut_order import (
    LISTED,
    NO_LIMIT,
    UNCUT,
    WIDE_ROW,
    cut_key,
    load_chunk,
    row_cut,
    row_total,
    top_p_depth,
)
from rollout.kernels.launch import CaptureScratch
from rollout.kernels.tile_ops import exp_nonpositive, head_bound, id_in_chunk, key_value, order_key

# N rows of logits, M >= N rows of the step, V vocabulary, C chunks of CHUNK ids

_TOP_K_DEPTH = tl.constexpr(24.0)
"""Nats below the maximum within which the k-th id is looked for by pivots, if it has no bound."""
_BISECTIONS = tl.constexpr(12)


def launch_cut_head(
    logits: torch.Tensor,  # [N, V]
    kinds: torch.Tensor,  # [M]
    top_k: torch.Tensor,  # [M]
    top_p: torch.Tensor,  # [M]
    scratch: CaptureScratch,
    distance: torch.Tensor | None,  # [1]
) -> None:
    """Sort the rows into uncut, listed and wide ones, and list the candidates of the listed.

    Args:
        logits: [N, V] float32, bfloat16 or float16.
        kinds: [M] int8.
        top_k: [M] int32, see `SupportCut`.
        top_p: [M] float32.
        scratch: the working memory, of which the bracket, its keys and `cut_state` are written.
        distance: [1] int64 or None, see `capture_step`.
    """
    rows, vocab_size = kinds.shape[0], logits.shape[1]
    unit = launch.row_unit(logits)
    chunks = launch.ceil_div(vocab_size, launch.CHUNK)
    start, distance = scratch.start(logits, distance)
    wide = 16 // logits.element_size()
    _word_kernel[(chunks, rows)](
        start,
        distance,
        kinds,
        top_k,
        top_p,
        scratch.chunk_max,
        scratch.chunk_sum,
        scratch.word_max,
        logits.stride(0) // unit,
        vocab_size // unit,
        scratch.chunk_max.stride(0),
        scratch.word_max.stride(0),
        UNIT=unit,
        WIDE=wide,
        CHUNK=launch.CHUNK,
        GROUP=launch.GROUP,
        num_warps=launch.CUT_READ_WARPS,
    )
    words = launch.CHUNK // launch.GROUP
    _head_kernel[(rows,)](
        kinds,
        top_k,
        top_p,
        scratch.chunk_max,
        scratch.chunk_sum,
        scratch.word_max,
        scratch.cut_words,
        scratch.num_cut_words,
        scratch.cut_state,
        scratch.cut_pivots,
        scratch.bracket,
        scratch.bracket_mass,
        scratch.bracket_count,
        vocab_size,
        chunks,
        scratch.chunk_max.stride(0),
        scratch.word_max.stride(0),
        BLOCK_C=scratch.chunk_start.shape[1],
        BLOCK_G=launch.next_power_of_2(scratch.word_max.shape[1]),
        WORDS=words,
        MOST=launch.CUT_WORDS,
        PIVOTS=launch.CUT_PIVOTS,
        num_warps=launch.CUT_HEAD_WARPS,
        maxnreg=launch.CUT_HEAD_REGISTERS,
    )
    _list_kernel[(launch.CUT_WORDS // launch.CUT_LIST_BLOCK, rows)](
        start,
        distance,
        scratch.cut_state,
        scratch.cut_words,
        scratch.num_cut_words,
        scratch.bracket,
        scratch.bracket_count,
        scratch.bracket_keys,
        logits.stride(0) // unit,
        vocab_size // unit,
        UNIT=unit,
        WIDE=wide,
        WORDS=words,
        CHUNK=launch.CHUNK,
        GROUP=launch.GROUP,
        BLOCK_W=launch.CUT_LIST_BLOCK,
        MOST=launch.CUT_WORDS,
        LIST=launch.CUT_LIST,
        num_warps=launch.CUT_LIST_WARPS,
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
        "word_stride",
    ]
)
def _word_kernel(
    logits_ptr,
    distance_ptr,
    kinds_ptr,
    top_k_ptr,
    top_p_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    word_max_ptr,
    row_units,
    vocab_units,
    chunk_stride,
    word_stride,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _k, _p, cut = row_cut(kinds_ptr, top_k_ptr, top_p_ptr, row, vocab_units * UNIT)
    if cut == 0:
        return
    WORDS: tl.constexpr = CHUNK // GROUP
    value = load_chunk(
        logits_ptr, distance_ptr, row, row_units, vocab_units, UNIT, WIDE, CHUNK, GROUP
    )
    words = tl.max(tl.reshape(tl.max(value, axis=0), [WORDS, WIDE]), axis=1)
    largest = tl.max(words, axis=0)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    # few terms in float32, which are in one thread, then float64
    total = tl.sum(tl.sum(exp_nonpositive(value - base), axis=0).to(tl.float64), axis=0)
    tl.store(chunk_max_ptr + row * chunk_stride + chunk, largest)
    tl.store(chunk_sum_ptr + row * chunk_stride + chunk, total.to(tl.float32))
    at = row * word_stride + chunk * WORDS + tl.arange(0, WORDS)
    tl.store(word_max_ptr + at, words)


@triton.jit
def _mass_bounds(weight, depth, target):
    """Return two depths below the maximum: weights down to the first have the target mass.

    Those down to the second have not. Where the weights have less altogether, the first is `depth`;
    where the highest has more, the second is 0.

    Args:
        weight: float32 tile, exp(maximum of a word - maximum of the row).
        depth: the most that is looked at.
        target: float32.
    """
    deep = depth
    shallow = tl.zeros_like(depth)
    for _ in range(_BISECTIONS):
        middle = (deep + shallow) * 0.5
        reached = tl.sum(tl.where(weight >= tl.exp(-middle), weight, 0.0)) >= target
        deep = tl.where(reached, middle, deep)
        shallow = tl.where(reached, shallow, middle)
    return deep, shallow


@triton.jit(
    do_not_specialize=[
        "kinds_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "vocab_size",
        "num_chunks",
        "chunk_stride",
        "word_stride",
    ]
)
def _head_kernel(
    kinds_ptr,
    top_k_ptr,
    top_p_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    word_max_ptr,
    words_ptr,
    num_words_ptr,
    state_ptr,
    pivots_ptr,
    bracket_ptr,
    bracket_mass_ptr,
    bracket_count_ptr,
    vocab_size,
    num_chunks,
    chunk_stride,
    word_stride,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    WORDS: tl.constexpr,
    MOST: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, cut = row_cut(kinds_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    largest = tl.full((), 0.0, tl.float32)
    total = tl.full((), 0.0, tl.float64)
    if cut:
        largest, total = row_total(
            chunk_max_ptr, chunk_sum_ptr, row, num_chunks, chunk_stride, BLOCK_C
        )
    if total == 0.0:
        tl.store(state_ptr + row, UNCUT)
        return
    tl.store(bracket_ptr + row * 3 + 2, largest)
    tl.store(bracket_mass_ptr + row * 2, total)

    word = tl.arange(0, BLOCK_G)
    most = tl.load(
        word_max_ptr + row * word_stride + word,
        mask=word < num_chunks * WORDS,
        other=-float("inf"),
    )
    # the pivots of a wide row lie between these
    shallow = tl.full((), 0.0, tl.float32)
    deep = tl.full((), _TOP_K_DEPTH, tl.float32)
    if top_k < NO_LIMIT:
        key = order_key(most)
        lowest = order_key(tl.full((), -float("inf"), tl.float32)) + 1
        number = tl.sum((key >= lowest).to(tl.int32))
        # of fewer words than k all ids that are not masked are candidates
        bound = lowest
        if number > top_k:
            bound = head_bound(key, top_k, lowest, largest)
            # a distance that float32 does not hold would make the pivots NaN
            deep = tl.minimum(largest - key_value(bound), 3e38)
        low = key_value(bound)
        found = tl.minimum(number, top_k) <= MOST
    else:
        deep = top_p_depth(top_p, total, vocab_size)
        weight = exp_nonpositive(most - largest)
        target = (top_p * total).to(tl.float32)
        # what float32 rounds is on the safe side
        found = tl.sum(tl.where(weight >= tl.exp(-deep), weight, 0.0)) >= target * 1.00001
        if found:
            deep, _shallow = _mass_bounds(weight, deep, target * 1.00001)
        low = tl.min(tl.where(weight >= tl.exp(-deep), most, float("inf")), axis=0)
    chosen = (most >= low).to(tl.int32)
    place = tl.cumsum(chosen, axis=0) - chosen
    number = tl.sum(chosen, axis=0)
    tl.store(words_ptr + row * MOST + place, word, mask=(chosen > 0) & (place < MOST))
    tl.store(num_words_ptr + row, number)
    tl.store(bracket_ptr + row * 3, low)
    tl.store(bracket_ptr + row * 3 + 1, float("inf"))
    tl.store(bracket_mass_ptr + row * 2 + 1, 0.0)
    tl.store(bracket_count_ptr + row * 2, 0)
    tl.store(bracket_count_ptr + row * 2 + 1, 0)
    listed = found & (number <= MOST)
    tl.store(state_ptr + row, tl.where(listed, LISTED, WIDE_ROW))
    if (listed == 0) & (top_k == NO_LIMIT):
        # all that is not a maximum may be above
        power = exp_nonpositive(most - largest)
        rest = total.to(tl.float32) - tl.sum(power)
        least = (top_p * total).to(tl.float32) * 0.99999 - rest
        _deep, shallow = _mass_bounds(power, deep, least)
    index = tl.arange(0, PIVOTS)
    part = index.to(tl.float32) / (PIVOTS - 1)
    # closer to each other at the top, where the cut is likelier; with room for what was rounded
    shallow -= 1e-3
    deep += 1e-3
    pivots = largest - shallow - (deep - shallow) * part * tl.sqrt(part)
    tl.store(pivots_ptr + row * PIVOTS + index, pivots)


@triton.jit(do_not_specialize=["distance_ptr", "row_units", "vocab_units"])
def _list_kernel(
    logits_ptr,
    distance_ptr,
    state_ptr,
    words_ptr,
    num_words_ptr,
    bracket_ptr,
    bracket_count_ptr,
    keys_ptr,
    row_units,
    vocab_units,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MOST: tl.constexpr,
    LIST: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    if tl.load(state_ptr + row) != LISTED:
        return
    first = tl.program_id(0) * BLOCK_W
    number = tl.load(num_words_ptr + row)
    if first >= number:
        return
    low = tl.load(bracket_ptr + row * 3)
    at = first + tl.arange(0, BLOCK_W)
    word = tl.load(words_ptr + row * MOST + at, mask=at < number, other=0)[:, None]
    bit = tl.arange(0, GROUP)[None, :]
    ids = (word // WORDS) * CHUNK + id_in_chunk(word % WORDS, bit, WORDS, WIDE)
    value = tl.load(
        logits_ptr + (tl.load(distance_ptr) + row * row_units) * UNIT + ids,
        mask=(at < number)[:, None] & (ids < vocab_units * UNIT),
        other=-float("inf"),
    ).to(tl.float32)
    inside = (value >= low).to(tl.int32)
    of_word = tl.sum(inside, axis=1)
    # the order within the list is of no account
    start = tl.atomic_add(bracket_count_ptr + row * 2, tl.sum(of_word, axis=0))
    before = start + tl.cumsum(of_word, axis=0) - of_word
    place = before[:, None] + tl.cumsum(inside, axis=1) - inside
    tl.store(keys_ptr + row * LIST + place, cut_key(value, ids), mask=inside > 0)
