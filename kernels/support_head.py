"""Log-probabilities over each row's recorded support, from hidden states, without dense logits.

A replayed row is normalised over the ids that its sampler kept, so only those rows of the output
weight matter:

    z_e = (hidden[row_e] . weight[id_e]) * inverse_temperature[row_e]
    logprob_e = z_e - logsumexp over the entries of row_e
    dz_e = g_e - exp(logprob_e) * (sum of g over the row)

The support is a CSR matrix over (row, id); it is the sparsity pattern of the product, of its
gradient with respect to the hidden states (a segment sum over rows) and of that with respect to the
weight (a segment sum over ids). Rows of one entry have log-probability 0 and gradient 0 exactly,
and cost nothing; so do empty rows. Nothing waits for the device: every size follows from a shape.
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

# N rows, E entries of all rows, V vocabulary, H hidden size


def support_logprobs(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H]
    support_ids: torch.Tensor,  # [E]
    support_offsets: torch.Tensor,  # [N + 1]
    target_ids: torch.Tensor,  # [N]
    inverse_temperature: torch.Tensor,  # [N]
    *,
    check_targets: bool | None = None,
    impl: Impl | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's log-probability of its target and of every id in its support.

    Differentiable with respect to `hidden` and `weight`. An id that a row names twice counts twice
    in its normaliser.

    Args:
        hidden: [N, H] bf16, fp16, fp32 or (CPU) fp64.
        weight: [V, H], the dtype of `hidden`.
        support_ids: [E] int32 or int64 in [0, V), row i in offsets[i]:offsets[i + 1], any order.
        support_offsets: [N + 1] int64, ascending from 0 to E.
        target_ids: [N] int64, the sampled ids; ignored in rows with an empty support.
        inverse_temperature: [N] fp32, 1 / T of each row.
        check_targets: raise when a target is missing from its support. Unset, it is done on the CPU
            only, because on CUDA it waits for the device; there a missing target makes its own
            log-probability NaN, and `missing_targets` finds the rows without a wait.
        impl: for tests; the device decides when unset.

    Returns:
        target_logprobs: [N] fp32 (fp64 for fp64 input), in nats; 0 in rows with an empty support.
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
    targets, logprobs = _SupportLogprobs.apply(*arguments)
    return targets, logprobs


def support_logprobs_reference(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H]
    support_ids: torch.Tensor,  # [E]
    support_offsets: torch.Tensor,  # [N + 1]
    target_ids: torch.Tensor,  # [N]
    inverse_temperature: torch.Tensor,  # [N]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `support_logprobs` in plain torch, on any device and dtype; O(E * H) memory.

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
    dots = (hidden[rows_w].to(dtype) * weight[support_ids[wide].long()].to(dtype)).sum(-1)
    logits = dots * inverse_temperature[rows_w].to(dtype)
    top = logits.new_full((num_rows,), -torch.inf)
    top = top.scatter_reduce(0, rows_w, logits.detach(), "amax")
    total = logits.new_zeros(num_rows).index_add(0, rows_w, (logits - top[rows_w]).exp())
    # rows without selected entries would give log(0), whose gradient is NaN
    logsumexp = top + torch.where(lengths > 1, total, 1.0).log()
    logprobs = logits.new_zeros(num_entries).index_put((wide,), logits - logsumexp[rows_w])
    positions = target_positions(support_ids, support_offsets, target_ids)
    found = (positions >= 0).nonzero().squeeze(1)
    targets = torch.where(lengths > 0, torch.nan, 0.0).to(dtype)
    return targets.index_put((found,), logprobs[positions[found]]), logprobs


def entry_rows(
    support_offsets: torch.Tensor,  # [N + 1]
    num_entries: int,
) -> torch.Tensor:
    """Return the row of every entry of a CSR matrix, without waiting for the device.

    Args:
        support_offsets: [N + 1] int64.
        num_entries: E.

    Returns:
        [E] int64.
    """
    rows = torch.arange(support_offsets.shape[0] - 1, device=support_offsets.device)
    return rows.repeat_interleave(support_offsets.diff(), output_size=num_entries)


def target_positions(
    support_ids: torch.Tensor,  # [E]
    support_offsets: torch.Tensor,  # [N + 1]
    target_ids: torch.Tensor,  # [N]
) -> torch.Tensor:
    """Return the first entry of each row that names the row's target, or -1.

    Args:
        support_ids: [E] int32 or int64.
        support_offsets: [N + 1] int64.
        target_ids: [N] int64.

    Returns:
        [N] int64 positions into the entries; -1 where the support is empty or lacks the target.
    """
    num_entries = support_ids.shape[0]
    rows = entry_rows(support_offsets, num_entries)
    entries = torch.arange(num_entries, device=support_ids.device)
    entries = torch.where(support_ids == target_ids[rows], entries, num_entries)
    first = torch.full_like(target_ids, num_entries, dtype=torch.int64)
    first = first.scatter_reduce(0, rows, entries, "amin")
    return torch.where(first == num_entries, -1, first)


def missing_targets(
    support_ids: torch.Tensor,  # [E]
    support_offsets: torch.Tensor,  # [N + 1]
    target_ids: torch.Tensor,  # [N]
) -> torch.Tensor:
    """Return which rows have a support that lacks their target, without waiting for the device.

    Args:
        support_ids: [E] int32 or int64.
        support_offsets: [N + 1] int64.
        target_ids: [N] int64.

    Returns:
        [N] bool; False in rows with an empty support.
    """
    positions = target_positions(support_ids, support_offsets, target_ids)
    return (support_offsets.diff() > 0) & (positions < 0)


def raise_missing(
    support_ids: torch.Tensor, support_offsets: torch.Tensor, target_ids: torch.Tensor
) -> None:
    """Raise on the first row whose support lacks its target; waits for the device.

    Args:
        support_ids: [E] int32 or int64.
        support_offsets: [N + 1] int64.
        target_ids: [N] int64.

    Raises:
        ValueError: there is such a row.
    """
    missing = missing_targets(support_ids, support_offsets, target_ids).nonzero()
    if missing.numel():
        row = int(missing[0, 0])
        raise ValueError(
            f"row {row}: target id {int(target_ids[row])} is not in its support, expected every "
            f"sampled id in its own support ({missing.shape[0]} such rows); exclude these rows or "
            "check that targets and supports are aligned"
        )


def check_arguments(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    support_ids: torch.Tensor,
    support_offsets: torch.Tensor,
    target_ids: torch.Tensor,
    inverse_temperature: torch.Tensor,
) -> None:
    """Check what every head takes, without waiting for a device.

    Args:
        hidden: [N, H] float.
        weight: [V, H], the dtype of `hidden`.
        support_ids: [E] int32 or int64.
        support_offsets: [N + 1] int64.
        target_ids: [N] int64.
        inverse_temperature: [N].

    Raises:
        ValueError: shapes, dtypes, devices or (on the CPU) values are wrong.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}, expected [N, H] and "
            "[V, H]"
        )
    if hidden.dtype != weight.dtype or not hidden.dtype.is_floating_point:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}, expected one floating dtype; "
            "cast one of them"
        )
    num_rows = hidden.shape[0]
    for name, tensor, length in (
        ("support_offsets", support_offsets, num_rows + 1),
        ("target_ids", target_ids, num_rows),
        ("inverse_temperature", inverse_temperature, num_rows),
        ("support_ids", support_ids, support_ids.numel()),
    ):
        if list(tensor.shape) != [length]:
            raise ValueError(f"{name} is {list(tensor.shape)}, expected [{length}]")
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, expected {hidden.device} as hidden")
    if weight.device != hidden.device:
        raise ValueError(f"weight is on {weight.device}, expected {hidden.device} as hidden")
    for name, tensor, allowed in (
        ("support_ids", support_ids, (torch.int32, torch.int64)),
        ("support_offsets", support_offsets, (torch.int64,)),
        ("target_ids", target_ids, (torch.int64,)),
    ):
        if tensor.dtype not in allowed:
            raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, allowed))}")
    if hidden.device.type == "cpu":
        _check_values(support_ids, support_offsets, weight.shape[0])


