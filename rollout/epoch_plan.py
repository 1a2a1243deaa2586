"""Which prompt groups make which step of an epoch, from the commit records alone.

The order depends on the seed, the epoch, the records and the number of canonical splits, on nothing
else: no random state, no library version, no number of ranks. A split is the part of every step
that is never divided between ranks; each reads its own stretch of the dataset, so that ranks do not
read each other's row groups. Groups are shuffled with locality: blocks (row groups) are permuted,
and groups are permuted within a window of blocks, so that a reader holds a window and not the
dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from rollout.schema.records import CommitRecord

Remainder = Literal["drop", "pad", "repeat"]
Block = tuple[int, int]
"""A shard (index into the pinned records) and a row group in it."""

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1
_Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Rows of one group in one shard."""

    shard: int
    """Index into the pinned commit records."""
    first_row: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedGroup:
    """One prompt's rollouts, wherever they were committed."""

    prompt_key: str
    pieces: tuple[Piece, ...]
    block: Block
    """The shard and the row group where the group starts."""
    dataset: int = 0
    """Which of the mixed datasets it is from."""

    @property
    def num_rows(self) -> int:
        """Rollouts that are really there."""
        return sum(piece.num_rows for piece in self.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPlan:
    """The groups of every step and split of one epoch."""

    num_steps: int
    share: int
    """Groups that a split brings to a full step."""
    splits: tuple[_Ints, ...]
    """The groups of each split, in order."""
    dropped: _Ints
    """Groups that this epoch leaves out, because they fill no step."""
    repeated: _Ints
    """Groups that fill the last step up and come a second time."""

    def groups(self, step: int, split: int) -> list[int]:
        """Return the groups of a split in a step; fewer, or none, at a padded end."""
        found: list[int] = self.splits[split][step * self.share : (step + 1) * self.share].tolist()
        return found


def plan_groups(
    shards: Sequence[CommitRecord], *, dataset: int = 0, first_shard: int = 0
) -> list[PlannedGroup]:
    """List every group once, in the records' order; a group in several parts is joined.

    Args:
        shards: commit records that name a shard.
        dataset: which of the mixed datasets they are from.
        first_shard: the index of the first of them among all pinned records.

    Returns:
        Groups in order of first appearance.
    """
    pieces: dict[str, list[Piece]] = {}
    for index, record in enumerate(shards):
        for group in record.groups:
            piece = Piece(
                shard=first_shard + index, first_row=group.first_row, num_rows=group.num_rows
            )
            pieces.setdefault(group.prompt_key, []).append(piece)
    ends = [np.cumsum([group.rows for group in record.row_groups]) for record in shards]
    groups = []
    for prompt_key, found in pieces.items():
        first = found[0]
        row_group = int(
            np.searchsorted(ends[first.shard - first_shard], first.first_row, side="right")
        )
        groups.append(
            PlannedGroup(
                prompt_key=prompt_key,
                pieces=tuple(found),
                block=(first.shard, row_group),
                dataset=dataset,
            )
        )
    return groups


def count_steps(num_groups: int, groups_per_step: int, remainder: Remainder) -> int:
    """Return the steps of an epoch of so many groups."""
    full, rest = divmod(num_groups, groups_per_step)
    return full + (rest > 0 and remainder != "drop")


def mixed_counts(sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Return how many groups each dataset brings to an epoch of as many groups as there are.

    Args:
        sizes: groups of each dataset.
        weights: shares of the datasets in every step; unset, each group comes once an epoch.

    Returns:
        Counts that sum to the sizes' sum, each nearest to its share.
    """
    if weights is None:
        return list(sizes)
    total = sum(sizes)
    exact = np.array(weights, np.float64) / sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    for index in np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]:
        counts[index] += 1
    found: list[int] = counts.tolist()
    return found


def plan_epoch(
    groups: Sequence[PlannedGroup],
    *,
    seed: int,
    epoch: int,
    groups_per_step: int,
    splits: int = 1,
    window_blocks: int = 8,
    shuffle: bool = True,
    remainder: Remainder = "pad",
    weights: Sequence[float] | None = None,
) -> EpochPlan:
    """Order the groups of an epoch into steps and splits.

    Args:
        groups: from `plan_groups`, one dataset after the other.
        seed: of the run.
        epoch: from 0; each has its own order.
        groups_per_step: a multiple of `splits`.
        splits: canonical splits of a step.
        window_blocks: row groups within which groups are mixed, over all splits together.
        shuffle: False keeps the dataset's order.
        remainder: what becomes of groups that fill no whole step: left out, a short last step,
            or filled up with groups that come a second time.
        weights: shares of the mixed datasets. One that has fewer groups than its share passes
            over its groups again, one with more goes on in the next epoch where it stopped.

    Returns:
        The plan; splits differ by at most one group in a short step.
    """
    order, owner, place = _sequence(groups, seed, epoch, shuffle, weights)
    full, rest = divmod(order.size, groups_per_step)
    share = groups_per_step // splits
    dropped = order[full * groups_per_step :] if remainder == "drop" else order[:0]
    last = 0 if remainder == "drop" else rest
    sizes = [full * share + last // splits + (split < last % splits) for split in range(splits)]
    keys = _random_keys(order.size, seed, 2 * epoch + 1)
    window = -(-window_blocks // splits)
    start, found, repeated = 0, [], [order[:0]]
    for size in sizes:
        span = slice(start, start + size)
        own = order[span]
        if shuffle:
            own = _shuffle(own, owner[span], place[span], keys[span], window)
        if remainder == "repeat" and rest:
            # from the split's own stretch where it has one: those row groups are its own
            extra = np.resize(own if own.size else order, (full + 1) * share - size)
            repeated.append(extra)
            own = np.concatenate([own, extra])
        found.append(own)
        start += size
    return EpochPlan(
        num_steps=full + (last > 0),
        share=share,
        splits=tuple(found),
        dropped=dropped,
        repeated=np.concatenate(repeated),
    )


def _sequence(
    groups: Sequence[PlannedGroup],
    seed: int,
    epoch: int,
    shuffle: bool,
    weights: Sequence[float] | None,
) -> tuple[_Ints, _Ints, _Ints]:
    """Return the epoch's groups with blocks permuted, each one's dataset, and its block's place."""
    datasets = np.array([group.dataset for group in groups], np.int64)
    members = [np.flatnonzero(datasets == d) for d in range(int(datasets.max(initial=0)) + 1)]
    orders, places, fractions = [], [], []
    for d, (own, count) in enumerate(
        zip(members, mixed_counts([m.size for m in members], weights), strict=True)
    ):
        blocks, block = np.unique(
            np.array([groups[i].block for i in own.tolist()], np.int64).reshape(-1, 2),
            axis=0,
            return_inverse=True,
        )
        parts, part_places = [own[:0]], [own[:0]]
        passes = range(0)
        if own.size and count:
            passes = range(epoch * count // own.size, -(-(epoch + 1) * count // own.size))
        for number in passes:
            rank = np.arange(len(blocks))
            if shuffle:
                chosen = np.argsort(_random_keys(len(blocks), seed + d, 2 * number), kind="stable")
                rank = np.empty_like(chosen)
                rank[chosen] = np.arange(len(blocks))
            by_block = np.argsort(rank[block.ravel()], kind="stable")
            order = by_block if shuffle else np.arange(own.size)
            first = max(epoch * count - number * own.size, 0)
            order = order[first : (epoch + 1) * count - number * own.size]
            parts.append(own[order])
            part_places.append(rank[block.ravel()][order] + number * len(blocks))
        orders.append(np.concatenate(parts))
        places.append(np.concatenate(part_places))
        fractions.append((np.arange(count) + 0.5) / max(count, 1))
    owner = np.repeat(np.arange(len(members)), [order.size for order in orders])
    # datasets alternate evenly, so that every step holds them in their shares
    merged = np.lexsort((owner, np.concatenate(fractions)))
    return np.concatenate(orders)[merged], owner[merged], np.concatenate(places)[merged]


def _shuffle(
    order: _Ints, owner: _Ints, place: _Ints, keys: NDArray[np.uint64], window: int
) -> _Ints:
    """Permute a split's groups within windows of blocks, and among those of their dataset."""
    result = order.copy()
    for dataset in np.unique(owner):
        slots = np.flatnonzero(owner == dataset)
        _, rank = np.unique(place[slots], return_inverse=True)
        result[slots] = order[slots][np.lexsort((keys[slots], rank.ravel() // window))]
    return result


def _random_keys(count: int, seed: int, stream: int) -> NDArray[np.uint64]:
    """Return 64-bit keys of 0 .. count - 1 in a stream: splitmix64, fixed for good."""
    start = _mix(seed * _GOLDEN + stream)
    with np.errstate(over="ignore"):
        x = np.uint64(start) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _mix(value: int) -> int:
    """Return the splitmix64 finaliser of one number."""
    x = value & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
