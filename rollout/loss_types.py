"""What a loss takes, how it is set, and what it gives back.

Everything is ragged: N scored tokens, and E support entries in CSR form, those of row i in
offsets[i]:offsets[i + 1].
"""

# N scored tokens, E support entries of all rows

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.loss_metrics import LossMetrics

LossName = Literal["ipo", "icepop", "reinforce"]
Importance = Literal["none", "truncated"]
Centering = Literal["off", "exact", "tail", "sampled"]
KlEstimator = Literal["exact", "tail", "sampled", "token"]

_INTEGER_FIELDS = ("support_offsets", "target_ids", "support_ids")
_BOOL_FIELDS = (
    "loss_mask",
    "support_valid",
    "support_is_samples",
    "trainer_is_normalised",
    "kept_mass_known",
)
_ENTRY_FIELDS = ("trainer_support_logprobs", "sampler_support_logprobs", "support_ids")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossInputs:
    """The tokens of one micro-batch: both sides' logprobs, at one temperature, over one support.

    A row's support is of one of three kinds: `exact` (valid, not samples, sampler tail mass 0),
    `head` (valid, not samples, tail mass above 0) or `draws` (valid, samples). Validity is
    `support_valid`, never a value: an entry of logprob 0.0 is legal.

    Raises:
        ValueError: shapes, dtypes or devices disagree.
    """

    trainer_logprobs: Tensor
    """[N] log p of the sampled token, nats, differentiable; over the support where it is exact."""
    sampler_logprobs: Tensor
    """[N] log q of the sampled token, nats, as recorded."""
    advantages: Tensor
    """[N] float."""
    loss_mask: Tensor
    """[N] bool, True for a token that the loss reads."""
    temperature: Tensor
    """[N] the sampling temperature at which both sides are taken; 0 for a greedy row."""
    support_offsets: Tensor
    """[N + 1] int64 row pointers into the entries, starting at 0."""
    trainer_support_logprobs: Tensor
    """[E] log p of each entry, nats, differentiable."""
    sampler_support_logprobs: Tensor
    """[E] log q of each entry, nats; -inf marks an entry that is padding."""
    support_valid: Tensor
    """[N] bool, whether the row has a support at all."""
    support_is_samples: Tensor
    """[N] bool, whether the entries are i.i.d. draws from q, repeats kept."""
    sampler_tail_mass: Tensor
    """[N] probability under q outside the entries; 0 for an exact support."""
    trainer_tail_mass: Tensor | None = None
    """[N] probability under p outside the entries, from a log-sum-exp; needed by `tail`."""
    global_denominator: Tensor | float
    """Loss tokens (or their weights) of the whole global batch, the same on every micro-batch."""
    loss_weights: Tensor | None = None
    """[N] weights on every term of a token; None is all ones."""
    target_ids: Tensor | None = None
    """[N] the sampled ids; with `support_ids`, lets the loss check that they are supported."""
    support_ids: Tensor | None = None
    """[E] the ids of the entries."""
    trainer_is_normalised: Tensor | None = None
    """[N] bool, False where the trainer's values are logits / T; None is all True."""
    kept_mass: Tensor | None = None
    """[N] full-vocabulary probability under p of the support, for the metrics only."""
    kept_mass_known: Tensor | None = None
    """[N] bool, where `kept_mass` was computed; None is everywhere that it is given."""

    def __post_init__(self) -> None:
        num_tokens = self.trainer_logprobs.shape[0] if self.trainer_logprobs.ndim == 1 else -1
        num_entries = self.trainer_support_logprobs.numel()
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or field.name == "global_denominator":
                continue
            expected = num_entries if field.name in _ENTRY_FIELDS else num_tokens
            expected += field.name == "support_offsets"
            _check_tensor(field.name, value, expected, self.trainer_logprobs.device)
        if not isinstance(self.global_denominator, Tensor) and not self.global_denominator > 0:
            raise ValueError(
                f"global_denominator is {self.global_denominator}, expected a positive number: "
                "the loss tokens of the whole global batch"
            )


