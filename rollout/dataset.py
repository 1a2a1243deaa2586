"""Write and read a dataset by its commit records, so that every rollout counts exactly once.

A part counts from the moment its commit record is created, exclusively, and never before. Part
numbers count up within a unit with no holes, and a writer creates the record of part k only after
it has seen the keys of parts 0 to k - 1: so two writers can't commit the same key, whatever they
race for. A file may be named by the record of its own unit and part only, hence an unnamed one is
an orphan for good as soon as that record exists.
"""

from __future__ import annotations

import datetime
import logging
import tempfile
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from rollout.errors import DatasetError, OutputError
from rollout.rows import PlanEntry, Rejection, RolloutRow
from rollout.schema import layout
from rollout.schema.records import CommitRecord, DatasetRecord, GroupRange, RecordError
from rollout.shard import ROW_GROUP_BYTES, ShardInfo, open_shard, verify_shard, write_shard
from rollout.sidecars import plan_bytes, read_plan, read_rejected, rejected_bytes
from rollout.storage import Storage

_log = logging.getLogger(__name__)

_READERS: Final = 16
_ABSENT: Final = "(absent)"
_EMPTY: Final = ShardInfo(
    size=0, sha256="", rows=0, tokens=0, entries=0, max_token_id=-1, row_groups=()
)


