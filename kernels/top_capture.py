"""Head and tail of an untruncated row: the most probable ids and the mass of the others.

The tail is summed on its own, never as one minus the head: in float32 that difference loses a tail
of 1e-6 altogether, and the trainer divides by it.

The first pass leaves the maximum and the sum of every group of 32 ids. The `top` groups with the
largest maxima hold the head: an id outside them is beaten by the maxima of `top` groups. So one
program per row selects groups, reads those alone, selects ids, and adds up the sums of all other
groups. Of equal maxima the groups of the lowest ids are taken, which keeps the rule for equal ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels import launch
from rollout.kernels.step_output import StepOutput
from rollout.kernels.tile_ops import (
    KIND_TOP,
    head_bound,
    log_probability,
    order_key,
    pack_entry,
    row_end,
)


def top_reference(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the head of one row and sum its tail, in plain torch.

    tail = exp(logsumexp(tail logits) - logsumexp(all logits)); exactly 0 when no kept id is left
    out.

    Args:
        logits: [V] any float dtype, without NaN and +inf, not all -inf.
        top: ids in the head.

    Returns:
        ids [min(top, kept)] int64, the most probable ids (of equal ones the lowest), ascending;
        tail mass [], float32.
    """
    values = logits.float()
    num_head = min(top, int((values > -torch.inf).sum()))
    head = torch.argsort(values, descending=True, stable=True)[:num_head].sort().values
    rest = values.double()
    total = torch.logsumexp(rest, dim=0)
    rest = rest.clone()
    rest[head] = -torch.inf
    return head, torch.exp(torch.logsumexp(rest, dim=0) - total).float()


def launch_top(
    logits: torch.Tensor,  # [N, V]
    kinds: torch.Tensor,  # [N]
    out: StepOutput,
    top: int,
    distance: torch.Tensor | None,  # [1]
) -> None:
    """Write the entries and the tail mass of TOP rows, after the row statistics.

    Args:
        logits: [N, V] float32, bfloat16 or float16.
        kinds: [N] int8.
        out: the buffers of the step.
        top: ids in the head, at least 1.
        distance: [1] int64 or None, see `capture_step`.
    """
    rows, vocab_size = kinds.shape[0], logits.shape[1]
    scratch = out.scratch
    unit = launch.row_unit(logits)
    start, distance = scratch.start(logits, distance)
    _top_kernel[(rows,)](
        start,
        distance,
        kinds,
        scratch.chunk_max,
        scratch.group_max,
        scratch.group_sum,
        scratch.row_max,
        scratch.row_log_sum,
        scratch.head_groups,
        out.counts,
        out.entries,
        out.tail_mass,
        logits.stride(0) // unit,
        vocab_size // unit,
        launch.ceil_div(vocab_size, launch.CHUNK),
        out.entries.shape[0],
        scratch.chunk_max.stride(0),
        scratch.head_groups.stride(0),
        top,
        UNIT=unit,
        BLOCK_N=launch.next_power_of_2(out.counts.shape[0]),
        BLOCK_G=launch.next_power_of_2(scratch.group_max.shape[1]),
        BLOCK_T=launch.next_power_of_2(top),
        WORDS=launch.CHUNK // launch.GROUP,
        GROUP=launch.GROUP,
        num_warps=launch.HEAD_WARPS,
        maxnreg=launch.HEAD_REGISTERS,
    )


