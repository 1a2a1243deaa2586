"""Read single row groups of a dataset's shards as rollouts whose arrays are views, not copies."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rollout.dataset_view import DatasetView
from rollout.errors import DatasetError
from rollout.rows import RolloutRow
from rollout.schema.records import CommitRecord

COLUMNS: Final = (
    "rollout_id",
    "group_id",
    "prompt_id",
    "sample_index",
    "group_size",
    "prompt_token_ids",
    "token_ids",
    "sampled_logprobs",
    "temperature",
    "policy_step",
    "support_kind",
    "support_offsets",
    "support_entries",
    "tail_mass",
    "draw_entries",
    "reward",
    "advantage",
)
"""What training reads; the text and the user's own columns stay on the storage."""

_OPEN_SHARDS: Final = 8
_HASH_BYTES: Final = 8 * 2**20


class ShardReader:
    """Reads rows of pinned shards through a cache of decoded row groups.

    Each shard's digest is compared with its commit record when the shard is first opened; page
    checksums are verified on every read.
    """

    def __init__(
        self, view: DatasetView, shards: Sequence[CommitRecord], *, cache_bytes: int, verify: bool
    ) -> None:
        self._view = view
        self._shards = shards
        self._cache_bytes = cache_bytes
        self._verify = verify
        self._verified: set[int] = set()
        self._files: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._cache: OrderedDict[tuple[int, int], list[RolloutRow]] = OrderedDict()
        self._cached_bytes = 0
        self._ends = [np.cumsum([group.rows for group in shard.row_groups]) for shard in shards]

    def read(self, shard: int, first_row: int, num_rows: int) -> Iterator[RolloutRow]:
        """Yield consecutive rows of a shard.

        Raises:
            DatasetError: the shard is missing, damaged, or not the one of its record.
        """
        ends = self._ends[shard]
        row = first_row
        while row < first_row + num_rows:
            index = int(np.searchsorted(ends, row, side="right"))
            start = int(ends[index - 1]) if index else 0
            rows = self._row_group(shard, index)
            stop = min(first_row + num_rows, int(ends[index]))
            yield from rows[row - start : stop - start]
            row = stop

    def close(self) -> None:
        """Close files and drop the cache; the reader can be used again."""
        while self._files:
            self._files.popitem()[1].close()
        self._cache.clear()
        self._cached_bytes = 0

    def _row_group(self, shard: int, index: int) -> list[RolloutRow]:
        """Return a decoded row group, most recently used last in the cache."""
        key = (shard, index)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        record = self._shards[shard]
        file = self._file(shard)
        try:
            table = file.read_row_group(index, columns=list(COLUMNS))
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(f"{record.file}: row group {index} is damaged: {error}") from error
        first = int(self._ends[shard][index - 1]) if index else 0
        keys = record.keys[first : first + table.num_rows]
        rows = rows_of(table, [prompt_key for prompt_key, _ in keys])
        self._cache[key] = rows
        self._cached_bytes += _num_bytes(rows)
        while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= _num_bytes(dropped)
        return rows

    def _file(self, shard: int) -> pq.ParquetFile:
        """Return an open shard, its digest compared on the first use."""
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        record = self._shards[shard]
        if self._verify and shard not in self._verified:
            self._check_digest(record)
            self._verified.add(shard)
        self._files[shard] = self._view.open_shard(record)
        if len(self._files) > _OPEN_SHARDS:
            self._files.popitem(last=False)[1].close()
        return self._files[shard]

    def _check_digest(self, record: CommitRecord) -> None:
        """Raise DatasetError unless a shard's bytes are those that were committed."""
        assert record.file is not None
        storage = self._view.storage
        try:
            source = storage.local_or_stream(record.file)
            with Path(source).open("rb") if isinstance(source, str) else source as file:
                size, sha256 = _digest(file)
        except FileNotFoundError as error:
            raise DatasetError(f"dataset {storage.url}: {record.file} is missing") from error
        if (size, sha256) != (record.size, record.sha256):
            raise DatasetError(
                f"dataset {storage.url}: {record.file} has {size} bytes with sha256 {sha256}, "
                f"expected {record.size} with {record.sha256}: it changed after it was committed"
            )


def rows_of(table: pa.Table, prompt_keys: Sequence[str]) -> list[RolloutRow]:
    """Turn a table into rollouts; their arrays are read-only views of the table's buffers.

    Args:
        table: columns `COLUMNS` of the dataset's schema.
        prompt_keys: one for each row.

    Returns:
        One rollout a row; columns that are not read stay unset.
    """
    keys = iter(prompt_keys)
    rows = []
    for batch in table.to_batches():
        columns: dict[str, Any] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            nested = pa.types.is_list(column.type)
            columns[name] = _slices(column) if nested else column.to_pylist()
        for values in zip(*columns.values(), strict=True):
            fields = dict(zip(columns, values, strict=True))
            rows.append(RolloutRow(prompt_key=next(keys), **fields))
    return rows


def _slices(column: pa.ListArray) -> list[NDArray[Any] | None]:
    """Return each list of a column as a view, None where it is null."""
    values = column.values.to_numpy(zero_copy_only=True)
    bounds = column.offsets.to_numpy(zero_copy_only=True).tolist()
    valid = column.is_valid().to_pylist()
    return [
        values[bounds[i] : bounds[i + 1]] if present else None for i, present in enumerate(valid)
    ]


def _num_bytes(rows: Sequence[RolloutRow]) -> int:
    return sum(row.num_bytes for row in rows)


def _digest(file: IO[bytes]) -> tuple[int, str]:
    """Return size and sha256 of a file."""
    sha256, size = hashlib.sha256(), 0
    while block := file.read(_HASH_BYTES):
        sha256.update(block)
        size += len(block)
    return size, sha256.hexdigest()
