"""Decode the Parquet pages of support entries straight into the ids and logprobs of a batch.

A BYTE_STREAM_SPLIT page holds the first byte of all its values, then the second of all, and so on:
of packed entries first the four streams of the ids, then the four of the logprobs. Joining each
four by themselves gives what a batch needs, without the packed values; and where the lists begin is
known from the offsets, so that the pages' levels are skipped. Arrow's reader takes twice as long to
make the packed values, which would then have to be split and copied.

Pages wait as they are stored, in a third of the memory, and are decoded when a batch takes up their
rows, where it wants them. It reads what `rollout.shard` writes and refuses everything else: V1
pages, zstd, with a checksum.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from isal import isal_zlib
from numpy.typing import NDArray

from rollout.errors import DatasetError
from rollout.page_header import read_struct

_STREAMS: Final = 8
_FEW_BYTES: Final = 1024
# of the Parquet format
_DATA_PAGE: Final = 0
_RLE: Final = 3
_BYTE_STREAM_SPLIT: Final = 9


class Entries(Protocol):
    """Entries of one rollout after the other, decoded or not."""

    @property
    def size(self) -> int:
        """How many."""

    def write(self, into: SplitEntries) -> None:
        """Write them to arrays of as many.

        Raises:
            DatasetError: their page is damaged.
        """


class SplitEntries(NamedTuple):
    """E entries, as `rollout.schema.entries.unpack_entries` gives them."""

    ids: NDArray[np.int32]
    """[E]."""
    logprobs: NDArray[np.float32]
    """[E] nats."""

    @property
    def size(self) -> int:
        """E."""
        return self.ids.size

    def part(self, start: int, stop: int) -> SplitEntries:
        """Return views of some of them."""
        return SplitEntries(self.ids[start:stop], self.logprobs[start:stop])

    def write(self, into: SplitEntries) -> None:
        """Copy them to arrays of as many."""
        np.copyto(into.ids, self.ids)
        np.copyto(into.logprobs, self.logprobs)


class EntryPages:
    """The pages of a row group's `support_entries`; safe to use from several threads.

    Args:
        chunk: all bytes of the column chunk.
        counts: [R] int64 entries of each row; 0 where its list is null.
        where: what the chunk belongs to, for messages.

    Raises:
        OSError: a page is not as `rollout.shard` writes it, or they hold other numbers of entries.
    """

    def __init__(self, chunk: memoryview, counts: NDArray[np.int64], where: str) -> None:
        self._where = where
        self.num_bytes = len(chunk)
        """Bytes that the pages take as they are stored."""
        # levels take less than a byte a value, and a null or empty list has one as well
        largest = (_STREAMS + 1) * (int(counts.sum()) + counts.size) + _FEW_BYTES
        self._pages = list(_pages(chunk, largest))
        values = _offsets([page.num_values for page in self._pages])
        bounds = _offsets(np.maximum(counts, 1))
        if values[-1] != bounds[-1]:
            raise OSError(f"{values[-1]} values of support_entries, expected {bounds[-1]}")
        # of the row in which each page begins, those before the page
        row = np.searchsorted(bounds, values, side="right") - 1
        inside = np.minimum(values - bounds[row], np.append(counts, 0)[row])
        self._starts: list[int] = (_offsets(counts)[row] + inside).tolist()
        self._last: tuple[int, NDArray[np.uint8]] | None = None

    def span(self, start: int, stop: int) -> EntrySpan:
        """Return some of the entries, to be decoded later."""
        return EntrySpan(self, start, stop)

    def decode(self, start: int, stop: int, into: SplitEntries) -> None:
        """Decode entries; the checksum of every page of theirs is verified.

        Args:
            start: the first.
            stop: behind the last.
            into: arrays of as many.

        Raises:
            DatasetError: a page is damaged, or not as `rollout.shard` writes it.
        """
        number, place = bisect_right(self._starts, start) - 1, start
        while place < stop:
            first, after = self._starts[number : number + 2]
            end = min(stop, after)
            try:
                streams = self._streams(number)
            except (OSError, pa.ArrowException) as error:
                raise DatasetError(f"{self._where} is damaged: {error}") from error
            # the next rollout of a batch begins in this page
            self._last = (number, streams) if end < after else None
            own = into.part(place - start, end - start)
            part = streams[:, place - first : end - first]
            _join(part[:4], own.ids.view(np.uint32))
            _join(part[4:], own.logprobs.view(np.uint32))
            number, place = number + 1, end

    def _streams(self, number: int) -> NDArray[np.uint8]:
        """Decompress a page, unless it was the last one, to [8, n]."""
        last = self._last
        if last is not None and last[0] == number:
            return last[1]
        page = self._pages[number]
        if isal_zlib.crc32(page.data) != page.checksum:
            raise OSError("crc checksum verification failed for a page of support_entries")
        # a context of its own costs less than a lock
        raw = pa.Codec("zstd").decompress(pa.py_buffer(page.data), page.num_bytes)
        values = _values(raw)
        count = self._starts[number + 1] - self._starts[number]
        if values.size != _STREAMS * count:
            raise OSError(f"page of {values.size} bytes of values, expected {count} entries")
        return values.reshape(_STREAMS, count)


@dataclass(frozen=True, slots=True, eq=False)
class EntrySpan:
    """Some entries of pages that were not decoded yet."""

    pages: EntryPages
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many."""
        return self.stop - self.start

    def write(self, into: SplitEntries) -> None:
        """Decode them.

        Raises:
            DatasetError: see `EntryPages.decode`.
        """
        self.pages.decode(self.start, self.stop, into)


