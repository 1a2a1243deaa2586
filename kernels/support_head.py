"""Log-probabilities over each row's recorded support, from hidden states, without dense logits.

A replayed row is normalised over the ids that its sampler kept, so only those rows of the output
weight matter:

    z_e = (hidden[row_e] . weight[id_e]) * inverse_temperature[row_e]
    logprob_e = z_e - logsumexp over the entries of row_e
    dz_e = g_e - exp(logprob_e) * (sum of g over the row)

The support is a CSR matrix over (row, id); it is the sparsity pattern of the product, of its
gradient with respect to the hidden states (a segment sum over rows) and of that with respect to the
weight (a segment sum over ids). Rows of one entry have log-probability 0 and gradient 0 exactly,
and cost nothing. Empty rows cost nothing either and have no log-probability: their target is NaN,
since a row without a recorded support needs the whole vocabulary (`rollout.head` sends it there)
and any number here would pass for its result. Nothing waits for the device: every size follows
from a shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rollout.kernels.head_config import hot_block
from rollout.kernels.hot_ids import HotIds, hot_grads, hot_logits
from rollout.kernels.id_order import IdOrder, sort_by_id
from rollout.kernels.launch import Impl, choose_impl
from rollout.kernels.segment_sum import SegmentSum, segment_sums
from rollout.kernels.support_head_bwd import logit_grads, take
from rollout.kernels.support_head_fwd import entry_keys, row_softmax, sampled_product
from rollout.kernels.support_rows import (
    check_arguments,
    entry_rows,
    raise_missing,
    target_positions,
)
from rollout.kernels.wide_rows import wide_grads, wide_logits

# N rows, R wide rows, E entries of all rows, V vocabulary, H hidden size


def support_logprobs(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H]
    support_ids: torch.Tensor,  # [E]
    support_offsets: torch.Tensor,  # [N + 1]
    target_ids: torch.Tensor,  # [N]
    inverse_temperature: torch.Tensor,  # [N]
    *,
    wide_rows: torch.Tensor | None = None,  # [R]
    check_targets: bool | None = None,
    impl: Impl | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's log-probability of its target and of every id in its support.

    Differentiable with respect to `hidden` and `weight`. An id that a row names twice counts twice
    in its normaliser. On CUDA nothing waits for the device, and beyond the results and the weight's
    gradient the extra memory is O(E + N * H): of the most frequent ids, at most H of them, there is
    a dense [N, H] block of logits, and of wide rows one of at most 2**25 logits or R * H.

    Args:
        hidden: [N, H] bf16, fp16, fp32 or (CPU) fp64.
        weight: [V, H], the dtype of `hidden`.
        support_ids: [E] int32 or int64 in [0, V), row i in offsets[i]:offsets[i + 1], any order.
        support_offsets: [N + 1] int64, ascending from 0 to E.
        target_ids: [N] int64, the sampled ids.
        inverse_temperature: [N] fp32, 1 / T of each row.
        wide_rows: [R] int64 from `find_wide_rows`, rows that are cheaper by a product with the
            whole weight; it changes the cost and no result.
        check_targets: raise when a target is missing from its support, as it is from an empty one.
            Unset, it is done on the CPU only, because on CUDA it waits for the device; there a
            missing target makes its own log-probability NaN, and `missing_targets` finds the rows
            without a wait.
        impl: for tests; the device decides when unset.

    Returns:
        target_logprobs: [N] fp32 (fp64 for fp64 input), in nats; NaN where the target is missing.
        support_logprobs: [E], likewise.

    Raises:
        ValueError: shapes or dtypes disagree, ids out of [0, V) (CPU), or a target is missing from
            its support.
    """
    check_arguments(hidden, weight, support_ids, support_offsets, target_ids, inverse_temperature)
    if check_targets is None:
        check_targets = hidden.device.type == "cpu"
    if check_targets:
        raise_missing(support_ids, support_offsets, target_ids)
    arguments = hidden, weight, support_ids, support_offsets, target_ids, inverse_temperature
    if choose_impl(hidden, impl) == "reference":
        return support_logprobs_reference(*arguments)
    targets, logprobs = _SupportLogprobs.apply(*arguments, wide_rows)
    return targets, logprobs


