"""Top-k and top-p, decided by the capture: which ids of a row the token may be drawn from.

The ids of a row are in order of their logits, of equal ones the lowest id first. top_k keeps the
first k of them; top_p then keeps the shortest prefix whose probability, among what top_k kept,
reaches p. What is kept is therefore a prefix, and a row's cut is its last id.

Most rows keep few ids, and one read of the logits leaves a list of candidates (`cut_head`); wide
rows take two more (`cut_wide`). Among the candidates the cut is found here, by bisection. Sums
decide to about 1e-6 of the mass; nothing goes by the order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout.kernels import launch
from rollout.kernels.cut_head import launch_cut_head
from rollout.kernels.cut_order import ID_BITS, LISTED, NO_LIMIT, UNCUT, cut_key, key_logit
from rollout.kernels.cut_wide import launch_cut_wide
from rollout.kernels.launch import CaptureScratch
from rollout.kernels.tile_ops import exp_nonpositive, order_key

# N rows of logits, M >= N rows of the step, V vocabulary

_FIXED = tl.constexpr(1099511627776.0)  # 2**40, of a weight of 1: sums of integers have no order


@dataclass(frozen=True, kw_only=True, slots=True)
class SupportCut:
    """How the rows of a step are truncated; M rows."""

    top_k: torch.Tensor
    """[M] int32, ids kept at most; 0 or at least V keeps all."""
    top_p: torch.Tensor
    """[M] float32 in (0, 1], the probability to reach; 1 keeps all."""


def cut_reference(logits: torch.Tensor, cut: SupportCut) -> torch.Tensor:
    """Mask what is cut off, in plain torch and float64.

    Args:
        logits: [N, V] any float dtype, no NaN or +inf; some may be -inf.
        cut: of at least N rows.

    Returns:
        [N, V] float32, -inf where an id is not kept.
    """
    values = logits.float()
    order = torch.sort(values, dim=1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    top_k = cut.top_k[: values.shape[0], None].long()
    top_p = cut.top_p[: values.shape[0], None].double()
    kept = (rank < top_k) | (top_k <= 0)
    weights = torch.where(kept, (order.values - order.values[:, :1]).double().exp(), 0.0)
    before = weights.cumsum(dim=1) - weights  # of the ids ahead of each
    kept &= (before < top_p * weights.sum(dim=1, keepdim=True)) | (top_p >= 1.0)
    sorted_values = torch.where(kept, order.values, -torch.inf)
    return torch.full_like(values, -torch.inf).scatter(1, order.indices, sorted_values)


def launch_support_cut(
    logits: torch.Tensor,  # [N, V]
    kinds: torch.Tensor,  # [M]
    cut: SupportCut,
    scratch: CaptureScratch,
    distance: torch.Tensor | None,  # [1]
) -> None:
    """Find the cut of each KEPT row and leave it in the scratch; other rows are not cut.

    Of rows whose kept ids are all listed, that is the bound of the list and their statistics;
    otherwise the logit and the id to which the pass over the logits keeps ids.

    Args:
        logits: [N, V] float32, bfloat16 or float16, not truncated.
        kinds: [M] int8.
        cut: how the rows are truncated.
        scratch: the step's working memory.
        distance: [1] int64 or None, see `capture_step`.
    """
    launch_cut_head(logits, kinds, cut.top_k, cut.top_p, scratch, distance)
    launch_cut_wide(logits, kinds, cut.top_k, cut.top_p, scratch, distance)
    unit = launch.row_unit(logits)
    start, distance = scratch.start(logits, distance)
    _search_kernel[(kinds.shape[0],)](
        start,
        distance,
        cut.top_k,
        cut.top_p,
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
        BLOCK=launch.CUT_SEARCH_BLOCK,
        LIST=launch.CUT_LIST,
        num_warps=launch.CUT_SEARCH_WARPS,
    )


@triton.jit
def _tally(row_ptr, keys_ptr, whole, number, largest, bound, BLOCK: tl.constexpr):
    """Return the count and the fixed-point mass of the candidates that reach a key."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for first in range(0, number, BLOCK):
        at = first + tl.arange(0, BLOCK)
        live = at < number
        if whole:
            value = tl.load(row_ptr + at, mask=live, other=-float("inf")).to(tl.float32)
            key = cut_key(value, at)
        else:
            key = tl.load(keys_ptr + at, mask=live, other=0)
            value, _ids = key_logit(key)
        reached = live & (key >= bound)
        weight = exp_nonpositive(tl.where(reached, value - largest, 0.0)) * _FIXED
        count += reached.to(tl.int32)
        mass += tl.where(reached, weight.to(tl.int64), 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _bisect(
    row_ptr,
    keys_ptr,
    whole,
    number,
    largest,
    bottom,
    above,
    need,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the highest key that candidates of the count or mass needed reach.

    Args:
        row_ptr: the row's logits.
        keys_ptr: its list of candidates.
        whole: whether all ids are candidates, and not those of the list.
        number: how many there are.
        largest: the row's maximum.
        bottom: a key that enough reach.
        above: a higher one, that not enough reach.
        need: int64, how much is enough.
        BY_MASS: whether it is a mass and not a count.
        BLOCK: candidates at a time.
    """
    # the ids that reach bottom and not above are at most these
    between = number + 1
    upto = tl.full((), 0, tl.int32)
    while (above - bottom > 1) & (between > 1):
        middle = bottom + (above - bottom) // 2
        count, mass = _tally(row_ptr, keys_ptr, whole, number, largest, middle, BLOCK)
        reached = mass if BY_MASS else count.to(tl.int64)
        if reached >= need:
            bottom = middle
            between = count - upto
        else:
            above = middle
            between -= count - upto
            upto = count
    return bottom


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
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(state_ptr + row) == UNCUT:
        tl.store(cut_value_ptr + row, -float("inf"))
        tl.store(cut_id_ptr + row, NO_LIMIT)
        return
    vocab_size = vocab_units * UNIT
    low = tl.load(bracket_ptr + row * 3)
    high = tl.load(bracket_ptr + row * 3 + 1)
    largest = tl.load(bracket_ptr + row * 3 + 2)
    total = tl.load(bracket_mass_ptr + row * 2)
    number = tl.load(bracket_count_ptr + row * 2)
    # of many equal logits, for one, the list does not hold all
    whole = number > LIST
    number = tl.where(whole, vocab_size, number)
    mass_above = tl.where(whole, 0.0, tl.load(bracket_mass_ptr + row * 2 + 1))
    count_above = tl.where(whole, 0, tl.load(bracket_count_ptr + row * 2 + 1))
    row_ptr = logits_ptr + (tl.load(distance_ptr) + row * row_units) * UNIT
    keys_ptr += row * LIST
    bottom = order_key(low).to(tl.int64) << ID_BITS
    above = order_key(high).to(tl.int64) << ID_BITS
    top_k = tl.load(top_k_ptr + row)
    if (top_k > 0) & (top_k < vocab_size):
        need = (top_k - count_above).to(tl.int64)
        bottom = _bisect(
            row_ptr, keys_ptr, whole, number, largest, bottom, above, need, False, BLOCK
        )
        _count, mass = _tally(row_ptr, keys_ptr, whole, number, largest, bottom, BLOCK)
        total = mass_above + mass.to(tl.float64) / _FIXED
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1.0:
        need = ((top_p.to(tl.float64) * total - mass_above) * _FIXED).to(tl.int64)
        bottom = _bisect(
            row_ptr,
            keys_ptr,
            whole,
            number,
            largest,
            bottom,
            above,
            tl.maximum(need, 1),
            True,
            BLOCK,
        )
    count, mass = _tally(row_ptr, keys_ptr, whole, number, largest, bottom, BLOCK)
    if tl.load(state_ptr + row) == LISTED:
        # all that is kept is in the list: what the pass over the logits would find
        chunk = tl.arange(0, BLOCK_C)
        first = (chunk == 0) & (chunk < num_chunks)
        at = row * chunk_stride + chunk
        sums = (mass.to(tl.float64) / _FIXED).to(tl.float32)
        tl.store(chunk_max_ptr + at, tl.where(first, largest, -float("inf")), chunk < num_chunks)
        tl.store(chunk_sum_ptr + at, tl.where(first, sums, 0.0), chunk < num_chunks)
        tl.store(chunk_count_ptr + at, tl.where(first, count, 0), chunk < num_chunks)
        tl.store(cut_bound_ptr + row, bottom)
        return
    least, last = key_logit(bottom)
    tl.store(cut_value_ptr + row, least)
    tl.store(cut_id_ptr + row, last)
