"""Policy losses over recorded rollouts: ipo, icepop, reinforce, with centering and sampler KL.

With A the advantage, r = p / q the importance ratio of the sampled token a, both over the recorded
support and at the recorded temperature, each token adds

    reinforce   -A sg(w) log p_a      w = 1, or min(r, cap)
    icepop      -A r                  where ratio_low <= r <= ratio_high, else 0
    ipo         -A min(r, cap)        where |p - q| <= max_probability_gap, else 0 (capped with
                                      the gradient straight through)

plus A sum_v c_v log p_v (`rollout.centering`) and the KL terms (`rollout.sampler_kl`). The sum over
the micro-batch is divided by the denominator of the whole global batch, so that how it is cut into
micro-batches changes nothing; rejected tokens don't shrink the denominator.

Sources: icepop arXiv 2510.18855; ipo as in prime-rl, September 2026.
"""

# N scored tokens, E support entries of all rows

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollout.centering import centering_term
from rollout.loss_checks import check_inputs
from rollout.loss_fused import can_fuse, fused_rows
from rollout.loss_metrics import LossMetrics
from rollout.loss_rows import LossRows, select_rows
from rollout.loss_types import LossConfig, LossInputs, LossOutputs
from rollout.sampler_kl import sampler_kl
from rollout.trust_region import importance_weight, log_weight_cap, trusted

__all__ = ["LossConfig", "LossInputs", "LossMetrics", "LossOutputs", "compute_loss"]


def compute_loss(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Compute a loss over the scored tokens of one micro-batch.

    On a GPU it is one kernel, which waits for nothing and leaves the gradient by support entries
    unset if no term reads them; `check_values` waits before it.

    Args:
        inputs: N scored tokens and E support entries.
        config: which loss, centering and KL.

    Returns:
        The loss (a scalar in float32, or float64 for float64 inputs) and its metrics.

    Raises:
        ValueError: with `check_values`, supports are missing their sampled id, are of a kind that
            the config can't use, or don't fit their offsets.
    """
    if config.check_values:
        check_inputs(inputs, config)
    if can_fuse(inputs):
        return _fused_loss(inputs, config)
    rows = select_rows(inputs, config)
    keep = trusted(rows.log_p.detach(), rows.log_q, config)
    keep = rows.usable if keep is None else rows.usable & keep
    token_losses = _POLICY_TERMS[config.loss](rows, config)
    policy = torch.where(keep, rows.scale * token_losses, torch.zeros_like(token_losses)).sum()

    # an empty sum rather than None keeps every output in the graph, whatever the settings
    centering = kl = rows.entry_log_p[:0].sum()
    centering_l1 = kl_q_p = kl_p_q = centering.detach()
    if config.centering != "off":
        centering, centering_l1 = centering_term(rows, config)
    if config.uses_kl:
        q_p, p_q = sampler_kl(rows, config)
        kl = (rows.weight * (config.kl_q_p * q_p + config.kl_p_q * p_q)).sum()
        kl_q_p, kl_p_q = q_p.detach().sum(), p_q.detach().sum()

    denominator = _denominator(inputs, policy.dtype)
    parts = [term / denominator for term in (policy, centering, kl)]
    metrics = LossMetrics(
        num_tokens=rows.scored.sum(),
        num_nonfinite=rows.nonfinite.sum(),
        num_unsupported=rows.unsupported.sum(),
        num_masked=(rows.usable & ~keep).sum(),
        log_ratio=_log_ratio(rows),
        policy_loss=parts[0].detach(),
        centering_loss=parts[1].detach(),
        kl_loss=parts[2].detach(),
        kl_q_p=kl_q_p,
        kl_p_q=kl_p_q,
        centering_l1=centering_l1,
        **_kept_mass(inputs, rows.usable, rows.weight.dtype),
    )
    return LossOutputs(loss=parts[0] + parts[1] + parts[2], metrics=metrics)


def _fused_loss(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Do `compute_loss` by one kernel."""
    rows = fused_rows(inputs, config)
    denominator = _denominator(inputs, torch.float32)
    policy, centering, kl = (rows.sums[:3] / denominator).unbind()
    kl_q_p, kl_p_q, centering_l1 = rows.sums[3:].unbind()
    num_tokens, num_nonfinite, num_unsupported, num_masked = rows.counts.unbind()
    metrics = LossMetrics(
        num_tokens=num_tokens,
        num_nonfinite=num_nonfinite,
        num_unsupported=num_unsupported,
        num_masked=num_masked,
        log_ratio=rows.log_ratio,
        policy_loss=policy,
        centering_loss=centering,
        kl_loss=kl,
        kl_q_p=kl_q_p,
        kl_p_q=kl_p_q,
        centering_l1=centering_l1,
        **_kept_mass(inputs, rows.usable, torch.float32),
    )
    return LossOutputs(loss=rows.total / denominator, metrics=metrics)


def _denominator(inputs: LossInputs, dtype: torch.dtype) -> Tensor | float:
    """Return the global denominator; a float64 scalar would widen the loss."""
    denominator = inputs.global_denominator
    return denominator.to(dtype) if isinstance(denominator, Tensor) else denominator


def _reinforce(rows: LossRows, config: LossConfig) -> Tensor:
    """Return -sg(w) log p [N]."""
    weight = importance_weight(rows.log_p.detach(), rows.log_q, config)
    return -weight * rows.log_p


def _ratio(rows: LossRows, config: LossConfig) -> Tensor:
    """Return -min(r, cap) [N], the gradient straight through the cap."""
    cap = log_weight_cap(config)
    log_ratio = rows.log_p - rows.log_q
    capped = log_ratio.detach().clamp(max=cap)
    return -(capped + log_ratio - log_ratio.detach()).exp()


_POLICY_TERMS: dict[str, Callable[[LossRows, LossConfig], Tensor]] = {
    "ipo": _ratio,
    "icepop": _ratio,
    "reinforce": _reinforce,
}


def _log_ratio(rows: LossRows) -> Tensor:
    """Return detached log p - log q [N], NaN where there is no ratio."""
    log_ratio = (rows.log_p - rows.log_q).detach()
    return torch.where(rows.normalised, log_ratio, torch.full_like(log_ratio, torch.nan))


def _kept_mass(inputs: LossInputs, usable: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the sum and the count of the kept masses that are known."""
    if inputs.kept_mass is None:
        return {
            "kept_mass": torch.zeros((), dtype=dtype, device=usable.device),
            "num_kept_mass": torch.zeros((), dtype=torch.int64, device=usable.device),
        }
    known = usable
    if inputs.kept_mass_known is not None:
        known = known & inputs.kept_mass_known
    mass = inputs.kept_mass.detach().to(dtype)
    return {
        "kept_mass": torch.where(known, mass, torch.zeros_like(mass)).sum(),
        "num_kept_mass": known.sum(),
    }
