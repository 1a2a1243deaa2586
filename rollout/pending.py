"""Finished parts that the output would not take, kept on a local disk until it does.

A folder for each output and run of fingerprints, so that the next run of the same job on this
machine finds what the last one could not upload. A part counts once its description is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from rollout.dataset import DatasetWriter
from rollout.errors import DatasetError
from rollout.local_files import sync_file
from rollout.part_work import WriteShard, write_verified
from rollout.rows import PlanEntry, Rejection, RolloutRow
from rollout.schema.records import CommitRecord
from rollout.shard import ROW_GROUP_BYTES, open_shard
from rollout.table_rows import ROW_COLUMNS, table_rows

_log = logging.getLogger(__name__)
_STALE_SECONDS: Final = 3600.0  # a file whose description never came


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingPart:
    """A part in the folder."""

    path: Path
    """Its description; the shard beside it has the same name with another suffix."""
    unit: str
    keys: tuple[tuple[str, int], ...]
    """The (prompt_key, sample_index) of every row, in the shard's order."""
    rejected: tuple[Rejection, ...]


class PendingParts:
    """The folder of one output."""

    def __init__(self, folder: Path, budget: int, fingerprint: str) -> None:
        """Look at a folder, which need not exist.

        Args:
            folder: where the parts are.
            budget: most bytes kept there.
            fingerprint: of the run.
        """
        self.folder = folder
        """Where the parts are."""
        self._budget = budget
        self._fingerprint = fingerprint
        self._lock = threading.Lock()

    @classmethod
    def of(cls, base: str | None, output: str, fingerprint: str, budget: int) -> PendingParts:
        """Name the folder of an output.

        Args:
            base: where such folders are; default: the user's cache.
            output: what identifies the output.
            fingerprint: of the run.
            budget: most bytes kept there.
        """
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        parent = Path(base) if base is not None else cache / "rollout" / "pending"
        name = hashlib.sha256(f"{output} {fingerprint}".encode()).hexdigest()[:32]
        return cls(parent / name, budget, fingerprint)

    def save(
        self,
        unit: str,
        rows: Sequence[RolloutRow],
        rejected: Sequence[Rejection],
        write: WriteShard = write_verified,
    ) -> bool:
        """Keep a part.

        Args:
            unit: the part's unit.
            rows: rollouts that passed `rollout.rows.check_row`.
            rejected: what was set aside.
            write: writes the shard, and reads it back.

        Returns:
            Whether there was room for it.

        Raises:
            OSError: the disk does not take it.
        """
        with self._lock:
            size = sum(row.num_bytes for row in rows)
            if self.num_bytes() + size > self._budget:
                return False
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self.folder / f"{time.time_ns():020d}-{uuid.uuid4().hex}.json"
            description = {
                "unit": unit,
                # the order of the shard is the order of the rows
                "keys": [row.key for row in rows],
                "rejected": [dataclasses.asdict(item) for item in rejected],
            }
            shard, new = path.with_suffix(".parquet"), path.with_suffix(".new")
            try:
                if rows:
                    write(shard, rows, self._fingerprint, ROW_GROUP_BYTES)
                new.write_text(json.dumps(description))
                for written in (shard, new) if rows else (new,):
                    sync_file(written)
                new.replace(path)
            except BaseException:
                shard.unlink(missing_ok=True)
                new.unlink(missing_ok=True)
                raise
            return True

    def num_bytes(self) -> int:
        """Count the bytes that are kept."""
        total = 0
        with contextlib.suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    total += path.stat().st_size
        return total

    def parts(self) -> list[PendingPart]:
        """List the parts, oldest first.

        Raises:
            DatasetError: a description is damaged.
        """
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                raw = json.loads(path.read_text())
                found.append(
                    PendingPart(
                        path=path,
                        unit=raw["unit"],
                        keys=tuple((str(key), int(index)) for key, index in raw["keys"]),
                        rejected=tuple(Rejection(**item) for item in raw["rejected"]),
                    )
                )
            except FileNotFoundError:
                continue  # uploaded by another process of the job
            except (ValueError, KeyError, TypeError) as error:
                raise DatasetError(
                    f"{path}: damaged: {error}: remove it and {path.stem}.parquet, and its "
                    "rollouts are sampled again"
                ) from error
        return found

    def commit(self, part: PendingPart, writer: DatasetWriter) -> list[CommitRecord]:
        """Commit a part and remove it; what was sampled again meanwhile is left out.

        Returns:
            The records that this made.

        Raises:
            OutputError: the output does not take it.
            DatasetError: the part is damaged.
        """
        try:
            rows = self._rows(part)
        except FileNotFoundError:
            return []  # uploaded by another process of the job
        # the output may have been made anew since, with another plan
        writer.append_plan(
            PlanEntry(
                prompt_key=row.prompt_key,
                prompt_id=row.prompt_id,
                unit=part.unit,
            )
            for row in rows
        )
        units = writer.ledger.units_of([row.prompt_key for row in rows])
        records = []
        for unit in dict.fromkeys([part.unit, *(unit for unit in units if unit is not None)]):
            own = [row for row, planned in zip(rows, units, strict=True) if planned == unit]
            record = writer.commit_part(unit, own, part.rejected if unit == part.unit else ())
            if record is not None:
                records.append(record)
        for suffix in (".json", ".parquet"):
            part.path.with_suffix(suffix).unlink(missing_ok=True)
        return records

    def commit_all(self, writer: DatasetWriter) -> int:
        """Commit what an earlier run had to leave here, and tidy up.

        Returns:
            How many rollouts this committed.

        Raises:
            OutputError: the output does not take it.
            DatasetError: a part is damaged.
        """
        committed = 0
        for part in self.parts():
            committed += sum(record.rows for record in self.commit(part, writer))
        if committed:
            _log.warning("uploaded %d rollouts that were kept in %s", committed, self.folder)
        with contextlib.suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    described = path.with_suffix(".json").exists()
                    if not described and path.stat().st_mtime < time.time() - _STALE_SECONDS:
                        path.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # only where it is empty
        return committed

    def _rows(self, part: PendingPart) -> list[RolloutRow]:
        shard = part.path.with_suffix(".parquet")
        try:
            return _read(shard, part.keys) if part.keys else []
        except FileNotFoundError:
            raise
        except (DatasetError, pa.ArrowException, OSError) as error:
            raise DatasetError(
                f"{shard}: can't be uploaded: {error}: remove it and {part.path.name}, and its "
                f"{len(part.keys)} rollouts are sampled again"
            ) from error


def _read(path: Path, keys: tuple[tuple[str, int], ...]) -> list[RolloutRow]:
    """Read a kept shard, which has to hold these rollouts."""
    prompts = [prompt for prompt, _ in keys]
    rows: list[RolloutRow] = []
    with open_shard(path) as shard:
        if shard.metadata.num_rows != len(keys):
            raise DatasetError(f"it has {shard.metadata.num_rows} rollouts, expected {len(keys)}")
        for group in range(shard.num_row_groups):
            table = shard.read_row_group(group, columns=list(ROW_COLUMNS))
            rows += table_rows(table, prompts[len(rows) : len(rows) + table.num_rows])
    if tuple(row.key for row in rows) != keys:
        raise DatasetError("it holds other rollouts than its description says")
    return rows
