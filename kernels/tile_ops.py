"""Small device functions that several capture kernels use, and the constants that they share."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)

# values of RowKind and RowFlag, for code that runs on the device
KIND_SKIP = tl.constexpr(0)
KIND_KEPT = tl.constexpr(1)
KIND_GREEDY = tl.constexpr(2)
KIND_TOP = tl.constexpr(3)
FLAG_NONFINITE = tl.constexpr(1)
FLAG_EMPTY = tl.constexpr(2)
FLAG_OVERFLOW = tl.constexpr(4)
FLAG_SAMPLED_MISSING = tl.constexpr(8)


@triton.jit
def exp_nonpositive(x):
    """Return exp(x) of x <= 0 in float32, off by about 2 ulp; of NaN it is NaN, of -inf 0."""
    # below -200 the result is 0 anyway, and -inf would turn the correction into NaN
    x = tl.maximum(x, -200.0, propagate_nan=tl.PropagateNan.ALL)
    whole = x * _LOG2_E
    power = tl.exp2(whole)
    # what rounding the product lost: at x = -11 it is worth 4e-7 of the result, and with equal
    # logits it has the same sign in every term
    return tl.fma(power, tl.fma(whole, -_LN_2, x), power)


@triton.jit
def log_probability(value, row_max, row_log_sum):
    """Return (value - row_max) - row_log_sum in float32, with +0.0 in place of -0.0."""
    result = (value - row_max) - row_log_sum
    return tl.where(result == 0.0, 0.0, result)


@triton.jit
def pack_entry(logprob, token_id):
    """Return the packed entry (float32 bits << 32 | id) as int64."""
    return (logprob.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token_id.to(tl.int64)


@triton.jit
def row_end(counts_ptr, row, BLOCK_N: tl.constexpr):
    """Return the inclusive prefix sum of the rows' counts at `row`, int64."""
    index = tl.arange(0, BLOCK_N)
    counts = tl.load(counts_ptr + index, mask=index <= row, other=0)
    return tl.sum(counts.to(tl.int64), axis=0)


@triton.jit
def popcount(word):
    """Return the number of set bits of uint32 words, as int32."""
    pairs = word - ((word >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
    halves = octets + (octets >> 8)
    return ((halves + (halves >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def nth_set_bit(word, n):
    """Return the position of the n-th (from 0) lowest set bit of uint32 words, as int32."""
    pairs = word - ((word >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
    # descend: is the bit in the lower or the upper half of what is left
    low = ((octets + (octets >> 8)) & 0xFF).to(tl.int32)
    upper = n >= low
    n = tl.where(upper, n - low, n)
    position = tl.where(upper, 16, 0)
    low = ((octets >> position.to(tl.uint32)) & 0xFF).to(tl.int32)
    upper = n >= low
    n = tl.where(upper, n - low, n)
    position = tl.where(upper, position + 8, position)
    low = ((nibbles >> position.to(tl.uint32)) & 0xF).to(tl.int32)
    upper = n >= low
    n = tl.where(upper, n - low, n)
    position = tl.where(upper, position + 4, position)
    low = ((pairs >> position.to(tl.uint32)) & 0x3).to(tl.int32)
    upper = n >= low
    n = tl.where(upper, n - low, n)
    position = tl.where(upper, position + 2, position)
    low = ((word >> position.to(tl.uint32)) & 0x1).to(tl.int32)
    return tl.where(n >= low, position + 1, position)


@triton.jit
def order_key(value):
    """Map float32 to int32 so that the integers order as the floats do; -0.0 and 0.0 are equal."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """Invert `order_key` for one integer."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def head_bound(keys, n, low, largest):
    """Find a bound that at least n of the int32 keys reach, and all keys above it are fewer than n.

    By bisection that ends as soon as exactly n keys reach the bound: the number of steps then goes
    by the gap between two neighbours and not by the 32 bits of a key. The first steps halve the
    distance in logits, the others in keys, which always ends.

    Args:
        keys: int32 of `order_key`, any shape.
        n: at least 1.
        low: a key that at least n keys reach.
        largest: the float32 of the largest key.

    Returns:
        The bound, int32.
    """
    # in int64, since the distance of two keys can need 33 bits
    bottom = low.to(tl.int64)
    above = order_key(largest).to(tl.int64) + 1
    low_value = tl.maximum(key_value(low), largest - 32.0)
    high_value = largest
    step = 0
    while above - bottom > 1:
        middle = (low_value + high_value) * 0.5
        key = order_key(middle).to(tl.int64)
        if (step >= 16) | (key <= bottom) | (key >= above):
            key = bottom + (above - bottom) // 2
        reached = tl.sum((keys >= key.to(tl.int32)).to(tl.int32))
        if reached >= n:
            bottom = key
            low_value = middle
        else:
            above = key
            high_value = middle
        if reached == n:
            above = bottom + 1
        step += 1
    return bottom.to(tl.int32)


@triton.jit
def id_in_chunk(word, bit, WORDS: tl.constexpr, WIDE: tl.constexpr):
    """Return the id within the chunk that a bit of a word stands for.

    A thread of a pass over the logits holds WIDE ids next to each other from each of GROUP // WIDE
    parts of the chunk, and these are the bits of one word.
    """
    return (bit // WIDE) * (WORDS * WIDE) + word * WIDE + bit % WIDE


@triton.jit
def word_of_rank(upto, rank, WORDS: tl.constexpr):
    """Return the word that the entries of some ranks are in, and the entries before that word.

    Args:
        upto: [WORDS] int32, the entries up to and with each word.
        rank: int32 vector.
        WORDS: a power of two.
    """
    # how many words end at or before it, by bisection
    word = tl.zeros_like(rank)
    before = tl.zeros_like(rank)
    for level in tl.static_range(WORDS.bit_length() - 1):
        probe = word + ((WORDS // 2) >> level)
        ended = tl.gather(upto, probe - 1, 0)
        word = tl.where(ended <= rank, probe, word)
        before = tl.where(ended <= rank, ended, before)
    return word, before