def support_logprobs_reference(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H]
    support_ids: torch.Tensor,  # [E]
    support_offsets: torch.Tensor,  # [N + 1]
    target_ids: torch.Tensor,  # [N]
    inverse_temperature: torch.Tensor,  # [N]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `support_logprobs` in plain torch, on any device and dtype.

    Takes O(E * H + V * H) memory.

    Args:
        hidden: [N, H], any float dtype.
        weight: [V, H], the same.
        support_ids: [E] int32 or int64.
        support_offsets: [N + 1] int64.
        target_ids: [N] int64.
        inverse_temperature: [N].

    Returns:
        target_logprobs: [N] fp32, or fp64 for fp64 input; NaN where the target is missing.
        support_logprobs: [E], likewise.
    """
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    num_rows, num_entries = hidden.shape[0], support_ids.shape[0]
    lengths = support_offsets.diff()
    rows = entry_rows(support_offsets, num_entries)
    # rows of one entry are left out by selection, so that no value of theirs can reach a gradient
    wide = (lengths[rows] > 1).nonzero().squeeze(1)
    rows_w = rows[wide]
    # cast before the gather, so that gradients add up in the wider dtype
    dots = (hidden.to(dtype)[rows_w] * weight.to(dtype)[support_ids[wide].long()]).sum(-1)
    logits = dots * inverse_temperature[rows_w].to(dtype)
    top = logits.new_full((num_rows,), -torch.inf)
    top = top.scatter_reduce(0, rows_w, logits.detach(), "amax")
    total = logits.new_zeros(num_rows).index_add(0, rows_w, (logits - top[rows_w]).exp())
    # rows without selected entries would give log(0), whose gradient is NaN
    logsumexp = top + torch.where(lengths > 1, total, 1.0).log()
    logprobs = logits.new_zeros(num_entries).index_put((wide,), logits - logsumexp[rows_w])
    positions = target_positions(support_ids, support_offsets, target_ids)
    found = (positions >= 0).nonzero().squeeze(1)
    targets = logits.new_full((num_rows,), torch.nan)
    return targets.index_put((found,), logprobs[positions[found]]), logprobs


class _SupportLogprobs(torch.autograd.Function):
    """The Triton path of `support_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        support_ids: torch.Tensor,
        support_offsets: torch.Tensor,
        target_ids: torch.Tensor,
        inverse_temperature: torch.Tensor,
        wide_rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-probabilities; keep O(E) integers for the backward."""
        hidden, weight = _unit_stride(hidden), _unit_stride(weight)
        (num_rows, width), vocab = hidden.shape, weight.shape[0]
        support_ids, support_offsets = support_ids.contiguous(), support_offsets.contiguous()
        scale = inverse_temperature.float().contiguous()
        wide = None
        if wide_rows is not None:
            wide = torch.zeros(num_rows, dtype=torch.int8, device=hidden.device)
            wide.index_fill_(0, wide_rows, 1)
        rows, keys, positions = entry_keys(
            support_ids, support_offsets, target_ids.contiguous(), vocab, wide
        )
        logprobs = torch.empty(keys.shape[0], dtype=torch.float32, device=hidden.device)
        order: IdOrder | None = None
        hot: HotIds | None = None
        block = hot_block(num_rows, keys.shape[0], vocab, width, weight.dtype)
        if block and ctx.needs_input_grad[1]:
            order = sort_by_id(keys, vocab)
            hot = hot_logits(
                hidden, weight, keys, rows, support_offsets, scale, logprobs, order, block
            )
            sampled_product(
                hidden,
                weight,
                keys,
                rows,
                scale,
                logprobs,
                listed=hot.cold_entries,
                count=hot.cold_offsets[-1:],
            )
        else:
            sampled_product(hidden, weight, keys, rows, scale, logprobs)
        if wide_rows is not None:
            wide_logits(hidden, weight, wide_rows, support_ids, support_offsets, scale, logprobs)
        targets = row_softmax(logprobs, support_offsets, positions)
        ctx.save_for_backward(
            hidden,
            weight,
            support_offsets,
            scale,
            rows,
            keys,
            positions,
            logprobs,
            wide_rows,
            None if wide_rows is None else support_ids,
        )
        ctx.order, ctx.hot = order, hot
        ctx.set_materialize_grads(False)
        return targets, logprobs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_targets: torch.Tensor | None, grad_entries: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Sum weighted weight rows over rows, and weighted hidden states over ids."""
        grad_hidden: torch.Tensor | None = None
        grad_weight: torch.Tensor | None = None
        if grad_targets is None and grad_entries is None:
            return (None,) * 7
        hidden, weight, offsets, scale, rows, keys, positions, logprobs = ctx.saved_tensors[:8]
        wide_rows, ids = ctx.saved_tensors[8:]
        coefficients = logit_grads(
            logprobs,
            None if grad_entries is None else grad_entries.contiguous(),
            None if grad_targets is None else grad_targets.contiguous(),
            offsets,
            positions,
            scale,
        )
        hot: HotIds | None = ctx.hot
        order: IdOrder | None = ctx.order
        base: torch.Tensor | None = None
        by_row: SegmentSum | None = None
        by_id: SegmentSum | None = None
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if needs_weight:
            grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        wide_hidden: torch.Tensor | None = None
        if wide_rows is not None:
            wide_hidden = wide_grads(
                hidden,
                weight,
                wide_rows,
                ids,
                offsets,
                coefficients,
                grad_weight,
                needs_hidden=needs_hidden,
            )
        if grad_weight is not None:
            order = sort_by_id(keys, weight.shape[0]) if order is None else order
            sorted_rows, sorted_grads = take(order.entries, order.offsets, rows, coefficients)
            if hot is not None:
                base, hot_rows = hot_grads(
                    hidden, weight, sorted_grads, sorted_rows, order, hot, needs_hidden=needs_hidden
                )
                if wide_rows is not None:
                    hot_rows += grad_weight[hot.ids]
                grad_weight[hot.ids] = hot_rows
            by_id = SegmentSum(
                source=hidden,
                index=sorted_rows,
                coefficients=sorted_grads,
                offsets=order.offsets,
                out=grad_weight,
            )
        if needs_hidden:
            by_row_offsets = offsets
            if hot is not None:
                by_row_offsets = hot.cold_offsets
                keys, coefficients = take(hot.cold_entries, by_row_offsets, keys, coefficients)
            grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
            by_row = SegmentSum(
                source=weight,
                index=keys,
                coefficients=coefficients,
                offsets=by_row_offsets,
                out=grad_hidden,
            )
        segment_sums(
            by_row,
            by_id,
            num_rows=hidden.shape[0],
            row_base=base,
            id_skip=None if hot is None else hot.slots,
            adds_ids=wide_rows is not None,
        )
        if grad_hidden is not None and wide_hidden is not None:
            grad_hidden.index_copy_(0, wide_rows, wide_hidden)
        return grad_hidden, grad_weight, None, None, None, None, None


def _unit_stride(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix itself if its rows are contiguous, else a contiguous copy."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
