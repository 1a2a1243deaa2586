"""The sums that `rollout inspect` makes over the row groups of a dataset."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import polars as pl

from rollout.report import SupportReport
from rollout.tally import Tally

COLUMNS: Final = (
    "support_kind",
    "support_offsets",
    "tail_mass",
    "finish_reason",
    "num_prompt_tokens",
    "num_tokens",
    "group_size",
    "reward",
)
"""The columns that the sums need."""


@dataclass(kw_only=True, slots=True)
class KindTally:
    """Sums over the rows of one kind of support."""

    rollouts: int = 0
    tokens: int = 0
    sizes: Tally = field(default_factory=Tally)
    tails: int = 0
    tail_sum: float = 0.0
    tail_maximum: float = 0.0
    tails_above: int = 0

    def add(self, rows: pl.DataFrame) -> None:
        """Count the supports of more rows."""
        self.rollouts += len(rows)
        self.tokens += int(rows["num_tokens"].sum())
        listed = rows["support_offsets"].drop_nulls()
        self.sizes.add(listed.list.diff(null_behavior="drop").list.explode().drop_nulls())

    def add_tail(self, rows: pl.DataFrame) -> None:
        """Count the tails of more rows of kind `top`."""
        tail = rows["tail_mass"].drop_nulls().list.explode().drop_nulls().cast(pl.Float64)
        if len(tail) == 0:
            return
        self.tails += len(tail)
        self.tail_sum += float(tail.sum())
        self.tail_maximum = max(self.tail_maximum, float(tail.to_numpy().max()))
        self.tails_above += int((tail > 0.01).sum())

    def report(self, kind: str) -> SupportReport:
        """Return the numbers for people."""
        has_tail = kind == "top" and self.tails > 0
        return SupportReport(
            kind=kind,
            rollouts=self.rollouts,
            tokens=self.tokens,
            sizes=self.sizes.spread(),
            singleton_share=self.sizes.share_of(1),
            tail_mean=self.tail_sum / self.tails if has_tail else None,
            tail_maximum=self.tail_maximum if has_tail else None,
            tail_above_1_percent=self.tails_above / self.tails if has_tail else None,
        )


@dataclass(kw_only=True, slots=True)
class Tallies:
    """Sums over row groups."""

    finish: Counter[str | None] = field(default_factory=Counter)
    prompt_tokens: Tally = field(default_factory=Tally)
    tokens: Tally = field(default_factory=Tally)
    rewards: Tally = field(default_factory=Tally)
    kinds: dict[str, KindTally] = field(default_factory=dict)
    rows: int = 0
    nonfinite_rewards: int = 0
    nulls: int = 0
    """Rollouts without a reward."""
    pieces: list[pl.DataFrame] = field(default_factory=list)
    """prompt_key, group_size and reward of every rollout."""

    def add(self, frame: pl.DataFrame) -> None:
        """Count more rows: the columns `COLUMNS` and `prompt_key`."""
        self.rows += len(frame)
        self.finish.update(frame["finish_reason"].to_list())
        self.prompt_tokens.add(frame["num_prompt_tokens"])
        self.tokens.add(frame["num_tokens"])
        given = frame["reward"].drop_nulls()
        finite = given.filter(given.is_finite())
        self.rewards.add(finite)
        self.nonfinite_rewards += len(given) - len(finite)
        self.nulls += len(frame) - len(given)
        for (kind,), rows in frame.group_by("support_kind"):
            tally = self.kinds.setdefault(str(kind), KindTally())
            tally.add(rows)
            if kind == "top":
                tally.add_tail(rows)
        self.pieces.append(frame.select("prompt_key", "group_size", "reward"))

    def rollouts(self) -> pl.DataFrame | None:
        """Return prompt_key, group_size and reward of every rollout; None without any."""
        return pl.concat(self.pieces) if self.pieces else None
