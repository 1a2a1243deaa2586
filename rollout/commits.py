"""Read the records of a dataset: what made it, and every part that counts."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from rollout.errors import DatasetError, OutputError
from rollout.schema import layout
from rollout.schema.records import CommitRecord, DatasetRecord, RecordError
from rollout.storage import Storage

# one lot is one call of the storage: a thread for each file would cost more than the file
_LOT: Final = 16
_LOTS_AHEAD: Final = 2
_ABSENT: Final = "(absent)"


def find_record(storage: Storage) -> DatasetRecord | None:
    """Read what made the dataset; None where there is none.

    Raises:
        DatasetError: the record is damaged or of another format version.
    """
    try:
        return DatasetRecord.from_json(storage.read_bytes(layout.DATASET_FILE))
    except FileNotFoundError:
        return None
    except RecordError as error:
        raise DatasetError(f"{storage.url}/{layout.DATASET_FILE}: {error}") from error


def read_commit(storage: Storage, name: str) -> CommitRecord:
    """Read one commit record.

    Raises:
        FileNotFoundError: the part is not committed.
        DatasetError: the record is damaged or of another format version.
    """
    return parse_commit(storage, name, storage.read_bytes(name))


def iter_commits(storage: Storage) -> Iterator[tuple[CommitRecord, int]]:
    """Read the commit records one by one, by unit and part, with no part left out.

    Yields:
        Each record with the bytes of its file.

    Raises:
        DatasetError: a record is missing, damaged or of another format version.
    """
    for name, data in read_ahead(storage, commit_names(storage)):
        if isinstance(data, FileNotFoundError):
            raise DatasetError(
                f"dataset {storage.url}: a commit record is missing although later parts exist: "
                f"{data}: copy the dataset again"
            ) from data
        if isinstance(data, Exception):
            raise data
        yield parse_commit(storage, name, data), len(data)


def commit_names(storage: Storage) -> list[str]:
    """Name every commit record that has to be there, by unit and part.

    Raises:
        DatasetError: the folder can't be listed.
    """
    highest: dict[str, int] = {}
    for base in storage.list(layout.COMMIT_FOLDER):
        parsed = layout.parse_part(base)
        if parsed is not None and parsed.attempt is None:
            highest[parsed.unit] = max(parsed.part, highest.get(parsed.unit, -1))
    # parts have no holes, so a name that a listing missed is read all the same
    return [
        layout.commit_name(unit, part)
        for unit in sorted(highest)
        for part in range(highest[unit] + 1)
    ]


def read_ahead(storage: Storage, names: list[str]) -> Iterator[tuple[str, bytes | Exception]]:
    """Read small files side by side, a few of them ahead of the caller.

    Yields:
        Each name with what the file holds, or why it can't be read.
    """
    lots = (names[start : start + _LOT] for start in range(0, len(names), _LOT))
    waiting: deque[tuple[list[str], Future[Sequence[bytes | BaseException]]]] = deque()
    with ThreadPoolExecutor(_LOTS_AHEAD) as pool:
        for lot in itertools.chain(lots, [None] * _LOTS_AHEAD):
            if lot is not None:
                waiting.append((lot, pool.submit(storage.read_many, lot)))
            if waiting and (lot is None or len(waiting) > _LOTS_AHEAD):
                first, future = waiting.popleft()
                for name, data in zip(first, future.result(), strict=True):
                    yield name, data if isinstance(data, bytes) else _read_again(storage, name)


def _read_again(storage: Storage, name: str) -> bytes | Exception:
    """Read a file that did not come at once: until it does, or is known not to."""
    try:
        return storage.read_bytes(name)
    except Exception as error:
        return error


def parse_commit(storage: Storage, name: str, data: bytes) -> CommitRecord:
    """Parse a commit record.

    Raises:
        DatasetError: it is damaged or of another format version.
    """
    try:
        return CommitRecord.from_bytes(data)
    except RecordError as error:
        raise DatasetError(f"{storage.url}/{name}: {error}") from error


def dataset_exists(storage: Storage, record: DatasetRecord) -> bool:
    """Say whether a job would go on with what is in the output, or start a dataset there.

    Args:
        storage: the output.
        record: what is about to make the data.

    Raises:
        OutputError: the folder holds another run, or files of one without its record.
        DatasetError: what is there is damaged or of another format version.
    """
    found = find_record(storage)
    if found is None:
        for folder in (layout.DATA_FOLDER, layout.COMMIT_FOLDER):
            if storage.list(folder):
                raise OutputError(
                    f"output {storage.url}: `{folder}/` holds files but there is no "
                    f"{layout.DATASET_FILE}: choose an empty folder"
                )
        return False
    if found.fingerprint != record.fingerprint:
        raise OutputError(_other_run(storage, found, record))
    return True


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
