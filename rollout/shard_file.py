"""Put a Parquet file together: most columns as Arrow wrote them, support entries from their pages.

Arrow writes the other columns, and lists that are all null in place of the entries, to memory. Each
row group of the file has the entries in that place, and the footer says where everything is now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from rollout.compact_thrift import I64, LIST, Struct, read_struct, write_struct
from rollout.entry_chunk import EntryChunk

_MAGIC: Final = b"PAR1"
_TAIL: Final = 8  # the footer's length, and the magic
# numbers of the fields in Parquet's structs: of the file, a row group, a column and its metadata
_ROW_GROUPS: Final = 4
_COLUMNS, _GROUP_RAW, _GROUP_OFFSET, _GROUP_SIZE = 1, 2, 5, 6
_COLUMN_OFFSET, _METADATA = 2, 3
_PATH, _VALUES, _RAW, _SIZE, _PLACE, _PAGES, _LEVELS = 3, 5, 6, 7, 9, 13, 16
_COUNT = 3
_REPETITION, _DEFINITION = 2, 3


def file_parts(written: pa.Buffer, chunks: Sequence[EntryChunk]) -> list[pa.Buffer]:
    """Return the bytes of the file, one part after the other.

    Args:
        written: what Arrow wrote, with null lists of support entries.
        chunks: the entries of each row group.
    """
    end = written.size - _TAIL
    length = int.from_bytes(written[end : end + 4].to_pybytes(), "little")
    footer, _ = read_struct(written[end - length : end].to_pybytes())
    parts = [pa.py_buffer(_MAGIC)]
    place = len(_MAGIC)
    groups: list[Struct] = footer[_ROW_GROUPS][1][1]
    for group, chunk in zip(groups, chunks, strict=True):
        columns: list[Struct] = group[_COLUMNS][1][1]
        first = place
        for column in columns:
            metadata: Struct = column[_METADATA][1]
            start, size = metadata[_PLACE][1], metadata[_SIZE][1]
            _set(metadata, _PLACE, place)
            if column[_COLUMN_OFFSET][1]:
                _set(column, _COLUMN_OFFSET, place)
            if metadata[_PATH][1][1][0] == b"support_entries":
                _describe(metadata, chunk)
                parts += [pa.py_buffer(page) for page in chunk.pages]
                place += chunk.size
            else:
                parts.append(written[start : start + size])
                place += size
        _set(group, _GROUP_OFFSET, first)
        _set(group, _GROUP_SIZE, place - first)
        _set(group, _GROUP_RAW, sum(column[_METADATA][1][_RAW][1] for column in columns))
    tail = write_struct(footer)
    parts.append(pa.py_buffer(tail + len(tail).to_bytes(4, "little") + _MAGIC))
    return parts


def _describe(metadata: Struct, chunk: EntryChunk) -> None:
    _set(metadata, _VALUES, chunk.num_values)
    _set(metadata, _RAW, chunk.raw_size)
    _set(metadata, _SIZE, chunk.size)
    if _PAGES in metadata:
        ((kind, _),) = {(page[1][1], page[2][1]) for page in metadata[_PAGES][1][1]}
        assert kind == 0, "a data page"
        _set(metadata[_PAGES][1][1][0], _COUNT, chunk.num_pages)
    if _LEVELS in metadata:
        counts: Struct = metadata[_LEVELS][1]
        counts[_REPETITION] = _longs([chunk.num_lists, chunk.num_values - chunk.num_lists])
        counts[_DEFINITION] = _longs(list(chunk.levels))


def _longs(values: list[int]) -> tuple[int, Any]:
    return LIST, (I64, values)


def _set(fields: Struct, number: int, value: int) -> None:
    """Change a number, keeping its type."""
    fields[number] = fields[number][0], value
