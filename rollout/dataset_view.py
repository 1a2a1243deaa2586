"""Read a dataset as its commit records describe it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow.parquet as pq

from rollout.commits import find_record, read_ahead, read_commits
from rollout.errors import DatasetError
from rollout.rows import PlanEntry, Rejection
from rollout.schema import layout
from rollout.schema.records import CommitRecord, DatasetRecord
from rollout.shard import open_shard, verify_shard
from rollout.sidecars import read_plan, read_rejected
from rollout.storage import Storage


@dataclass(frozen=True, kw_only=True)
class DatasetView:
    """A dataset as its records describe it at the moment of `read_dataset`."""

    storage: Storage
    record: DatasetRecord
    commits: tuple[CommitRecord, ...]
    """By unit and part; some hold rejections only, or nothing."""

    @cached_property
    def covered(self) -> frozenset[tuple[str, int]]:
        """Every committed (prompt_key, sample_index)."""
        return frozenset().union(*(record.keys for record in self.commits))

    @cached_property
    def rejected(self) -> tuple[Rejection, ...]:
        """What is set aside and was not sampled later, each once: the last word on it."""
        last: dict[tuple[str, int | None], Rejection] = {}
        names = [name for record in self.commits if (name := record.rejected_file) is not None]
        for name, data in zip(names, self._read_all(names), strict=True):
            for item in read_rejected(data, name):
                last[item.key] = item
        if not last:
            return ()
        sampled = {key for key, _ in self.covered}
        return tuple(
            item
            for item in last.values()
            if (
                item.prompt_key not in sampled
                if item.sample_index is None
                else (item.prompt_key, item.sample_index) not in self.covered
            )
        )

    @property
    def shards(self) -> tuple[CommitRecord, ...]:
        """The commit records that name a shard."""
        return tuple(record for record in self.commits if record.file is not None)

    @cached_property
    def plan(self) -> tuple[PlanEntry, ...]:
        """Every planned prompt, in the plan's order."""
        entries: dict[str, PlanEntry] = {}
        names = [
            f"{layout.PLAN_FOLDER}/{base}"
            for base in self.storage.list(layout.PLAN_FOLDER)
            if layout.parse_plan(base) is not None
        ]
        for name, data in zip(names, self._read_all(names), strict=True):
            for entry in read_plan(data, name):
                entries.setdefault(entry.prompt_key, entry)
        return tuple(entries.values())

    def _read_all(self, names: list[str]) -> list[bytes]:
        """Read small files side by side, each of which has to be there."""
        found = []
        for name, data in read_ahead(self.storage, names):
            if isinstance(data, FileNotFoundError):
                raise DatasetError(f"dataset {self.storage.url}: {name} is missing") from data
            if isinstance(data, Exception):
                raise data
            found.append(data)
        return found

    def open_shard(self, record: CommitRecord) -> pq.ParquetFile:
        """Open a part's shard with page checksums verified; close it after use.

        Raises:
            DatasetError: the record names no shard, or the shard is missing or damaged.
        """
        if record.file is None:
            raise DatasetError(f"part {record.unit}-{record.part}: it holds no rollouts")
        try:
            return open_shard(self.storage.local_or_stream(record.file))
        except FileNotFoundError as error:
            raise DatasetError(f"dataset {self.storage.url}: {record.file} is missing") from error

    def verify(self, record: CommitRecord) -> None:
        """Read a part's shard completely and compare it with its record.

        Raises:
            DatasetError: the shard is missing, damaged, or not the one of the record.
        """
        if record.file is None:
            return
        try:
            source = self.storage.local_or_stream(record.file)
        except FileNotFoundError as error:
            raise DatasetError(f"dataset {self.storage.url}: {record.file} is missing") from error
        try:
            verify_shard(Path(source) if isinstance(source, str) else source, record)
        except DatasetError as error:
            raise DatasetError(f"{record.file}: {error}") from error


def read_dataset(storage: Storage) -> DatasetView:
    """Read a dataset's records.

    Raises:
        DatasetError: not a dataset, of a newer format, or a record is damaged or missing.
    """
    record = find_record(storage)
    if record is None:
        raise DatasetError(
            f"{storage.url} is not a dataset: there is no {layout.DATASET_FILE} in it"
        )
    return DatasetView(storage=storage, record=record, commits=tuple(read_commits(storage)))
