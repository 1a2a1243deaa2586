"""The batch's most frequent ids as one dense block beside the sparse rest.

Text puts a few thousand ids into most supports. Gathering their weight rows once per entry moves
the same bytes again and again, while a matrix product over just these ids reads them once and runs
on the tensor cores. The block holds at most H ids, so its [N, block] matrices stay within N * H;
which ids it holds is decided on the device, how many on the host. Entries that a row does not name
are zeros of these products, so a hidden state that is not finite spoils the block's gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout.kernels.head_config import ENTRY_BLOCK
from rollout.kernels.id_order import IdOrder
from rollout.kernels.matmul import matmul_fp32

# N rows, E entries of all rows, V vocabulary, H hidden size, B ids of the block


@triton.jit
def _block_logits_kernel(
    product_ptr,
    keys_ptr,
    rows_ptr,
    slots_ptr,
    scale_ptr,
    logits_ptr,
    cold_ptr,
    num_entries,
    vocab,
    block_size,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_entries
    key = tl.load(keys_ptr + entry, mask=inside, other=vocab)
    row = tl.load(rows_ptr + entry, mask=inside, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + key, mask=key < vocab, other=-1)
    hot = slot >= 0
    product = tl.load(product_ptr + row * block_size + slot, mask=hot, other=0.0)
    scale = tl.load(scale_ptr + row, mask=hot, other=0.0)
    # an entry without a key is in neither part: NaN unless it is alone in its row
    tl.store(logits_ptr + entry, tl.where(hot, product * scale, float("nan")), mask=inside)
    tl.store(cold_ptr + entry, ((key < vocab) & (slot < 0)).to(tl.int32), mask=inside)


@triton.jit
def _compact_kernel(cold_ptr, ranks_ptr, entries_ptr, num_entries, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_entries
    cold = tl.load(cold_ptr + entry, mask=inside, other=0) > 0
    rank = tl.load(ranks_ptr + entry, mask=cold, other=1)
    tl.store(entries_ptr + rank - 1, entry.to(tl.int32), mask=cold)


@triton.jit
def _block_grads_kernel(
    coefficients_ptr,
    keys_ptr,
    rows_ptr,
    slots_ptr,
    grads_ptr,
    count_ptr,
    grads_stride,
    BLOCK: tl.constexpr,
):
    count = tl.load(count_ptr)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    key = tl.load(keys_ptr + place, mask=inside, other=0)
    slot = tl.load(slots_ptr + key, mask=inside, other=-1).to(tl.int64)
    hot = slot >= 0
    row = tl.load(rows_ptr + place, mask=hot, other=-1)
    total = tl.load(coefficients_ptr + place, mask=hot, other=0.0)
    earlier = hot & (place > 0)
    key_before = tl.load(keys_ptr + place - 1, mask=earlier, other=-1)
    row_before = tl.load(rows_ptr + place - 1, mask=earlier, other=-1)
    first = hot & ((key_before != key) | (row_before != row))
    # a row that names an id more than once has those entries in a run, which its first adds up
    step = 1
    more = first
    while tl.max(more.to(tl.int32), 0) > 0:
        more = more & (place + step < count)
        more = more & (tl.load(keys_ptr + place + step, mask=more, other=-1) == key)
        more = more & (tl.load(rows_ptr + place + step, mask=more, other=-1) == row)
        total += tl.load(coefficients_ptr + place + step, mask=more, other=0.0)
        step += 1
    tl.store(grads_ptr + slot * grads_stride + row, total, mask=first)


@dataclass(frozen=True, kw_only=True, slots=True)
class HotIds:
    """Which ids a dense block holds, and the entries of the others."""

    ids: torch.Tensor
    """[B] int64."""
    slots: torch.Tensor
    """[V] int32, the place of an id in the block, or -1."""
    cold_entries: torch.Tensor
    """[E] int32, ascending; the first cold_offsets[N] count."""
    cold_offsets: torch.Tensor
    """[N + 1] int64, row i's cold entries in cold_offsets[i]:cold_offsets[i + 1]."""