class DatasetWriter:
    """Adds parts to a dataset; any number of processes with one fingerprint may share it.

    Use `DatasetWriter.open`. One object may be used from several threads.
    """

    def __init__(
        self, storage: Storage, record: DatasetRecord, scratch: Path | None, row_group_bytes: int
    ) -> None:
        self.storage = storage
        self.record = record
        """The record in the dataset, which may carry another job's provenance."""
        self._scratch = scratch
        self._row_group_bytes = row_group_bytes
        self._lock = threading.RLock()
        self._commits: dict[str, list[CommitRecord]] = {}
        self._covered: set[tuple[str, int]] = set()
        self._rejected_prompts: set[str] = set()
        self._plan: dict[str, str] = {}
        self._next_plan = 0

    @classmethod
    def open(
        cls,
        storage: Storage,
        record: DatasetRecord,
        *,
        scratch: Path | None = None,
        row_group_bytes: int = ROW_GROUP_BYTES,
    ) -> DatasetWriter:
        """Create a dataset, or go on with the one that is there.

        Args:
            storage: where; an empty or missing folder, or a dataset with the same fingerprint.
            record: what is about to make the data.
            scratch: local folder for unfinished shards; default: see `Storage.scratch_folder`.
            row_group_bytes: raw bytes after which a row group is closed.

        Raises:
            OutputError: the folder holds another run, or files of one without its record.
            DatasetError: what is there is damaged or of a newer format.
        """
        found = _find_record(storage)
        if found is None:
            for folder in (layout.DATA_FOLDER, layout.COMMIT_FOLDER):
                if storage.list(folder):
                    raise OutputError(
                        f"output {storage.url}: `{folder}/` holds files but there is no "
                        f"{layout.DATASET_FILE}: choose an empty folder"
                    )
            if storage.create_exclusive(layout.DATASET_FILE, record.to_json()):
                found = record
            else:
                found = _find_record(storage)
        if found is None:
            raise OutputError(f"output {storage.url}: {layout.DATASET_FILE} came and went")
        if found.fingerprint != record.fingerprint:
            raise OutputError(_other_run(storage, found, record))
        writer = cls(storage, found, scratch, row_group_bytes)
        for commit in _read_commits(storage):
            writer._apply(commit)
        writer._read_new_plan()
        return writer

    @property
    def covered(self) -> Set[tuple[str, int]]:
        """Every committed (prompt_key, sample_index); grows with each commit, don't change it."""
        return self._covered

    @property
    def rejected_prompts(self) -> Set[str]:
        """Keys of the prompts recorded as set aside whole."""
        return self._rejected_prompts

    @property
    def plan(self) -> Mapping[str, str]:
        """The unit of every planned prompt_key, in the plan's order."""
        return self._plan

    @property
    def commits(self) -> list[CommitRecord]:
        """Every commit record seen so far, by unit and part."""
        with self._lock:
            return [record for unit in sorted(self._commits) for record in self._commits[unit]]

    def append_plan(self, entries: Iterable[PlanEntry]) -> int:
        """Assign prompts to units, for good; a prompt that has a unit keeps it.

        Returns:
            How many prompts were new.

        Raises:
            ValueError: a unit's name can't be part of a file name.
            OutputError: the plan can't be written.
        """
        wanted = {entry.prompt_key: entry for entry in reversed(list(entries))}
        wanted = dict(reversed(wanted.items()))
        for unit in {entry.unit for entry in wanted.values()}:
            layout.check_unit(unit)
        with self._lock:
            while True:
                new = [entry for key, entry in wanted.items() if key not in self._plan]
                if not new:
                    return 0
                name = layout.plan_name(self._next_plan)
                if self.storage.create_exclusive(name, plan_bytes(new, self.record.fingerprint)):
                    self._apply_plan(new)
                    return len(new)
                # another process appended first: see what it planned
                self._read_new_plan()

    def commit_part(
        self, unit: str, rows: Sequence[RolloutRow], rejected: Sequence[Rejection] = ()
    ) -> CommitRecord | None:
        """Commit rollouts and rejections of one unit as its next part.

        Rows whose key is committed already are left out, so are rejections of committed rollouts
        and of prompts that are recorded as rejected. Rows are written by group in order of first
        appearance, then by sample_index. The call is durable when it returns.

        Args:
            unit: the unit that the plan gives the rows' prompts.
            rows: rollouts that passed `rollout.rows.check_row`.
            rejected: what was set aside.

        Returns:
            The record, or None when nothing was left to commit.

        Raises:
            ValueError: a row's prompt is not planned for this unit, or a key is given twice.
            OutputError: it can't be written; committed parts are not affected.
        """
        layout.check_unit(unit)
        self._check_rows(unit, rows)
        while True:
            self._catch_up(unit)
            with self._lock:
                part = len(self._commits.get(unit, ()))
                left = [row for row in rows if row.key not in self._covered]
                refused = self._new_rejections(rejected, {row.key for row in left})
            if not left and not refused:
                return None
            record = self._upload(unit, part, _by_group(left), refused)
            if self.storage.create_exclusive(layout.commit_name(unit, part), record.to_json()):
                self._apply(record)
                return record
            # another writer took the part: its file stands, ours is an orphan
            _log.info("unit %s: part %d was committed by another writer first", unit, part)

    def remove_orphans(self) -> int:
        """Remove the files that no commit record names, safely beside live writers.

        A file whose part is not committed may belong to a live writer: the part is closed with an
        empty record first, so that this writer loses the race and uploads again.

        Returns:
            How many files were removed.

        Raises:
            OutputError: one can't be removed.
        """
        removed = 0
        for folder in (layout.DATA_FOLDER, layout.REJECTED_FOLDER):
            for base in self.storage.list(folder):
                parsed = layout.parse_part(base)
                if parsed is None or parsed.attempt is None:
                    _log.warning("output %s: leaving %s/%s", self.storage.url, folder, base)
                    continue
                record = self._close_part(parsed.unit, parsed.part)
                name = f"{folder}/{base}"
                if name not in (record.file, record.rejected_file):
                    self.storage.delete(name)
                    removed += 1
        self.storage.remove_stale_scratch()
        return removed

    def _check_rows(self, unit: str, rows: Sequence[RolloutRow]) -> None:
        seen: set[tuple[str, int]] = set()
        for row in rows:
            planned = self._plan.get(row.prompt_key)
            if planned != unit:
                raise ValueError(
                    f"prompt {row.prompt_key}: planned for unit {planned}, got unit {unit}: "
                    "call append_plan first and commit it with its unit"
                )
            if row.key in seen:
                raise ValueError(f"rollout {row.key}: given twice in one part")
            seen.add(row.key)

    def _new_rejections(
        self, rejected: Sequence[Rejection], own: Set[tuple[str, int]]
    ) -> list[Rejection]:
        new: dict[tuple[str, int | None], Rejection] = {}
        for item in rejected:
            if item.sample_index is None:
                known = item.prompt_key in self._rejected_prompts
            else:
                key = (item.prompt_key, item.sample_index)
                known = key in self._covered or key in own
            if not known:
                new.setdefault(item.key, item)
        return list(new.values())

    def _upload(
        self, unit: str, part: int, rows: list[RolloutRow], rejected: list[Rejection]
    ) -> CommitRecord:
        """Write, verify and upload a part's files; nothing counts until the record exists."""
        attempt = uuid.uuid4().hex[:16]
        file = layout.data_name(unit, part, attempt) if rows else None
        info = _EMPTY
        if file is not None:
            folder = self._scratch or self.storage.scratch_folder()
            handle, path = tempfile.mkstemp(suffix=".part", prefix=f"{unit}-", dir=folder)
            local = Path(path)
            try:
                with open(handle, "wb"):
                    pass
                info = write_shard(
                    local, rows, self.record.fingerprint, row_group_bytes=self._row_group_bytes
                )
                verify_shard(local, info)
                self.storage.put_file(local, file)
            except OSError as error:
                if isinstance(error, OutputError):
                    raise
                raise OutputError(f"output: can't write a shard to {folder}: {error}") from error
            finally:
                local.unlink(missing_ok=True)
        rejected_file = layout.rejected_name(unit, part, attempt) if rejected else None
        if rejected_file is not None:
            self.storage.write_bytes(
                rejected_file, rejected_bytes(rejected, self.record.fingerprint)
            )
        return CommitRecord(
            unit=unit,
            part=part,
            attempt=attempt,
            file=file,
            size=info.size,
            sha256=info.sha256,
            rows=info.rows,
            tokens=info.tokens,
            entries=info.entries,
            max_token_id=info.max_token_id,
            keys=tuple(row.key for row in rows),
            row_groups=info.row_groups,
            groups=_group_ranges(rows),
            rejected_file=rejected_file,
            rejected_rows=len(rejected),
            rejected_keys=tuple(item.key for item in rejected),
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        )

    def _close_part(self, unit: str, part: int) -> CommitRecord:
        """The record of a part, made empty where there is none yet."""
        while True:
            self._catch_up(unit)
            records = self._commits.get(unit, [])
            if part < len(records):
                return records[part]
            void = self._upload(unit, len(records), [], [])
            name = layout.commit_name(unit, void.part)
            if self.storage.create_exclusive(name, void.to_json()):
                self._apply(void)

    def _catch_up(self, unit: str) -> None:
        """Read the records that other writers made for a unit; no listing is needed."""
        while True:
            with self._lock:
                part = len(self._commits.get(unit, ()))
            try:
                record = _read_commit(self.storage, layout.commit_name(unit, part))
            except FileNotFoundError:
                return
            self._apply(record)

    def _apply(self, record: CommitRecord) -> None:
        with self._lock:
            known = self._commits.setdefault(record.unit, [])
            if record.part < len(known):
                return
            known.append(record)
            self._covered.update(record.keys)
            self._rejected_prompts.update(
                key for key, index in record.rejected_keys if index is None
            )

    def _apply_plan(self, entries: Iterable[PlanEntry]) -> None:
        for entry in entries:
            self._plan.setdefault(entry.prompt_key, entry.unit)
        self._next_plan += 1

    def _read_new_plan(self) -> None:
        with self._lock:
            while True:
                name = layout.plan_name(self._next_plan)
                try:
                    data = self.storage.read_bytes(name)
                except FileNotFoundError:
                    return
                self._apply_plan(read_plan(data, name))


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
        return frozenset(key for record in self.commits for key in record.keys)

    @cached_property
    def rejected(self) -> tuple[Rejection, ...]:
        """What is set aside and was not sampled later, each once: the last word on it."""
        last: dict[tuple[str, int | None], Rejection] = {}
        sampled = {key for key, _ in self.covered}
        for record in self.commits:
            if record.rejected_file is None:
                continue
            data = self.storage.read_bytes(record.rejected_file)
            for item in read_rejected(data, record.rejected_file):
                last[item.key] = item
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
        for base in self.storage.list(layout.PLAN_FOLDER):
            if layout.parse_plan(base) is not None:
                name = f"{layout.PLAN_FOLDER}/{base}"
                for entry in read_plan(self.storage.read_bytes(name), name):
                    entries.setdefault(entry.prompt_key, entry)
        return tuple(entries.values())

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
    record = _find_record(storage)
    if record is None:
        raise DatasetError(
            f"{storage.url} is not a dataset: there is no {layout.DATASET_FILE} in it"
        )
    return DatasetView(storage=storage, record=record, commits=tuple(_read_commits(storage)))


