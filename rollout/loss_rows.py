"""Which tokens and entries a loss can use, chosen before any exponential is taken.

An impossible row is left out by selection and counted: its values are replaced by safe ones
(log p = log q = 0) first, so that neither the loss nor a gradient ever sees them. Multiplying by a
zero mask instead would give 0 * inf = NaN.
"""

# N scored tokens, E support entries of all rows

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.kernels.support_rows import entry_rows
from rollout.loss_types import LossConfig, LossInputs

# e^-1000 is never drawn: below it stands a sentinel such as -9999, which exp() would turn into 0
MIN_SAMPLED_LOG_Q = -1000.0
# a mask value such as -1e9 or -1e30; a real logit over the smallest temperature stays far above
MIN_LOG_P = -1e6
# what rounding may add to a log-softmax of 0; p may come from bf16 logits
MAX_LOG_Q = 1e-3
MAX_LOG_P = 0.1
MAX_MASS = 1.0 + 1e-3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossRows:
    """Inputs in one working dtype (float32 or float64), safe where unusable."""

    usable: Tensor
    """[N] bool, tokens that count in the loss."""
    normalised: Tensor
    """[N] bool, usable tokens whose log p is normalised."""
    scored: Tensor
    """[N] bool, the loss mask."""
    nonfinite: Tensor
    """[N] bool, scored tokens with an impossible value."""
    unsupported: Tensor
    """[N] bool, scored tokens without a support that the loss can use, values otherwise fine."""
    log_p: Tensor
    """[N] differentiable, 0 where unusable."""
    log_q: Tensor
    """[N] 0 where unusable."""
    scale: Tensor
    """[N] advantage times advantage_scale times weight, 0 where unusable."""
    weight: Tensor
    """[N] loss weight, 0 where unusable."""
    entry_row: Tensor
    """[E] int64, the row of each entry."""
    entry_usable: Tensor
    """[E] bool, entries of usable rows that are no padding."""
    entry_log_p: Tensor
    """[E] differentiable, 0 where unusable."""
    entry_log_q: Tensor
    """[E] 0 where unusable."""
    is_samples: Tensor
    """[N] bool, rows whose entries are draws."""
    num_entries: Tensor
    """[N] int64, entries of each row that are no padding."""
    sampler_tail: Tensor
    """[N] probability outside the entries under q, 0 where unusable."""
    trainer_tail: Tensor
    """[N] the same under p, 0 where unusable or not given."""

    def per_entry(self, values: Tensor) -> Tensor:
        """Return a value per row [N] as a value per entry [E]."""
        return values[self.entry_row]

    def row_sums(self, values: Tensor) -> Tensor:
        """Return sums [N] of values per entry [E]; differentiable."""
        zeros = values.new_zeros(self.usable.shape[0])
        return zeros.index_add(0, self.entry_row, values)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Entries:
    """The entries that the config's terms read, or none of them where they read none."""

    row: Tensor
    """[E] int64."""
    log_p: Tensor
    """[E] differentiable."""
    log_q: Tensor
    """[E]."""
    real: Tensor
    """[E] bool, False for padding."""
    num_real: Tensor
    """[N] int64."""
    num_bad: Tensor
    """[N] int64, entries with an impossible value."""