def _check_values(support_ids: torch.Tensor, support_offsets: torch.Tensor, vocab: int) -> None:
    """Raise ValueError for offsets that are no CSR and ids out of the vocabulary."""
    num_entries = support_ids.shape[0]
    ends = int(support_offsets[0]), int(support_offsets[-1])
    if ends != (0, num_entries) or bool((support_offsets.diff() < 0).any()):
        raise ValueError(
            f"support_offsets run from {ends[0]} to {ends[1]}, expected ascending from 0 to "
            f"{num_entries}"
        )
    if num_entries:
        low, high = int(support_ids.min()), int(support_ids.max())
        if low < 0 or high >= vocab:
            raise ValueError(f"support_ids span [{low}, {high}], expected ids in [0, {vocab})")


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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-probabilities; keep O(E) integers for the backward."""
        hidden, weight = _unit_stride(hidden), _unit_stride(weight)
        (num_rows, width), vocab = hidden.shape, weight.shape[0]
        support_ids, support_offsets = support_ids.contiguous(), support_offsets.contiguous()
        scale = inverse_temperature.float().contiguous()
        rows, keys, positions = entry_keys(
            support_ids, support_offsets, target_ids.contiguous(), vocab
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
                hidden, weight, keys, rows, scale, logprobs, order=order, slots=hot.slots
            )
        else:
            sampled_product(hidden, weight, keys, rows, scale, logprobs)
        targets = row_softmax(logprobs, support_offsets, positions)
        ctx.save_for_backward(
            hidden, weight, support_offsets, scale, rows, keys, positions, logprobs
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
            return None, None, None, None, None, None
        hidden, weight, offsets, scale, rows, keys, positions, logprobs = ctx.saved_tensors
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
        if ctx.needs_input_grad[1]:
            order = sort_by_id(keys, weight.shape[0]) if order is None else order
            sorted_rows, sorted_grads = take(order.entries, order.offsets, rows, coefficients)
            grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            if hot is not None:
                base, grad_weight[hot.ids] = hot_grads(
                    hidden,
                    weight,
                    sorted_grads,
                    sorted_rows,
                    order,
                    hot,
                    needs_hidden=ctx.needs_input_grad[0],
                )
            by_id = SegmentSum(
                source=hidden,
                index=sorted_rows,
                coefficients=sorted_grads,
                offsets=order.offsets,
                out=grad_weight,
            )
        if ctx.needs_input_grad[0]:
            if hot is not None:
                offsets = hot.cold_offsets
                keys, coefficients = take(hot.cold_entries, offsets, keys, coefficients)
            grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
            by_row = SegmentSum(
                source=weight,
                index=keys,
                coefficients=coefficients,
                offsets=offsets,
                out=grad_hidden,
            )
        segment_sums(
            by_row,
            by_id,
            num_rows=hidden.shape[0],
            row_base=base,
            id_skip=None if hot is None else hot.slots,
        )
        return grad_hidden, grad_weight, None, None, None, None


def _unit_stride(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix itself if its rows are contiguous, else a contiguous copy."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
