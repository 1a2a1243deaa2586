"""Importance weights f(p / q) and trust regions, the same for sampled tokens and for candidates.

Everything is tested in log space: a ratio is never formed before it is capped or rejected, since
exp() of a rejected log-ratio above 88 is inf in float32 and inf * 0 is NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollout.loss_types import LossConfig

SLACK_ULPS = 16  # two rounded logprobs may miss an inclusive bound by a few units in the last place


def ratio_in_band(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Return where low <= exp(log_ratio) <= high, both inclusive up to rounding.

    Args:
        log_ratio: any shape.
        low: smallest ratio, 0 for none.
        high: largest ratio.

    Returns:
        bool of the same shape; NaN is outside.
    """
    slack = SLACK_ULPS * torch.finfo(log_ratio.dtype).eps
    log_low = math.log(low) if low > 0.0 else -math.inf
    return (log_ratio >= log_low - slack) & (log_ratio <= math.log(high) + slack)


def probability_gap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return |p - q| as exp(max) * -expm1(min - max), which doesn't cancel for p close to q."""
    larger, smaller = torch.maximum(log_p, log_q), torch.minimum(log_p, log_q)
    return larger.exp() * -torch.expm1(smaller - larger)


def trusted(log_p: Tensor, log_q: Tensor, config: LossConfig) -> Tensor | None:
    """Return where the loss's trust region keeps a token or a candidate.

    Args:
        log_p: trainer logprobs, any shape.
        log_q: sampler logprobs, same shape.
        config: the loss and its bounds.

    Returns:
        bool of the same shape, or None where the loss has no trust region.
    """
    if config.loss == "icepop":
        return ratio_in_band(log_p - log_q, config.ratio_low, config.ratio_high)
    if config.loss == "ipo":
        slack = SLACK_ULPS * torch.finfo(log_p.dtype).eps
        return probability_gap(log_p, log_q) <= config.max_probability_gap + slack
    return None


def log_weight_cap(config: LossConfig) -> float | None:
    """Return the largest log weight of a trusted token, or None where weights are 1."""
    if config.loss == "icepop":
        return math.log(config.ratio_high)
    if config.loss == "ipo" or config.importance == "truncated":
        return math.log(config.ratio_cap)
    return None


def importance_weight(log_p: Tensor, log_q: Tensor, config: LossConfig) -> Tensor:
    """Return f(p / q): 1, or the capped ratio, and 0 outside the trust region.

    Args:
        log_p: trainer logprobs, any shape.
        log_q: sampler logprobs, same shape.
        config: the loss, its bounds and its cap.

    Returns:
        Weights of the same shape, finite for every finite input.
    """
    cap = log_weight_cap(config)
    if cap is None:
        return torch.ones_like(log_p)
    weight = (log_p - log_q).clamp(max=cap).exp()
    keep = trusted(log_p, log_q, config)
    return weight if keep is None else torch.where(keep, weight, torch.zeros_like(weight))


def weighted_mass(log_p: Tensor, log_q: Tensor, config: LossConfig) -> Tensor:
    """Return q f(p / q) without forming the ratio: q, or min(p, cap q), 0 outside the trust region.

    Args:
        log_p: trainer logprobs, any shape.
        log_q: sampler logprobs, same shape.
        config: the loss, its bounds and its cap.

    Returns:
        Coefficients of the same shape, in [0, 1].
    """
    cap = log_weight_cap(config)
    if cap is None:
        return log_q.exp()
    mass = torch.minimum(log_p, log_q + cap).exp()
    keep = trusted(log_p, log_q, config)
    return mass if keep is None else torch.where(keep, mass, torch.zeros_like(mass))


def tail_ratio(sampler_tail: Tensor, trainer_tail: Tensor, floor: float) -> Tensor:
    """Return rho = Q_T / P_T, both tails at least `floor`; 0 where the sampler has no tail.

    The floor is self-limiting: the tail's contribution to the gradient has norm at most
    max(Q_T, floor).
    """
    rho = sampler_tail.clamp(min=floor) / trainer_tail.clamp(min=floor)
    return torch.where(sampler_tail > 0.0, rho, torch.zeros_like(rho))


def tail_coefficient(rho: Tensor, config: LossConfig) -> Tensor:
    """Return alpha = rho f(1 / rho), the tail's coefficient on p: q is modelled as rho p there.

    Args:
        rho: [N] tail ratio, 0 where there is no tail.
        config: the loss, its bounds and its cap; ipo has no such number.

    Returns:
        [N] rho for weight 1, min(1, cap rho) for a truncated ratio, 1 or 0 for a band.
    """
    if config.loss == "icepop":
        # log 0 = -inf gives an infinite 1 / rho, which no band holds
        inside = ratio_in_band(-rho.log(), config.ratio_low, config.ratio_high)
        return inside.to(rho.dtype)
    if config.importance == "truncated":
        capped = (rho * config.ratio_cap).clamp(max=1.0)
        return torch.where(rho > 0.0, capped, torch.zeros_like(rho))
    return rho
