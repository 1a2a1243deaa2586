"""The sampled token, drawn by the capture while it reads the logits.

An engine that samples by the Gumbel maximum adds noise to every logit of the vocabulary and takes
the largest sum: a pass as long as the capture's own. Where the noise of an id depends on the
request, the position and the id alone, the capture finds the very same token on its way. Of a
truncated row only the kept ids can win: their noise is added when their entries are packed. Of an
untruncated one it is added in the one read of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels import launch
from rollout.kernels.step_output import StepOutput
from rollout.kernels.support_cut import SupportCut
from rollout.kernels.tile_ops import KIND_KEPT, log_probability, order_key

NO_SCORE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""Below every `score_key`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDraw:
    """How the tokens of a step are drawn; M rows."""

    add_noise: Any
    """A Triton function of (logits float32, ids int32 of the same shape, seed, position), of which
    the last two are int64 scalars: returns the logits with the noise of their ids added."""
    seeds: torch.Tensor
    """[M] int64, of each row's request, as the engine's sampler has them."""
    lead: torch.Tensor
    """[M] int64, what the sampler's position of a row is ahead of its output position."""
    untruncated: bool = True
    """Whether there may be rows of other kinds than KEPT and SKIP; the noise of all ids takes three
    times as long as to read them."""
    cut: SupportCut | None = None
    """How KEPT rows are truncated first; null if their logits are masked already."""


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
    """Write the tokens of KEPT rows, which the second pass found, and their logprobs.

    Args:
        logits: [N, V] float32, bfloat16 or float16.
        sampled_ids: [M] int64, becomes the token of each KEPT row that has one.
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
def score_key(score, token):
    """Return int64 that orders as (score, lower id first) does."""
    return (order_key(score).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def key_token(key):
    """Return the id of a `score_key`, int64."""
    return 0x7FFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def best_of_block(add_noise: tl.constexpr, value, ids, live, seed, position):
    """Return the highest `score_key` of a block of kept ids."""
    keys = score_key(add_noise(value, ids, seed, position), ids)
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
    token = tl.where(found, key_token(best), 0)
    # other rows than KEPT ones have their token from the first pass, and broken ones have 0
    tl.store(sampled_ids_ptr + row, token, mask=found)
    row_ptr = logits_ptr + tl.load(distance_ptr) * UNIT + row * row_stride
    value = tl.load(row_ptr + token, mask=found, other=0.0).to(tl.float32)
    row_max = tl.load(row_max_ptr + row, mask=found, other=0.0)
    row_log_sum = tl.load(row_log_sum_ptr + row, mask=found, other=0.0)
    logprob = log_probability(value, row_max, row_log_sum)
    tl.store(sampled_logprobs_ptr + row, logprob, mask=found)
