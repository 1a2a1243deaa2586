"""`support_logprobs` for rows whose support is a good part of the vocabulary.

From about one id in a hundred on, multiplying a row with all of the weight on the tensor cores is
cheaper than gathering the rows of the weight that it names. Logits exist for one block of ids at a
time, forward and again in the backward, and only the support's are read: the result and the
gradients are those of the sparse head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rollout.kernels.dense_kernels import pick_entries_kernel, scatter_entries_kernel
from rollout.kernels.head_config import WIDE_BLOCK_ELEMENTS
from rollout.kernels.launch import Impl, choose_impl
from rollout.kernels.matmul import add_matmul_fp32, matmul_fp32, vocab_blocks
from rollout.kernels.support_head import (
    check_arguments,
    raise_missing,
    support_logprobs_reference,
)
from rollout.kernels.support_head_bwd import logit_grads
from rollout.kernels.support_head_fwd import entry_keys, row_softmax

# N rows, E entries of all rows, V vocabulary, H hidden size

_SPLIT = 16
"""Programs that share the entries of one row."""


def wide_support_logprobs(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H]
    support_ids: torch.Tensor,  # [E]
    support_offsets: torch.Tensor,  # [N + 1]
    target_ids: torch.Tensor,  # [N]
    inverse_temperature: torch.Tensor,  # [N]
    *,
    impl: Impl | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `support_logprobs` does, at a cost that does not depend on the supports.

    Extra memory on CUDA: two [N, block] matrices of at most 2**25 elements each or N * H, whichever
    is more.

    Args:
        hidden: [N, H] bf16, fp16, fp32 or (CPU) fp64.
        weight: [V, H], the dtype of `hidden`.
        support_ids: [E] int32 or int64 in [0, V), row i in offsets[i]:offsets[i + 1], any order.
        support_offsets: [N + 1] int64, ascending from 0 to E.
        target_ids: [N] int64, the sampled ids.
        inverse_temperature: [N] fp32, 1 / T of each row.
        impl: for tests; the device decides when unset.

    Returns:
        target_logprobs: [N] fp32 (fp64 for fp64 input), in nats; 0 in rows with an empty support,
            NaN where the target is missing (CUDA).
        support_logprobs: [E], likewise.

    Raises:
        ValueError: shapes or dtypes disagree, ids are out of [0, V) or a target is missing from its
            support (CPU).
    """
    arguments = hidden, weight, support_ids, support_offsets, target_ids, inverse_temperature
    check_arguments(*arguments)
    if hidden.device.type == "cpu":
        raise_missing(support_ids, support_offsets, target_ids)
    if choose_impl(hidden, impl) == "reference":
        return support_logprobs_reference(*arguments)
    targets, logprobs = _WideLogprobs.apply(*arguments)
    return targets, logprobs


class _WideLogprobs(torch.autograd.Function):
    """The Triton path of `wide_support_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        support_ids: torch.Tensor,
        support_offsets: torch.Tensor,
        target_ids: torch.Tensor,
        inverse_temperature: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Walk over the vocabulary once; keep O(N + E) numbers for the backward."""
        ids, offsets = support_ids.contiguous(), support_offsets.contiguous()
        scale = inverse_temperature.float().contiguous()
        positions = entry_keys(ids, offsets, target_ids.contiguous(), weight.shape[0])[2]
        # an id out of the vocabulary is in no block and shows as NaN
        logprobs = torch.full(ids.shape, torch.nan, dtype=torch.float32, device=ids.device)
        for first, end in _blocks(hidden, weight):
            pick_entries_kernel[(hidden.shape[0], _SPLIT)](
                matmul_fp32(hidden, weight[first:end].T),
                ids,
                offsets,
                scale,
                logprobs,
                first,
                end - first,
                BLOCK=1024,
                num_warps=4,
            )
        targets = row_softmax(logprobs, offsets, positions)
        ctx.save_for_backward(hidden, weight, ids, offsets, scale, positions, logprobs)
        ctx.set_materialize_grads(False)
        return targets, logprobs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_targets: torch.Tensor | None, grad_entries: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Write each block's gradients from those of its entries, multiply both ways."""
        if grad_targets is None and grad_entries is None:
            return None, None, None, None, None, None
        hidden, weight, ids, offsets, scale, positions, logprobs = ctx.saved_tensors
        coefficients = logit_grads(
            logprobs,
            None if grad_entries is None else grad_entries.contiguous(),
            None if grad_targets is None else grad_targets.contiguous(),
            offsets,
            positions,
            scale,
        )
        grad_hidden: torch.Tensor | None = None
        grad_weight: torch.Tensor | None = None
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for first, end in _blocks(hidden, weight):
            grads = torch.zeros(
                hidden.shape[0], end - first, dtype=torch.float32, device=hidden.device
            )
            scatter_entries_kernel[(hidden.shape[0], _SPLIT)](
                coefficients, ids, offsets, grads, first, end - first, BLOCK=1024, num_warps=4
            )
            grads = grads.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden = add_matmul_fp32(grad_hidden, grads, weight[first:end])
            if grad_weight is not None:
                torch.mm(grads.T, hidden, out=grad_weight[first:end])
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _blocks(hidden: torch.Tensor, weight: torch.Tensor) -> list[tuple[int, int]]:
    """Return the blocks of ids of one walk."""
    num_rows, width = hidden.shape
    return list(vocab_blocks(num_rows, weight.shape[0], width, WIDE_BLOCK_ELEMENTS))
