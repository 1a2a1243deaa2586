"""A loss as one kernel, for float32 and narrower values on a GPU.

The same numbers as `rollout.loss_rows`, `rollout.centering` and `rollout.sampler_kl` give one
operation at a time; they are its reference and do float64 and the CPU.
"""

# N scored tokens, E support entries of all rows

from __future__ import annotations

import math
from typing import Literal

import torch

from rollout.kernels.launch import choose_impl
from rollout.kernels.policy_rows import PolicyRows, PolicyRules, policy_rows
from rollout.loss_rows import (
    MAX_LOG_P,
    MAX_LOG_Q,
    MAX_MASS,
    MIN_LOG_P,
    MIN_SAMPLED_LOG_Q,
    working_dtype,
)
from rollout.loss_types import LossConfig, LossInputs
from rollout.trust_region import SLACK_ULPS, log_weight_cap


def can_fuse(inputs: LossInputs) -> bool:
    """Return whether the kernel can do a micro-batch: on a GPU, not in float64."""
    fits = working_dtype(inputs) == torch.float32
    return fits and choose_impl(inputs.trainer_logprobs, None) == "triton"


def fused_rows(inputs: LossInputs, config: LossConfig) -> PolicyRows:
    """Return the sums of a micro-batch.

    Args:
        inputs: one micro-batch that `can_fuse`.
        config: the loss.

    Returns:
        Sums and counts, not yet divided by the denominator.
    """
    return policy_rows(
        inputs.trainer_logprobs,
        inputs.trainer_support_logprobs,
        log_q=inputs.sampler_logprobs,
        entry_log_q=inputs.sampler_support_logprobs,
        offsets=inputs.support_offsets,
        advantages=inputs.advantages,
        mask=inputs.loss_mask,
        valid=inputs.support_valid,
        is_samples=inputs.support_is_samples,
        sampler_tail=inputs.sampler_tail_mass,
        trainer_tail=inputs.trainer_tail_mass,
        is_normalised=inputs.trainer_is_normalised,
        weights=inputs.loss_weights,
        rules=policy_rules(config),
    )


def policy_rules(config: LossConfig) -> PolicyRules:
    """Return a config as the numbers that the kernel takes."""
    slack = SLACK_ULPS * torch.finfo(torch.float32).eps
    cap = log_weight_cap(config)
    loss: Literal["plain", "truncated", "icepop", "ipo"] = "plain"
    if config.loss != "reinforce":
        loss = config.loss
    elif config.importance == "truncated":
        loss = "truncated"
    return PolicyRules(
        loss=loss,
        centering=config.centering,
        kl=config.kl_estimator if config.uses_kl else "off",
        use_exact="exact" in config.support_kinds,
        use_head="head" in config.support_kinds,
        use_draws="draws" in config.support_kinds,
        cancels=config.cancels_normaliser,
        log_low=(math.log(config.ratio_low) if config.ratio_low > 0.0 else -math.inf) - slack,
        log_high=math.log(config.ratio_high) + slack,
        gap=config.max_probability_gap + slack,
        log_weight_cap=0.0 if cap is None else cap,
        log_kl_cap=math.log(config.ratio_cap),
        tail_floor=config.tail_floor,
        advantage_scale=config.advantage_scale,
        kl_q_p=config.kl_q_p,
        kl_p_q=config.kl_p_q,
        min_log_p=MIN_LOG_P,
        max_log_p=MAX_LOG_P if config.reads_ratio else torch.finfo(torch.float32).max,
        min_log_q=MIN_SAMPLED_LOG_Q,
        max_log_q=MAX_LOG_Q,
        max_mass=MAX_MASS,
    )
