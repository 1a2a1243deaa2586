"""Decode the Parquet pages of support entries straight into ids and logprobs.

A BYTE_STREAM_SPLIT page holds the first byte of all its values, then the second of all, and so on:
of packed entries first the four streams of the ids, then the four of the logprobs. Joining each
four by themselves gives what a batch needs, without the packed values; and where the lists begin is
known from the offsets, so that the pages' levels are skipped. Arrow's reader takes twice as long to
make the packed values, which would then have to be split.

It reads what `rollout.shard` writes and refuses everything else: V1 pages, zstd, with a checksum.
"""

from __future__ import annotations

import zlib
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_AT_ONCE: Final = 65_536
_STREAMS: Final = 8
_FEW_BYTES: Final = 1024
# of the Parquet format
_DATA_PAGE: Final = 0
_RLE: Final = 3
_BYTE_STREAM_SPLIT: Final = 9
# of Thrift's compact protocol
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _BINARY, _STRUCT = 1, 2, 3, 4, 5, 6, 8, 12
_MOST_NESTED: Final = 3
_MOST_VARINT_BITS: Final = 63


class SplitEntries(NamedTuple):
    """E entries, as `rollout.schema.entries.unpack_entries` gives them."""

    ids: NDArray[np.int32]
    """[E]."""
    logprobs: NDArray[np.float32]
    """[E] nats."""

    def part(self, start: int, stop: int) -> SplitEntries:
        """Return views of some of them."""
        return SplitEntries(self.ids[start:stop], self.logprobs[start:stop])


def decode_entries(chunk: memoryview, into: SplitEntries) -> int:
    """Decode a column chunk of `support_entries`; every page's checksum is verified.

    Args:
        chunk: all bytes of the chunk.
        into: arrays of at least as many entries as it holds.

    Returns:
        How many it holds.

    Raises:
        OSError: it is damaged, or not as `rollout.shard` writes it.
    """
    codec = pa.Codec("zstd")
    scratch = np.empty((2, _AT_ONCE), np.uint32)
    # levels take less than a byte a value
    largest = (_STREAMS + 1) * into.ids.size + _FEW_BYTES
    place = done = 0
    while place < len(chunk):
        try:
            header, place = _struct(chunk, place, 0)
            size, most = header[3], header[2]
            stored = header[4] & 0xFFFFFFFF
            kinds = (header[1], *(header[5][field] for field in (2, 3, 4)))
        except (IndexError, KeyError, TypeError) as error:
            raise OSError(f"the page header before byte {place} can't be parsed") from error
        if kinds != (_DATA_PAGE, _BYTE_STREAM_SPLIT, _RLE, _RLE):
            raise OSError(f"page of type and encodings {kinds}, expected BYTE_STREAM_SPLIT in V1")
        page = chunk[place : place + size]
        if size < 1 or len(page) != size or zlib.crc32(page) != stored:
            raise OSError("crc checksum verification failed for a page of support_entries")
        if not 0 < most <= largest:
            raise OSError(f"page of {most} bytes, expected at most {largest}")
        place += size
        values = _values(codec.decompress(pa.py_buffer(page), most))
        count = values.size // _STREAMS
        own = into.part(done, done + count)
        if values.size % _STREAMS or own.ids.size != count:
            raise OSError(f"page of {values.size} bytes of values beyond entry {done}")
        streams = values.reshape(_STREAMS, count)
        _join(streams[:4], own.ids.view(np.uint32), scratch)
        _join(streams[4:], own.logprobs.view(np.uint32), scratch)
        done += count
    return done


def _values(page: pa.Buffer) -> NDArray[np.uint8]:
    """Return the values of a decompressed page: what follows its two runs of levels."""
    data = np.frombuffer(page, np.uint8)
    start = 0
    for _ in ("repetition", "definition"):
        start += 4 + int.from_bytes(data[start : start + 4].tobytes(), "little")
    if start > data.size:
        raise OSError(f"page of {data.size} bytes whose levels take {start}")
    return data[start:]


def _join(
    streams: NDArray[np.uint8],  # [4, n]
    out: NDArray[np.uint32],  # [n]
    scratch: NDArray[np.uint32],  # [2, _AT_ONCE]
) -> None:
    """Make numbers of four bytes, which are given from the lowest up."""
    # the highest byte of an id is 0
    top = 3 if streams[3].any() else 2
    # pieces that stay in the cache, from where each result is written once
    for first in range(0, out.size, _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        own = out[part]
        value, lower = scratch[:, : own.size]
        np.copyto(value, streams[top, part])
        for stream in range(top - 1, -1, -1):
            np.left_shift(value, 8, out=value)
            np.copyto(lower, streams[stream, part])
            np.bitwise_or(value, lower, out=value if stream else own)


def _struct(data: memoryview, place: int, nested: int) -> tuple[dict[int, Any], int]:
    """Parse a Thrift struct of the compact protocol: its fields by number, and where it ends."""
    fields: dict[int, Any] = {}
    number = 0
    while (byte := data[place]) != 0:
        place += 1
        kind = byte & 0x0F
        if byte >> 4:
            number += byte >> 4
        else:
            number, place = _integer(data, place)
        if kind in (_TRUE, _FALSE):
            fields[number] = kind == _TRUE
        elif kind == _BYTE:
            fields[number], place = data[place], place + 1
        elif kind in (_I16, _I32, _I64):
            fields[number], place = _integer(data, place)
        elif kind == _BINARY:
            size, place = _varint(data, place)
            fields[number], place = bytes(data[place : place + size]), place + size
        elif kind == _STRUCT and nested < _MOST_NESTED:
            fields[number], place = _struct(data, place, nested + 1)
        else:
            raise KeyError(kind)
    return fields, place + 1


def _integer(data: memoryview, place: int) -> tuple[int, int]:
    """Parse a signed number."""
    value, place = _varint(data, place)
    return (value >> 1) ^ -(value & 1), place


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    """Parse a number of seven bits a byte."""
    value = shift = 0
    while shift <= _MOST_VARINT_BITS:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise KeyError("a number that does not end")
