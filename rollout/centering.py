"""Score centering: subtract the weighted score's mean under the sampler from every token's update.

With s_v = grad log p_v, the sampled update A w_a s_a becomes A (w_a s_a - mu_w), where
mu_w = sum_v q_v w_v s_v. As a loss this adds +A * sum_v c_v log p_v with detached coefficients c:

    exact    c_v = q_v f(p_v / q_v) over the whole kept support
    tail     c_v = q_v f(p_v / q_v) - alpha p_v over the head, q modelled as rho p on the tail,
             alpha = rho f(1 / rho); the sum over the tail is gone since sum_v p_v s_v = 0
    sampled  c_j = f(p_j / q_j) / K over K i.i.d. draws, repeats kept

The trust region is evaluated for each candidate, and the correction also applies to tokens whose
own policy term is rejected: otherwise E_q[w_a s_a - mu_w] is not 0.

Source: arXiv 2609.20807, eq. 9 to 14.
"""

# N scored tokens, E support entries of all rows

from __future__ import annotations

import torch
from torch import Tensor

from rollout.loss_rows import LossRows
from rollout.loss_types import LossConfig
from rollout.trust_region import (
    importance_weight,
    tail_coefficient,
    tail_ratio,
    weighted_mass,
)


@torch.no_grad()
def centering_coefficients(rows: LossRows, config: LossConfig) -> Tensor:
    """Return the detached coefficients c of log p, per entry.

    Args:
        rows: usable tokens and entries.
        config: loss, estimator and floors.

    Returns:
        [E] coefficients, exactly 0 for padding and for entries of unusable rows.
    """
    log_p, log_q = rows.entry_log_p, rows.entry_log_q
    coefficients = weighted_mass(log_p, log_q, config)
    if config.centering == "tail":
        rho = tail_ratio(rows.sampler_tail, rows.trainer_tail, config.tail_floor)
        alpha = tail_coefficient(rho, config)
        coefficients = coefficients - rows.per_entry(alpha) * log_p.exp()
    if config.centering == "sampled":
        # uniform weights: a draw already comes with probability q, so q must not enter again
        uniform = 1.0 / rows.num_entries.clamp(min=1).to(log_p.dtype)
        drawn = importance_weight(log_p, log_q, config) * rows.per_entry(uniform)
        coefficients = torch.where(rows.per_entry(rows.is_samples), drawn, coefficients)
    return torch.where(rows.entry_usable, coefficients, torch.zeros_like(coefficients))


def centering_term(rows: LossRows, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return the correction to add to the loss, and the size of its coefficients.

    Args:
        rows: usable tokens and entries.
        config: loss, estimator and floors.

    Returns:
        The scalar sum over rows of A * weight * sum_v c_v log p_v, not yet normalised, and the
        detached sum of |c|.
    """
    coefficients = centering_coefficients(rows, config)
    correction = (rows.per_entry(rows.scale) * coefficients * rows.entry_log_p).sum()
    return correction, coefficients.abs().sum()
