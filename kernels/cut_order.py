"""What the kernels that find a row's cut share: which rows are cut, the order of a row's ids."""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.kernels.tile_ops import KIND_KEPT, key_value, order_key

# C chunks of CHUNK ids

NO_LIMIT = tl.constexpr(0x7FFFFFFF)
ID_BITS = tl.constexpr(22)
LAST_ID = tl.constexpr((1 << 22) - 1)

# values of the scratch's `cut_state`
UNCUT = tl.constexpr(0)
LISTED = tl.constexpr(1)
WIDE_ROW = tl.constexpr(2)


@triton.jit
def row_cut(kinds_ptr, top_k_ptr, top_p_ptr, row, vocab_size):
    """Return k, p and whether the row is truncated by them; k is NO_LIMIT if it keeps all."""
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where((top_k <= 0) | (top_k >= vocab_size), NO_LIMIT, top_k)
    top_p = tl.load(top_p_ptr + row)
    cut = (tl.load(kinds_ptr + row) == KIND_KEPT) & ((top_k < NO_LIMIT) | (top_p < 1.0))
    return top_k, top_p, cut


@triton.jit
def row_total(chunk_max_ptr, chunk_sum_ptr, row, num_chunks, chunk_stride, BLOCK_C: tl.constexpr):
    """Return the row's maximum and its sum relative to that, float64; both 0 if it is broken."""
    chunk = tl.arange(0, BLOCK_C)
    at = row * chunk_stride + chunk
    present = chunk < num_chunks
    chunk_max = tl.load(chunk_max_ptr + at, mask=present, other=-float("inf"))
    chunk_sum = tl.load(chunk_sum_ptr + at, mask=present, other=0.0)
    largest = tl.max(chunk_max, axis=0)
    # NaN and +inf make a sum NaN; a row without ids has the sum 0
    broken = tl.sum((chunk_sum != chunk_sum).to(tl.int32), axis=0) > 0
    broken = broken | (largest == -float("inf"))
    largest = tl.where(broken, 0.0, largest)
    scale = tl.exp((chunk_max - largest).to(tl.float64))
    total = tl.sum(tl.where(chunk_sum > 0.0, chunk_sum.to(tl.float64) * scale, 0.0), axis=0)
    return largest, tl.where(broken, 0.0, total)


@triton.jit
def load_chunk(
    logits_ptr,
    distance_ptr,
    row,
    row_units,
    vocab_units,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Load the chunk of the first axis of the grid, in the layout of `tile_ops.id_in_chunk`.

    Returns:
        [GROUP // WIDE, CHUNK // GROUP * WIDE] float32, -inf beyond the vocabulary; a thread holds
        all of axis 0, and so all 32 ids of each of its words.
    """
    COLUMNS: tl.constexpr = CHUNK // GROUP * WIDE
    ids = tl.program_id(0) * CHUNK + tl.arange(0, GROUP // WIDE)[:, None] * COLUMNS
    ids += tl.arange(0, COLUMNS)[None, :]
    # products with the constant UNIT, so that the compiler sees what divides them
    row_ptr = logits_ptr + (tl.load(distance_ptr) + row * row_units) * UNIT
    value = tl.load(row_ptr + ids, mask=ids < vocab_units * UNIT, other=-float("inf"))
    return value.to(tl.float32)


@triton.jit
def top_p_depth(top_p, total, vocab_size):
    """Return how many nats below the maximum the cut of top_p is at most."""
    # ids with less than (1 - p) / V of the probability have less than 1 - p of it together
    least = tl.maximum(1.0 - top_p, 1e-7).to(tl.float64) * total / vocab_size
    return 0.01 - tl.log(least).to(tl.float32)


@triton.jit
def cut_key(value, ids):
    """Return int64 that orders as the ids of a row are ordered, the likeliest highest."""
    return (order_key(value).to(tl.int64) << ID_BITS) | (ids ^ LAST_ID).to(tl.int64)


@triton.jit
def key_logit(key):
    """Invert `cut_key`: return the logit, +0.0 of either zero, and the id."""
    value = key_value((key >> ID_BITS).to(tl.int32))
    return value, ((key & LAST_ID) ^ LAST_ID).to(tl.int32)
