"""The output head of a mixed batch: every row takes the cheapest exact path.

A row of an exact support takes the sparse head: by gathering the weight rows that it names, or, if
it names a good part of the vocabulary, by a product with all of them of which only the named
logits are read. A recorded head, or no support at all, needs the normaliser of the whole
vocabulary, from the chunked dense head. Draws need it too, unless the loss weighs every candidate
with 1: then log p(target) - mean log p(draws) is free of the normaliser, and the row is done like
an exact support of its target and its draws.

The paths are planned on the CPU, where the loader makes its batches, so that no step waits for the
device. From batch to loss:

    plan = plan_batch(batch, config, vocab_size=weight.shape[0], weight_dtype=weight.dtype)
    batch, plan = batch.to(device), plan.to(device)
    inputs = score_batch(hidden[batch.hidden_index], weight, batch, plan)
    outputs = compute_loss(inputs, config)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rollout.kernels.dense_head import dense_logprobs
from rollout.kernels.support_head import support_logprobs
from rollout.kernels.wide_rows import find_wide_rows
from rollout.loss_types import LossConfig, LossInputs

if TYPE_CHECKING:
    from rollout.batch import RolloutBatch

# N rows, E entries of all rows, V vocabulary, H hidden size, R rows and P places of one path

Normaliser = Literal["needed", "cancels"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PathRows:
    """The rows of one path, as a CSR matrix of its own."""

    rows: Tensor
    """[R] int64, rows of the batch, ascending."""
    offsets: Tensor
    """[R + 1] int64 row pointers into the path's places."""
    entries: Tensor
    """[P - D] int64, entries of the batch, in the order of their places."""
    entry_places: Tensor
    """[P - D] int64, the place of each entry."""
    target_places: Tensor
    """[D] int64, places that hold the target of a row of draws, before its draws."""
    target_rows: Tensor
    """[D] int64, the rows of the batch that these are of."""

    def to(self, device: torch.device) -> PathRows:
        """Return the same on a device, without waiting for it.

        Args:
            device: where the hidden states are.

        Returns:
            A copy, or tensors of this where they are there already.
        """
        return PathRows(
            **{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadPlan:
    """Which path each row of a batch takes."""

    sparse: PathRows | None
    """Rows normalised over their entries; None for no such row, or for all rows of the batch."""
    wide_rows: Tensor | None
    """[W] int64, those of the R sparse rows that are cheaper by a product with the whole weight."""
    dense: PathRows | None
    """Rows normalised over the vocabulary."""
    all_sparse: bool
    """Whether every row is a sparse one as it stands, so that nothing need be selected."""
    is_normalised: Tensor
    """[N] bool, False where the row's log-probabilities are off by one constant."""

    def to(self, device: torch.device) -> HeadPlan:
        """Return the same on a device, without waiting for it.

        Args:
            device: where the hidden states are.

        Returns:
            The plan with its tensors there.
        """
        return HeadPlan(
            sparse=self.sparse and self.sparse.to(device),
            wide_rows=None if self.wide_rows is None else self.wide_rows.to(device),
            dense=self.dense and self.dense.to(device),
            all_sparse=self.all_sparse,
            is_normalised=self.is_normalised.to(device, non_blocking=True),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadOutput:
    """The trainer's side of a batch; nats, differentiable but for `is_normalised`."""

    target_logprobs: Tensor
    """[N] log p of the sampled token; NaN in rows that were not needed, as no number is theirs."""
    support_logprobs: Tensor
    """[E] log p of each entry; NaN where the row has no valid support or was not needed."""
    tail_mass: Tensor
    """[N] probability under p outside the entries; 0 for exact supports and draws whose normaliser
    cancels."""
    is_normalised: Tensor
    """[N] bool, False where all log-probabilities of the row are off by one constant."""


def plan_head(
    *,
    support_offsets: Tensor,  # [N + 1]
    support_valid: Tensor,  # [N]
    support_is_samples: Tensor,  # [N]
    sampler_tail_mass: Tensor,  # [N]
    vocab_size: int,
    weight_dtype: torch.dtype,
    normaliser: Normaliser = "needed",
    needed: Tensor | None = None,  # [N]
) -> HeadPlan:
    """Choose each row's path from what its record holds.

    Args:
        support_offsets: [N + 1] int64, on the CPU.
        support_valid: [N] bool, whether the row has a support at all.
        support_is_samples: [N] bool, whether the entries are draws.
        sampler_tail_mass: [N] float, probability under q outside the entries; 0 for an exact one.
        vocab_size: V.
        weight_dtype: of the output weight; 32-bit products are never the cheap path.
        normaliser: `cancels` if the loss reads draws only as log p(target) - mean log p(draws),
            `needed` if it reads any of these values alone.
        needed: [N] bool, rows that the loss reads; all when None. The others cost nothing.

    Returns:
        The plan, on the CPU.

    Raises:
        ValueError: a tensor is not on the CPU, or lengths disagree.
    """
    num_rows = support_valid.shape[0]
    needed = torch.ones_like(support_valid) if needed is None else needed
    for name, tensor, length in (
        ("support_offsets", support_offsets, num_rows + 1),
        ("support_is_samples", support_is_samples, num_rows),
        ("sampler_tail_mass", sampler_tail_mass, num_rows),
        ("needed", needed, num_rows),
    ):
        if tensor.shape != (length,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({length},)")
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}, expected cpu: plan before the copy")
    lengths = support_offsets.diff()
    exact = support_valid & ~support_is_samples & (sampler_tail_mass == 0) & needed
    draws = support_valid & support_is_samples & needed
    cancels = draws if normaliser == "cancels" else torch.zeros_like(draws)
    sparse = exact | cancels
    all_sparse = bool(sparse.all()) and not bool(cancels.any())
    counts = torch.where(support_valid, lengths, 0)
    starts = support_offsets[:-1]
    by_entries = None if all_sparse else _path_rows(sparse, starts, counts, cancels)
    offsets = support_offsets if by_entries is None else by_entries.offsets
    wide_rows = find_wide_rows(offsets, vocab_size, weight_dtype)
    return HeadPlan(
        sparse=by_entries,
        wide_rows=wide_rows if wide_rows.numel() else None,
        dense=_path_rows(needed & ~sparse, starts, counts, torch.zeros_like(cancels)),
        all_sparse=all_sparse,
        is_normalised=~cancels,
    )


def head_logprobs(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    support_ids: Tensor,  # [E]
    support_offsets: Tensor,  # [N + 1]
    target_ids: Tensor,  # [N]
    temperature: Tensor,  # [N]
    plan: HeadPlan,
    *,
    check_targets: bool | None = None,
) -> HeadOutput:
    """Compute the trainer's log-probabilities of a batch, each row by its path.

    Differentiable with respect to `hidden` and `weight`.

    Args:
        hidden: [N, H] bf16, fp16, fp32 or (CPU) fp64, the states that predict the scored tokens.
        weight: [V, H], the dtype of `hidden`.
        support_ids: [E] int32 or int64, row i in offsets[i]:offsets[i + 1].
        support_offsets: [N + 1] int64.
        target_ids: [N] int64, the sampled ids.
        temperature: [N] fp32; 0 in greedy rows, whose support is one id.
        plan: of this batch, on the device of `hidden`.
        check_targets: see `rollout.kernels.support_head.support_logprobs`.

    Returns:
        The log-probabilities.

    Raises:
        ValueError: shapes or dtypes disagree, or a target is missing from its support.
    """
    inverse = torch.where(temperature > 0, temperature, 1.0).reciprocal()
    if plan.all_sparse:
        targets, entries = support_logprobs(
            hidden,
            weight,
            support_ids,
            support_offsets,
            target_ids,
            inverse,
            wide_rows=plan.wide_rows,
            check_targets=check_targets,
        )
        return HeadOutput(
            target_logprobs=targets,
            support_logprobs=entries,
            tail_mass=torch.zeros_like(targets),
            is_normalised=plan.is_normalised,
        )
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    targets = hidden.new_full(target_ids.shape, torch.nan, dtype=dtype)
    entries = hidden.new_full(support_ids.shape, torch.nan, dtype=dtype)
    tail_mass = torch.zeros_like(targets)
    if plan.sparse is None and plan.dense is None:
        # a rank without loss tokens still takes part in the backward, and in what it communicates
        targets = targets + hidden[:0].sum() + weight[:0].sum()
    for path in (plan.sparse, plan.dense):
        if path is None:
            continue
        arguments = (
            _take_rows(hidden, path.rows),
            weight,
            _path_ids(path, support_ids, target_ids),
            path.offsets,
            target_ids[path.rows],
            inverse[path.rows],
        )
        if path is plan.dense:
            dense = dense_logprobs(*arguments)
            path_targets, path_entries = dense.targets, dense.entries
            tail_mass = tail_mass.index_copy(0, path.rows, dense.tail.exp())
        else:
            path_targets, path_entries = support_logprobs(
                *arguments, wide_rows=plan.wide_rows, check_targets=check_targets
            )
        targets = targets.index_copy(0, path.rows, path_targets)
        if path.target_places.numel():
            path_entries = path_entries.index_select(0, path.entry_places)
        entries = entries.index_copy(0, path.entries, path_entries)
    return HeadOutput(
        target_logprobs=targets,
        support_logprobs=entries,
        tail_mass=tail_mass,
        is_normalised=plan.is_normalised,
    )


def plan_batch(
    batch: RolloutBatch, config: LossConfig, *, vocab_size: int, weight_dtype: torch.dtype
) -> HeadPlan:
    """Choose the paths of a loader's batch for a loss: only its tokens, by the least that it reads.

    Args:
        batch: one micro-batch, on the CPU.
        config: the loss that will read the scores.
        vocab_size: V.
        weight_dtype: of the output weight.

    Returns:
        The plan, on the CPU.

    Raises:
        ValueError: the batch is not on the CPU.
    """
    # under other estimators the loss refuses draws, whatever becomes of their normaliser
    cancels = config.centering == "sampled" and config.cancels_normaliser
    return plan_head(
        support_offsets=batch.support_offsets,
        support_valid=batch.support_valid,
        support_is_samples=batch.support_is_samples,
        sampler_tail_mass=batch.sampler_tail_mass,
        vocab_size=vocab_size,
        weight_dtype=weight_dtype,
        normaliser="cancels" if cancels else "needed",
        needed=batch.loss_mask,
    )


def score_batch(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    batch: RolloutBatch,
    plan: HeadPlan,
    *,
    loss_weights: Tensor | None = None,  # [N]
    check_targets: bool | None = None,
) -> LossInputs:
    """Score a batch by its plan and join both sides, ready for `rollout.losses.compute_loss`.

    Differentiable with respect to `hidden` and `weight`. Tail masses, and which rows are
    unnormalised, come along, so that no row can be read as another kind than it was done as.

    Args:
        hidden: [N, H], the states at `batch.hidden_index`.
        weight: [V, H], the dtype of `hidden`.
        batch: on the device of `hidden`.
        plan: of this batch, there too.
        loss_weights: [N], see `LossInputs`.
        check_targets: see `rollout.kernels.support_head.support_logprobs`.

    Returns:
        The inputs of the loss.

    Raises:
        ValueError: shapes or dtypes disagree, or a target is missing from its support.
    """
    scores = head_logprobs(
        hidden,
        weight,
        batch.support_ids,
        batch.support_offsets,
        batch.target_ids,
        batch.temperature,
        plan,
        check_targets=check_targets,
    )
    return batch.loss_inputs(
        scores.target_logprobs,
        scores.support_logprobs,
        trainer_tail_mass=scores.tail_mass,
        trainer_is_normalised=scores.is_normalised,
        loss_weights=loss_weights,
    )


def _path_rows(chosen: Tensor, starts: Tensor, counts: Tensor, extra: Tensor) -> PathRows | None:
    """Return the chosen rows as a CSR matrix, with a place for the target in the `extra` ones."""
    rows = chosen.nonzero().squeeze(1)
    if not rows.numel():
        return None
    counts, first = counts[rows], extra[rows].long()
    offsets = torch.zeros(rows.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(counts + first, 0, out=offsets[1:])
    before = counts.cumsum(0) - counts
    within = torch.arange(int(counts.sum())) - before.repeat_interleave(counts)
    has_target = first.nonzero().squeeze(1)
    return PathRows(
        rows=rows,
        offsets=offsets,
        entries=starts[rows].repeat_interleave(counts) + within,
        entry_places=(offsets[:-1] + first).repeat_interleave(counts) + within,
        target_places=offsets[:-1][has_target],
        target_rows=rows[has_target],
    )


class _TakeRows(torch.autograd.Function):
    """Distinct rows of a matrix; its gradient is a copy, where that of an index is a sum."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rows: Tensor) -> Tensor:
        """Return matrix[rows]."""
        ctx.save_for_backward(rows)
        ctx.num_rows = matrix.shape[0]
        return matrix.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient in the rows' places, zeros elsewhere."""
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, grad.shape[1]).index_copy_(0, rows, grad), None


def _take_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return matrix[rows] for distinct rows."""
    taken: Tensor = _TakeRows.apply(matrix, rows)  # type: ignore[no-untyped-call]
    return taken


def _path_ids(path: PathRows, support_ids: Tensor, target_ids: Tensor) -> Tensor:
    """Return the ids of a path's places."""
    num_places = path.entries.shape[0] + path.target_places.shape[0]
    ids = support_ids.new_empty(num_places)
    ids[path.entry_places] = support_ids[path.entries]
    ids[path.target_places] = target_ids[path.target_rows].to(ids.dtype)
    return ids
