"""The scores that a token is drawn by, logit + noise of every id, and the token that they give."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def add_gumbel(value, ids, seed, position):  # type: ignore[no-untyped-def]
    """Add Gumbel noise of 24 bits, by a hash of seed, position and id as an engine's sampler."""
    word = ids.to(tl.uint32) * 0x9E3779B1 + position.to(tl.uint32) * 0x85EBCA77
    word = (word ^ seed.to(tl.uint32) ^ (seed >> 32).to(tl.uint32)) * 0xC2B2AE3D
    word = (word ^ (word >> 15)) * 0x27D4EB2F
    word = word ^ (word >> 13)
    uniform = ((word >> 8).to(tl.int32).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    return value - tl.log(-tl.log(uniform))


def noisy_logits(
    values: torch.Tensor,  # [N, V]
    add_noise: Any,
    seeds: torch.Tensor,  # [N]
    positions: torch.Tensor,  # [N]
) -> torch.Tensor:
    """Add the noise of every id, each by itself.

    Args:
        values: [N, V] float32, contiguous; the logits.
        add_noise: see `rollout.kernels.token_draw.TokenDraw`.
        seeds: [N] int64, contiguous.
        positions: [N] int64, contiguous; of the noise.

    Returns:
        [N, V] float32.
    """
    rows, vocab_size = values.shape
    scores = torch.empty_like(values)
    _score_kernel[(rows, triton.cdiv(vocab_size, BLOCK))](
        values, seeds, positions, scores, vocab_size, ADD_NOISE=add_noise, BLOCK=BLOCK
    )
    return scores


def best_ids(scores: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Choose of each row the kept id of the largest score, of equal ones the lowest.

    Args:
        scores: [N, V] float32.
        kept: [N, V] bool, at least one of each row.

    Returns:
        [N] int64.
    """
    largest = scores.masked_fill(~kept, -torch.inf).max(dim=1, keepdim=True).values
    ids = torch.arange(scores.shape[1], device=scores.device)
    return torch.where(kept & (scores == largest), ids, scores.shape[1]).min(dim=1).values


@triton.jit  # type: ignore[untyped-decorator]
def _score_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    seeds_ptr,
    positions_ptr,
    scores_ptr,
    vocab_size,
    ADD_NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = ids < vocab_size
    value = tl.load(values_ptr + row * vocab_size + ids, mask=live, other=0.0)
    scores = ADD_NOISE(value, ids, tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    tl.store(scores_ptr + row * vocab_size + ids, scores, mask=live)
