"""KL between sampler q and trainer p at each scored prefix, in both directions, named by formula.

    q_p   sum_v q_v (log q_v - log p_v)     gradient -sum_v q_v s_v
    p_q   sum_v p_v (log p_v - log q_v)     gradient  sum_v p_v (log p_v - log q_v) s_v

"forward" and "backward" name opposite directions in different papers, so neither word is used here.
Estimators, with r = p / q, s_v = grad log p_v:

    exact    the sums over the whole kept support
    tail     head ids plus the tail as one bin; never above the full KL
    sampled  means over K draws: log q - log p (may be negative), and r log r - r + 1
    token    the sampled token alone: r - 1 - log r, and r log r - r + 1, both >= 0
"""

# N scored tokens, E support entries of all rows

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollout.loss_rows import LossRows
from rollout.loss_types import LossConfig
from rollout.trust_region import tail_ratio


def sampler_kl(rows: LossRows, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return the KL of every token in both directions, differentiable with respect to log p.

    Args:
        rows: usable tokens and entries.
        config: estimator, cap and floor.

    Returns:
        KL(q || p) [N] and KL(p || q) [N], nats, exactly 0 where unusable.
    """
    if config.kl_estimator == "token":
        q_p, p_q = _from_ratio(rows.log_p - rows.log_q, config.ratio_cap)
        return q_p, p_q
    q_p, p_q = _summed(rows, config)
    if config.kl_estimator == "sampled":
        drawn_q_p, drawn_p_q = _drawn(rows, config)
        q_p = torch.where(rows.is_samples, drawn_q_p, q_p)
        p_q = torch.where(rows.is_samples, drawn_p_q, p_q)
    zero = torch.zeros_like(q_p)
    return torch.where(rows.usable, q_p, zero), torch.where(rows.usable, p_q, zero)


def _from_ratio(log_ratio: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return r - 1 - log r and r log r - r + 1, with r capped in value and gradient factor.

    The ratio is capped straight through, so a capped token still has a gradient.
    """
    capped = log_ratio.detach().clamp(max=math.log(cap))
    log_r = capped + log_ratio - log_ratio.detach()
    ratio = log_r.exp()
    return torch.expm1(log_r) - log_r, ratio * log_r - torch.expm1(log_r)


def _summed(rows: LossRows, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return both sums over the entries, with the tail as one more bin under `tail`.

    Values are detached and gradients attached as coefficients on log p: the tail mass of p is
    itself a function of the head, d P_T = -sum_H p_v s_v, and comes without a gradient.
    """
    log_p, log_q = rows.entry_log_p.detach(), rows.entry_log_q
    p, q = log_p.exp(), log_q.exp()
    value_q_p = rows.row_sums(_where(rows.entry_usable, q * (log_q - log_p)))
    value_p_q = rows.row_sums(_where(rows.entry_usable, p * (log_p - log_q)))
    slope_q_p, slope_p_q = -q, p * (log_p - log_q)
    if config.kl_estimator == "tail":
        rho = tail_ratio(rows.sampler_tail, rows.trainer_tail, config.tail_floor)
        has_tail = rows.sampler_tail > 0.0
        log_rho = torch.where(has_tail, rho, torch.ones_like(rho)).log()
        value_q_p = value_q_p + rows.sampler_tail * log_rho
        value_p_q = value_p_q - rows.trainer_tail * log_rho
        slope_q_p = slope_q_p + rows.per_entry(rho) * p
        slope_p_q = slope_p_q + rows.per_entry(log_rho) * p
    return (
        _attach(rows, value_q_p, slope_q_p),
        _attach(rows, value_p_q, slope_p_q),
    )


def _drawn(rows: LossRows, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return both means over a row's draws."""
    log_ratio = rows.entry_log_p - rows.entry_log_q
    uniform = rows.per_entry(1.0 / rows.num_entries.clamp(min=1).to(log_ratio.dtype))
    _, p_q = _from_ratio(log_ratio, config.ratio_cap)
    # rows of other kinds may be far wider than K draws: select before summing
    counted = rows.entry_usable & rows.per_entry(rows.is_samples)
    return (
        rows.row_sums(_where(counted, -log_ratio * uniform)),
        rows.row_sums(_where(counted, p_q * uniform)),
    )


def _attach(rows: LossRows, value: Tensor, slope: Tensor) -> Tensor:
    """Return detached values [N] whose gradient on each entry's log p [E] is the slope."""
    moving = rows.entry_log_p - rows.entry_log_p.detach()
    return value + rows.row_sums(_where(rows.entry_usable, slope) * moving)


def _where(mask: Tensor, values: Tensor) -> Tensor:
    """Return values where the mask holds, else 0."""
    return torch.where(mask, values, torch.zeros_like(values))
