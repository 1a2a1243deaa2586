"""Numbers to log beside a loss: kept as sums, so that micro-batches and ranks add up exactly."""

# N scored tokens

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)
MAX_RATIO = 1e30  # one wild token must not turn a mean into inf


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossMetrics:
    """Detached sums over the loss tokens of one micro-batch; nothing here costs a sync."""

    num_tokens: Tensor
    """Tokens that the loss mask selects."""
    num_nonfinite: Tensor
    """Of these, excluded: a logprob, advantage, weight or mass no real token can have."""
    num_unsupported: Tensor
    """Of these, excluded: no support of a kind that the loss needs, values otherwise fine."""
    num_masked: Tensor
    """Usable tokens whose policy term the trust region rejects."""
    log_ratio: Tensor
    """[N] log p - log q of the sampled tokens, NaN where unusable or unnormalised."""
    policy_loss: Tensor
    """Part of the loss: the sampled tokens' policy term."""
    centering_loss: Tensor
    """Part of the loss: the centering correction."""
    kl_loss: Tensor
    """Part of the loss: the sampler KL, coefficients included."""
    kl_q_p: Tensor
    """Sum over usable tokens of the estimate of sum_v q_v (log q_v - log p_v)."""
    kl_p_q: Tensor
    """Sum over usable tokens of the estimate of sum_v p_v (log p_v - log q_v)."""
    centering_l1: Tensor
    """Sum over usable tokens of sum_v |centering coefficient of v|."""
    kept_mass: Tensor
    """Sum of the support's full-vocabulary probability under p, where it is known."""
    num_kept_mass: Tensor
    """Tokens whose kept mass is known."""

    @staticmethod
    def merge(parts: Sequence[LossMetrics]) -> LossMetrics:
        """Add micro-batches (or ranks) into one.

        Raises:
            ValueError: there is nothing to merge.
        """
        if not parts:
            raise ValueError("got no metrics to merge, expected at least one micro-batch")
        merged: dict[str, Tensor] = {}
        for name in LossMetrics.__slots__:
            values = [getattr(part, name) for part in parts]
            merged[name] = torch.cat(values) if name == "log_ratio" else torch.stack(values).sum()
        return LossMetrics(**merged)

    def summary(self) -> dict[str, float]:
        """Return means, shares and quantiles as Python numbers (one sync).

        `k3` is the mean of r - 1 - log r, an estimate of KL(q || p). Means over nothing are NaN.
        """
        log_ratio = self.log_ratio.double()
        num_usable = (self.num_tokens - self.num_nonfinite - self.num_unsupported).double()
        ratio = log_ratio.exp().clamp(max=MAX_RATIO)
        k3 = (torch.expm1(log_ratio) - log_ratio).clamp(max=MAX_RATIO)
        values = {
            "tokens": self.num_tokens,
            "nonfinite": self.num_nonfinite,
            "unsupported": self.num_unsupported,
            "masked_share": self.num_masked / num_usable,
            "ratio_mean": ratio.nanmean(),
            "k3": k3.nanmean(),
            "policy_loss": self.policy_loss,
            "centering_loss": self.centering_loss,
            "kl_loss": self.kl_loss,
            "kl_q_p": self.kl_q_p / num_usable,
            "kl_p_q": self.kl_p_q / num_usable,
            "centering_l1": self.centering_l1 / num_usable,
            "kept_mass": self.kept_mass / self.num_kept_mass,
        }
        for quantile, value in zip(QUANTILES, _quantiles(ratio), strict=True):
            values[f"ratio_p{round(100 * quantile):02d}"] = value
        numbers = torch.stack([value.double() for value in values.values()]).tolist()
        return dict(zip(values, numbers, strict=True))


def _quantiles(values: Tensor) -> Tensor:
    """Return `QUANTILES` of [M] values, linearly interpolated, NaN left out; NaN of nothing.

    By hand, since torch.quantile refuses more than 16 M values, and an empty tensor.
    """
    # NaN sorts last; one more stands for an empty tensor
    ordered = torch.cat([values.sort().values, values.new_full((1,), torch.nan)])
    last = (values.isnan().logical_not().sum() - 1).clamp(min=0)
    position = torch.tensor(QUANTILES, dtype=values.dtype).to(values.device, non_blocking=True)
    position = position * last
    below = position.long()
    return torch.lerp(ordered[below], ordered[torch.minimum(below + 1, last)], position - below)