def _find_record(storage: Storage) -> DatasetRecord | None:
    try:
        return DatasetRecord.from_json(storage.read_bytes(layout.DATASET_FILE))
    except FileNotFoundError:
        return None
    except RecordError as error:
        raise DatasetError(f"{storage.url}/{layout.DATASET_FILE}: {error}") from error


def _read_commit(storage: Storage, name: str) -> CommitRecord:
    try:
        return CommitRecord.from_json(storage.read_bytes(name))
    except RecordError as error:
        raise DatasetError(f"{storage.url}/{name}: {error}") from error


def _read_commits(storage: Storage) -> list[CommitRecord]:
    """Every commit record, by unit and part, with no part left out."""
    highest: dict[str, int] = {}
    for base in storage.list(layout.COMMIT_FOLDER):
        parsed = layout.parse_part(base)
        if parsed is not None and parsed.attempt is None:
            highest[parsed.unit] = max(parsed.part, highest.get(parsed.unit, -1))
    # parts have no holes, so a name that a listing missed is read all the same
    names = [
        layout.commit_name(unit, part)
        for unit in sorted(highest)
        for part in range(highest[unit] + 1)
    ]
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(lambda name: _read_commit(storage, name), names))
    except FileNotFoundError as error:
        raise DatasetError(
            f"dataset {storage.url}: a commit record is missing although later parts exist: "
            f"{error}: copy the dataset again"
        ) from error


def _by_group(rows: list[RolloutRow]) -> list[RolloutRow]:
    order: dict[str, int] = {}
    for row in rows:
        order.setdefault(row.group_id, len(order))
    return sorted(rows, key=lambda row: (order[row.group_id], row.sample_index))


def _group_ranges(rows: list[RolloutRow]) -> tuple[GroupRange, ...]:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.group_id] = counts.get(row.group_id, 0) + 1
    ranges = []
    first = 0
    for group_id, count in counts.items():
        ranges.append(GroupRange(group_id=group_id, first_row=first, num_rows=count))
        first += count
    return tuple(ranges)


def _other_run(storage: Storage, old: DatasetRecord, new: DatasetRecord) -> str:
    """Say which inputs of the fingerprint differ."""
    before, after = _flatten(old.fingerprint_inputs), _flatten(new.fingerprint_inputs)
    changes = [
        f"`{key}` is {before.get(key, _ABSENT)!r} there and {after.get(key, _ABSENT)!r} now"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]
    what = "; ".join(changes) or f"fingerprint {old.fingerprint} there, {new.fingerprint} now"
    return f"output {storage.url} holds another run: {what}: choose another output"


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat
