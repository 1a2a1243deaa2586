"""The terms of a policy loss over ragged supports, with their gradients, in one pass.

As single operations icepop with exact centering walks over the entries 35 times forward, with 268
bytes of traffic for each of them. Here one program does a row: it decides whether the row is
usable, sums its terms, and writes the derivative of their sum by every log-probability, so that the
backward is one multiplication. Nothing waits for the device.

The formulas are those of `rollout.losses`, `rollout.centering` and `rollout.sampler_kl`, in plain
torch, which are the reference: this is their value and gradient in float32. Impossible values are
left out by selection before any exponential is taken.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from rollout.kernels.head_config import row_blocks
from rollout.kernels.policy_kernel import policy_rows_kernel

# N rows, E entries of all rows


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRules:
    """A loss as numbers; logs of bounds include what rounding may add to them."""

    loss: Literal["plain", "truncated", "icepop", "ipo"]
    """Plain and truncated are reinforce by its two weights."""
    centering: Literal["off", "exact", "tail", "sampled"]
    kl: Literal["off", "exact", "tail", "sampled", "token"]
    use_exact: bool
    """Whether exact supports serve every term; entries are read if any kind does."""
    use_head: bool
    use_draws: bool
    cancels: bool
    """Whether rows without a normaliser serve too."""
    log_low: float
    log_high: float
    """Of icepop's band."""
    gap: float
    """Of ipo, between probabilities."""
    log_weight_cap: float
    log_kl_cap: float
    tail_floor: float
    advantage_scale: float
    kl_q_p: float
    kl_p_q: float
    min_log_p: float
    max_log_p: float
    min_log_q: float
    max_log_q: float
    max_mass: float
    """Of the values that are possible."""


class PolicyRows(NamedTuple):
    """What `policy_rows` returns."""

    total: torch.Tensor
    """Scalar, differentiable: the sum of all terms."""
    sums: torch.Tensor
    """[6] sums over rows: policy, centering and KL terms, KL(q || p), KL(p || q), and the absolute
    centering coefficients."""
    counts: torch.Tensor
    """[4] int64 rows: scored, impossible, unsupported, and rejected by the trust region."""
    log_ratio: torch.Tensor
    """[N] log p - log q, NaN where unusable or unnormalised."""
    usable: torch.Tensor
    """[N] bool."""


def policy_rows(
    log_p: torch.Tensor,  # [N]
    entry_log_p: torch.Tensor,  # [E]
    *,
    log_q: torch.Tensor,  # [N]
    entry_log_q: torch.Tensor,  # [E]
    offsets: torch.Tensor,  # [N + 1]
    advantages: torch.Tensor,  # [N]
    mask: torch.Tensor,  # [N]
    valid: torch.Tensor,  # [N]
    is_samples: torch.Tensor,  # [N]
    sampler_tail: torch.Tensor,  # [N]
    trainer_tail: torch.Tensor | None,  # [N]
    is_normalised: torch.Tensor | None,  # [N]
    weights: torch.Tensor | None,  # [N]
    rules: PolicyRules,
) -> PolicyRows:
    """Return the sums of a loss over the scored rows of a batch.

    Differentiable with respect to `log_p` and `entry_log_p`. The fields mean what those of
    `rollout.loss_types.LossInputs` do.

    Args:
        log_p: [N] float.
        entry_log_p: [E] float.
        log_q: [N] float.
        entry_log_q: [E] float.
        offsets: [N + 1] int64.
        advantages: [N] float.
        mask: [N] bool.
        valid: [N] bool.
        is_samples: [N] bool.
        sampler_tail: [N] float.
        trainer_tail: [N] float, or None for 0.
        is_normalised: [N] bool, or None for True.
        weights: [N] float, or None for 1.
        rules: the loss.

    Returns:
        Sums, counts and log ratios; without a gradient by entries that no term reads.
    """
    rows = {
        "entry_log_q": entry_log_q,
        "log_q": log_q,
        "offsets": offsets,
        "advantages": advantages,
        "mask": mask,
        "valid": valid,
        "is_samples": is_samples,
        "sampler_tail": sampler_tail,
        "trainer_tail": torch.zeros_like(log_q) if trainer_tail is None else trainer_tail,
        "is_normalised": torch.ones_like(mask) if is_normalised is None else is_normalised,
        "weights": torch.ones_like(log_q) if weights is None else weights,
    }
    result: tuple[torch.Tensor, ...] = _PolicyRows.apply(log_p, entry_log_p, rows, rules)
    return PolicyRows(*result)


class _PolicyRows(torch.autograd.Function):
    """The kernel and the multiplication that is its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        log_p: torch.Tensor,
        entry_log_p: torch.Tensor,
        rows: dict[str, torch.Tensor],
        rules: PolicyRules,
    ) -> tuple[torch.Tensor, ...]:
        """Compute the terms, and keep the derivatives of their sum."""
        num_rows, num_entries = log_p.shape[0], entry_log_p.shape[0]
        numbers = asdict(rules)
        flags = {
            "LOSS": numbers.pop("loss"),
            "CENTERING": numbers.pop("centering"),
            "KL": numbers.pop("kl"),
            "USE_EXACT": numbers.pop("use_exact"),
            "USE_HEAD": numbers.pop("use_head"),
            "USE_DRAWS": numbers.pop("use_draws"),
            "CANCELS": numbers.pop("cancels"),
        }
        reads_entries = rules.use_exact or rules.use_head or rules.use_draws
        terms = torch.empty(6, num_rows, dtype=torch.float32, device=log_p.device)
        counts = torch.empty(4, num_rows, dtype=torch.int32, device=log_p.device)
        log_ratio, grads = torch.empty_like(terms[0]), torch.empty_like(terms[0])
        usable = torch.empty(num_rows, dtype=torch.int8, device=log_p.device)
        entry_grads = terms.new_empty(num_entries if reads_entries else 0)
        if num_rows:
            policy_rows_kernel[(num_rows,)](
                log_p.contiguous(),
                entry_log_p.contiguous(),
                *(_bytes(tensor) for tensor in rows.values()),
                terms,
                counts,
                log_ratio,
                usable,
                grads,
                entry_grads,
                num_rows,
                **numbers,
                **flags,
                **row_blocks(num_rows, num_entries),
            )
        ctx.save_for_backward(grads, entry_grads)
        ctx.dtypes = log_p.dtype, entry_log_p.dtype
        ctx.reads_entries = reads_entries
        sums = terms.sum(1)
        results = sums, counts.sum(1), log_ratio, usable.view(torch.bool)
        ctx.mark_non_differentiable(*results)
        ctx.set_materialize_grads(False)
        return sums[:3].sum(), *results

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_total: torch.Tensor | None, *_: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Scale the derivatives; None for entries that no term reads."""
        if grad_total is None:
            return None, None, None, None
        grads, entry_grads = ctx.saved_tensors
        by_entry: torch.Tensor | None = None
        if ctx.reads_entries and ctx.needs_input_grad[1]:
            by_entry = (entry_grads * grad_total).to(ctx.dtypes[1])
        return (grads * grad_total).to(ctx.dtypes[0]), by_entry, None, None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor, booleans as bytes."""
    tensor = tensor.contiguous()
    return tensor.view(torch.int8) if tensor.dtype == torch.bool else tensor
