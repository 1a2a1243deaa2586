"""The first pass over the logits: maximum, sum and kept ids of each chunk of a row, then of rows.

A row is split over several programs, since a step of few rows would otherwise leave most of the
chip idle. Sums are float32 within a group of 32 ids and float64 above: float32 throughout, with up
to V terms, can be off by more than the 5e-7 that a logprob may be.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels import launch
from rollout.kernels.cut_order import LISTED
from rollout.kernels.step_output import StepOutput
from rollout.kernels.tile_ops import (
    FLAG_EMPTY,
    FLAG_NONFINITE,
    FLAG_SAMPLED_MISSING,
    KIND_GREEDY,
    KIND_KEPT,
    KIND_SKIP,
    KIND_TOP,
    exp_nonpositive,
    key_value,
    log_probability,
    order_key,
    popcount,
)
from rollout.kernels.token_draw import NO_SCORE, TokenDraw, key_token, score_key

# N rows, V vocabulary, C chunks of CHUNK ids, G groups of GROUP ids in a chunk


def launch_row_stats(
    logits: torch.Tensor,  # [N, V]
    sampled_ids: torch.Tensor,  # [N]
    kinds: torch.Tensor,  # [N]
    out: StepOutput,
    top: int,
    draw: TokenDraw | None,
    positions: torch.Tensor,  # [N]
    distance: torch.Tensor | None,  # [1]
) -> None:
    """Fill the scratch, and of each row of `out` the count, sampled logprob and flags but OVERFLOW.

    Args:
        logits: [N, V] float32, bfloat16 or float16.
        sampled_ids: [N] int64; where tokens are drawn, it becomes those of all rows but KEPT ones.
        kinds: [N] int8.
        out: the buffers of the step; `tail_mass` becomes 0, or NaN in broken TOP rows.
        top: ids recorded of a TOP row.
        draw: how tokens are drawn, None where they are.
        positions: [N] int64.
        distance: [1] int64 or None, see `capture_step`.
    """
    rows, vocab_size = kinds.shape[0], logits.shape[1]
    scratch = out.scratch
    unit = launch.row_unit(logits)
    noise = draw.add_noise if draw is not None and draw.untruncated else None
    chunks = launch.ceil_div(vocab_size, launch.CHUNK)
    start, distance = scratch.start(logits, distance)
    _chunk_stats_kernel[(chunks, rows)](
        start,
        distance,
        kinds,
        scratch.chunk_max,
        scratch.chunk_sum,
        scratch.chunk_count,
        scratch.mask_words,
        scratch.word_start,
        scratch.group_max,
        scratch.group_sum,
        positions if draw is None else draw.seeds,
        positions,
        positions if draw is None else draw.lead,
        scratch.chunk_best,
        scratch.cut_state,
        scratch.cut_value,
        scratch.cut_id,
        logits.stride(0) // unit,
        vocab_size // unit,
        rows - launch.cached_rows(logits),
        scratch.chunk_max.stride(0),
        scratch.mask_words.stride(0),
        UNIT=unit,
        WIDE=16 // logits.element_size(),
        HAS_GROUP_MAX=scratch.group_max.shape == scratch.mask_words.shape,
        HAS_GROUP_SUM=scratch.group_sum.shape == scratch.mask_words.shape,
        CHUNK=launch.CHUNK,
        GROUP=launch.GROUP,
        SPARSE=launch.SPARSE,
        ADD_NOISE=noise,
        CUT=draw is not None and draw.cut is not None,
        num_warps=launch.CHUNK_WARPS if noise is None else launch.NOISE_WARPS,
        maxnreg=None if noise is None else launch.NOISE_REGISTERS,
    )
    _row_stats_kernel[(rows,)](
        start,
        distance,
        sampled_ids,
        kinds,
        scratch.chunk_max,
        scratch.chunk_sum,
        scratch.chunk_count,
        scratch.chunk_start,
        scratch.row_max,
        scratch.row_log_sum,
        scratch.chunk_best,
        scratch.best_score,
        out.counts,
        out.sampled_logprobs,
        out.tail_mass,
        out.flags,
        logits.stride(0),
        vocab_size,
        chunks,
        scratch.chunk_max.stride(0),
        top,
        UNIT=unit,
        DRAW=draw is not None,
        BLOCK_C=scratch.chunk_start.shape[1],
        num_warps=1,
    )


@triton.jit(
    do_not_specialize=[
        "distance_ptr",
        "kinds_ptr",
        "seeds_ptr",
        "positions_ptr",
        "lead_ptr",
        "row_units",
        "vocab_units",
        "num_stream",
        "chunk_stride",
        "group_stride",
    ]
)
def _chunk_stats_kernel(
    logits_ptr,
    distance_ptr,
    kinds_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    chunk_count_ptr,
    mask_words_ptr,
    word_start_ptr,
    group_max_ptr,
    group_sum_ptr,
    seeds_ptr,
    positions_ptr,
    lead_ptr,
    chunk_best_ptr,
    cut_state_ptr,
    cut_value_ptr,
    cut_id_ptr,
    row_units,
    vocab_units,
    num_stream,
    chunk_stride,
    group_stride,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_GROUP_MAX: tl.constexpr,
    HAS_GROUP_SUM: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    SPARSE: tl.constexpr,
    ADD_NOISE: tl.constexpr,
    CUT: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    kind = tl.load(kinds_ptr + row)
    if kind == KIND_SKIP:
        return
    if CUT and tl.load(cut_state_ptr + row) == LISTED:
        return  # the search for the cut has left the statistics
    # every thread holds whole words of the mask: WIDE ids next to each other from each of ACROSS
    # rows of the chunk, so that neither the bits nor most of the sum cross threads
    ACROSS: tl.constexpr = GROUP // WIDE
    WORDS: tl.constexpr = CHUNK // GROUP
    across = tl.arange(0, ACROSS)[:, None]
    column = tl.arange(0, WORDS * WIDE)[None, :]
    ids = chunk * CHUNK + across * (WORDS * WIDE) + column
    # products with the constant UNIT, so that the compiler sees what divides them
    row_ptr = logits_ptr + (tl.load(distance_ptr) + row * row_units) * UNIT
    # [ACROSS, WORDS * WIDE]
    inside = ids < vocab_units * UNIT
    # the second pass starts with the last rows: the others make room for them in the cache
    if row < num_stream:
        value = tl.load(
            row_ptr + ids, mask=inside, other=-float("inf"), eviction_policy="evict_first"
        )
    else:
        value = tl.load(row_ptr + ids, mask=inside, other=-float("inf"))
    value = value.to(tl.float32)
    if CUT:
        least = tl.load(cut_value_ptr + row)
        last = tl.load(cut_id_ptr + row)
        # of equal logits those up to the last id stay, and NaN does
        higher = key_value(order_key(least) + 1)
        value = tl.where(value < tl.where(ids > last, higher, least), -float("inf"), value)
    kept = value > -float("inf")
    of_column = tl.sum(kept.to(tl.int32) << (across * WIDE + column % WIDE), axis=0)
    words = tl.sum(tl.reshape(of_column, [WORDS, WIDE]), axis=1)
    largest = tl.max(tl.max(value, axis=0), axis=0)
    # a chunk without kept ids has the sum 0; NaN and +inf make the sum NaN
    base = tl.where(largest == -float("inf"), 0.0, largest)
    power = exp_nonpositive(value - base)
    # few terms in float32, which are in one thread, then float64
    total = tl.sum(tl.sum(power, axis=0).to(tl.float64), axis=0)
    at = row * chunk_stride + chunk
    tl.store(chunk_max_ptr + at, largest)
    tl.store(chunk_sum_ptr + at, total.to(tl.float32))
    bits = popcount(words.to(tl.uint32, bitcast=True))
    count = tl.sum(bits, axis=0)
    tl.store(chunk_count_ptr + at, count)
    at = row * group_stride + chunk * WORDS + tl.arange(0, WORDS)
    if kind == KIND_KEPT:
        tl.store(mask_words_ptr + at, words)
        if count <= SPARSE:
            tl.store(word_start_ptr + at, tl.cumsum(bits, axis=0) - bits)
    # groups are consecutive ids, for the order of the draws and of equal ids
    if HAS_GROUP_SUM:
        tl.store(group_sum_ptr + at, tl.sum(tl.reshape(power, [WORDS, GROUP]), axis=1))
    if HAS_GROUP_MAX and kind == KIND_TOP:
        tl.store(group_max_ptr + at, tl.max(tl.reshape(value, [WORDS, GROUP]), axis=1))
    # tokens of KEPT rows are drawn among what is packed
    if ADD_NOISE is not None and kind != KIND_KEPT:
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row) + tl.load(lead_ptr + row)
        best = tl.full((), NO_SCORE, tl.int64)
        PART: tl.constexpr = WORDS * WIDE
        # again from the cache, a part at a time: the noise of all takes too many registers
        for part in range(ACROSS):
            own = chunk * CHUNK + part * PART + tl.arange(0, PART)
            logit = tl.load(row_ptr + own, mask=own < vocab_units * UNIT, other=-float("inf"))
            logit = logit.to(tl.float32)
            sums = logit
            if kind != KIND_GREEDY:
                sums = ADD_NOISE(logit, own, seed, position)
            sums = tl.where(logit > -float("inf"), sums, -float("inf"))
            most = tl.max(sums, axis=0)
            # of equal sums the lowest id
            first = tl.min(tl.where(sums == most, own, 0x7FFFFFFF), axis=0)
            best = tl.maximum(best, score_key(most, first))
        tl.store(chunk_best_ptr + row * chunk_stride + chunk, best)


@triton.jit(
    do_not_specialize=[
        "distance_ptr",
        "sampled_ids_ptr",
        "kinds_ptr",
        "row_stride",
        "vocab_size",
        "num_chunks",
        "chunk_stride",
        "top",
    ],
    do_not_specialize_on_alignment=["logits_ptr"],
)
def _row_stats_kernel(
    logits_ptr,
    distance_ptr,
    sampled_ids_ptr,
    kinds_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    chunk_count_ptr,
    chunk_start_ptr,
    row_max_ptr,
    row_log_sum_ptr,
    chunk_best_ptr,
    best_score_ptr,
    counts_ptr,
    sampled_logprobs_ptr,
    tail_mass_ptr,
    flags_ptr,
    row_stride,
    vocab_size,
    num_chunks,
    chunk_stride,
    top,
    UNIT: tl.constexpr,
    DRAW: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds_ptr + row)
    if kind == KIND_SKIP:
        tl.store(counts_ptr + row, 0)
        tl.store(sampled_logprobs_ptr + row, 0.0)
        tl.store(tail_mass_ptr + row, 0.0)
        tl.store(flags_ptr + row, 0)
        if DRAW:
            tl.store(sampled_ids_ptr + row, 0)
        return
    chunk = tl.arange(0, BLOCK_C)
    present = chunk < num_chunks
    at = row * chunk_stride + chunk
    chunk_max = tl.load(chunk_max_ptr + at, mask=present, other=-float("inf"))
    chunk_sum = tl.load(chunk_sum_ptr + at, mask=present, other=0.0)
    chunk_count = tl.load(chunk_count_ptr + at, mask=present, other=0)
    nonfinite = tl.sum((chunk_sum != chunk_sum).to(tl.int32), axis=0) > 0
    largest = tl.max(chunk_max, axis=0)
    empty = (largest == -float("inf")) & (nonfinite == 0)
    broken = nonfinite | empty
    base = tl.where(broken, 0.0, largest)
    scale = tl.exp((chunk_max - base).to(tl.float64))
    total = tl.sum(tl.where(chunk_sum > 0.0, chunk_sum.to(tl.float64) * scale, 0.0), axis=0)
    log_sum = tl.log(tl.where(broken, 1.0, total)).to(tl.float32)

    if DRAW:
        best = tl.load(chunk_best_ptr + at, mask=present & (kind != KIND_KEPT), other=NO_SCORE)
        sampled = key_token(tl.max(best, axis=0))
        # nothing is drawn yet of a KEPT row, and never of a broken one
        sampled = tl.where((kind == KIND_KEPT) | broken, 0, sampled)
        tl.store(sampled_ids_ptr + row, sampled)
        tl.store(best_score_ptr + row, NO_SCORE)
    else:
        sampled = tl.load(sampled_ids_ptr + row)
    inside = (sampled >= 0) & (sampled < vocab_size)
    value = tl.load(
        logits_ptr + tl.load(distance_ptr) * UNIT + row * row_stride + tl.where(inside, sampled, 0),
        mask=inside,
        other=-float("inf"),
    ).to(tl.float32)
    missing = (broken == 0) & (value == -float("inf")) & (not DRAW)
    logprob = log_probability(value, base, log_sum)
    if kind == KIND_GREEDY:
        logprob = tl.where(missing, -float("inf"), 0.0)
    logprob = tl.where(broken, float("nan"), logprob)

    kept = tl.sum(chunk_count, axis=0)
    # chunks that are not there start after all entries
    chunk_start = tl.cumsum(chunk_count, axis=0) - chunk_count
    tl.store(chunk_start_ptr + row * BLOCK_C + chunk, chunk_start)
    count = tl.where(kind == KIND_KEPT, kept, 0)
    count = tl.where(kind == KIND_TOP, tl.minimum(kept, top), count)
    count = tl.where((kind == KIND_GREEDY) & (missing == 0), 1, count)
    flags = tl.where(nonfinite, FLAG_NONFINITE, 0) | tl.where(empty, FLAG_EMPTY, 0)
    flags = flags | tl.where(missing, FLAG_SAMPLED_MISSING, 0)
    tl.store(row_max_ptr + row, largest)
    tl.store(row_log_sum_ptr + row, log_sum)
    tl.store(counts_ptr + row, tl.where(broken, 0, count))
    tl.store(sampled_logprobs_ptr + row, logprob)
    tl.store(tail_mass_ptr + row, tl.where(broken & (kind == KIND_TOP), float("nan"), 0.0))
    tl.store(flags_ptr + row, flags)
