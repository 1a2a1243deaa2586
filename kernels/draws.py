"""Independent samples of the sampler's distribution beside the sampled token.

Draw k of a position is the inverse of q's cumulative distribution over ascending ids at a uniform
number with 106 random bits, so that an id of probability 1e-12 is drawn as often as it should be,
which float32 noise never does. The bits are one block of Philox 4x32-10 with the rollout's seed as
the key and (position, draw index, 0, DOMAIN) as the counter: the same seed gives the same draws on
any device and in any batch, and no other user of the seed (the engine's own sampler counts with a
last word of 0) ever sees these bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels import launch
from rollout.kernels.step_output import StepOutput
from rollout.kernels.tile_ops import (
    FLAG_EMPTY,
    FLAG_NONFINITE,
    KIND_GREEDY,
    KIND_SKIP,
    log_probability,
    pack_entry,
)

DOMAIN = 0x64726177
"""Last word of the counter: "draw" in ASCII."""

_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)


def draw_bits(seeds: torch.Tensor, positions: torch.Tensor, num_draws: int) -> torch.Tensor:
    """Compute the random words of draws by Philox 4x32-10.

    Args:
        seeds: [N] int64, any bits.
        positions: [N] int64, output positions; the low 32 bits count.
        num_draws: draws of each row, K.

    Returns:
        [N, K, 4] int64 words in [0, 2**32).

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    key = [(seeds & _WORD)[:, None], ((seeds >> 32) & _WORD)[:, None]]
    index = torch.arange(num_draws, device=seeds.device)[None, :]
    zero = torch.zeros_like(index)
    words = [(positions & _WORD)[:, None] + zero, index + 0 * key[0], zero + 0 * key[0]]
    words.append(words[2] + DOMAIN)
    for _ in range(10):
        high0, low0 = _multiply_words(words[0], _PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply_words(words[2], _PHILOX_MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [(key[i] + _PHILOX_WEYL[i]) & _WORD for i in range(2)]
    return torch.stack(words, dim=-1)


def _multiply_words(words: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low 32 bits of a product of 32-bit words held in int64."""
    # in halves, since the product of two 32-bit words overflows int64
    low_part = (words & 0xFFFF) * factor
    high_part = (words >> 16) * factor + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


def draws_reference(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Draw from one row by inverting its cumulative distribution, in plain torch.

    Args:
        logits: [V] any float dtype, without NaN and +inf, not all -inf.
        words: [K, 4] int64, of `draw_bits`.

    Returns:
        [K] int64 ids.
    """
    values = logits.double()
    weights = torch.exp(values - values.max())
    cumulative = torch.cumsum(weights, dim=0)
    targets = _uniform(words[:, 0], words[:, 1]) * cumulative[-1]
    # the first id whose cumulative weight exceeds the target: it has a positive weight
    ids = torch.searchsorted(cumulative, targets, right=True)
    return ids.clamp(max=int(weights.nonzero().max()))


def _uniform(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Turn two 32-bit words into a float64 in [0, 1) with 53 random bits."""
    return ((high >> 5) * 67108864 + (low >> 6)).double() * 2.0**-53


def launch_draws(
    logits: torch.Tensor,  # [N, V]
    sampled_ids: torch.Tensor,  # [N]
    kinds: torch.Tensor,  # [N]
    out: StepOutput,
    seeds: torch.Tensor,  # [N]
    positions: torch.Tensor,  # [N]
    distance: torch.Tensor | None,  # [1]
) -> None:
    """Write the draws of every row, after the row statistics.

    Args:
        logits: [N, V] float32, bfloat16 or float16.
        sampled_ids: [N] int64.
        kinds: [N] int8.
        out: the buffers of the step.
        seeds: [N] int64.
        positions: [N] int64.
        distance: [1] int64 or None, see `capture_step`.
    """
    rows, vocab_size = kinds.shape[0], logits.shape[1]
    scratch = out.scratch
    num_draws = out.draws.shape[1]
    start, distance = scratch.start(logits, distance)
    _draws_kernel[(rows, launch.ceil_div(num_draws, launch.DRAW_BLOCK))](
        start,
        distance,
        sampled_ids,
        kinds,
        seeds,
        positions,
        scratch.chunk_max,
        scratch.chunk_sum,
        scratch.group_sum,
        scratch.row_max,
        scratch.row_log_sum,
        out.counts,
        out.flags,
        out.draws,
        logits.stride(0),
        vocab_size,
        launch.ceil_div(vocab_size, launch.CHUNK),
        scratch.chunk_max.stride(0),
        scratch.group_sum.stride(0),
        num_draws,
        UNIT=launch.row_unit(logits),
        BLOCK_K=launch.DRAW_BLOCK,
        BLOCK_C=scratch.chunk_start.shape[1],
        GROUPS=launch.CHUNK // launch.GROUP,
        GROUP=launch.GROUP,
        DOMAIN=DOMAIN,
        num_warps=launch.DRAW_WARPS,
    )


@triton.jit
def _pick(weights, target, SIZE: tl.constexpr):
    """Invert the cumulative distribution of each row of weights [K, SIZE] at target in [0, 1).

    Returns the index, never of a weight of 0, and where the target lies within its share.
    """
    index = tl.arange(0, SIZE)[None, :]
    cumulative = tl.cumsum(weights, axis=1)
    goal = target * tl.max(cumulative, axis=1)
    past = (cumulative > goal[:, None]) & (weights > 0.0)
    first = tl.min(tl.where(past, index, SIZE), axis=1)
    last = tl.max(tl.where(weights > 0.0, index, 0), axis=1)
    first = tl.minimum(first, last)
    share = tl.sum(tl.where(index == first[:, None], weights, 0.0), axis=1)
    before = tl.sum(tl.where(index < first[:, None], weights, 0.0), axis=1)
    return first, (goal - before) / share


@triton.jit
def _uniform_53(high, low):
    """Turn two uint32 words into a float64 in [0, 1) with 53 random bits."""
    bits = (high >> 5).to(tl.int64) * 67108864 + (low >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit(
    do_not_specialize=[
        "distance_ptr",
        "sampled_ids_ptr",
        "kinds_ptr",
        "seeds_ptr",
        "positions_ptr",
        "row_stride",
        "vocab_size",
        "num_chunks",
        "chunk_stride",
        "group_stride",
        "num_draws",
    ],
    do_not_specialize_on_alignment=["logits_ptr"],
)
def _draws_kernel(
    logits_ptr,
    distance_ptr,
    sampled_ids_ptr,
    kinds_ptr,
    seeds_ptr,
    positions_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    group_sum_ptr,
    row_max_ptr,
    row_log_sum_ptr,
    counts_ptr,
    flags_ptr,
    draws_ptr,
    row_stride,
    vocab_size,
    num_chunks,
    chunk_stride,
    group_stride,
    num_draws,
    UNIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    DOMAIN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    draw = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = draw < num_draws
    out_ptr = draws_ptr + row * num_draws + draw
    kind = tl.load(kinds_ptr + row)
    flags = tl.load(flags_ptr + row)
    if (kind == KIND_SKIP) | ((flags & (FLAG_NONFINITE | FLAG_EMPTY)) != 0):
        tl.store(out_ptr, tl.zeros([BLOCK_K], tl.int64), mask=live)
        return
    if kind == KIND_GREEDY:
        # the bits of logprob 0 are 0
        sampled = tl.load(sampled_ids_ptr + row)
        sampled = tl.where(tl.load(counts_ptr + row) > 0, sampled, 0)
        tl.store(out_ptr, tl.zeros([BLOCK_K], tl.int64) + sampled, mask=live)
        return
    row_max = tl.load(row_max_ptr + row)
    row_log_sum = tl.load(row_log_sum_ptr + row)
    position = tl.load(positions_ptr + row)
    zero = tl.zeros([BLOCK_K], tl.uint32)
    word0, word1, word2, word3 = tl.philox(
        tl.load(seeds_ptr + row),
        zero + position.to(tl.uint32),
        draw.to(tl.uint32),
        zero,
        zero + DOMAIN,
    )

    chunk = tl.arange(0, BLOCK_C)
    present = chunk < num_chunks
    at = row * chunk_stride + chunk
    chunk_max = tl.load(chunk_max_ptr + at, mask=present, other=-float("inf"))
    weights = tl.load(chunk_sum_ptr + at, mask=present, other=0.0).to(tl.float64)
    weights = weights * tl.exp((chunk_max - row_max).to(tl.float64))
    total = tl.sum(weights, axis=0)
    weights = tl.broadcast_to(weights[None, :], [BLOCK_K, BLOCK_C])
    at_chunk, target = _pick(weights, _uniform_53(word0, word1), BLOCK_C)
    # the next 53 bits of the uniform number, at the scale of the chunk
    picked = tl.where(chunk[None, :] == at_chunk[:, None], weights, 0.0)
    fine = _uniform_53(word2, word3) * 1.1102230246251565e-16
    target = _clamp_unit(target + fine * (total / tl.sum(picked, axis=1)))

    group = at_chunk[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    weights = tl.load(group_sum_ptr + row * group_stride + group).to(tl.float64)
    at_group, target = _pick(weights, target, GROUPS)

    ids = (at_chunk * GROUPS + at_group)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(
        logits_ptr + tl.load(distance_ptr) * UNIT + row * row_stride + ids,
        mask=ids < vocab_size,
        other=-float("inf"),
    ).to(tl.float32)
    weights = tl.exp((value - tl.max(value, axis=1)[:, None]).to(tl.float64))
    at_id, _ = _pick(weights, _clamp_unit(target), GROUP)
    chosen = tl.arange(0, GROUP)[None, :] == at_id[:, None]
    value = tl.sum(tl.where(chosen, value, 0.0), axis=1)
    token = (at_chunk * GROUPS + at_group) * GROUP + at_id
    entry = pack_entry(log_probability(value, row_max, row_log_sum), token)
    tl.store(out_ptr, entry, mask=live)


@triton.jit
def _clamp_unit(x):
    """Bring what rounding put outside [0, 1] back."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)
