"""Support entries where the sampling process wrote them: in the spool, until a shard holds them.

The driver moves no entries: it knows of each token where they lie, and whoever writes the shard
reads them there. A segment file stays until everything in it that somebody needs is released.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

SEGMENT_BITS = 40  # an address is the segment's number and, in this many bits, the byte in it
_WIDE = 256  # mean entries of a token from which on each is read by itself
_GAP_BYTES = 8192  # reading so much more takes as long as reading once more
_MOVED_SEGMENTS = 1 << 22  # numbers of the segments made here, beyond any of the sampling process


def segment_name(index: int) -> str:
    """Name a segment file."""
    return f"segment-{index:08d}.spool"


class HeldSegments:
    """The segments of a folder, and how many bytes of each are still needed; thread-safe."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        """Where the segments are."""
        self._lock = threading.Lock()
        self._needed: dict[int, int] = {}
        self._sealed: dict[int, int] = {}
        self._moved = _MOVED_SEGMENTS

    @property
    def num_bytes(self) -> int:
        """Bytes of the segments that nothing is added to, and needed bytes of the others."""
        with self._lock:
            open_ones = sum(n for index, n in self._needed.items() if index not in self._sealed)
            return sum(self._sealed.values()) + open_ones

    def hold(self, segment: int, num_bytes: int) -> None:
        """Keep a segment for so many bytes more."""
        with self._lock:
            self._needed[segment] = self._needed.get(segment, 0) + num_bytes

    def seal(self, segment: int, size: int) -> None:
        """Note a segment's final size; it goes as soon as nothing of it is needed."""
        with self._lock:
            self._sealed[segment] = size
            unneeded = self._drop_unneeded([segment])
        self._unlink(unneeded)

    def release(self, addresses: npt.NDArray[np.int64], counts: npt.NDArray[np.int32]) -> None:
        """Give up entries.

        Args:
            addresses: [T] where each token's entries start.
            counts: [T] how many there are.
        """
        segments, inverse = np.unique(addresses >> SEGMENT_BITS, return_inverse=True)
        sizes = np.bincount(inverse, weights=8.0 * counts, minlength=segments.size)
        with self._lock:
            for segment, size in zip(segments.tolist(), sizes.tolist(), strict=True):
                left = self._needed.get(segment, 0) - int(size)
                assert left >= 0, f"entries of segment {segment} are released twice"
                self._needed[segment] = left
            unneeded = self._drop_unneeded(segments.tolist())
        self._unlink(unneeded)

    def sparse(self, share: float) -> list[int]:
        """Return the sealed segments of which less than a share of the bytes is needed."""
        with self._lock:
            return [
                index
                for index, size in self._sealed.items()
                if self._needed.get(index, 0) < share * size
            ]

    def move(
        self, addresses: npt.NDArray[np.int64], counts: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64]:
        """Copy entries to a segment of their own, so that the ones they are in can go.

        Args:
            addresses: [T] where each token's entries start.
            counts: [T] how many there are.

        Returns:
            [T] where they are now.

        Raises:
            OSError: the disk does not take them; nothing has changed then.
        """
        entries = load_entries(self.folder, addresses, counts)
        with self._lock:
            index = self._moved = self._moved + 1
        path = self.folder / segment_name(index)
        try:
            path.write_bytes(entries.data)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self.hold(index, entries.nbytes)
        self.seal(index, entries.nbytes)
        self.release(addresses, counts)
        ends = np.cumsum(counts, dtype=np.int64)
        return (index << SEGMENT_BITS) + 8 * (ends - counts)

    def _drop_unneeded(self, segments: list[int]) -> list[int]:
        """Forget those of the segments that can go; return them."""
        unneeded = [s for s in segments if s in self._sealed and not self._needed.get(s, 0)]
        for segment in unneeded:
            del self._sealed[segment]
            self._needed.pop(segment, None)
        return unneeded

    def _unlink(self, segments: list[int]) -> None:
        # without the lock, since it takes long to free a large file's memory
        for segment in segments:
            # the folder may be gone with the job
            with contextlib.suppress(FileNotFoundError):
                (self.folder / segment_name(segment)).unlink()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpooledEntries:
    """The entries of a rollout of T tokens, still in the spool."""

    segments: HeldSegments
    addresses: npt.NDArray[np.int64]
    """[T] segment and byte where each token's entries start."""
    counts: npt.NDArray[np.int32]
    """[T] entries of each token."""

    @property
    def size(self) -> int:
        """Number of entries, E."""
        return int(self.counts.sum(dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the entries."""
        return 8 * self.size

    def load(self) -> npt.NDArray[np.uint64]:
        """Read the entries.

        Returns:
            [E] packed.

        Raises:
            OSError: a segment is gone or cut short.
        """
        return load_entries(self.segments.folder, self.addresses, self.counts)

    def release(self) -> None:
        """Give the entries up; once, after which they can't be loaded."""
        self.segments.release(self.addresses, self.counts)


def spooled(entries: object) -> SpooledEntries:
    """Take stored entries for what they are.

    Raises:
        TypeError: they are stored elsewhere.
    """
    if not isinstance(entries, SpooledEntries):
        raise TypeError(f"entries in {type(entries).__name__}, expected the spool")
    return entries


def load_entries(
    folder: Path, addresses: npt.NDArray[np.int64], counts: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint64]:
    """Read entries from the segments of a folder.

    Args:
        folder: the spool's.
        addresses: [T] where each token's entries start.
        counts: [T] how many there are.

    Returns:
        [E] packed.

    Raises:
        OSError: a segment is gone or cut short.
    """
    starts = np.cumsum(counts, dtype=np.int64) - counts
    entries = np.empty(int(counts.sum(dtype=np.int64)), np.uint64)
    # by address, so that each segment is opened once
    order = np.argsort(addresses, kind="stable")
    order = order[counts[order] > 0]
    segments = addresses[order] >> SEGMENT_BITS
    for own in np.split(order, np.flatnonzero(np.diff(segments)) + 1) if order.size else ():
        segment = int(addresses[own[0]] >> SEGMENT_BITS)
        places = addresses[own] & ((1 << SEGMENT_BITS) - 1)
        file = os.open(folder / segment_name(segment), os.O_RDONLY)
        try:
            if counts[own].mean() >= _WIDE:
                _read_each(file, places, starts[own], counts[own], entries)
            else:
                _read_gathered(file, places, starts[own], counts[own], entries)
        finally:
            os.close(file)
    return entries


def _read_each(
    file: int,
    places: npt.NDArray[np.int64],  # [T] bytes in the file
    starts: npt.NDArray[np.int64],  # [T] indices in entries
    counts: npt.NDArray[np.int32],  # [T]
    entries: npt.NDArray[np.uint64],
) -> None:
    """Read each token's entries to where they belong."""
    target = entries.view(np.uint8).data
    for place, start, count in zip(places.tolist(), starts.tolist(), counts.tolist(), strict=True):
        _read(file, place, target[8 * start : 8 * (start + count)])


def _read_gathered(
    file: int,
    places: npt.NDArray[np.int64],  # [T] bytes in the file, rising
    starts: npt.NDArray[np.int64],  # [T] indices in entries
    counts: npt.NDArray[np.int32],  # [T]
    entries: npt.NDArray[np.uint64],
) -> None:
    """Read what is close together in one go, with what lies between, and pick the entries out."""
    ends = places + 8 * counts.astype(np.int64)
    first = np.concatenate([[0], np.flatnonzero(places[1:] - ends[:-1] > _GAP_BYTES) + 1])
    begins = places[first]
    sizes = np.append(ends[first[1:] - 1], ends[-1]) - begins
    bases = np.cumsum(sizes) - sizes  # where each stretch is in the buffer
    buffer = np.empty(int(sizes.sum()) // 8, np.uint64)
    target = buffer.view(np.uint8).data
    for begin, base, size in zip(begins.tolist(), bases.tolist(), sizes.tolist(), strict=True):
        _read(file, begin, target[base : base + size])
    stretch_lengths = np.diff(np.append(first, places.size))
    sources = (places - np.repeat(begins - bases, stretch_lengths)) // 8
    before = np.cumsum(counts, dtype=np.int64) - counts
    index = np.arange(int(counts.sum(dtype=np.int64)))
    entries[index + np.repeat(starts - before, counts)] = buffer[
        index + np.repeat(sources - before, counts)
    ]


def _read(file: int, offset: int, target: memoryview) -> None:
    while target:
        done = os.preadv(file, [target], offset)
        if not done:
            raise OSError(f"spool: a segment ends at byte {offset}, before its entries do")
        offset += done
        target = target[done:]
