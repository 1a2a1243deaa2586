"""Which prompt groups make which step of an epoch, from the commit records alone.

The order depends on the seed, the epoch and the records, on nothing else: no random state, no
library version, no number of ranks. Groups are shuffled with locality: blocks (row groups) are
permuted, and groups are permuted within a window of blocks, so that a reader holds a window and
not the dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollout.schema.records import CommitRecord

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1


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

    group_id: str
    pieces: tuple[Piece, ...]
    block: tuple[int, int]
    """The shard and the row group where the group starts."""

    @property
    def num_rows(self) -> int:
        """Rollouts that are really there."""
        return sum(piece.num_rows for piece in self.pieces)


def plan_groups(shards: Sequence[CommitRecord]) -> list[PlannedGroup]:
    """List every group once, in the records' order; a group in several parts is joined.

    Args:
        shards: commit records that name a shard.

    Returns:
        Groups in order of first appearance.
    """
    pieces: dict[str, list[Piece]] = {}
    for index, record in enumerate(shards):
        for group in record.groups:
            piece = Piece(shard=index, first_row=group.first_row, num_rows=group.num_rows)
            pieces.setdefault(group.group_id, []).append(piece)
    ends = [np.cumsum([group.rows for group in record.row_groups]) for record in shards]
    groups = []
    for group_id, found in pieces.items():
        first = found[0]
        row_group = int(np.searchsorted(ends[first.shard], first.first_row, side="right"))
        groups.append(
            PlannedGroup(group_id=group_id, pieces=tuple(found), block=(first.shard, row_group))
        )
    return groups


def epoch_order(
    groups: Sequence[PlannedGroup], *, seed: int, epoch: int, window_blocks: int, shuffle: bool
) -> list[int]:
    """Order the groups of an epoch.

    Args:
        groups: from `plan_groups`.
        seed: of the run.
        epoch: from 0; each has its own order.
        window_blocks: row groups within which groups are mixed.
        shuffle: False keeps the dataset's order.

    Returns:
        A permutation of range(len(groups)).
    """
    if not shuffle:
        return list(range(len(groups)))
    blocks = sorted({group.block for group in groups})
    block_keys = _random_keys(len(blocks), seed, 2 * epoch)
    rank = {blocks[i]: place for place, i in enumerate(np.argsort(block_keys, kind="stable"))}
    windows = np.array([rank[group.block] // window_blocks for group in groups], np.int64)
    group_keys = _random_keys(len(groups), seed, 2 * epoch + 1)
    order: list[int] = np.lexsort((group_keys, windows)).tolist()
    return order


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