def select_rows(inputs: LossInputs, config: LossConfig) -> LossRows:
    """Sort out usable tokens and entries.

    Args:
        inputs: one micro-batch.
        config: says which kinds of support every term needs.

    Returns:
        The working view of the inputs.
    """
    dtype = working_dtype(inputs)
    log_p, log_q = inputs.trainer_logprobs.to(dtype), inputs.sampler_logprobs.to(dtype)
    weight = torch.ones_like(log_q) if inputs.loss_weights is None else inputs.loss_weights
    trainer_tail = torch.zeros_like(log_q)
    if inputs.trainer_tail_mass is not None:
        trainer_tail = inputs.trainer_tail_mass.detach().to(dtype)
    sampler_tail = inputs.sampler_tail_mass.to(dtype)
    max_log_p = MAX_LOG_P if config.reads_ratio else torch.finfo(dtype).max

    kinds = support_kinds(inputs)
    entries = _read_entries(inputs, config, dtype, max_log_p)
    possible = (
        _in_range(log_p, MIN_LOG_P, max_log_p)
        & _in_range(log_q, MIN_SAMPLED_LOG_Q, MAX_LOG_Q)
        & torch.isfinite(inputs.advantages)
        & torch.isfinite(weight)
    )
    supported = torch.ones_like(possible)
    if config.support_kinds:
        good_tails = is_mass(sampler_tail) & (is_mass(trainer_tail) | ~kinds["head"])
        good_support = (entries.num_bad == 0) & (good_tails | kinds["draws"])
        possible &= ~inputs.support_valid | good_support
        supported = (entries.num_real > 0) & any_of(kinds, config.support_kinds)
    normalised = torch.ones_like(possible)
    if inputs.trainer_is_normalised is not None:
        normalised = inputs.trainer_is_normalised
        if not config.cancels_normaliser:
            supported = supported & normalised

    usable = inputs.loss_mask & possible & supported
    entry_usable = entries.real & usable[entries.row]
    weight = _select(usable, weight.to(dtype))
    advantage = _select(usable, inputs.advantages.to(dtype) * config.advantage_scale)
    return LossRows(
        usable=usable,
        normalised=usable & normalised,
        scored=inputs.loss_mask,
        nonfinite=inputs.loss_mask & ~possible,
        unsupported=inputs.loss_mask & possible & ~supported,
        log_p=_select(usable, log_p),
        log_q=_select(usable, log_q),
        scale=advantage * weight,
        weight=weight,
        entry_row=entries.row,
        entry_usable=entry_usable,
        entry_log_p=_select(entry_usable, entries.log_p),
        entry_log_q=_select(entry_usable, entries.log_q),
        is_samples=inputs.support_is_samples & inputs.support_valid,
        num_entries=entries.num_real,
        sampler_tail=_select(usable & kinds["head"], sampler_tail),
        trainer_tail=_select(usable & kinds["head"], trainer_tail),
    )


def working_dtype(inputs: LossInputs) -> torch.dtype:
    """Return float64 where any logprob is, else float32: losses need more range than half."""
    logprobs = (
        inputs.trainer_logprobs,
        inputs.sampler_logprobs,
        inputs.trainer_support_logprobs,
        inputs.sampler_support_logprobs,
    )
    wide = any(values.dtype == torch.float64 for values in logprobs)
    return torch.float64 if wide else torch.float32


def entry_rows_of(inputs: LossInputs) -> Tensor:
    """Return the row of every entry [E], without waiting for the device."""
    return entry_rows(inputs.support_offsets.long(), inputs.trainer_support_logprobs.shape[0])


def _read_entries(
    inputs: LossInputs, config: LossConfig, dtype: torch.dtype, max_log_p: float
) -> _Entries:
    """Return the entries with what is wrong with them."""
    log_p, log_q = inputs.trainer_support_logprobs, inputs.sampler_support_logprobs
    zeros = torch.zeros_like(inputs.support_offsets[1:], dtype=torch.int64)
    if config.support_kinds:
        row = entry_rows_of(inputs)
    else:
        # of no use to any term: an empty slice keeps them in the graph and costs nothing
        log_p, log_q, row = log_p[:0], log_q[:0], zeros[:0]
    # below the floor an entry has no weight at all in float32, so it is padding like -inf
    real = ~(log_q < MIN_SAMPLED_LOG_Q)
    bad = real & ~((log_q <= MAX_LOG_Q) & _in_range(log_p, MIN_LOG_P, max_log_p))
    return _Entries(
        row=row,
        log_p=log_p.to(dtype),
        log_q=log_q.to(dtype),
        real=real,
        num_real=zeros.index_add(0, row, real.long()),
        num_bad=zeros.index_add(0, row, bad.long()),
    )


def _select(mask: Tensor, values: Tensor) -> Tensor:
    """Return values where the mask holds, else 0; the gradient elsewhere is exactly 0."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _in_range(values: Tensor, low: float, high: float) -> Tensor:
    """Return where detached values lie in [low, high]; NaN and infinities don't."""
    return (values.detach() >= low) & (values.detach() <= high)


def is_mass(values: Tensor) -> Tensor:
    """Return where values are probabilities, give or take rounding."""
    return _in_range(values, 0.0, MAX_MASS)


def support_kinds(inputs: LossInputs) -> dict[str, Tensor]:
    """Return, per kind of support, the rows [N] that have it; a NaN tail mass counts as a head."""
    entries = inputs.support_valid & ~inputs.support_is_samples
    no_tail = inputs.sampler_tail_mass == 0.0
    return {
        "exact": entries & no_tail,
        "head": entries & ~no_tail,
        "draws": inputs.support_valid & inputs.support_is_samples,
    }


def any_of(kinds: dict[str, Tensor], names: frozenset[str]) -> Tensor:
    """Return the rows [N] whose kind of support is among the names."""
    result = torch.zeros_like(kinds["exact"])
    for name in sorted(names):
        result |= kinds[name]
    return result
