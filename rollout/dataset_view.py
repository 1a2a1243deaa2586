"""Read a dataset as its commit records describe it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.commits import find_record, iter_commits, read_ahead
from rollout.errors import DatasetError
from rollout.rows import PlanEntry, Rejection
from rollout.schema import layout
from rollout.schema.records import CommitRecord, DatasetRecord
from rollout.schema.sidecars import PLAN_SCHEMA
from rollout.shard import open_shard, row_group_ranges
from rollout.sidecars import read_plan, read_plan_columns, read_rejected
from rollout.storage import Storage

PLAN_IDS: Final = ["prompt_key", "prompt_id"]


@dataclass(frozen=True, kw_only=True)
class DatasetView:
    """A dataset as its records describe it at the moment of `read_dataset`."""

    storage: Storage
    record: DatasetRecord
    commits: tuple[CommitRecord, ...]
    """By unit and part; some hold rejections only, or nothing."""
    record_bytes: int
    """Bytes of the files that the commit records were read from."""

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
        sampled = self.samples_of({item.prompt_key for item in last.values()})
        return tuple(
            item
            for item in last.values()
            if (
                item.prompt_key not in sampled
                if item.sample_index is None
                else item.sample_index not in sampled.get(item.prompt_key, ())
            )
        )

    def samples_of(self, prompt_keys: Set[str]) -> dict[str, set[int]]:
        """Find the committed samples of some prompts; those without any are left out."""
        found: dict[str, set[int]] = {}
        for record in self.commits:
            if prompt_keys.isdisjoint(record.prompt_keys):
                continue
            for group in record.groups:
                if group.prompt_key in prompt_keys:
                    end = group.first_row + group.num_rows
                    samples = record.sample_indices[group.first_row : end]
                    found.setdefault(group.prompt_key, set()).update(samples)
        return found

    @property
    def shards(self) -> tuple[CommitRecord, ...]:
        """The commit records that name a shard."""
        return tuple(record for record in self.commits if record.file is not None)

    @cached_property
    def plan(self) -> tuple[PlanEntry, ...]:
        """Every planned prompt, in the plan's order."""
        entries: dict[str, PlanEntry] = {}
        for name, data in self._plan_files.items():
            for entry in read_plan(data, name):
                entries.setdefault(entry.prompt_key, entry)
        return tuple(entries.values())

    @cached_property
    def plan_ids(self) -> pa.Table:
        """prompt_key and prompt_id of every planned prompt, in the plan's order."""
        files = self._plan_files.items()
        tables = [read_plan_columns(data, name, PLAN_IDS) for name, data in files]
        return pa.concat_tables(tables or [PLAN_SCHEMA.empty_table().select(PLAN_IDS)])

    @property
    def plan_bytes(self) -> int:
        """Bytes of the plan's files."""
        return sum(map(len, self._plan_files.values()))

    @cached_property
    def _plan_files(self) -> dict[str, bytes]:
        found = [layout.parse_plan(base) for base in self.storage.list(layout.PLAN_FOLDER)]
        # they have no holes: with one, prompts that were never sampled would not be missed
        highest = max((number for number in found if number is not None), default=-1)
        names = [layout.plan_name(number) for number in range(highest + 1)]
        return dict(zip(names, self._read_all(names), strict=True))

    def _read_all(self, names: list[str]) -> list[bytes]:
        """Read small files side by side, each of which has to be there."""
        found = []
        for name, data in read_ahead(self.storage, names):
            if isinstance(data, FileNotFoundError):
                raise self._lacks(name) from data
            if isinstance(data, Exception):
                raise data
            found.append(data)
        return found

    def open_shard(self, record: CommitRecord) -> pq.ParquetFile:
        """Open a part's shard with page checksums verified; close it after use.

        Raises:
            DatasetError: the record names no shard, or the shard is missing, damaged, or has other
                row groups than its record says.
        """
        if record.file is None:
            raise DatasetError(f"part {record.unit}-{record.part}: it holds no rollouts")
        try:
            shard = open_shard(self.storage.local_or_stream(record.file))
        except FileNotFoundError as error:
            raise self._lacks(record.file) from error
        except DatasetError as error:
            raise DatasetError(f"{record.file}: {error}") from error
        problem = _other_shard(shard.metadata, record)
        if problem is not None:
            shard.close()
            raise DatasetError(f"{record.file}: {problem}: copy the dataset again")
        return shard

    def _lacks(self, name: str) -> DatasetError:
        return DatasetError(
            f"dataset {self.storage.url}: {name} is missing: copy the dataset again"
        )


def _other_shard(footer: pq.FileMetaData, record: CommitRecord) -> str | None:
    """Say in which way a whole shard is not the one of its record, as far as its footer tells."""
    if footer.num_rows != record.rows:
        return f"holds {footer.num_rows} rollouts, its commit record names {record.rows}"
    expected = [(group.offset, group.size, group.rows) for group in record.row_groups]
    if row_group_ranges(footer) != expected:
        return "its row groups are not where its commit record says: it is another shard"
    return None


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
    commits, sizes = [], 0
    for commit, size in iter_commits(storage):
        commits.append(commit)
        sizes += size
    return DatasetView(storage=storage, record=record, commits=tuple(commits), record_bytes=sizes)
