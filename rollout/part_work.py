"""What is done to a part before it is uploaded: entries read, rows checked, a shard written.

The same work here or in a process of its own (`rollout.part_pool`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.rows import BadRowError, RolloutRow, check_row
from rollout.shard import ROW_GROUP_BYTES, ShardInfo, verify_shard, write_shard

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
        """Read the entries that are still in the spool.

        Args:
            rows: of one part.

        Raises:
            OSError: the spool can't be read.
        """
        self._rows = [dataclasses.replace(row) for row in rows]
        for row in self._rows:
            row.load_entries()

    def bad_rows(self) -> list[BadRow]:
        """Check every row; see `rollout.rows.check_row`."""
        bad = []
        for index, row in enumerate(self._rows):
            try:
                check_row(row)
            except BadRowError as error:
                bad.append(BadRow(index=index, reason=error.reason, detail=error.detail))
        return bad

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


def write_verified(
    path: Path,
    rows: Sequence[RolloutRow],
    fingerprint: str,
    row_group_bytes: int = ROW_GROUP_BYTES,
) -> ShardInfo:
    """Write rows to a shard, and read it back completely; arguments as `PartWork.write` has them.

    Raises:
        OSError: the disk does not take it.
        DatasetError: what was written does not read back.
    """
    info = write_shard(path, rows, fingerprint, row_group_bytes=row_group_bytes)
    verify_shard(path, info, digests=False)
    return info