def _check_tensor(name: str, value: Tensor, expected: int, device: torch.device) -> None:
    """Raise ValueError unless the field is 1-D, of the expected length, dtype family and device."""
    if value.shape != (expected,):
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected ({expected},)")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, expected {device} like trainer_logprobs")
    if name in _BOOL_FIELDS:
        right, family = value.dtype == torch.bool, "bool"
    elif name in _INTEGER_FIELDS:
        right, family = value.dtype in (torch.int32, torch.int64), "int32 or int64"
    else:
        right, family = value.dtype.is_floating_point, "a float dtype"
    if not right:
        raise ValueError(f"{name} is {value.dtype}, expected {family}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Settings of a loss, checked when they are made.

    Raises:
        ConfigError: a value is out of range, or the combination can't be computed.
    """

    loss: LossName
    """Which loss: see `rollout.losses.compute_loss`."""
    advantage_scale: float = 1.0
    """Factor on every advantage."""
    ratio_low: float = 0.2
    """icepop: smallest importance ratio kept, inclusive."""
    ratio_high: float = 5.0
    """icepop: largest importance ratio kept, inclusive."""
    max_probability_gap: float = 0.3
    """ipo: largest |p - q| kept, inclusive."""
    importance: Importance = "none"
    """reinforce: weight 1 (`none`) or min(ratio, ratio_cap) (`truncated`)."""
    ratio_cap: float = 1e4
    """Cap on the ratio: of ipo, of `truncated` reinforce, and of sampled KL terms."""
    centering: Centering = "off"
    """Score centering: over an exact support, head + modelled tail, or K draws."""
    tail_floor: float = 1e-6
    """Smallest tail mass that either side's tail is taken to have, where the sampler has a tail."""
    kl_q_p: float = 0.0
    """Coefficient of sum_v q_v (log q_v - log p_v), q the sampler."""
    kl_p_q: float = 0.0
    """Coefficient of sum_v p_v (log p_v - log q_v), q the sampler."""
    kl_estimator: KlEstimator = "exact"
    """KL over the exact support, head + tail as one bin, K draws, or the sampled token alone."""
    check_values: bool = True
    """Raise on misaligned data; costs two device-to-host syncs a call."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("loss", LossName),
            ("importance", Importance),
            ("centering", Centering),
            ("kl_estimator", KlEstimator),
        ):
            choices = get_args(allowed)
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, expected one of {', '.join(choices)}"
                )
        if not 0.0 <= self.ratio_low < self.ratio_high < math.inf:
            raise ConfigError(
                f"ratio_low is {self.ratio_low} and ratio_high is {self.ratio_high}, "
                "expected 0 <= ratio_low < ratio_high < inf"
            )
        if not self.max_probability_gap > 0.0:
            raise ConfigError(
                f"max_probability_gap is {self.max_probability_gap}, expected above 0"
            )
        if not self.ratio_cap > 0.0:
            raise ConfigError(f"ratio_cap is {self.ratio_cap}, expected above 0")
        if not 0.0 < self.tail_floor < 1.0:
            raise ConfigError(f"tail_floor is {self.tail_floor}, expected in (0, 1)")
        if self.kl_q_p < 0.0 or self.kl_p_q < 0.0:
            raise ConfigError(
                f"kl_q_p is {self.kl_q_p} and kl_p_q is {self.kl_p_q}, expected 0 or more"
            )
        if self.importance != "none" and self.loss != "reinforce":
            raise ConfigError(
                f"importance is {self.importance!r} with loss {self.loss!r}, expected it with "
                "reinforce only: ipo and icepop carry their own weight"
            )
        if self.loss == "ipo" and self.centering == "tail":
            raise ConfigError(
                "ipo can't take centering 'tail': its rule |p - q| <= max_probability_gap differs "
                "from id to id inside the tail, so one coefficient can't stand for it; "
                "use 'exact' or 'sampled', or icepop or reinforce"
            )

    @property
    def uses_kl(self) -> bool:
        """Whether any sampler KL term has a coefficient."""
        return self.kl_q_p > 0.0 or self.kl_p_q > 0.0

    @property
    def support_kinds(self) -> frozenset[str]:
        """Kinds of support that every term can use (`exact`, `head`, `draws`); empty: none needed.

        An exact support serves every estimator: a tail of mass 0 or an average over draws would
        only approximate what it gives exactly.
        """
        kinds = {
            "exact": frozenset({"exact"}),
            "tail": frozenset({"exact", "head"}),
            "sampled": frozenset({"exact", "draws"}),
        }
        wanted = []
        if self.centering != "off":
            wanted.append(kinds[self.centering])
        if self.uses_kl and self.kl_estimator != "token":
            wanted.append(kinds[self.kl_estimator])
        return frozenset.intersection(*wanted) if wanted else frozenset()

    @property
    def cancels_normaliser(self) -> bool:
        """Whether coefficients on log p add up to 0, so that logits / T serve as well as log p."""
        return not self.reads_ratio and self.centering in ("exact", "sampled")

    @property
    def reads_ratio(self) -> bool:
        """Whether any term reads p / q, and so a normalised log p."""
        plain = self.loss == "reinforce" and self.importance == "none"
        return not plain or self.uses_kl or self.centering == "tail"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossOutputs:
    """A loss to differentiate and what to log beside it."""

    loss: Tensor
    """Scalar: the sum over this micro-batch over the global denominator."""
    metrics: LossMetrics
    """Detached sums that add up over micro-batches."""
