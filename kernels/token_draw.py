"""The sampled token, drawn by the capture from the ids that are kept.

An engine that samples by the Gumbel maximum adds noise to every logit of the vocabulary, also to
those that are masked, and takes the largest sum: a pass as long as the capture's own. Where the
noise of an id depends on the request, the position and the id alone, the largest sum over the kept
ids is at the very same token, and those are in registers when their entries are packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels import launch
from rollout.kernels.step_output import StepOutput
from rollout.kernels.tile_ops import KIND_KEPT, log_probability, order_key

NO_SCORE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""Below what `best_of_block` returns of kept ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDraw:
    """How the tokens of a step are drawn; M rows."""

    add_noise: Any
    """A Triton function of (logits [B] float32, ids [B] int32, seed, position), of which the last
    two are int64 scalars: returns [B] float32, to each logit the noise of its id added."""
    seeds: torch.Tensor
    """[M] int64, of each row's request, as the engine's sampler has them."""
    positions: torch.Tensor
    """[M] int64, of each row's noise, as the engine's sampler has them."""


def tokens_reference(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Draw the tokens of some rows in plain torch.

    Args:
        logits: [N, V] any float dtype, no row all -inf.
        noise: [N, V] float32, the noise of each id.

    Returns:
        [N] int64, the id with the largest sum in float32, of equal ones the lowest.
    """
    total = logits.float() + noise
    best = total == total.max(dim=1, keepdim=True).values
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(best, ids, logits.shape[1]).min(dim=1).values


def launch_take_tokens(
    logits: torch.Tensor,  # [N, V]
    sampled_ids: torch.Tensor,  # [M]
    kinds: torch.Tensor,  # [M]
    out: StepOutput,
    distance: torch.Tensor | None,  # [1]
) -> None:
    """Write the tokens that the second pass found, and their logprobs.

    Args:
        logits: [N, V] float32, bfloat16 or float16.
        sampled_ids: [M] int64, becomes the token of each KEPT row that has one, else 0.
        kinds: [M] int8.
        out: the buffers of the step, after the second pass.
        distance: [1] int64 or None, see `capture_step`.
    """
    rows = kinds.shape[0]
    scratch = out.scratch
    start, distance = scratch.start(logits, distance)
    _take_tokens_kernel[(launch.ceil_div(rows, launch.TAKE_BLOCK),)](
        start,
        distance,
        kinds,
        scratch.best_score,
        scratch.row_max,
        scratch.row_log_sum,
        out.counts,
        sampled_ids,
        out.sampled_logprobs,
        logits.stride(0),
        rows,
        UNIT=launch.row_unit(logits),
        BLOCK=launch.TAKE_BLOCK,
        num_warps=launch.TAKE_WARPS,
    )


@triton.jit
def best_of_block(add_noise: tl.constexpr, value, ids, live, seed, position):
    """Return of a block of kept ids int64 that orders as (largest sum, lower id first) does."""
    sums = order_key(add_noise(value, ids, seed, position))
    keys = (sums.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    return tl.max(tl.where(live, keys, NO_SCORE), axis=0)


@triton.jit(
    do_not_specialize=["distance_ptr", "kinds_ptr", "sampled_ids_ptr", "row_stride", "num_rows"],
    do_not_specialize_on_alignment=["logits_ptr"],
)
def _take_tokens_kernel(
    logits_ptr,
    distance_ptr,
    kinds_ptr,
    best_score_ptr,
    row_max_ptr,
    row_log_sum_ptr,
    counts_ptr,
    sampled_ids_ptr,
    sampled_logprobs_ptr,
    row_stride,
    num_rows,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    present = row < num_rows
    kind = tl.load(kinds_ptr + row, mask=present, other=0)
    # broken rows have no entries
    found = (kind == KIND_KEPT) & (tl.load(counts_ptr + row, mask=present, other=0) > 0)
    best = tl.load(best_score_ptr + row, mask=found, other=0)
    token = tl.where(found, 0x7FFFFFFF - (best & 0xFFFFFFFF), 0)
    tl.store(sampled_ids_ptr + row, token, mask=present)
    row_ptr = logits_ptr + tl.load(distance_ptr) * UNIT + row * row_stride
    value = tl.load(row_ptr + token, mask=found, other=0.0).to(tl.float32)
    row_max = tl.load(row_max_ptr + row, mask=found, other=0.0)
    row_log_sum = tl.load(row_log_sum_ptr + row, mask=found, other=0.0)
    logprob = log_probability(value, row_max, row_log_sum)
    tl.store(sampled_logprobs_ptr + row, logprob, mask=found)
