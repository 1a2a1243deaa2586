"""A part's shard, written before it is the part's turn to be committed.

The parts of a unit are committed one after the other, so that their numbers have no holes; writing
a large one takes seconds, and waiting for the disk some more, and the shard is the same whichever
number the part gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollout.dataset import DatasetWriter
from rollout.errors import DatasetError
from rollout.local_files import scratch_file, sync_file
from rollout.part_work import WriteShard, by_prompt
from rollout.rows import RolloutRow
from rollout.shard import ShardInfo


@contextmanager
def written_early(
    writer: DatasetWriter, rows: Sequence[RolloutRow], write: WriteShard, *, again: WriteShard
) -> Iterator[WriteShard]:
    """Write a shard now, for a `commit_part` to come.

    Args:
        writer: the dataset.
        rows: what is to be committed.
        write: writes a shard now, and reads it back.
        again: writes one at the part's turn.

    Yields:
        What `commit_part` takes for `write`: it moves the shard where the rows are still the same,
        and writes another one where some of them were committed meanwhile. Where the disk did not
        take the shard, it is written at its turn, which then says why.
    """
    ordered = by_prompt(rows)
    fingerprint, row_group_bytes = writer.record.fingerprint, writer.row_group_bytes
    try:
        early = scratch_file(writer.scratch)
    except OSError:
        yield again
        return
    try:
        try:
            info = write(early, ordered, fingerprint, row_group_bytes)
            if writer.storage.local_root is not None:  # else it is uploaded from here
                sync_file(early)
        except (OSError, DatasetError):
            early.unlink(missing_ok=True)
        del write  # it holds the part's memory

        def move(
            path: Path, wanted: Sequence[RolloutRow], for_run: str, group_bytes: int
        ) -> ShardInfo:
            same = [id(row) for row in wanted] == [id(row) for row in ordered]
            if not same or (for_run, group_bytes) != (fingerprint, row_group_bytes):
                return again(path, wanted, for_run, group_bytes)
            try:
                early.replace(path)
            except OSError:  # not written, taken before, or on another disk
                return again(path, wanted, for_run, group_bytes)
            return info

        yield move
    finally:
        early.unlink(missing_ok=True)
