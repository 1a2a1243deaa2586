"""Write and read a dataset by its commit records, so that every rollout counts exactly once.

A part counts from the moment its commit record is created, exclusively, and never before. Part
numbers count up within a unit with no holes, and a writer creates the record of part k only after
it has seen the keys of parts 0 to k - 1: so two writers can't commit the same key, whatever they
race for. A file may be named by the record of its own unit and part only, hence an unnamed one is
an orphan for good as soon as that record exists.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from rollout.commits import dataset_exists, find_record, iter_commits, read_commit
from rollout.dataset_view import DatasetView, read_dataset
from rollout.errors import OutputError
from rollout.ledger import Ledger
from rollout.local_files import scratch_file
from rollout.part_work import WriteShard, by_prompt, write_verified
from rollout.rows import PlanEntry, Rejection, RolloutRow
from rollout.schema import layout
from rollout.schema.records import CommitRecord, DatasetRecord
from rollout.shard import ROW_GROUP_BYTES, ShardInfo
from rollout.sidecars import plan_bytes, read_plan_units, rejected_bytes
from rollout.storage import Storage

__all__ = ["DatasetView", "DatasetWriter", "dataset_exists", "read_dataset"]

_log = logging.getLogger(__name__)

_PLAN_PROMPTS: Final = 2**14  # of one plan file, at most
_EMPTY: Final = ShardInfo(
    size=0, sha256="", rows=0, tokens=0, entries=0, max_token_id=-1, row_groups=(), footer_blake3=""
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
        self.engine: dict[str, Any] = {}
        """What samples now: version, runner and dtypes of the engine; goes into commit records."""
        self._scratch = scratch
        self.row_group_bytes = row_group_bytes
        """Raw bytes after which a row group is closed."""
        self._lock = threading.RLock()
        self.ledger = Ledger()
        """What is planned, committed and set aside; grows with each commit."""
        # the files that each part's record names: all that is kept of the records
        self._parts: dict[str, list[tuple[str | None, str | None]]] = {}
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
        if not dataset_exists(storage, record):
            # not created where another process was first: then its record is compared
            storage.create_exclusive(layout.DATASET_FILE, record.to_json())
            dataset_exists(storage, record)
        found = find_record(storage)
        if found is None:
            raise OutputError(f"output {storage.url}: {layout.DATASET_FILE} came and went")
        writer = cls(storage, found, scratch, row_group_bytes)
        for commit, _ in iter_commits(storage):
            writer._apply(commit)
        writer._read_new_plan()
        return writer

    @property
    def scratch(self) -> Path:
        """Local folder for unfinished shards."""
        return self._scratch or self.storage.scratch_folder()

    def free_bytes(self) -> int:
        """Return what the disk of unfinished shards has free."""
        folder = self.scratch
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def covers(self, prompt_key: str, sample_index: int) -> bool:
        """Whether a rollout is committed."""
        return self.ledger.covers(self.ledger.numbers([prompt_key])[0], sample_index)

    def catch_up(self, unit: str) -> None:
        """Learn what other writers have committed of a unit.

        Raises:
            DatasetError: a record can't be read.
        """
        self._catch_up(unit)

    def append_plan(self, entries: Iterable[PlanEntry]) -> int:
        """Assign prompts to units, for good; a prompt that has a unit keeps it.

        Returns:
            How many prompts were new.

        Raises:
            ValueError: a unit's name can't be part of a file name.
            OutputError: the plan can't be written.
        """
        new = 0
        remaining = iter(entries)
        while chunk := list(itertools.islice(remaining, _PLAN_PROMPTS)):
            new += self._append_plan(chunk)
        return new

    def _append_plan(self, entries: Sequence[PlanEntry]) -> int:
        wanted: dict[str, PlanEntry] = {}
        for entry in entries:
            wanted.setdefault(entry.prompt_key, entry)
        for unit in {entry.unit for entry in wanted.values()}:
            layout.check_unit(unit)
        with self._lock:
            while True:
                units = self.ledger.units_of(list(wanted))
                new = [
                    entry
                    for entry, unit in zip(wanted.values(), units, strict=True)
                    if unit is None
                ]
                if not new:
                    return 0
                name = layout.plan_name(self._next_plan)
                if self.storage.create_exclusive(name, plan_bytes(new, self.record.fingerprint)):
                    self._next_plan += 1
                    return self.ledger.plan(
                        [entry.prompt_key for entry in new], [entry.unit for entry in new]
                    )
                # another process appended first: see what it planned
                self._read_new_plan()

    def commit_part(
        self,
        unit: str,
        rows: Sequence[RolloutRow],
        rejected: Sequence[Rejection] = (),
        write: WriteShard = write_verified,
    ) -> CommitRecord | None:
        """Commit rollouts and rejections of one unit as its next part.

        Rows whose key is committed already are left out, so are rejections of committed rollouts
        and of prompts that are recorded as rejected. Rows are written by prompt in order of first
        appearance, then by sample_index. The call is durable when it returns.

        Args:
            unit: the unit that the plan gives the rows' prompts.
            rows: rollouts that passed `rollout.rows.check_row`.
            rejected: what was set aside.
            write: writes the shard, and reads it back.

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
                part = len(self._parts.get(unit, ()))
                numbers = self.ledger.numbers([row.prompt_key for row in rows])
                left = [
                    row
                    for row, number in zip(rows, numbers, strict=True)
                    if not self.ledger.covers(number, row.sample_index)
                ]
                refused = self._new_rejections(rejected, {row.key for row in left})
            if not left and not refused:
                return None
            record = self._upload(unit, part, by_prompt(left), refused, write)
            if self.storage.create_exclusive(layout.commit_name(unit, part), record.to_bytes()):
                self._apply(record)
                return record
            # another writer took the part: its file stands, ours is an orphan
            _log.info("unit %s: part %d was committed by another writer first", unit, part)

    def missing_files(self) -> list[str]:
        """Name the files that commit records name and that are not there, as far as is known here.

        Raises:
            DatasetError: the folders can't be listed.
        """
        with self._lock:
            named = [name for parts in self._parts.values() for pair in parts for name in pair]
        there = {
            f"{folder}/{base}"
            for folder in (layout.DATA_FOLDER, layout.REJECTED_FOLDER)
            for base in self.storage.list(folder)
        }
        return [name for name in named if name is not None and name not in there]

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
                name = f"{folder}/{base}"
                if name not in self._close_part(parsed.unit, parsed.part):
                    self.storage.delete(name)
                    removed += 1
        self.storage.remove_stale_scratch()
        return removed

    def _check_rows(self, unit: str, rows: Sequence[RolloutRow]) -> None:
        seen: set[tuple[str, int]] = set()
        units = self.ledger.units_of([row.prompt_key for row in rows])
        for row, planned in zip(rows, units, strict=True):
            if planned != unit:
                raise ValueError(
                    f"prompt {row.prompt_key}: planned for unit {planned}, got unit {unit}: "
                    "call append_plan first and commit it with its unit"
                )
            if row.key in seen:
                raise ValueError(f"rollout {row.key}: given twice in one part")
            seen.add(row.key)

    def _new_rejections(
        self, rejected: Sequence[Rejection], own: set[tuple[str, int]]
    ) -> list[Rejection]:
        new: dict[tuple[str, int | None], Rejection] = {}
        numbers = self.ledger.numbers([item.prompt_key for item in rejected])
        for item, number in zip(rejected, numbers, strict=True):
            if item.sample_index is None:
                known = self.ledger.is_set_aside(number)
            else:
                covered = self.ledger.covers(number, item.sample_index)
                known = covered or (item.prompt_key, item.sample_index) in own
            if not known:
                new.setdefault(item.key, item)
        return list(new.values())

    def _upload(
        self,
        unit: str,
        part: int,
        rows: list[RolloutRow],
        rejected: list[Rejection],
        write: WriteShard,
    ) -> CommitRecord:
        """Write, verify and upload a part's files; nothing counts until the record exists."""
        attempt = uuid.uuid4().hex[:16]
        file = layout.data_name(unit, part, attempt) if rows else None
        info = self._upload_shard(file, rows, write) if file is not None else _EMPTY
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
            **_row_columns(rows),
            row_groups=info.row_groups,
            footer_blake3=info.footer_blake3,
            rejected_file=rejected_file,
            rejected_rows=len(rejected),
            rejected_keys=tuple(item.key for item in rejected),
            engine=dict(self.engine),
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        )

    def _upload_shard(self, file: str, rows: list[RolloutRow], write: WriteShard) -> ShardInfo:
        folder = self.scratch
        try:
            local = scratch_file(folder)
            try:
                info = write(local, rows, self.record.fingerprint, self.row_group_bytes)
                self.storage.put_file(local, file)
            finally:
                local.unlink(missing_ok=True)
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(f"output: can't write a shard in {folder}: {error}") from error
        return info

    def _close_part(self, unit: str, part: int) -> tuple[str | None, str | None]:
        """The files of a part, whose record is made empty where there is none yet."""
        while True:
            self._catch_up(unit)
            known = self._parts.get(unit, [])
            if part < len(known):
                return known[part]
            void = self._upload(unit, len(known), [], [], write_verified)
            name = layout.commit_name(unit, void.part)
            if self.storage.create_exclusive(name, void.to_bytes()):
                self._apply(void)

    def _catch_up(self, unit: str) -> None:
        """Read the records that other writers made for a unit; no listing is needed."""
        while True:
            with self._lock:
                part = len(self._parts.get(unit, ()))
            try:
                record = read_commit(self.storage, layout.commit_name(unit, part))
            except FileNotFoundError:
                return
            self._apply(record, since=True)

    def _apply(self, record: CommitRecord, *, since: bool = False) -> None:
        with self._lock:
            known = self._parts.setdefault(record.unit, [])
            self.ledger.set_aside(record.rejected_keys, since=since)
            if record.part < len(known):
                return
            known.append((record.file, record.rejected_file))
            self.ledger.cover(record.keys)

    def _read_new_plan(self) -> None:
        with self._lock:
            while True:
                name = layout.plan_name(self._next_plan)
                try:
                    data = self.storage.read_bytes(name)
                except FileNotFoundError:
                    return
                self.ledger.plan(*read_plan_units(data, name))
                self._next_plan += 1


def _row_columns(rows: list[RolloutRow]) -> dict[str, Any]:
    """What a commit record says of rows that are sorted by prompt."""
    counts = Counter(row.prompt_key for row in rows)
    return {
        "prompt_keys": tuple(counts),
        "prompt_rows": tuple(counts.values()),
        "sample_indices": tuple(row.sample_index for row in rows),
    }
