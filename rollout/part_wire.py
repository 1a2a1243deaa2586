"""Rows and answers between the job and the processes that write shards: JSON and Arrow, framed.

A message is the lengths of its two halves, a JSON object, and an Arrow table or nothing. Entries do
not travel: the row says where in the spool they are.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa

from rollout.rows import RolloutRow
from rollout.schema.columns import LIST_COLUMNS, SCHEMA
from rollout.spool_entries import HeldSegments, SpooledEntries, spooled

_LENGTHS: Final = struct.Struct("<QQ")
# the counts follow from the rest
_COLUMNS: Final = [field for field in SCHEMA if not field.name.startswith("num_")]
_WIRE: Final = pa.schema(
    [
        pa.field("prompt_key", pa.string()),
        *(pa.field(field.name, field.type) for field in _COLUMNS),
        pa.field("spool_folder", pa.string()),
        pa.field("spool_addresses", pa.list_(pa.int64())),
    ]
)


def send(file: IO[bytes], head: dict[str, Any], body: bytes | memoryview | pa.Buffer = b"") -> None:
    """Write one message.

    Args:
        file: a pipe.
        head: JSON values.
        body: from `pack_rows`, or nothing.
    """
    text = json.dumps(head).encode()
    view = memoryview(body)
    file.write(_LENGTHS.pack(len(text), view.nbytes))
    file.write(text)
    file.write(view)
    file.flush()


def receive(file: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """Read one message.

    Raises:
        EOFError: the other side is gone.
    """
    head_bytes, body_bytes = _LENGTHS.unpack(_read(file, _LENGTHS.size))
    head: dict[str, Any] = json.loads(_read(file, head_bytes))
    return head, _read(file, body_bytes)


def pack_rows(rows: Sequence[RolloutRow]) -> pa.Buffer:
    """Turn rows into an Arrow stream."""
    stored = [None if row.stored_entries is None else spooled(row.stored_entries) for row in rows]
    columns = []
    for field in _WIRE:
        values: list[Any]
        if field.name == "spool_folder":
            values = [None if at is None else str(at.segments.folder) for at in stored]
        elif field.name == "spool_addresses":
            values = [None if at is None else at.addresses for at in stored]
        else:
            values = [getattr(row, field.name) for row in rows]
        columns.append(pa.array(values, field.type))
    sink = pa.BufferOutputStream()
    table = pa.Table.from_arrays(columns, schema=_WIRE)
    with pa.ipc.new_stream(sink, _WIRE) as stream:
        stream.write_table(table)
    return sink.getvalue()


def unpack_rows(body: bytes) -> list[RolloutRow]:
    """Return the rows of `pack_rows`."""
    with pa.ipc.open_stream(body) as stream:
        table = stream.read_all().combine_chunks()
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        column = table[name]
        columns[name] = (
            [None if value.values is None else value.values.to_numpy() for value in column]
            if name in LIST_COLUMNS or name == "spool_addresses"
            else column.to_pylist()
        )
    folders, addresses = columns.pop("spool_folder"), columns.pop("spool_addresses")
    rows = []
    for index in range(table.num_rows):
        row = RolloutRow(**{name: values[index] for name, values in columns.items()})
        if folders[index] is not None:
            assert row.support_offsets is not None
            row.stored_entries = SpooledEntries(
                segments=HeldSegments(Path(folders[index])),
                addresses=addresses[index],
                counts=np.diff(row.support_offsets).astype(np.int32),
            )
        rows.append(row)
    return rows


def _read(file: IO[bytes], length: int) -> bytes:
    data = file.read(length)
    if len(data) != length:
        raise EOFError(f"got {len(data)} of {length} bytes")
    return data