@triton.jit(
    do_not_specialize=[
        "distance_ptr",
        "kinds_ptr",
        "row_units",
        "vocab_units",
        "num_chunks",
        "capacity",
        "chunk_stride",
        "head_stride",
        "top",
    ],
)
def _top_kernel(
    logits_ptr,
    distance_ptr,
    kinds_ptr,
    chunk_max_ptr,
    group_max_ptr,
    group_sum_ptr,
    row_max_ptr,
    row_log_sum_ptr,
    head_groups_ptr,
    counts_ptr,
    entries_ptr,
    tail_mass_ptr,
    row_units,
    vocab_units,
    num_chunks,
    capacity,
    chunk_stride,
    head_stride,
    top,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds_ptr + row)
    count = tl.load(counts_ptr + row)
    if (kind != KIND_TOP) | (count == 0):
        return
    end = row_end(counts_ptr, row, BLOCK_N)
    row_max = tl.load(row_max_ptr + row)
    row_log_sum = tl.load(row_log_sum_ptr + row)

    lowest = order_key(tl.full([], -float("inf"), tl.float32)) + 1

    # the groups that hold the head, in rows of SIDE  [BLOCK_G // SIDE, SIDE]
    SIDE: tl.constexpr = 32
    CHUNK_SIDES: tl.constexpr = WORDS // SIDE
    side = tl.arange(0, BLOCK_G // SIDE)
    group = side[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    side_chunk = side // CHUNK_SIDES
    present = (side_chunk < num_chunks)[:, None]
    at = row * chunk_stride * WORDS + group
    key = order_key(tl.load(group_max_ptr + at, mask=present, other=-float("inf")))
    num_groups = tl.minimum(tl.sum((key >= lowest).to(tl.int32)), top)
    bound = head_bound(key, num_groups, lowest, row_max)
    chosen, place = _choose(key, bound, num_groups)
    tl.store(head_groups_ptr + row * head_stride + place, group, mask=chosen)
    # the mass of all others; their chunk's maximum is the scale of their sum
    group_sum = tl.load(group_sum_ptr + at, mask=present, other=0.0)
    side_sum = tl.sum(tl.where(chosen, 0.0, group_sum), axis=1)
    chunk_max = tl.load(
        chunk_max_ptr + row * chunk_stride + side_chunk,
        mask=side_chunk < num_chunks,
        other=-float("inf"),
    )
    tail = tl.sum(side_sum * tl.exp(chunk_max - row_max), axis=0)
    # the list of groups was stored by other threads than those that read it
    tl.debug_barrier()

    # the head among the ids of those groups, in ascending order of the ids  [BLOCK_T, GROUP]
    listed = tl.arange(0, BLOCK_T)
    head_group = tl.load(
        head_groups_ptr + row * head_stride + listed, mask=listed < num_groups, other=0
    )
    ids = head_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(
        logits_ptr + (tl.load(distance_ptr) + row * row_units) * UNIT + ids,
        mask=(listed < num_groups)[:, None] & (ids < vocab_units * UNIT),
        other=-float("inf"),
    ).to(tl.float32)
    key = order_key(value)
    # with as many groups as ids wanted, their maxima alone reach the bound
    low = tl.where(num_groups == count, bound, lowest)
    chosen, place = _choose(key, head_bound(key, count, low, row_max), count)
    tail += tl.sum(tl.where(chosen, 0.0, tl.exp(value - row_max)))
    logprob = log_probability(value, row_max, row_log_sum)
    entry = pack_entry(logprob, ids)
    tl.store(entries_ptr + (end - count) + place, entry, mask=chosen & (end <= capacity))
    tl.store(tail_mass_ptr + row, tail * tl.exp(-row_log_sum))


@triton.jit
def _choose(key, bound, n):
    """Choose n keys of a 2-D tile: those above the bound and, row after row, the first equal to it.

    Returns the choice and the place of each chosen key among them, in the order of the tile.
    """
    above = key > bound
    equal = key == bound
    # both are counted in one scan, in half an integer each; over rows and then over their totals,
    # which costs far less than a scan over all elements
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    totals = tl.sum(both, axis=1)
    upto = tl.cumsum(totals, axis=0) - totals
    upto = tl.cumsum(both, axis=1) + upto[:, None]
    spare = n - (tl.sum(totals, axis=0) & 0xFFFF)
    upto_equal = (upto >> 16) & 0xFFFF
    chosen = above | (equal & (upto_equal <= spare))
    return chosen, (upto & 0xFFFF) + tl.minimum(upto_equal, spare) - 1
