"""The sums behind the charts of `rollout report`, made in one pass over the shards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollout.dataset import DatasetView
from rollout.shard_scan import BadShard, ShardScan

COLUMNS: Final = (
    "prompt_id",
    "support_kind",
    "support_offsets",
    "tail_mass",
    "sampled_logprobs",
    "finish_reason",
    "num_tokens",
    "reward",
)
# a page is made rarely, so it may read more than the overview
MAX_SHARDS: Final = 256
MAX_BYTES: Final = 400_000_000

SIZE_EDGES: Final = np.concatenate(([1, 2], 2.0 ** np.arange(1.25, 21.01, 0.25)))
"""Edges of the support sizes' bins: singletons alone, then four bins a doubling."""
TAIL_EDGES: Final = 10.0 ** np.arange(-8, 0.01, 0.25)
"""Edges of the tail masses' bins; smaller masses are counted apart."""

_Counts = NDArray[np.int64]


@dataclass(kw_only=True, slots=True)
class ReportData:
    """Counts over the rollouts that were read."""

    rollouts: int = 0
    shards: int = 0
    bad: tuple[BadShard, ...] = ()
    rewards: list[pl.DataFrame] = field(default_factory=list)
    """part (index of the shard), prompt_id, reward of every rollout with a finite reward."""
    lengths: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Rollouts by (finish reason, tokens)."""
    sizes: dict[str, _Counts] = field(default_factory=dict)
    """Tokens by kind of support and bin of `SIZE_EDGES`."""
    tails: _Counts = field(default_factory=lambda: np.zeros(len(TAIL_EDGES) - 1, np.int64))
    """Tokens of kind top by bin of `TAIL_EDGES`."""
    small_tails: int = 0
    """Tokens of kind top whose tail mass is below the first edge."""
    surprisal: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Sum of -log q of the sampled tokens by position; its mean estimates the entropy."""
    tokens: _Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens by position."""

    def reward_frame(self) -> pl.DataFrame | None:
        """Return part, prompt_id and reward; None without rewards."""
        frame = pl.concat(self.rewards) if self.rewards else None
        return frame if frame is not None and len(frame) else None


def collect(view: DatasetView, *, full: bool) -> ReportData:
    """Read the columns that the charts need, of all shards or of an even sample.

    Args:
        view: the dataset.
        full: read every shard; else at most `MAX_SHARDS` and about `MAX_BYTES`.
    """
    data = ReportData()
    scan = ShardScan(view, COLUMNS, full=full, max_shards=MAX_SHARDS, max_bytes=MAX_BYTES)
    parts = {record.file: index for index, record in enumerate(view.shards)}
    for record, frame in scan.frames():
        _add(data, frame, parts[record.file])
    data.shards = len(scan.chosen)
    data.bad = tuple(scan.bad)
    return data


def _add(data: ReportData, frame: pl.DataFrame, part: int) -> None:
    data.rollouts += len(frame)
    finite = frame.filter(pl.col("reward").is_finite())
    data.rewards.append(finite.select(pl.lit(part, pl.Int32).alias("part"), "prompt_id", "reward"))
    pairs = zip(frame["finish_reason"], frame["num_tokens"], strict=True)
    data.lengths.update((reason or "(none)", tokens) for reason, tokens in pairs)
    for (kind,), rows in frame.group_by("support_kind"):
        if kind == "none":
            continue
        sizes = rows["support_offsets"].drop_nulls().list.diff(null_behavior="drop")
        flat = sizes.list.explode().drop_nulls().to_numpy()
        counts, _ = np.histogram(flat, SIZE_EDGES)
        name = str(kind)
        data.sizes[name] = data.sizes.get(name, np.zeros(len(counts), np.int64)) + counts
        if kind == "top":
            tail = rows["tail_mass"].drop_nulls().list.explode().drop_nulls().to_numpy()
            counts, _ = np.histogram(tail, TAIL_EDGES)
            data.tails += counts
            data.small_tails += int((tail < TAIL_EDGES[0]).sum())
    _add_positions(data, frame)


def _add_positions(data: ReportData, frame: pl.DataFrame) -> None:
    lengths = frame["num_tokens"].to_numpy()
    if not lengths.size or not int(lengths.max()):
        return
    logprobs = frame["sampled_logprobs"].list.explode().drop_nulls().to_numpy().astype(np.float64)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    position = np.arange(logprobs.size) - starts
    good = np.isfinite(logprobs)
    longest = max(int(lengths.max()), data.tokens.size)
    sums = np.bincount(position[good], -logprobs[good], minlength=longest)
    counts = np.bincount(position[good], minlength=longest)
    data.surprisal = np.pad(data.surprisal, (0, longest - data.surprisal.size)) + sums
    data.tokens = np.pad(data.tokens, (0, longest - data.tokens.size)) + counts
