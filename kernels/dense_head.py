"""Log-probabilities over the whole vocabulary, in blocks of ids, for rows without a full support.

A row whose recorded ids are not all that its sampler could draw needs the normaliser of the whole
vocabulary:

    z = (hidden . weight) / T,  logz = logsumexp(z),  logprob_v = z_v - logz
    tail = logsumexp of z over the ids without an entry, minus logz

Logits exist for one block of ids at a time, forward and again backward. The tail is summed over
its own ids: one minus the head's mass would have no correct digit left where it matters.

    dz_v = g_v - p_v * (sum of all g of the row) + [v in tail] * g_tail * p_v / p_tail
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from rollout.kernels.dense_kernels import dense_grads_kernel, dense_stats_kernel
from rollout.kernels.head_config import DENSE_BLOCK_ELEMENTS
from rollout.kernels.launch import Impl, choose_impl
from rollout.kernels.matmul import add_matmul_fp32, matmul_fp32, vocab_blocks
from rollout.kernels.support_rows import check_arguments, entry_rows

# N rows, E entries of all rows, V vocabulary, H hidden size


class DenseLogprobs(NamedTuple):
    """What `dense_logprobs` returns; nats, fp32, or fp64 for fp64 input."""

    targets: torch.Tensor
    """[N] log-probabilities of the targets."""
    entries: torch.Tensor
    """[E] log-probabilities of the entries."""
    tail: torch.Tensor
    """[N] log of the mass of the ids without an entry: 0 in rows without entries, -inf where every
    id has one."""
    logz: torch.Tensor
    """[N] log-sum-exp of the logits, without a gradient."""


def dense_logprobs(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H]
    entry_ids: torch.Tensor,  # [E]
    entry_offsets: torch.Tensor,  # [N + 1]
    target_ids: torch.Tensor,  # [N]
    inverse_temperature: torch.Tensor,  # [N]
    *,
    impl: Impl | None = None,
) -> DenseLogprobs:
    """Return log-probabilities over the vocabulary of each row's target, entries and tail.

    Differentiable with respect to `hidden` and `weight`. The target need not be among the entries,
    and a row may name an id more than once. Extra memory on CUDA: three [N, block] matrices of at
    most 2**27 elements each or N * H, whichever is more.

    Args:
        hidden: [N, H] bf16, fp16, fp32 or (CPU) fp64.
        weight: [V, H], the dtype of `hidden`.
        entry_ids: [E] int32 or int64 in [0, V), row i in offsets[i]:offsets[i + 1], any order.
        entry_offsets: [N + 1] int64, ascending from 0 to E.
        target_ids: [N] int64 in [0, V).
        inverse_temperature: [N] fp32, 1 / T of each row.
        impl: for tests; the device decides when unset.

    Returns:
        The log-probabilities.

    Raises:
        ValueError: shapes or dtypes disagree, or ids are out of [0, V) (CPU).
    """
    arguments = hidden, weight, entry_ids, entry_offsets, target_ids, inverse_temperature
    check_arguments(*arguments)
    if choose_impl(hidden, impl) == "reference":
        return dense_logprobs_reference(*arguments)
    return DenseLogprobs(*_DenseLogprobs.apply(*arguments))


def dense_logprobs_reference(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H]
    entry_ids: torch.Tensor,  # [E]
    entry_offsets: torch.Tensor,  # [N + 1]
    target_ids: torch.Tensor,  # [N]
    inverse_temperature: torch.Tensor,  # [N]
) -> DenseLogprobs:
    """Compute `dense_logprobs` in plain torch, with dense logits, on any device and dtype.

    Args:
        hidden: [N, H], any float dtype.
        weight: [V, H], the same.
        entry_ids: [E] int32 or int64.
        entry_offsets: [N + 1] int64.
        target_ids: [N] int64.
        inverse_temperature: [N].

    Returns:
        The log-probabilities.
    """
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = hidden.to(dtype) @ weight.to(dtype).T * inverse_temperature.to(dtype)[:, None]
    logprobs = torch.log_softmax(logits, -1)
    rows, ids = entry_rows(entry_offsets, entry_ids.shape[0]), entry_ids.long()
    head = torch.zeros_like(logits, dtype=torch.bool)
    head[rows, ids] = True
    # a row without a tail is replaced before the log-sum-exp, whose gradient at -inf is NaN
    whole = head.all(-1)
    tail = logprobs.masked_fill(head & ~whole[:, None], -torch.inf).logsumexp(-1)
    return DenseLogprobs(
        targets=logprobs.gather(1, target_ids[:, None]).squeeze(1),
        entries=logprobs[rows, ids],
        tail=torch.where(whole, -torch.inf, tail),
        logz=logits.detach().logsumexp(-1),
    )


class _DenseLogprobs(torch.autograd.Function):
    """The Triton path of `dense_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        entry_ids: torch.Tensor,
        entry_offsets: torch.Tensor,
        target_ids: torch.Tensor,
        inverse_temperature: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Walk over the vocabulary once; keep O(N + E) numbers for the backward."""
        num_rows, num_entries = hidden.shape[0], entry_ids.shape[0]
        ids, offsets, target_ids = (
            tensor.contiguous() for tensor in (entry_ids, entry_offsets, target_ids)
        )
        scale = inverse_temperature.float().contiguous()
        stats = hidden.new_zeros((4, num_rows), dtype=torch.float32)
        stats[0::2] = -torch.inf
        # an id out of the vocabulary is in no block and shows as NaN
        targets = torch.full_like(scale, torch.nan)
        entries = hidden.new_full((num_entries,), torch.nan, dtype=torch.float32)
        for first, end in _blocks(hidden, weight):
            dense_stats_kernel[(num_rows,)](
                matmul_fp32(hidden, weight[first:end].T),
                ids,
                offsets,
                target_ids,
                scale,
                stats,
                targets,
                entries,
                first,
                end - first,
                num_rows,
                BLOCK=2048,
                BLOCK_E=128,
                num_warps=4,
            )
        logz = stats[0] + stats[1].log()
        tail_logsumexp = stats[2] + stats[3].log()
        entries -= logz[entry_rows(offsets, num_entries)]
        targets -= logz
        ctx.save_for_backward(
            hidden, weight, ids, offsets, target_ids, scale, logz, tail_logsumexp, entries
        )
        ctx.mark_non_differentiable(logz)
        ctx.set_materialize_grads(False)
        return targets, entries, tail_logsumexp - logz, logz

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_targets: torch.Tensor | None,
        grad_entries: torch.Tensor | None,
        grad_tail: torch.Tensor | None,
        _: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute each block of logits again, turn it into its gradient, multiply both ways."""
        saved = ctx.saved_tensors
        hidden, weight, ids, offsets, target_ids, scale, logz, tail_logsumexp, entries = saved
        num_rows = hidden.shape[0]
        grad_targets = torch.zeros_like(logz) if grad_targets is None else grad_targets
        grad_entries = torch.zeros_like(entries) if grad_entries is None else grad_entries
        mass = grad_targets.float().clone()
        mass.index_add_(0, entry_rows(offsets, ids.shape[0]), grad_entries.float())
        if grad_tail is not None:
            # a row without a tail has no gradient through it
            grad_tail = torch.where(tail_logsumexp == -torch.inf, 0.0, grad_tail)
            mass += grad_tail
        grad_hidden: torch.Tensor | None = None
        grad_weight: torch.Tensor | None = None
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for first, end in _blocks(hidden, weight):
            block = weight[first:end]
            grads = torch.empty(num_rows, end - first, dtype=weight.dtype, device=weight.device)
            dense_grads_kernel[(num_rows,)](
                matmul_fp32(hidden, block.T),
                ids,
                offsets,
                target_ids,
                scale,
                logz,
                tail_logsumexp,
                entries,
                mass,
                grad_targets.contiguous(),
                grad_entries.contiguous(),
                None if grad_tail is None else grad_tail.contiguous(),
                grads,
                first,
                end - first,
                HAS_TAIL=grad_tail is not None,
                BLOCK=2048,
                BLOCK_E=128,
                num_warps=4,
            )
            if grad_hidden is not None:
                grad_hidden = add_matmul_fp32(grad_hidden, grads, block)
            if grad_weight is not None:
                torch.mm(grads.T, hidden, out=grad_weight[first:end])
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _blocks(hidden: torch.Tensor, weight: torch.Tensor) -> list[tuple[int, int]]:
    """Return the blocks of ids of one walk."""
    num_rows, width = hidden.shape
    return list(vocab_blocks(num_rows, weight.shape[0], width, DENSE_BLOCK_ELEMENTS))
