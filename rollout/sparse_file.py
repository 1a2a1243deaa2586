"""A file of which only some ranges were fetched, for readers that ask for exactly those."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence


class SparseFile:
    """A seekable file over fetched ranges; what was not fetched can't be read.

    Args:
        parts: fetched bytes by the offset of the first.
        size: bytes of the whole file.
    """

    closed = False

    def __init__(self, parts: Mapping[int, bytes | memoryview], size: int) -> None:
        self._starts = sorted(parts)
        self._views = [memoryview(parts[start]) for start in self._starts]
        self._size = size
        self._position = 0

    def read(self, size: int = -1) -> memoryview:
        """Read from the position on, without a copy.

        Raises:
            OSError: these bytes were not fetched.
        """
        if size < 0:
            size = self._size - self._position
        if size == 0:
            return memoryview(b"")
        index = bisect_right(self._starts, self._position) - 1
        if index >= 0:
            first = self._position - self._starts[index]
            found = self._views[index][first : first + size]
            if len(found) == size:
                self._position += size
                return found
        raise OSError(f"bytes {self._position} to {self._position + size} were not fetched")

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def seekable(self) -> bool:
        """Whether the position can be moved: yes."""
        return True

    def close(self) -> None:
        """Do nothing: the bytes belong to the caller."""

    def flush(self) -> None:
        """Do nothing: nothing is written."""


def joined_ranges(ranges: Sequence[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """Join ranges (first byte, bytes) that are at most `gap` bytes apart."""
    joined: list[tuple[int, int]] = []
    for start, size in sorted(ranges):
        if joined and start - sum(joined[-1]) <= gap:
            first, length = joined[-1]
            joined[-1] = (first, max(length, start + size - first))
        else:
            joined.append((start, size))
    return joined
