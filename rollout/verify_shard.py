"""Prove that a shard is the one of its commit record, and that every row of it is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from blake3 import blake3
from numpy.typing import NDArray

from rollout.errors import DatasetError
from rollout.rows import BadRowError, RolloutRow, check_row
from rollout.schema.columns import FINGERPRINT_KEY, SCHEMA
from rollout.schema.records import CommitRecord
from rollout.shard import open_shard
from rollout.storage import Storage
from rollout.table_rows import table_rows

_BLOCK_BYTES: Final = 8 * 2**20


def check_bytes(storage: Storage, record: CommitRecord) -> None:
    """Compare a shard's size and digests with its record's, a few megabytes at a time.

    Raises:
        DatasetError: it is missing, or a byte differs; says in which row group.
    """
    assert record.file is not None
    size = storage.size(record.file)
    if size is None:
        raise DatasetError("is missing")
    if size != record.size:
        raise DatasetError(f"has {size} bytes, expected {record.size}")
    whole = hashlib.sha256()
    position = 0
    damaged: list[str] = []
    for index, group in enumerate(record.row_groups):
        _feed(storage, record.file, position, group.offset, whole.update)
        own = blake3()
        end = group.offset + group.size
        _feed(storage, record.file, group.offset, end, whole.update, own.update)
        if own.hexdigest() != group.blake3:
            damaged.append(f"row group {index} (bytes {group.offset} to {end})")
        position = end
    footer = blake3()
    _feed(storage, record.file, position, size, whole.update, footer.update)
    if record.row_groups and footer.hexdigest() != record.footer_blake3:
        damaged.append(f"the footer (bytes {position} to {size})")
    if damaged:
        raise DatasetError(f"other bytes than were committed in {', '.join(damaged)}")
    if whole.hexdigest() != record.sha256:
        raise DatasetError("other bytes than were committed outside of its row groups")


def checked_rows(
    storage: Storage, record: CommitRecord, fingerprint: str
) -> Iterator[list[RolloutRow]]:
    """Read a shard and check its schema, its page checksums, and every row by the format's rules.

    Args:
        storage: the dataset's.
        record: the shard's record, consistent in itself.
        fingerprint: the dataset's.

    Yields:
        The rows of one row group after the other.

    Raises:
        DatasetError: the first fault.
    """
    assert record.file is not None
    keys = record.keys
    tokens = entries = first = 0
    largest = -1
    groups: dict[str, str] = {}
    with open_shard(storage.local_or_stream(record.file)) as shard:
        metadata = shard.metadata.metadata or {}
        if not shard.schema_arrow.equals(SCHEMA, check_metadata=True):
            raise DatasetError("its schema is not the one of its format version")
        if metadata.get(FINGERPRINT_KEY.encode()) != fingerprint.encode():
            raise DatasetError("it was written by a run with another fingerprint")
        rows = [shard.metadata.row_group(i).num_rows for i in range(shard.num_row_groups)]
        if rows != [group.rows for group in record.row_groups]:
            raise DatasetError(f"its row groups have {_short(rows)} rows, not those of its record")
        for index in range(shard.num_row_groups):
            try:
                table = shard.read_row_group(index, use_threads=False)
            except (pa.ArrowException, OSError) as error:
                raise DatasetError(f"row group {index} is damaged: {error}") from error
            found = _rows_of(table, keys[first : first + table.num_rows], groups)
            yield found
            first += len(found)
            tokens += sum(row.token_ids.size for row in found)
            entries += sum(_size(row.support_entries) for row in found)
            largest = max(largest, *(_largest_id(row) for row in found))
    if len(set(groups.values())) != len(groups):
        raise DatasetError("two of its prompts have the same group_id")
    for name, got, expected in (
        ("tokens", tokens, record.tokens),
        ("support entries", entries, record.entries),
        ("as its largest token id", largest, record.max_token_id),
    ):
        if got != expected:
            raise DatasetError(f"holds {got} {name}, its record says {expected}")


def _rows_of(
    table: pa.Table, keys: Sequence[tuple[str, int]], groups: dict[str, str]
) -> list[RolloutRow]:
    """Build the rows of a row group, each checked against the record and in itself.

    Args:
        table: the row group.
        keys: (prompt_key, sample_index) of its rows, by the record.
        groups: the group_id of each prompt so far; those of this row group are added.
    """
    rows = table_rows(table, [key for key, _ in keys])
    counts = zip(
        *(table[name].to_pylist() for name in ("num_prompt_tokens", "num_tokens")),
        table["num_support_entries"].to_pylist(),
        strict=True,
    )
    for row, (key, sample), counted in zip(rows, keys, counts, strict=True):
        try:
            check_row(row)
        except BadRowError as error:
            raise DatasetError(f"rollout {row.rollout_id!r}: {error}") from error
        problem = _contradiction(row, sample, groups.setdefault(key, row.group_id), counted)
        if problem is not None:
            raise DatasetError(f"rollout {row.rollout_id!r}: {problem}")
    return rows


def _contradiction(row: RolloutRow, sample: int, group: str, counted: Any) -> str | None:
    """Say what of a row contradicts its record or the format; `check_row` does not know these."""
    if row.sample_index != sample:
        return f"is sample {row.sample_index}, its record says {sample}"
    if row.group_id != group:
        return f"is of group {row.group_id}, its prompt's rows before it are of {group}"
    sizes = (row.prompt_token_ids.size, row.token_ids.size, _size(row.support_entries))
    if counted != sizes:
        return f"its counts say {counted}, its lists hold {sizes}"
    if row.group_size < 1:
        return f"group_size is {row.group_size}"
    if row.support_entries is not None and row.support_offsets is not None:
        if row.tail_mass is None:
            return "no tail_mass beside its support"
        problem = order_problem(row.support_entries, row.support_offsets)
        if problem is not None:
            return problem
    if row.metadata is not None:
        try:
            json.loads(row.metadata)
        except (ValueError, RecursionError) as error:
            return f"its metadata is no JSON: {error}"
    return None


def order_problem(entries: NDArray[np.uint64], offsets: NDArray[np.int64]) -> str | None:
    """Say where a support is not as the format wants it: distinct ids, in ascending order.

    Args:
        entries: [E] uint64 packed.
        offsets: [T + 1] int64, from 0 to E, never falling.
    """
    if entries.size < 2:
        return None
    same_token = np.ones(entries.size - 1, bool)
    borders = offsets[1:-1]
    same_token[borders[(borders > 0) & (borders < entries.size)] - 1] = False
    if (same_token & (entries[1:] <= entries[:-1])).any():
        return "a support is not in canonical order"
    tokens = np.repeat(np.arange(offsets.size - 1, dtype=np.uint64), np.diff(offsets))
    ids = np.sort(tokens << np.uint64(32) | entries & np.uint64(0xFFFFFFFF))
    if (ids[1:] == ids[:-1]).any():
        return "a support lists an id twice"
    return None


def _largest_id(row: RolloutRow) -> int:
    ids = [row.prompt_token_ids, row.token_ids]
    ids += [e.view("<u4")[::2] for e in (row.support_entries, row.draw_entries) if e is not None]
    return max((int(part.max()) for part in ids if part.size), default=-1)


def _size(array: NDArray[Any] | None) -> int:
    return 0 if array is None else int(array.size)


def _short(values: list[int]) -> str:
    return f"{values}" if len(values) <= 4 else f"{values[:3]}... ({len(values)} of them)"


def _feed(
    storage: Storage, name: str, start: int, end: int, *sinks: Callable[[bytes], object]
) -> None:
    """Hand bytes of a file to each sink, in blocks."""
    while start < end:
        block = storage.read_range(name, start, min(_BLOCK_BYTES, end - start))
        if not block:
            raise DatasetError(f"ends at byte {start}, expected more")
        for sink in sinks:
            sink(block)
        start += len(block)
