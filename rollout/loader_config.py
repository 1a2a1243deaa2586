"""What decides a loader's batches, and what it reports of an epoch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from rollout.advantages import AdvantageRule
from rollout.batch_rows import Untruncated
from rollout.epoch_plan import Remainder
from rollout.errors import ConfigError
from rollout.schema.columns import SCHEMA
from rollout.shard_reader import BASE_COLUMNS, OPTIONAL_COLUMNS

_CHOICES = (
    ("advantage", ("group_mean", "group_normalised", "column")),
    ("untruncated", ("head", "draws")),
    ("remainder", ("drop", "pad", "repeat")),
)
# read only when asked for; they come along in `RolloutBatch.columns`
_EXTRA_COLUMNS = tuple(
    name for name in SCHEMA.names if name not in {*BASE_COLUMNS, *OPTIONAL_COLUMNS}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """What decides the batches; part of the loader's state.

    Raises:
        ConfigError: a value is out of range.
    """

    groups_per_step: int
    """Prompt groups of one global batch, over all ranks."""
    token_budget: int
    """Most tokens (prompt and completion) of a micro-batch; a longer rollout goes alone."""
    entry_budget: int = 2**26
    """Most support entries of a micro-batch; likewise."""
    advantage: AdvantageRule = "group_mean"
    """Reward minus the group's mean; the same over its deviation; or the `advantage` column."""
    untruncated: Untruncated = "head"
    """Whether untruncated rows bring their recorded head or their draws."""
    shuffle: bool = True
    """Whether groups come in a seeded order, another one in each epoch."""
    seed: int = 0
    window_blocks: int = 8
    """Row groups within which prompt groups are mixed, over all ranks."""
    remainder: Remainder = "pad"
    """What becomes of groups that fill no whole step: left out, a short last step that is filled
    with weight zero, or one filled with groups that come a second time."""
    splits: int = 0
    """Canonical splits of a step: global batches are the same for every world size that divides
    them. 0 takes the world size."""
    weights: tuple[float, ...] | None = None
    """Shares of mixed datasets in every step; unset, every rollout comes once an epoch."""
    columns: tuple[str, ...] | None = None
    """Columns to read beyond those that every batch needs; unset, all that training uses."""

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "token_budget", "entry_budget", "window_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name, allowed in _CHOICES:
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}"
                )
        if self.splits < 0 or (self.splits and self.groups_per_step % self.splits):
            raise ConfigError(
                f"groups_per_step is {self.groups_per_step}, expected a multiple of the "
                f"{self.splits} splits: every split brings as many groups"
            )
        if self.weights is not None and not all(
            math.isfinite(weight) and weight > 0 for weight in self.weights
        ):
            raise ConfigError(f"weights are {self.weights}, expected finite numbers above 0")
        known = {*BASE_COLUMNS, *OPTIONAL_COLUMNS, *_EXTRA_COLUMNS}
        unknown = [name for name in self.columns or () if name not in known]
        if unknown:
            raise ConfigError(
                f"columns has {unknown[0]!r}, expected some of "
                f"{', '.join((*OPTIONAL_COLUMNS, *_EXTRA_COLUMNS))}"
            )
        if self.columns is not None and ("support_entries" in self.columns) != (
            "support_offsets" in self.columns
        ):
            raise ConfigError(
                "columns has one of support_entries and support_offsets, expected both or neither"
            )

    @property
    def read_columns(self) -> list[str]:
        """The columns to decode."""
        optional = OPTIONAL_COLUMNS if self.columns is None else self.columns
        return list(dict.fromkeys((*BASE_COLUMNS, *optional)))

    @property
    def batch_columns(self) -> list[str]:
        """The columns that batches carry along by name."""
        return [name for name in self.columns or () if name in _EXTRA_COLUMNS]


@dataclass(slots=True, kw_only=True)
class LoaderReport:
    """What an epoch left out or bent, so that nothing goes unseen; the same on every rank.

    After a resume it counts from there on.
    """

    excluded: Counter[str] = field(default_factory=Counter)
    """Rollouts left out, by reason: `not_selected`, `no_reward`, `no_advantage`, `remainder`."""
    repeated: int = 0
    """Rollouts that come a second time to fill the last step."""
    over_budget: int = 0
    """Rollouts that alone exceed a budget and were given their own micro-batch."""
    incomplete_groups: int = 0
    """Groups with fewer rollouts than were asked for; advantages use the real count."""
    blank_batches: int = 0
    """Micro-batches of weight zero, over all ranks, that keep the ranks in step."""


def check_ranks(config: LoaderConfig, world_size: int) -> None:
    """Refuse splits that ranks can't share evenly.

    Raises:
        ConfigError: naming both numbers.
    """
    if config.splits % world_size:
        raise ConfigError(
            f"splits is {config.splits}, expected a multiple of the world size {world_size}: "
            "the global batch would not be the same; choose splits that every world size divides"
        )
