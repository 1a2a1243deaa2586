"""Kernels over one block of dense logits, [R rows, C consecutive ids], for the chunked heads."""

from __future__ import annotations

import triton
import triton.language as tl

# R rows, E entries of all rows, C ids of the block


@triton.jit
def _merge(peak, total, other_peak, other_total):
    higher = tl.maximum(peak, other_peak)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * tl.exp(peak - shift) + other_total * tl.exp(other_peak - shift)


@triton.jit
def _block_stats(base_ptr, scale, num_ids, BLOCK: tl.constexpr):
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, num_ids, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        z = tl.load(base_ptr + column, mask=column < num_ids, other=float("-inf")) * scale
        higher = tl.where(z > top, z, top)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.exp(z - shift)
        top = higher
    peak = tl.max(top)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, tl.sum(total * tl.exp(top - shift))


@triton.jit
def dense_stats_kernel(
    logits_ptr,
    ids_ptr,
    offsets_ptr,
    targets_ptr,
    scale_ptr,
    stats_ptr,
    target_logits_ptr,
    entry_logits_ptr,
    first_id,
    num_ids,
    num_rows,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Fold a block of logits into each row's running log-sum-exps, and pick its entries.

    Args:
        logits_ptr: [R, C] fp32 dot products; the entries' places are overwritten with -inf.
        ids_ptr: [E] int32 or int64.
        offsets_ptr: [R + 1] int64.
        targets_ptr: [R] int64.
        scale_ptr: [R] fp32 inverse temperatures.
        stats_ptr: [4, R] fp32, peak and sum over all ids, peak and sum over those without entry.
        target_logits_ptr: [R] fp32, written where the block holds the target.
        entry_logits_ptr: [E] fp32, written where the block holds the entry.
        first_id: of the block.
        num_ids: C.
        num_rows: R.
        BLOCK: ids of one step.
        BLOCK_E: entries of one step.
    """
    row = tl.program_id(0).to(tl.int64)
    base_ptr = logits_ptr + row * num_ids
    scale = tl.load(scale_ptr + row)
    target = tl.load(targets_ptr + row) - first_id
    if (target >= 0) & (target < num_ids):
        tl.store(target_logits_ptr + row, tl.load(base_ptr + target) * scale)
    peak, total = _block_stats(base_ptr, scale, num_ids, BLOCK=BLOCK)
    start = tl.load(offsets_ptr + row)
    end = tl.load(offsets_ptr + row + 1)
    found = row * 0
    # a place that two entries share is read by both before either overwrites it
    for begin in range(start, end, BLOCK_E):
        entry = begin + tl.arange(0, BLOCK_E).to(tl.int64)
        place = tl.load(ids_ptr + entry, mask=entry < end, other=-1).to(tl.int64) - first_id
        here = (entry < end) & (place >= 0) & (place < num_ids)
        z = tl.load(base_ptr + place, mask=here, other=0.0)
        tl.store(entry_logits_ptr + entry, z * scale, mask=here)
        found += tl.sum(here.to(tl.int64))
    tail_peak, tail_total = peak, total
    if found > 0:
        tl.debug_barrier()
        for begin in range(start, end, BLOCK_E):
            entry = begin + tl.arange(0, BLOCK_E).to(tl.int64)
            place = tl.load(ids_ptr + entry, mask=entry < end, other=-1).to(tl.int64) - first_id
            here = (entry < end) & (place >= 0) & (place < num_ids)
            tl.store(base_ptr + place, float("-inf"), mask=here)
        tl.debug_barrier()
        # summed anew without the entries: a difference of sums would lose a small tail
        tail_peak, tail_total = _block_stats(base_ptr, scale, num_ids, BLOCK=BLOCK)
    stat_ptr = stats_ptr + row
    peak, total = _merge(peak, total, tl.load(stat_ptr), tl.load(stat_ptr + num_rows))
    tl.store(stat_ptr, peak)
    tl.store(stat_ptr + num_rows, total)
    stat_ptr += 2 * num_rows
    peak, total = _merge(tail_peak, tail_total, tl.load(stat_ptr), tl.load(stat_ptr + num_rows))
    tl.store(stat_ptr, peak)
    tl.store(stat_ptr + num_rows, total)


@triton.jit
def dense_grads_kernel(
    logits_ptr,
    ids_ptr,
    offsets_ptr,
    targets_ptr,
    scale_ptr,
    logz_ptr,
    tail_logsumexp_ptr,
    entry_logprobs_ptr,
    grad_mass_ptr,
    grad_targets_ptr,
    grad_entries_ptr,
    grad_tail_ptr,
    grads_ptr,
    first_id,
    num_ids,
    HAS_TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Turn a block of logits into the gradient of its dot products.

    Args:
        logits_ptr: [R, C] fp32 dot products, overwritten.
        ids_ptr: [E] int32 or int64.
        offsets_ptr: [R + 1] int64.
        targets_ptr: [R] int64.
        scale_ptr: [R] fp32 inverse temperatures.
        logz_ptr: [R] fp32 log-sum-exp over the vocabulary.
        tail_logsumexp_ptr: [R] fp32 log-sum-exp over the ids without entry.
        entry_logprobs_ptr: [E] fp32.
        grad_mass_ptr: [R] fp32, sum of the row's gradients.
        grad_targets_ptr: [R] fp32.
        grad_entries_ptr: [E] fp32.
        grad_tail_ptr: [R] fp32, of the tail's log-mass; unused without HAS_TAIL.
        grads_ptr: [R, C] in the weight's dtype, written.
        first_id: of the block.
        num_ids: C.
        HAS_TAIL: whether the tail's log-mass has a gradient.
        BLOCK: ids of one step.
        BLOCK_E: entries of one step.
    """
    row = tl.program_id(0).to(tl.int64)
    base_ptr = logits_ptr + row * num_ids
    scale = tl.load(scale_ptr + row)
    logz = tl.load(logz_ptr + row)
    mass = tl.load(grad_mass_ptr + row)
    if HAS_TAIL:
        grad_tail = tl.load(grad_tail_ptr + row)
        tail_logsumexp = tl.load(tail_logsumexp_ptr + row)
    for begin in range(0, num_ids, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        z = tl.load(base_ptr + column, mask=column < num_ids, other=0.0) * scale
        grad = -mass * tl.exp(z - logz)
        if HAS_TAIL:
            # at most 0 for ids of the tail; the others are overwritten below
            grad += grad_tail * tl.exp(tl.minimum(z - tail_logsumexp, 0.0))
        tl.store(base_ptr + column, grad * scale, mask=column < num_ids)
    start = tl.load(offsets_ptr + row)
    end = tl.load(offsets_ptr + row + 1)
    tl.debug_barrier()
    if HAS_TAIL:
        for begin in range(start, end, BLOCK_E):
            entry = begin + tl.arange(0, BLOCK_E).to(tl.int64)
            place = tl.load(ids_ptr + entry, mask=entry < end, other=-1).to(tl.int64) - first_id
            here = (entry < end) & (place >= 0) & (place < num_ids)
            logprob = tl.load(entry_logprobs_ptr + entry, mask=here, other=0.0)
            tl.store(base_ptr + place, -mass * tl.exp(logprob) * scale, mask=here)
        tl.debug_barrier()
    # entries may share an id, with each other or with the target
    for begin in range(start, end, BLOCK_E):
        entry = begin + tl.arange(0, BLOCK_E).to(tl.int64)
        place = tl.load(ids_ptr + entry, mask=entry < end, other=-1).to(tl.int64) - first_id
        here = (entry < end) & (place >= 0) & (place < num_ids)
        grad = tl.load(grad_entries_ptr + entry, mask=here, other=0.0)
        tl.atomic_add(base_ptr + place, grad * scale, mask=here)
    target = tl.load(targets_ptr + row) - first_id
    if (target >= 0) & (target < num_ids):
        tl.atomic_add(base_ptr + target, tl.load(grad_targets_ptr + row) * scale)
    tl.debug_barrier()
    for begin in range(0, num_ids, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        grad = tl.load(base_ptr + column, mask=column < num_ids, other=0.0)
        tl.store(grads_ptr + row * num_ids + column, grad, mask=column < num_ids)


@triton.jit
def pick_entries_kernel(
    logits_ptr,
    rows_ptr,
    ids_ptr,
    offsets_ptr,
    scale_ptr,
    entry_logits_ptr,
    first_id,
    num_ids,
    BLOCK: tl.constexpr,
):
    """Read the logits of the entries that a block holds, in some rows of a batch.

    Args:
        logits_ptr: [R, C] fp32 dot products.
        rows_ptr: [R] int64, the rows; what follows is of the whole batch.
        ids_ptr: [E] int32 or int64.
        offsets_ptr: [R + 1] int64.
        scale_ptr: [R] fp32 inverse temperatures.
        entry_logits_ptr: [E] fp32, written where the block holds the entry.
        first_id: of the block.
        num_ids: C.
        BLOCK: entries of one step.
    """
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    scale = tl.load(scale_ptr + row)
    start = tl.load(offsets_ptr + row) + tl.program_id(1) * BLOCK
    end = tl.load(offsets_ptr + row + 1)
    for begin in range(start, end, tl.num_programs(1) * BLOCK):
        entry = begin + tl.arange(0, BLOCK).to(tl.int64)
        place = tl.load(ids_ptr + entry, mask=entry < end, other=-1).to(tl.int64) - first_id
        here = (entry < end) & (place >= 0) & (place < num_ids)
        z = tl.load(logits_ptr + slot * num_ids + place, mask=here, other=0.0)
        tl.store(entry_logits_ptr + entry, z * scale, mask=here)


@triton.jit
def scatter_entries_kernel(
    coefficients_ptr,
    rows_ptr,
    ids_ptr,
    offsets_ptr,
    grads_ptr,
    first_id,
    num_ids,
    BLOCK: tl.constexpr,
):
    """Add the gradients of the entries that a block holds to it, in some rows of a batch.

    Args:
        coefficients_ptr: [E] fp32 gradients of the dot products.
        rows_ptr: [R] int64, the rows; the other inputs are of the whole batch.
        ids_ptr: [E] int32 or int64.
        offsets_ptr: [R + 1] int64.
        grads_ptr: [R, C] fp32, zeros before.
        first_id: of the block.
        num_ids: C.
        BLOCK: entries of one step.
    """
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    start = tl.load(offsets_ptr + row) + tl.program_id(1) * BLOCK
    end = tl.load(offsets_ptr + row + 1)
    for begin in range(start, end, tl.num_programs(1) * BLOCK):
        entry = begin + tl.arange(0, BLOCK).to(tl.int64)
        place = tl.load(ids_ptr + entry, mask=entry < end, other=-1).to(tl.int64) - first_id
        here = (entry < end) & (place >= 0) & (place < num_ids)
        grad = tl.load(coefficients_ptr + entry, mask=here, other=0.0)
        tl.atomic_add(grads_ptr + slot * num_ids + place, grad, mask=here)
