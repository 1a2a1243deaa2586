"""Exact distributions of many numbers, kept as counts of the distinct ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How a set of numbers is spread.

    A percentile is the smallest of the numbers that is not below at least that share of them, so
    it is always one that occurs.
    """

    count: int
    mean: float
    minimum: float
    p10: float
    median: float
    p90: float
    p99: float
    maximum: float


class Tally:
    """Counts numbers; memory grows with the distinct ones only."""

    def __init__(self) -> None:
        self._counts: list[pl.DataFrame] = []

    def add(self, values: pl.Series) -> None:
        """Count more numbers.

        Args:
            values: Numbers without nulls or NaN, the same type in every call.
        """
        if len(values) == 0:
            return
        self._counts.append(_count(pl.DataFrame({"value": values, "count": 1})))
        if len(self._counts) == 64:
            self._merge()

    def share_of(self, value: float) -> float | None:
        """Return the share of the numbers that equal `value`, or None where there are none."""
        counts = self._merge()
        if counts is None:
            return None
        hits = counts.filter(pl.col("value") == value)["count"].sum()
        return int(hits) / int(counts["count"].sum())

    def spread(self) -> Spread | None:
        """Return how the numbers are spread, or None where there are none."""
        counts = self._merge()
        if counts is None:
            return None
        ordered = counts.sort("value")
        values = ordered["value"].cast(pl.Float64)
        reached = ordered["count"].cum_sum()
        total = int(reached[-1])

        def percentile(percent: int) -> float:
            # the rank in whole numbers: 0.1 * 30 is above 3 in floating point
            rank = max(-(-percent * total // 100), 1)
            return float(values[int((reached < rank).sum())])

        return Spread(
            count=total,
            mean=float((values * ordered["count"]).sum() / total),
            minimum=float(values[0]),
            p10=percentile(10),
            median=percentile(50),
            p90=percentile(90),
            p99=percentile(99),
            maximum=float(values[-1]),
        )

    def _merge(self) -> pl.DataFrame | None:
        if not self._counts:
            return None
        self._counts = [_count(pl.concat(self._counts))]
        return self._counts[0]


def _count(frame: pl.DataFrame) -> pl.DataFrame:
    count: Any = pl.col("count").cast(pl.Int64).sum()
    return frame.group_by("value").agg(count)
