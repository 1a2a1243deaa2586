"""Write one Parquet shard and prove that what was written can be read back.

Arrow writes all columns but the support entries, which `rollout.entry_chunk` encodes. Layout, by
measurement: BYTE_STREAM_SPLIT with zstd-1 for entries and floats, DELTA_BINARY_PACKED for offsets,
page checksums on, statistics on scalar columns only, row groups closed by raw bytes at the end of a
prompt group, and always under 2**31 flattened elements, where Arrow's 32-bit list offsets end.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from rollout.entry_chunk import EntryChunk, encode_chunk
from rollout.errors import DatasetError
from rollout.rows import RolloutRow
from rollout.schema.columns import (
    FINGERPRINT_KEY,
    FORMAT_VERSION,
    LIST_COLUMNS,
    SCALAR_COLUMNS,
    SCHEMA,
    VERSION_KEY,
    other_version,
)
from rollout.schema.records import RowGroup
from rollout.shard_file import file_parts
from rollout.table import build_table

ROW_GROUP_BYTES: Final = 24 * 2**20
MAX_ELEMENTS: Final = 2**31 - 1

_ZSTD_LEVEL: Final = 1
_READ_BYTES: Final = 4 * 2**20
_ENCODINGS: Final = {
    "prompt_token_ids": "BYTE_STREAM_SPLIT",
    "token_ids": "BYTE_STREAM_SPLIT",
    "sampled_logprobs": "BYTE_STREAM_SPLIT",
    "support_offsets": "DELTA_BINARY_PACKED",
    # of the null lists, which the entries take the place of
    "support_entries": "BYTE_STREAM_SPLIT",
    "tail_mass": "BYTE_STREAM_SPLIT",
    "draw_entries": "BYTE_STREAM_SPLIT",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """What a shard holds, for its commit record."""

    size: int
    """Bytes of the file."""
    sha256: str
    rows: int
    tokens: int
    """Sampled tokens."""
    entries: int
    """Support entries."""
    max_token_id: int
    """Largest id in prompts, samples, supports and draws; -1 without rows."""
    row_groups: tuple[RowGroup, ...]
    footer_blake3: str
    """Of the bytes behind the last row group, in hex."""


class ShardDigest(Protocol):
    """What `verify_shard` compares with: a `ShardInfo` or a `CommitRecord`."""

    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def sha256(self) -> str: ...  # noqa: D102
    @property
    def rows(self) -> int: ...  # noqa: D102
    @property
    def tokens(self) -> int: ...  # noqa: D102
    @property
    def entries(self) -> int: ...  # noqa: D102
    @property
    def row_groups(self) -> tuple[RowGroup, ...]: ...  # noqa: D102
    @property
    def footer_blake3(self) -> str: ...  # noqa: D102


def write_shard(
    path: Path,
    rows: Iterable[RolloutRow],
    fingerprint: str,
    *,
    row_group_bytes: int = ROW_GROUP_BYTES,
    max_elements: int = MAX_ELEMENTS,
) -> ShardInfo:
    """Write rollouts to a local Parquet file, in the order given.

    Support entries are put in canonical order here; draws stay in the order drawn, so that a
    reader may take the first of them. Rows are consumed one prompt group at a time.

    Args:
        path: a local file, overwritten.
        rows: the rollouts; the samples of a prompt next to each other.
        fingerprint: the run's, for the key-value metadata.
        row_group_bytes: most raw bytes of a row group, unless one row alone has more.
        max_elements: most elements of one list column in one row group.

    Returns:
        What the file holds, read from the closed file.

    Raises:
        OSError: the disk does not take it.
        DatasetError: what was written does not read back as what it was.
        ValueError: a row can't be written: see `rollout.rows.check_row`, or it alone holds more
            than `max_elements`.
    """
    tokens = entries = num_rows = 0
    max_token_id = -1
    sink = pa.BufferOutputStream()
    tables: list[pa.Table] = []
    chunks: list[EntryChunk] = []
    with pq.ParquetWriter(
        sink,
        SCHEMA,
        compression="zstd",
        compression_level=_ZSTD_LEVEL,
        use_dictionary=False,
        column_encoding={f"{name}.list.element": how for name, how in _ENCODINGS.items()},
        write_statistics=list(SCALAR_COLUMNS),
        write_page_checksum=True,
    ) as writer:
        writer.add_key_value_metadata(
            {VERSION_KEY: str(FORMAT_VERSION), FINGERPRINT_KEY: fingerprint}
        )
        for batch in _batches(rows, row_group_bytes, max_elements):
            built = build_table(batch)
            writer.write_table(built.table, row_group_size=len(batch))
            tables.append(built.table)
            chunks.append(encode_chunk(built.entries, built.lists, _ZSTD_LEVEL))
            num_rows += len(batch)
            tokens += sum(row.token_ids.size for row in batch)
            entries += built.entries.size
            max_token_id = max(max_token_id, built.largest)
    with path.open("wb") as file:
        parts = file_parts(sink.getvalue(), chunks)
        file.writelines(parts)
    _compare(path, parts, tables)
    with path.open("rb") as file:
        ranges = row_group_ranges(pq.read_metadata(file))
        size, sha256, digests = _digest(file, [(start, size) for start, size, _ in ranges])
        footer_blake3 = digests.pop()
    return ShardInfo(
        size=size,
        sha256=sha256,
        rows=num_rows,
        tokens=tokens,
        entries=entries,
        max_token_id=max_token_id,
        row_groups=tuple(
            RowGroup(offset=start, size=length, blake3=digest, rows=count)
            for (start, length, count), digest in zip(ranges, digests, strict=True)
        ),
        footer_blake3=footer_blake3,
    )


def _compare(path: Path, parts: Sequence[pa.Buffer], tables: Sequence[pa.Table]) -> None:
    """Compare a closed file with what was to be written.

    Every byte is compared; beyond that, Arrow decodes all columns but the entries, which were
    decompressed and compared when they were encoded.
    """
    with pa.memory_map(str(path)) as file:
        for part in parts:
            if not file.read_buffer(part.size).equals(part):
                raise DatasetError(f"shard: {part.size} bytes are not what was written")
        if file.size() != file.tell():
            raise DatasetError(f"shard: {file.size()} bytes, expected {file.tell()}")
    others = [name for name in SCHEMA.names if name != "support_entries"]
    with open_shard(path) as shard:
        if not shard.schema_arrow.equals(SCHEMA, check_metadata=True):
            raise DatasetError("shard: its schema is not the one of its format version")
        for index, table in enumerate(tables):
            try:
                found = shard.read_row_group(index, columns=others, use_threads=False)
            except (pa.ArrowException, OSError) as error:
                raise DatasetError(f"shard: row group {index} is damaged: {error}") from error
            for name in others:
                if not _bits(found[name]).equals(_bits(table[name])):
                    raise DatasetError(f"shard: row group {index}: {name} is not what was written")


def _bits(column: pa.ChunkedArray) -> pa.Array:
    """Return floats as the numbers with their bits, since a NaN equals nothing."""
    array, own = column.combine_chunks(), column.type
    if pa.types.is_float32(own):
        return array.view(pa.int32())
    if pa.types.is_list(own) and pa.types.is_float32(own.value_type):
        return array.view(pa.list_(own.value_field.with_type(pa.int32())))
    return array


def open_shard(source: str | Path | IO[bytes]) -> pq.ParquetFile:
    """Open a shard so that a damaged page raises instead of giving wrong numbers.

    Args:
        source: a local path, or a seekable binary file.

    Raises:
        DatasetError: not a Parquet file, not a shard, or of a newer format.
    """
    target = source if not isinstance(source, str) else Path(source)
    try:
        shard = pq.ParquetFile(target, page_checksum_verification=True, pre_buffer=True)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise DatasetError(f"shard: not a readable parquet file: {error}") from error
    version = (shard.metadata.metadata or {}).get(VERSION_KEY.encode())
    if version is None:
        raise DatasetError("shard: a parquet file, but not written by rollout")
    if int(version) != FORMAT_VERSION:
        raise DatasetError(f"shard: {other_version(int(version))}")
    return shard


def verify_shard(source: Path | IO[bytes], expected: ShardDigest) -> None:
    """Read a shard back completely and compare it with what its record says.

    Args:
        source: a local path, or a seekable binary file.
        expected: the shard's `ShardInfo` or `CommitRecord`.

    Raises:
        DatasetError: size, digest, footer, a page's checksum, the schema or a count differs.
    """
    if isinstance(source, Path):
        with source.open("rb") as file:
            verify_shard(file, expected)
        return
    shard = open_shard(source)
    if not shard.schema_arrow.equals(SCHEMA, check_metadata=True):
        raise DatasetError("shard: its schema is not the one of its format version")
    ranges = row_group_ranges(shard.metadata)
    found = [(start, length, rows) for start, length, rows in ranges]
    wanted = [(group.offset, group.size, group.rows) for group in expected.row_groups]
    if found != wanted:
        raise DatasetError(f"shard: row groups are {found[:3]}..., expected {wanted[:3]}...")
    rows = tokens = entries = 0
    for index in range(shard.num_row_groups):
        try:
            table = shard.read_row_group(index, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(f"shard: row group {index} is damaged: {error}") from error
        rows += table.num_rows
        tokens += int(np.sum(_lengths(table["token_ids"])))
        entries += int(np.sum(_lengths(table["support_entries"])))
    for name, got, want in (
        ("rows", rows, expected.rows),
        ("tokens", tokens, expected.tokens),
        ("support entries", entries, expected.entries),
    ):
        if got != want:
            raise DatasetError(f"shard: holds {got} {name}, expected {want}")
    size, sha256, parts = _digest(source, [(start, length) for start, length, _ in ranges])
    if (size, sha256) != (expected.size, expected.sha256):
        raise DatasetError(
            f"shard: {size} bytes with sha256 {sha256}, expected {expected.size} with "
            f"{expected.sha256}"
        )
    if parts != [*(group.blake3 for group in expected.row_groups), expected.footer_blake3]:
        raise DatasetError("shard: the digest of a row group or of the footer differs")


def _batches(
    rows: Iterable[RolloutRow], row_group_bytes: int, max_elements: int
) -> Iterator[list[RolloutRow]]:
    """Cut rows into row groups: several prompt groups, or a part of one that is too large.

    No row group holds a part of one prompt group beside another one, so that a reader which mixes
    the groups of some row groups needs no others.
    """
    limits = np.array([row_group_bytes] + [max_elements] * len(LIST_COLUMNS), np.int64)
    batch: list[RolloutRow] = []
    filled = np.zeros_like(limits)
    for _, members in itertools.groupby(rows, key=lambda row: row.group_id):
        group = list(members)
        loads = np.array([_load(row, max_elements) for row in group], np.int64)
        total = loads.sum(axis=0)
        if batch and (filled + total > limits).any():
            yield batch
            batch, filled = [], np.zeros_like(limits)
        if (total <= limits).all():
            batch += group
            filled += total
            continue
        share = total[0] / (-(-total // limits)).max()
        for row, load in zip(group, loads, strict=True):
            if batch and (filled[0] >= share or (filled + load > limits).any()):
                yield batch
                batch, filled = [], np.zeros_like(limits)
            batch.append(row)
            filled += load
        yield batch
        batch, filled = [], np.zeros_like(limits)
    if batch:
        yield batch


def _load(row: RolloutRow, max_elements: int) -> list[int]:
    """Raw bytes of a row, and the elements of each of its list columns."""
    arrays = [getattr(row, name) for name in LIST_COLUMNS]
    elements = [0 if array is None else int(array.size) for array in arrays]
    if max(elements) > max_elements:
        widest = LIST_COLUMNS[elements.index(max(elements))]
        raise ValueError(
            f"rollout {row.rollout_id}: {max(elements)} values in {widest}, "
            f"expected at most {max_elements}: set it aside or lower its max_tokens"
        )
    return [row.num_bytes, *elements]


def _lengths(column: Any) -> Any:
    return [
        int(np.diff(chunk.offsets.to_numpy())[np.asarray(chunk.is_valid())].sum())
        for chunk in column.chunks
    ]


def row_group_ranges(metadata: Any) -> list[tuple[int, int, int]]:
    """First byte, bytes and rows of every row group."""
    ranges = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        columns = [group.column(number) for number in range(group.num_columns)]
        start = min(column.data_page_offset for column in columns)
        end = max(column.data_page_offset + column.total_compressed_size for column in columns)
        ranges.append((start, end - start, group.num_rows))
    return ranges


def _digest(file: IO[bytes], ranges: list[tuple[int, int]]) -> tuple[int, str, list[str]]:
    """Size and sha256 of a file; the BLAKE3 of rising ranges, and of what is behind the last."""
    whole = hashlib.sha256()
    digests = []
    file.seek(0)
    position = 0

    def take(length: int, *hashes: Any) -> int:
        taken = 0
        while taken < length and (block := file.read(min(_READ_BYTES, length - taken))):
            for digest in hashes:
                digest.update(block)
            taken += len(block)
        return taken

    for start, length in ranges:
        part = blake3()
        position += take(start - position, whole)
        position += take(length, whole, part)
        digests.append(part.hexdigest())
    rest = blake3()
    while block := file.read(_READ_BYTES):
        whole.update(block)
        rest.update(block)
        position += len(block)
    digests.append(rest.hexdigest())
    return position, whole.hexdigest(), digests