def hot_logits(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H]
    keys: torch.Tensor,  # [E]
    rows: torch.Tensor,  # [E]
    support_offsets: torch.Tensor,  # [N + 1]
    inverse_temperature: torch.Tensor,  # [N]
    logits: torch.Tensor,  # [E]
    order: IdOrder,
    block_size: int,
) -> HotIds:
    """Choose the most frequent ids, write their entries' logits, and list the other entries.

    Args:
        hidden: [N, H] bf16 or fp16.
        weight: [V, H], the same.
        keys: [E] int32.
        rows: [E] int32.
        support_offsets: [N + 1] int64.
        inverse_temperature: [N] fp32.
        logits: [E] fp32, written for the block's ids, NaN elsewhere.
        order: of `keys`.
        block_size: B.

    Returns:
        The block and the entries outside of it.
    """
    num_entries, vocab = keys.shape[0], weight.shape[0]
    ids = order.offsets.diff().topk(block_size, sorted=False).indices
    slots = torch.full((vocab,), -1, dtype=torch.int32, device=keys.device)
    slots[ids] = torch.arange(block_size, dtype=torch.int32, device=keys.device)
    product = matmul_fp32(hidden, weight[ids].T)
    cold = torch.empty_like(keys)
    grid = (triton.cdiv(num_entries, ENTRY_BLOCK),)
    _block_logits_kernel[grid](
        product,
        keys,
        rows,
        slots,
        inverse_temperature,
        logits,
        cold,
        num_entries,
        vocab,
        block_size,
        BLOCK=ENTRY_BLOCK,
    )
    ranks = torch.zeros(num_entries + 1, dtype=torch.int32, device=keys.device)
    torch.cumsum(cold, 0, dtype=torch.int32, out=ranks[1:])
    cold_entries = torch.empty_like(keys)
    _compact_kernel[grid](cold, ranks[1:], cold_entries, num_entries, BLOCK=ENTRY_BLOCK)
    return HotIds(
        ids=ids,
        slots=slots,
        cold_entries=cold_entries,
        cold_offsets=ranks[support_offsets].long(),
    )


def hot_grads(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H]
    sorted_coefficients: torch.Tensor,  # [E]
    sorted_rows: torch.Tensor,  # [E]
    order: IdOrder,
    hot: HotIds,
    *,
    needs_hidden: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the block's part of the gradient of the hidden states, and of its weight rows.

    Args:
        hidden: [N, H] bf16 or fp16.
        weight: [V, H], the same.
        sorted_coefficients: [E] fp32, gradients of the dot products, in the order of `order`.
        sorted_rows: [E] int32, likewise.
        order: of the entries.
        hot: from `hot_logits`.
        needs_hidden: whether to compute the first result.

    Returns:
        grad_hidden: [N, H] fp32, or None.
        grad_rows: [B, H] in the weight's dtype, the gradient of weight[hot.ids].
    """
    num_rows, num_entries = hidden.shape[0], sorted_rows.shape[0]
    # rows of 16 bytes' alignment: without it the products fall off the fast path
    grads_stride = -(-num_rows // 8) * 8
    grads = torch.zeros(hot.ids.shape[0], grads_stride, dtype=weight.dtype, device=weight.device)
    _block_grads_kernel[(triton.cdiv(num_entries, ENTRY_BLOCK),)](
        sorted_coefficients,
        order.keys,
        sorted_rows,
        hot.slots,
        grads,
        order.offsets[-1:],
        grads_stride,
        BLOCK=ENTRY_BLOCK,
    )
    grads = grads[:, :num_rows]
    grad_hidden = matmul_fp32(grads.T, weight[hot.ids]) if needs_hidden else None
    return grad_hidden, grads @ hidden