def write_entries(parts: Sequence[Entries], into: SplitEntries) -> None:
    """Write the entries of all parts, one after the other.

    Raises:
        DatasetError: see `EntryPages.decode`.
    """
    place = 0
    for part in _joined(parts):
        part.write(into.part(place, place + part.size))
        place += part.size


def _joined(parts: Sequence[Entries]) -> Iterator[Entries]:
    """Join spans that follow each other: a page is decoded in one piece."""
    last: Entries | None = None
    for part in parts:
        if (
            isinstance(last, EntrySpan)
            and isinstance(part, EntrySpan)
            and (last.pages, last.stop) == (part.pages, part.start)
        ):
            last = last.pages.span(last.start, part.stop)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


class _Page(NamedTuple):
    """A page, and what its header says."""

    data: memoryview
    """Compressed."""
    num_bytes: int
    """When it is decompressed."""
    num_values: int
    """Entries, and one for each list without any."""
    checksum: int


def _pages(chunk: memoryview, largest: int) -> Iterator[_Page]:
    """Parse the page headers of a column chunk, for pages of at most `largest` bytes."""
    place = 0
    while place < len(chunk):
        try:
            header, place = read_struct(chunk, place)
            size, most, stored = header[3], header[2], header[4]
            count, *encodings = (header[5][field] for field in (1, 2, 3, 4))
        except (IndexError, KeyError, TypeError) as error:
            raise OSError(f"the page header before byte {place} can't be parsed") from error
        if (header[1], *encodings) != (_DATA_PAGE, _BYTE_STREAM_SPLIT, _RLE, _RLE):
            raise OSError(
                f"page of type and encodings {(header[1], *encodings)}, expected "
                "BYTE_STREAM_SPLIT in V1"
            )
        if not 0 < size <= len(chunk) - place:
            raise OSError(f"page of {size} bytes, of which {len(chunk) - place} are there")
        if not 0 < most <= largest or not 0 <= count <= largest:
            raise OSError(f"page of {most} bytes and {count} values, expected at most {largest}")
        yield _Page(chunk[place : place + size], most, count, stored & 0xFFFFFFFF)
        place += size


def _values(page: pa.Buffer) -> NDArray[np.uint8]:
    """Return the values of a decompressed page: what follows its two runs of levels."""
    data = np.frombuffer(page, np.uint8)
    start = 0
    for _ in ("repetition", "definition"):
        start += 4 + int.from_bytes(data[start : start + 4].tobytes(), "little")
    if start > data.size:
        raise OSError(f"page of {data.size} bytes whose levels take {start}")
    return data[start:]


class _Scratch(threading.local):
    """Memory of a thread for joining the streams of a page; fresh memory would take longer."""

    def __init__(self) -> None:
        self._pairs = np.empty((2, 0), np.uint16)
        self._words = np.empty(0, np.uint32)

    def views(self, count: int) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
        """Return room for two times so many numbers of two bytes, and so many of four."""
        if self._words.size < count:
            self._pairs, self._words = np.empty((2, count), np.uint16), np.empty(count, np.uint32)
        return self._pairs[:, :count], self._words[:count]


_scratch = _Scratch()


def _join(
    streams: NDArray[np.uint8],  # [4, n]
    out: NDArray[np.uint32],  # [n]
) -> None:
    """Make numbers of four bytes, which are given from the lowest up."""
    pairs, upper = _scratch.views(out.size)
    # the highest byte of an id is 0
    np.copyto(upper, _paired(streams[2:], pairs) if streams[3].any() else streams[2])
    np.copyto(out, _paired(streams[:2], pairs))
    _add_above(out, upper)


def _paired(
    streams: NDArray[np.uint8],  # [2, n]
    pairs: NDArray[np.uint16],  # [2, n]
) -> NDArray[np.uint16]:
    """Make numbers of two bytes."""
    np.copyto(pairs, streams)
    lower: NDArray[np.uint16] = pairs[0]
    _add_above(lower, pairs[1])
    return lower


def _add_above(lower: NDArray[Any], upper: NDArray[Any]) -> None:
    """Fill the empty upper halves of numbers with the lower halves of others."""
    half = lower.itemsize // 2
    # numbers lie with the lowest byte first, so a place further in memory is a shift
    room = lower.view(np.uint8)[half:]
    np.bitwise_or(room, upper.view(np.uint8)[: room.size], out=room)


def _offsets(counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return exclusive prefix sums with the total at the end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
