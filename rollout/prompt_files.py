"""Rows of a prompts file: JSON lines, plain or compressed, or Parquet, on any fsspec storage.

A row that can't be read is returned as such and does not stop the file; a file that can't be read
raises. Byte order marks, CRLF, blank lines and a missing final newline make no difference.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from rollout.config import PromptsConfig
from rollout.errors import InputError, RolloutError
from rollout.storage_errors import explain

_FORMATS = (".jsonl", ".jsonl.gz", ".parquet")
_READ_BYTES = 2**20
_LINE_BYTES = 64 * 2**20  # no prompt is longer
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# columns of ours: a null field inside of them is one that the row does not have
_OURS = ("messages", "sampling", "chat_template_kwargs")


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRow:
    """One row as it stands in the file."""

    line: int
    """Line of the file, or row of a Parquet file, from 1."""
    data: dict[str, Any] | None
    """Null where the row can't be read."""
    problem: str | None
    """Why it can't."""
    raw: bytes
    """The line, or what stands for one that is too long; empty for Parquet."""


def read_rows(config: PromptsConfig) -> Iterator[RawRow]:
    """Read a file's rows in order.

    Args:
        config: where it is.

    Yields:
        rows, also those that can't be read.

    Raises:
        InputError: the file can't be opened or read on, or is of another format.
    """
    if not config.path.endswith(_FORMATS):
        raise InputError(f"prompts {config.name}: expected a file named {', '.join(_FORMATS)}")
    try:
        if config.path.endswith(".parquet"):
            yield from _parquet_rows(config)
        else:
            yield from _json_rows(config)
    except RolloutError:
        raise
    except Exception as error:  # every storage's client and every codec raises types of its own
        reason = getattr(error, "strerror", None) or explain(error, config.storage_options)
        reason = " ".join(str(reason).split())
        raise InputError(f"prompts {config.name} can't be read: {reason}") from error


def _json_rows(config: PromptsConfig) -> Iterator[RawRow]:
    compression = "gzip" if config.path.endswith(".gz") else None
    with fsspec.open(config.path, "rb", compression=compression, **config.storage_options) as file:
        for line, raw in enumerate(_lines(file), start=1):
            if isinstance(raw, _LongLine):
                problem = f"the line has {raw.size} bytes, expected at most {_LINE_BYTES}"
                yield RawRow(line=line, data=None, problem=problem, raw=raw.digest)
                continue
            if line == 1 and raw.startswith(_UTF16):
                raise InputError(f"prompts {config.name}: the file is UTF-16, save it as UTF-8")
            # each of several concatenated files may bring its own byte order mark
            text = raw.removeprefix(_BOM).strip()
            if text:
                yield _json_row(line, text)


@dataclass(frozen=True, kw_only=True, slots=True)
class _LongLine:
    """A line that is not kept."""

    size: int
    digest: bytes


def _lines(file: Any) -> Iterator[bytes | _LongLine]:
    """Cut a file into lines, and hold no more of one than a prompt may have."""
    with io.BufferedReader(file, _READ_BYTES) as reader:
        while raw := reader.readline(_LINE_BYTES):
            if len(raw) < _LINE_BYTES or raw.endswith(b"\n"):
                yield raw
                continue
            size, digest = 0, hashlib.sha256()
            while raw:
                size += len(raw)
                digest.update(raw)
                raw = b"" if raw.endswith(b"\n") else reader.readline(_READ_BYTES)
            yield _LongLine(size=size, digest=digest.digest())


def _json_row(line: int, text: bytes) -> RawRow:
    try:
        data = json.loads(text.decode(), object_pairs_hook=_no_repeated_keys)
        problem = None if isinstance(data, dict) else f"got {_kind(data)}, expected an object"
    except RecursionError:
        data, problem = None, "nested too deeply"
    except ValueError as error:
        data, problem = None, str(error)
    return RawRow(line=line, data=None if problem else data, problem=problem, raw=text)


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _no_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        repeated = next(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"key {repeated!r} stands twice in one object")
    return data


def _parquet_rows(config: PromptsConfig) -> Iterator[RawRow]:
    with (
        fsspec.open(config.path, "rb", **config.storage_options) as file,
        # a row group may be the whole file: read it page by page
        pq.ParquetFile(file, buffer_size=_READ_BYTES, pre_buffer=False) as table,
    ):
        counts = Counter(table.schema_arrow.names)
        repeated = [name for name, count in counts.items() if count > 1]
        if repeated:
            raise InputError(
                f"prompts {config.name}: column `{repeated[0]}` is there twice, rename one"
            )
        line = 1
        for batch in table.iter_batches(batch_size=1024):
            yield from _batch_rows(batch, line)
            line += batch.num_rows


def _batch_rows(batch: pa.RecordBatch, line: int) -> Iterator[RawRow]:
    try:
        rows = _values(batch)
    except Exception as error:  # one bad value spoils its batch: look at each row alone
        if batch.num_rows == 1:
            problem = f"{type(error).__name__}: {error}"
            yield RawRow(line=line, data=None, problem=problem, raw=str(line).encode())
            return
        for i in range(batch.num_rows):
            yield from _batch_rows(batch.slice(i, 1), line + i)
        return
    for i, data in enumerate(rows):
        yield RawRow(line=line + i, data=data, problem=None, raw=b"")


def _values(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        values = _column_values(column)
        columns[name] = [_without_nulls(v) for v in values] if name in _OURS else values
    return [
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    ] or [{}] * batch.num_rows


def _column_values(column: pa.Array) -> list[Any]:
    kind = column.type
    nanoseconds = (pa.types.is_timestamp(kind) or pa.types.is_duration(kind)) and kind.unit == "ns"
    if not nanoseconds:
        return column.to_pylist()  # type: ignore[no-any-return]
    # datetime holds no nanoseconds, numpy does
    known = column.is_valid().to_pylist()
    values = column.to_numpy(zero_copy_only=False)
    return [value if there else None for value, there in zip(values, known, strict=True)]


def _without_nulls(value: Any) -> Any:
    """Drop the fields that a struct column has only because another row has them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
