"""Rows of the sparse head whose support is a good part of the vocabulary.

From about one id in a hundred on, multiplying a row with all of the weight on the tensor cores is
cheaper than gathering the rows of the weight that it names. Logits of these rows exist for one
block of ids at a time, forward and again in the backward, and only the support's are read: the
results are those of the gathered rows. A block of R rows has at most 2**25 logits, or R * H.
"""

from __future__ import annotations

import torch

from rollout.kernels.dense_kernels import pick_entries_kernel, scatter_entries_kernel
from rollout.kernels.head_config import WIDE_BLOCK_ELEMENTS, WIDE_SHARE
from rollout.kernels.matmul import add_matmul_fp32, matmul_fp32, vocab_blocks

# N rows, R wide rows, E entries of all rows, V vocabulary, H hidden size

_SPLIT = 16
"""Programs that share the entries of one row."""


def find_wide_rows(
    support_offsets: torch.Tensor,  # [N + 1]
    vocab: int,
    weight_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the rows that are cheaper by the product with the whole weight.

    Args:
        support_offsets: [N + 1] int64, on the CPU: how many rows there are is needed there.
        vocab: V.
        weight_dtype: none in 32 bits, whose products run off the tensor cores.

    Returns:
        [R] int64, ascending.

    Raises:
        ValueError: the offsets are on another device.
    """
    if support_offsets.device.type != "cpu":
        raise ValueError(f"support_offsets are on {support_offsets.device}, expected cpu")
    wide = support_offsets.diff() * WIDE_SHARE > vocab
    if weight_dtype.itemsize != 2:
        wide = torch.zeros_like(wide)
    return wide.nonzero().squeeze(1)


def wide_logits(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H]
    wide_rows: torch.Tensor,  # [R]
    ids: torch.Tensor,  # [E]
    offsets: torch.Tensor,  # [N + 1]
    inverse_temperature: torch.Tensor,  # [N]
    logits: torch.Tensor,  # [E]
) -> None:
    """Write the logits of the entries of some rows; an id out of the vocabulary is left alone.

    Args:
        hidden: [N, H] bf16, fp16 or fp32.
        weight: [V, H], the same.
        wide_rows: [R] int64.
        ids: [E] int32 or int64.
        offsets: [N + 1] int64.
        inverse_temperature: [N] fp32.
        logits: [E] fp32, written at the entries of these rows.
    """
    chosen = hidden.index_select(0, wide_rows)
    for first, end in _blocks(chosen, weight):
        pick_entries_kernel[(chosen.shape[0], _SPLIT)](
            matmul_fp32(chosen, weight[first:end].T),
            wide_rows,
            ids,
            offsets,
            inverse_temperature,
            logits,
            first,
            end - first,
            BLOCK=1024,
            num_warps=4,
        )


def wide_grads(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H]
    wide_rows: torch.Tensor,  # [R]
    ids: torch.Tensor,  # [E]
    offsets: torch.Tensor,  # [N + 1]
    coefficients: torch.Tensor,  # [E]
    grad_weight: torch.Tensor | None,  # [V, H]
    *,
    needs_hidden: bool,
) -> torch.Tensor | None:
    """Write these rows' part of the weight's gradient and return that of their hidden states.

    Args:
        hidden: [N, H] bf16, fp16 or fp32.
        weight: [V, H], the same.
        wide_rows: [R] int64.
        ids: [E] int32 or int64.
        offsets: [N + 1] int64.
        coefficients: [E] fp32, gradients of the dot products.
        grad_weight: [V, H] in the weight's dtype, all of it overwritten; None if not wanted.
        needs_hidden: whether to compute the result.

    Returns:
        [R, H] in the dtype of `hidden`, or None.
    """
    chosen = hidden.index_select(0, wide_rows)
    total = torch.zeros(chosen.shape, dtype=torch.float32, device=chosen.device)
    for first, end in _blocks(chosen, weight):
        grads = torch.zeros(chosen.shape[0], end - first, dtype=torch.float32, device=chosen.device)
        scatter_entries_kernel[(chosen.shape[0], _SPLIT)](
            coefficients,
            wide_rows,
            ids,
            offsets,
            grads,
            first,
            end - first,
            BLOCK=1024,
            num_warps=4,
        )
        grads = grads.to(weight.dtype)
        if needs_hidden:
            total = add_matmul_fp32(total, grads, weight[first:end])
        if grad_weight is not None:
            torch.mm(grads.T, chosen, out=grad_weight[first:end])
    return total.to(hidden.dtype) if needs_hidden else None


def _blocks(chosen: torch.Tensor, weight: torch.Tensor) -> list[tuple[int, int]]:
    """Return the blocks of ids of one walk."""
    num_rows, width = chosen.shape
    return list(vocab_blocks(num_rows, weight.shape[0], width, WIDE_BLOCK_ELEMENTS))
