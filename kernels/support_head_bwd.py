"""Backward of the sparse head: the gradient of every logit, and entries in another order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels.head_config import ENTRY_BLOCK, row_blocks

# N rows, E entries of all rows, S segments


@triton.jit
def _logit_grads_kernel(
    logprobs_ptr,
    grad_entries_ptr,
    grad_targets_ptr,
    offsets_ptr,
    positions_ptr,
    scale_ptr,
    coefficients_ptr,
    HAS_ENTRIES: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets_ptr + row)
    end = tl.load(offsets_ptr + row + 1)
    if end - start < 2:
        if end > start:
            tl.store(coefficients_ptr + start, 0.0)
    else:
        position = tl.load(positions_ptr + row)
        scale = tl.load(scale_ptr + row)
        grad_target = scale * 0.0
        if HAS_TARGETS:
            # a missing target has no gradient
            grad_target = tl.load(grad_targets_ptr + row, mask=position < end, other=0.0)
        mass = grad_target
        if HAS_ENTRIES:
            total = tl.zeros((BLOCK,), tl.float32)
            for begin in range(start, end, BLOCK):
                entry = begin + tl.arange(0, BLOCK).to(tl.int64)
                total += tl.load(grad_entries_ptr + entry, mask=entry < end, other=0.0)
            mass += tl.sum(total)
        for begin in range(start, end, BLOCK):
            entry = begin + tl.arange(0, BLOCK).to(tl.int64)
            inside = entry < end
            grad = -tl.exp(tl.load(logprobs_ptr + entry, mask=inside, other=0.0)) * mass
            if HAS_ENTRIES:
                grad += tl.load(grad_entries_ptr + entry, mask=inside, other=0.0)
            grad += tl.where(entry == position, grad_target, 0.0)
            tl.store(coefficients_ptr + entry, grad * scale, mask=inside)


@triton.jit
def _take_kernel(
    order_ptr,
    count_ptr,
    index_ptr,
    coefficients_ptr,
    taken_index_ptr,
    taken_coefficients_ptr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < tl.load(count_ptr)
    entry = tl.load(order_ptr + place, mask=inside, other=0).to(tl.int64)
    index = tl.load(index_ptr + entry, mask=inside, other=0)
    coefficient = tl.load(coefficients_ptr + entry, mask=inside, other=0.0)
    tl.store(taken_index_ptr + place, index, mask=inside)
    tl.store(taken_coefficients_ptr + place, coefficient, mask=inside)


def logit_grads(
    logprobs: torch.Tensor,  # [E]
    grad_entries: torch.Tensor | None,  # [E]
    grad_targets: torch.Tensor | None,  # [N]
    support_offsets: torch.Tensor,  # [N + 1]
    positions: torch.Tensor,  # [N]
    inverse_temperature: torch.Tensor,  # [N]
) -> torch.Tensor:
    """Return the gradient of the loss with respect to every entry's dot product.

    Args:
        logprobs: [E] fp32, the forward's result.
        grad_entries: [E] fp32, or None for zeros.
        grad_targets: [N] fp32, or None for zeros.
        support_offsets: [N + 1] int64.
        positions: [N] int64, each row's target entry; E where there is none.
        inverse_temperature: [N] fp32.

    Returns:
        [E] fp32; exactly 0 in single-entry rows.
    """
    num_rows = positions.shape[0]
    coefficients = torch.empty_like(logprobs)
    _logit_grads_kernel[(num_rows,)](
        logprobs,
        grad_entries,
        grad_targets,
        support_offsets,
        positions,
        inverse_temperature,
        coefficients,
        HAS_ENTRIES=grad_entries is not None,
        HAS_TARGETS=grad_targets is not None,
        **row_blocks(num_rows, logprobs.shape[0]),
    )
    return coefficients


def take(
    order: torch.Tensor,  # [E]
    offsets: torch.Tensor,  # [S + 1]
    index: torch.Tensor,  # [E]
    coefficients: torch.Tensor,  # [E]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two values of each entry in another order.

    Args:
        order: [E] int32 or int64, the entry at each place.
        offsets: [S + 1] int64; the last says how many places count, the rest stays unwritten.
        index: [E] int32.
        coefficients: [E] fp32.

    Returns:
        `index` and `coefficients` at the entries of `order`.
    """
    taken_index, taken_coefficients = torch.empty_like(index), torch.empty_like(coefficients)
    _take_kernel[(triton.cdiv(index.shape[0], ENTRY_BLOCK),)](
        order,
        offsets[-1:],
        index,
        coefficients,
        taken_index,
        taken_coefficients,
        BLOCK=ENTRY_BLOCK,
    )
    return taken_index, taken_coefficients
