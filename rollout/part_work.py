"""What is done to a part before it is uploaded: entries read, rows checked, a shard written.

The same work here or in a process of its own (`rollout.part_pool`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollout.rows import BadRowError, RolloutRow, check_row
from rollout.schema.entries import canonical_order
from rollout.shard import ROW_GROUP_BYTES, ShardInfo, write_shard
from rollout.spool_entries import load_entries, spooled

# path, rows in the shard's order, fingerprint, raw bytes of a row group
WriteShard = Callable[[Path, Sequence[RolloutRow], str, int], ShardInfo]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that may not reach a file."""

    index: int
    reason: str
    detail: str


class PartWork:
    """The rows of one part, with their entries in memory; the rows given are left as they are."""

    def __init__(self, rows: Sequence[RolloutRow]) -> None:
        """Read the entries that are still in the spool, put them in order, check every row.

        Args:
            rows: of one part.

        Raises:
            OSError: the spool can't be read.
        """
        self._rows = [dataclasses.replace(row) for row in rows]
        _load(self._rows)
        self.bad_rows: list[BadRow] = []
        """The rows that may not reach a file; see `rollout.rows.check_row`."""
        for index, row in enumerate(self._rows):
            try:
                check_row(row)
            except BadRowError as error:
                self.bad_rows.append(BadRow(index=index, reason=error.reason, detail=error.detail))

    def write(
        self, path: Path, order: Sequence[int], fingerprint: str, row_group_bytes: int
    ) -> ShardInfo:
        """Write some of the rows to a shard, and read it back.

        Args:
            path: a local file, overwritten.
            order: indices of rows, in the shard's order.
            fingerprint: the run's.
            row_group_bytes: most raw bytes of a row group, unless one row alone has more.

        Raises:
            OSError: the disk does not take it.
            DatasetError: what was written does not read back.
        """
        rows = [self._rows[index] for index in order]
        return write_verified(path, rows, fingerprint, row_group_bytes)


def _load(rows: Sequence[RolloutRow]) -> None:
    """Load the entries that are stored, those of one spool into one array, in canonical order."""
    spools: dict[Path, list[RolloutRow]] = {}
    # in the order in which they are written, so that the entries of a row group are neighbours
    for row in by_prompt(rows):
        if row.stored_entries is not None:
            spools.setdefault(spooled(row.stored_entries).segments.folder, []).append(row)
    for folder, own in spools.items():
        stored = [spooled(row.stored_entries) for row in own]
        counts = np.concatenate([part.counts for part in stored])
        entries = load_entries(folder, np.concatenate([part.addresses for part in stored]), counts)
        # of all rows at once, since narrow tokens are sorted together where they are equally wide
        offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        canonical_order(entries, offsets, in_place=True)
        end = 0
        for row, part in zip(own, stored, strict=True):
            start, end = end, end + part.size
            row.support_entries, row.stored_entries = entries[start:end], None


def by_prompt(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    """Sort rows by prompt in order of first appearance, then by sample_index."""
    order: dict[str, int] = {}
    for row in rows:
        order.setdefault(row.prompt_key, len(order))
    return sorted(rows, key=lambda row: (order[row.prompt_key], row.sample_index))


def write_verified(
    path: Path,
    rows: Sequence[RolloutRow],
    fingerprint: str,
    row_group_bytes: int = ROW_GROUP_BYTES,
) -> ShardInfo:
    """Write rows to a shard, and compare it with them; arguments as `PartWork.write` has them.

    Raises:
        OSError: the disk does not take it.
        DatasetError: what was written does not read back.
    """
    return write_shard(path, rows, fingerprint, row_group_bytes=row_group_bytes)
