"""Encode support entries as the pages of a Parquet column chunk.

The encoding is the one of the other columns (V1 pages, BYTE_STREAM_SPLIT, zstd, checksums), and any
reader takes it. Arrow's writer makes two levels for each entry, which say where the lists begin,
and encodes them; here they are written as the runs that they are, in no time, as there are
thousands of entries for each list. A page is decompressed again and compared while it is in the
cache: decoding the written file by Arrow would take as long as encoding it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from isal import isal_zlib
from numpy.typing import NDArray

from rollout.compact_thrift import I32, STRUCT, Struct, varint, write_struct
from rollout.errors import DatasetError

PAGE_ENTRIES: Final = 1 << 17

# definition levels of a list column that may be null, and whose elements may not
NULL, EMPTY, PRESENT = 0, 1, 2
# of the Parquet format
_DATA_PAGE: Final = 0
RLE: Final = 3
BYTE_STREAM_SPLIT: Final = 9
_STREAMS: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryChunk:
    """A column chunk, and what the footer says of it."""

    pages: list[bytes | pa.Buffer]
    """Headers and bodies, one after the other."""
    size: int
    """Bytes of all of them."""
    raw_size: int
    """The same with the bodies uncompressed."""
    num_pages: int
    levels: tuple[int, int, int]
    """How many lists are null, how many empty, and how many entries there are."""
    num_lists: int

    @property
    def num_values(self) -> int:
        """Entries, and one for each list without any."""
        return sum(self.levels)


def encode_chunk(entries: NDArray[np.uint64], lists: list[int | None], level: int) -> EntryChunk:
    """Encode the entries of a row group.

    Args:
        entries: [E] of all rows.
        lists: entries of each row; null for a null list.
        level: of zstd.

    Raises:
        DatasetError: a page does not decompress to what was compressed.
    """
    codec = pa.Codec("zstd", level)
    pages: list[bytes | pa.Buffer] = []
    size = raw_size = start = 0
    for runs, values, count in _pages(lists):
        part = entries[start : start + count]
        start += count
        levels = _levels(runs)
        raw = _scratch.page(levels, part)
        body = codec.compress(pa.py_buffer(raw), asbytes=False)
        if not codec.decompress(body, raw.nbytes).equals(pa.py_buffer(raw)):
            raise DatasetError(
                "shard: a page of support_entries does not decompress to what it was"
            )
        header = write_struct(_header(values, raw.nbytes, body))
        pages += [header, body]
        size += len(header) + body.size
        raw_size += len(header) + raw.nbytes
    present = [count for count in lists if count is not None]
    return EntryChunk(
        pages=pages,
        size=size,
        raw_size=raw_size,
        num_pages=len(pages) // 2,
        levels=(len(lists) - len(present), present.count(0), int(entries.size)),
        num_lists=len(lists),
    )


class _Scratch(threading.local):
    """Memory of a thread for a page before it is compressed, which stays in the core's cache."""

    def __init__(self) -> None:
        self._raw = np.empty(0, np.uint8)
        self._pairs = np.empty((_STREAMS // 2, 0), np.uint16)

    def page(self, levels: bytes, entries: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Return levels and the byte streams of [n] entries; good until the next call."""
        count, size = entries.size, len(levels) + entries.nbytes
        if self._raw.size < size:
            self._raw = np.empty(size, np.uint8)
        if self._pairs.shape[1] < count:
            self._pairs = np.empty((_STREAMS // 2, count), np.uint16)
        raw, pairs = self._raw[:size], self._pairs[:, :count]
        raw[: len(levels)] = np.frombuffer(levels, np.uint8)
        streams = raw[len(levels) :].reshape(_STREAMS, count)
        # NumPy takes two thirds of the time for transposing pairs of bytes and splitting those
        pairs[...] = entries.view(np.uint16).reshape(count, _STREAMS // 2).T
        for pair, lower, upper in zip(pairs, streams[::2], streams[1::2], strict=True):
            np.copyto(lower, pair, casting="unsafe")
            np.right_shift(pair, 8, out=pair)
            np.copyto(upper, pair, casting="unsafe")
        return raw


_scratch = _Scratch()


# the rest of a list within a page: its definition level, values, and whether it begins there
_Run = tuple[int, int, bool]


def _pages(lists: list[int | None]) -> Iterator[tuple[list[_Run], int, int]]:
    """Cut lists into pages: the runs of each, its values with those of empty lists, its entries."""
    runs: list[_Run] = []
    values = entries = 0
    for count in lists:
        if not count:
            runs.append((NULL if count is None else EMPTY, 1, True))
            values += 1
        left = count or 0
        while left:
            taken = min(left, PAGE_ENTRIES - entries)
            runs.append((PRESENT, taken, left == count))
            values, entries, left = values + taken, entries + taken, left - taken
            if entries == PAGE_ENTRIES:
                yield runs, values, entries
                runs, values, entries = [], 0, 0
    if runs:
        yield runs, values, entries


def _levels(runs: list[_Run]) -> bytes:
    """Encode repetition levels, 0 where a list begins, and definition levels; each as runs."""
    repetition, definition = bytearray(), bytearray()
    inside = 0  # values since the last list began
    defined, repeated = runs[0][0], 0
    for level, count, begins in runs:
        if begins:
            if inside:
                repetition += varint(inside << 1) + b"\x01"
            repetition += b"\x02\x00"  # one value of 0
            inside = count - 1
        else:
            inside += count
        if level != defined:
            definition += varint(repeated << 1) + bytes([defined])
            defined, repeated = level, 0
        repeated += count
    if inside:
        repetition += varint(inside << 1) + b"\x01"
    definition += varint(repeated << 1) + bytes([defined])
    return b"".join(
        len(part).to_bytes(4, "little") + bytes(part) for part in (repetition, definition)
    )


def _header(values: int, raw_size: int, body: pa.Buffer) -> Struct:
    checksum = isal_zlib.crc32(body)
    data = {1: values, 2: BYTE_STREAM_SPLIT, 3: RLE, 4: RLE}
    return {
        1: (I32, _DATA_PAGE),
        2: (I32, raw_size),
        3: (I32, body.size),
        4: (I32, checksum - (checksum >> 31 << 32)),  # as a signed number
        5: (STRUCT, {number: (I32, value) for number, value in data.items()}),
    }
