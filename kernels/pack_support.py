"""The second pass over a step: the kept ids of each row, packed with their logprobs.

It goes by the bits that the first pass left and reads logits only where they are kept. Every entry
is found from its rank, by bisection over the entries before each chunk and each word of bits, so
that the work goes by the number of entries, lanes are never idle, and neighbours in the output are
written together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels import launch
from rollout.kernels.cut_order import LISTED, key_logit
from rollout.kernels.step_output import StepOutput
from rollout.kernels.tile_ops import (
    FLAG_OVERFLOW,
    KIND_GREEDY,
    KIND_KEPT,
    id_in_chunk,
    log_probability,
    nth_set_bit,
    pack_entry,
    popcount,
    row_end,
    word_of_rank,
)
from rollout.kernels.token_draw import NO_SCORE, TokenDraw, best_of_block

# N rows, V vocabulary


def launch_pack(
    logits: torch.Tensor,  # [N, V]
    sampled_ids: torch.Tensor,  # [N]
    kinds: torch.Tensor,  # [N]
    out: StepOutput,
    draw: TokenDraw | None,
    positions: torch.Tensor,  # [N]
    distance: torch.Tensor | None,  # [1]
) -> None:
    """Write the offsets, the OVERFLOW flags and the entries of KEPT and GREEDY rows.

    Where tokens are drawn, the scratch gets the best score of each KEPT row, also of those that
    overflow.

    Args:
        logits: [N, V] float32, bfloat16 or float16.
        sampled_ids: [N] int64.
        kinds: [N] int8.
        out: the buffers of the step, after the row statistics.
        draw: how tokens are drawn, None where they are.
        positions: [N] int64.
        distance: [1] int64 or None, see `capture_step`.
    """
    rows, vocab_size = kinds.shape[0], logits.shape[1]
    scratch = out.scratch
    chunks = launch.ceil_div(vocab_size, launch.CHUNK)
    start, distance = scratch.start(logits, distance)
    _pack_kernel[(chunks, rows)](
        start,
        distance,
        sampled_ids,
        kinds,
        scratch.chunk_count,
        scratch.chunk_start,
        scratch.word_start,
        scratch.mask_words,
        scratch.row_max,
        scratch.row_log_sum,
        out.counts,
        out.offsets,
        out.flags,
        out.entries,
        positions if draw is None else draw.seeds,
        positions,
        positions if draw is None else draw.lead,
        scratch.best_score,
        scratch.cut_state,
        scratch.cut_bound,
        scratch.bracket_count,
        scratch.bracket_keys,
        logits.stride(0),
        rows,
        out.entries.shape[0],
        scratch.chunk_count.stride(0),
        scratch.mask_words.stride(0),
        UNIT=launch.row_unit(logits),
        BLOCK_N=launch.next_power_of_2(out.counts.shape[0]),
        BLOCK_C=scratch.chunk_start.shape[1],
        BLOCK_S=launch.PACK_BLOCK_SPARSE,
        BLOCK_E=launch.PACK_BLOCK,
        SPARSE=launch.SPARSE,
        CHUNK=launch.CHUNK,
        GROUP=launch.GROUP,
        WIDE=16 // logits.element_size(),
        LIST=launch.CUT_LIST,
        ADD_NOISE=None if draw is None else draw.add_noise,
        CUT=draw is not None and draw.cut is not None,
        num_warps=launch.PACK_WARPS,
    )


@triton.jit
def _last_start(start_ptr, rank, SIZE: tl.constexpr):
    """Return the last of SIZE ascending starts that is not above the rank, by bisection."""
    at = tl.zeros_like(rank)
    step: tl.constexpr = SIZE // 2
    for level in tl.static_range(SIZE.bit_length() - 1):
        probe = at + (step >> level)
        at = tl.where(tl.load(start_ptr + probe) <= rank, probe, at)
    return at


@triton.jit(
    do_not_specialize=[
        "distance_ptr",
        "sampled_ids_ptr",
        "kinds_ptr",
        "seeds_ptr",
        "positions_ptr",
        "lead_ptr",
        "row_stride",
        "num_rows",
        "capacity",
        "chunk_stride",
        "word_stride",
    ],
    do_not_specialize_on_alignment=["logits_ptr"],
)
def _pack_kernel(
    logits_ptr,
    distance_ptr,
    sampled_ids_ptr,
    kinds_ptr,
    chunk_count_ptr,
    chunk_start_ptr,
    word_start_ptr,
    mask_words_ptr,
    row_max_ptr,
    row_log_sum_ptr,
    counts_ptr,
    offsets_ptr,
    flags_ptr,
    entries_ptr,
    seeds_ptr,
    positions_ptr,
    lead_ptr,
    best_score_ptr,
    cut_state_ptr,
    cut_bound_ptr,
    bracket_count_ptr,
    keys_ptr,
    row_stride,
    num_rows,
    capacity,
    chunk_stride,
    word_stride,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SPARSE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    LIST: tl.constexpr,
    ADD_NOISE: tl.constexpr,
    CUT: tl.constexpr,
):
    DRAW: tl.constexpr = ADD_NOISE is not None
    WORDS: tl.constexpr = CHUNK // GROUP
    chunk = tl.program_id(0)
    # the last rows first: the first pass left them in the cache
    row = (num_rows - 1 - tl.program_id(1)).to(tl.int64)
    kind = tl.load(kinds_ptr + row)
    count = tl.load(counts_ptr + row)
    if (chunk > 0) & ((kind != KIND_KEPT) | (count <= SPARSE)):
        return
    listed = False
    if CUT:
        listed = tl.load(cut_state_ptr + row) == LISTED
        if (chunk > 0) & listed:
            return
    end = row_end(counts_ptr, row, BLOCK_N)
    start = end - count
    fits = end <= capacity
    if chunk == 0:
        tl.store(offsets_ptr + row + 1, end)
        if row == 0:
            tl.store(offsets_ptr, start)
        if (fits == 0) & (count > 0):
            tl.store(flags_ptr + row, tl.load(flags_ptr + row) | FLAG_OVERFLOW)
        if fits & (kind == KIND_GREEDY) & (count > 0):
            # the bits of logprob 0 are 0
            tl.store(entries_ptr + start, tl.load(sampled_ids_ptr + row))
    # a row that does not fit has a token all the same
    if (kind != KIND_KEPT) | ((fits == 0) & (not DRAW)):
        return

    seed = tl.load(seeds_ptr + row) if DRAW else 0
    position = tl.load(positions_ptr + row) + tl.load(lead_ptr + row) if DRAW else 0
    row_max = tl.load(row_max_ptr + row)
    row_log_sum = tl.load(row_log_sum_ptr + row)
    row_ptr = logits_ptr + tl.load(distance_ptr) * UNIT + row * row_stride
    entries_ptr += start
    if CUT and listed:
        _pack_list(
            keys_ptr + row * LIST,
            tl.load(bracket_count_ptr + row * 2),
            tl.load(cut_bound_ptr + row),
            entries_ptr,
            row_max,
            row_log_sum,
            fits,
            seed,
            position,
            best_score_ptr + row,
            BLOCK_S,
            ADD_NOISE,
        )
        return
    chunk_start_ptr += row * BLOCK_C
    mask_words_ptr += row * word_stride
    if count <= SPARSE:
        word_start_ptr += row * word_stride
        best = tl.full((), NO_SCORE, tl.int64)
        for first in range(0, count, BLOCK_S):
            rank = first + tl.arange(0, BLOCK_S)
            # from the entry's rank to its chunk, word, bit
            nth = tl.minimum(rank, count - 1)
            of_chunk = _last_start(chunk_start_ptr, nth, BLOCK_C)
            nth -= tl.load(chunk_start_ptr + of_chunk)
            word = _last_start(word_start_ptr + of_chunk * WORDS, nth, WORDS)
            nth -= tl.load(word_start_ptr + of_chunk * WORDS + word)
            mask_word = tl.load(mask_words_ptr + of_chunk * WORDS + word)
            bit = nth_set_bit(mask_word.to(tl.uint32, bitcast=True), nth)
            ids = of_chunk * CHUNK + id_in_chunk(word, bit, WORDS, WIDE)
            live = rank < count
            value = tl.load(row_ptr + ids, mask=live, other=0.0).to(tl.float32)
            entry = pack_entry(log_probability(value, row_max, row_log_sum), ids)
            tl.store(entries_ptr + rank, entry, mask=live & fits)
            if DRAW:
                score = best_of_block(ADD_NOISE, value, ids, live, seed, position)
                best = tl.maximum(best, score)
        if DRAW:
            tl.store(best_score_ptr + row, best)
        return

    chunk_count = tl.load(chunk_count_ptr + row * chunk_stride + chunk)
    if chunk_count == 0:
        return
    entries_ptr += tl.load(chunk_start_ptr + chunk)
    words = tl.load(mask_words_ptr + chunk * WORDS + tl.arange(0, WORDS))
    words = words.to(tl.uint32, bitcast=True)
    # [WORDS], the entries up to and with each word
    upto = tl.cumsum(popcount(words), axis=0)
    chunk_ptr = row_ptr + chunk * CHUNK
    first_id = chunk * CHUNK
    # half a block for a chunk that would leave half of it idle
    if chunk_count > BLOCK_E // 2:
        _pack_chunk(
            chunk_ptr,
            entries_ptr,
            words,
            upto,
            chunk_count,
            first_id,
            row_max,
            row_log_sum,
            fits,
            seed,
            position,
            best_score_ptr + row,
            BLOCK_E,
            WORDS,
            WIDE,
            ADD_NOISE,
        )
    else:
        _pack_chunk(
            chunk_ptr,
            entries_ptr,
            words,
            upto,
            chunk_count,
            first_id,
            row_max,
            row_log_sum,
            fits,
            seed,
            position,
            best_score_ptr + row,
            BLOCK_E // 2,
            WORDS,
            WIDE,
            ADD_NOISE,
        )


@triton.jit
def _pack_list(
    keys_ptr,
    number,
    bound,
    entries_ptr,
    row_max,
    row_log_sum,
    fits,
    seed,
    position,
    best_score_ptr,
    BLOCK: tl.constexpr,
    ADD_NOISE: tl.constexpr,
):
    """Pack those of a row's listed candidates that reach the bound."""
    best = tl.full((), NO_SCORE, tl.int64)
    packed = tl.full((), 0, tl.int32)
    for first in range(0, number, BLOCK):
        at = first + tl.arange(0, BLOCK)
        key = tl.load(keys_ptr + at, mask=at < number, other=0)
        live = (at < number) & (key >= bound)
        one = live.to(tl.int32)
        value, ids = key_logit(key)
        entry = pack_entry(log_probability(value, row_max, row_log_sum), ids)
        place = packed + tl.cumsum(one, axis=0) - one
        tl.store(entries_ptr + place, entry, mask=live & fits)
        score = best_of_block(ADD_NOISE, value, ids, live, seed, position)
        best = tl.maximum(best, score)
        packed += tl.sum(one, axis=0)
    tl.store(best_score_ptr, best)


@triton.jit
def _pack_chunk(
    chunk_ptr,
    entries_ptr,
    words,
    upto,
    count,
    first_id,
    row_max,
    row_log_sum,
    fits,
    seed,
    position,
    best_score_ptr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
    ADD_NOISE: tl.constexpr,
):
    """Pack a chunk's entries, BLOCK at a time."""
    best = tl.full((), NO_SCORE, tl.int64)
    for first in range(0, count, BLOCK):
        rank = first + tl.arange(0, BLOCK)
        word, before = word_of_rank(upto, rank, WORDS)
        bit = nth_set_bit(tl.gather(words, word, 0), rank - before)
        in_chunk = id_in_chunk(word, bit, WORDS, WIDE)
        live = rank < count
        value = tl.load(chunk_ptr + in_chunk, mask=live, other=0.0).to(tl.float32)
        ids = first_id + in_chunk
        entry = pack_entry(log_probability(value, row_max, row_log_sum), ids)
        tl.store(entries_ptr + rank, entry, mask=live & fits)
        if ADD_NOISE is not None:
            score = best_of_block(ADD_NOISE, value, ids, live, seed, position)
            best = tl.maximum(best, score)
    if ADD_NOISE is not None:
        tl.atomic_max(best_score_ptr, best)
