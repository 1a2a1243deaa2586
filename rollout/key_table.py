"""Numbers for keys, held as digests in numpy arrays: 18 bytes a key, whatever its length.

A job knows millions of prompts; as Python strings in dicts each would cost hundreds of bytes. The
arrays live as long as the job, in pages of their own: these take no memory before they are written,
and go back to the system when runs are merged, whatever else stands on the heap.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

_Scalar = TypeVar("_Scalar", bound=np.generic)

# runs are merged up to this many keys, so that a key's place among those of its run is a uint16
_LARGEST_RUN: Final = 2**16
_CHUNK: Final = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Keys that were numbered one after the other, sorted by the first half of their digest."""

    first: int
    """The lowest of their numbers."""
    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    offsets: NDArray[np.uint16]
    """Each key's number, from `first` on."""


class KeyTable:
    """Numbers distinct keys 0, 1, 2... in the order in which they are added.

    Keys are told apart by 128 bits of BLAKE2b. Call it with many keys at once; it may be used from
    several threads.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._runs: list[_Run] = []
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size

    def find(self, keys: Sequence[str]) -> NDArray[np.int32]:
        """Look keys up.

        Args:
            keys: N keys.

        Returns:
            [N] int32 numbers; -1 for a key that was never added.
        """
        digests = _digests(keys)
        with self._lock:
            return self._find(digests)

    def add(self, keys: Sequence[str]) -> NDArray[np.int32]:
        """Look keys up, and number those that are new.

        Args:
            keys: N keys, also repeated ones.

        Returns:
            [N] int32 numbers.
        """
        digests = _digests(keys)
        with self._lock:
            numbers = self._find(digests)
            self._number_new(digests, numbers)
        return numbers

    def _number_new(self, digests: NDArray[np.uint64], numbers: NDArray[np.int32]) -> None:
        """Replace each -1 by a new number."""
        new: dict[tuple[int, int], int] = {}
        for i in np.flatnonzero(numbers < 0).tolist():
            high, low = digests[i].tolist()
            numbers[i] = new.setdefault((high, low), self._size + len(new))
        if not new:
            return
        added = np.array(list(new), np.uint64).reshape(-1, 2)
        for start in range(0, len(added), _LARGEST_RUN):
            piece = added[start : start + _LARGEST_RUN]
            order = np.argsort(piece[:, 0], kind="stable")
            self._insert(
                _Run(
                    first=self._size + start,
                    high=_kept(piece[order, 0]),
                    low=_kept(piece[order, 1]),
                    offsets=_kept(order.astype(np.uint16)),
                )
            )
        self._size += len(new)

    def _find(self, digests: NDArray[np.uint64]) -> NDArray[np.int32]:
        numbers = np.full(len(digests), -1, np.int32)
        for run in self._runs:
            left = np.flatnonzero(numbers < 0)
            at = np.searchsorted(run.high, digests[left, 0])
            # more than one look only where the first halves of two digests agree
            while left.size:
                inside = at < run.high.size
                left, at = left[inside], at[inside]
                same = run.high[at] == digests[left, 0]
                left, at = left[same], at[same]
                hit = run.low[at] == digests[left, 1]
                numbers[left[hit]] = run.offsets[at[hit]].astype(np.int32) + run.first
                left, at = left[~hit], at[~hit] + 1
        return numbers

    def _insert(self, run: _Run) -> None:
        """Add a run, merged with those before it that are not much larger."""
        while self._runs:
            last = self._runs[-1]
            total = last.high.size + run.high.size
            if last.high.size > 2 * run.high.size or total > _LARGEST_RUN:
                break
            del self._runs[-1]
            run = _merged(last, run)
        self._runs.append(run)


class Column:
    """A number >= 0 for each key of a table, 0 until it is set; grows with the table.

    Most are small: each stretch of keys has the narrowest type that holds its numbers.
    """

    def __init__(self) -> None:
        """Start with zeros."""
        self._chunks: list[NDArray[Any]] = []

    def __getitem__(self, number: int) -> int:
        chunk = number // _CHUNK
        return int(self._chunks[chunk][number % _CHUNK]) if chunk < len(self._chunks) else 0

    def __setitem__(self, number: int, value: int) -> None:
        index = number // _CHUNK
        while index >= len(self._chunks):
            self._chunks.append(_pages(_CHUNK, np.uint8))
        chunk = self._chunks[index]
        if value > np.iinfo(chunk.dtype).max:
            wider = _pages(_CHUNK, np.min_scalar_type(value))
            wider[:] = chunk
            self._chunks[index] = chunk = wider
        chunk[number % _CHUNK] = value


class IdSet:
    """A set of strings by 64 bits of their digests: 8 bytes each, for what is checked again."""

    def __init__(self) -> None:
        """Start empty."""
        self._runs: list[NDArray[np.uint64]] = []

    def add(self, ids: Sequence[str]) -> list[int]:
        """Add strings.

        Args:
            ids: N strings.

        Returns:
            Indices of those that may have been added before, also earlier in this call: all that
            were, and one in 2**64 / (strings so far) others.
        """
        digests = _digests(ids)[:, 0]
        known = np.zeros(len(digests), bool)
        for run in self._runs:
            at = np.minimum(np.searchsorted(run, digests), run.size - 1)
            known |= run[at] == digests
        unique, first = np.unique(digests, return_index=True)
        repeated = np.ones(len(digests), bool)
        repeated[first] = False
        if unique.size:
            self._insert(_kept(unique))
        found: list[int] = np.flatnonzero(known | repeated).tolist()
        return found

    def _insert(self, run: NDArray[np.uint64]) -> None:
        while self._runs:
            last = self._runs[-1]
            if last.size > 2 * run.size or last.size + run.size > _LARGEST_RUN:
                break
            del self._runs[-1]
            run = _interleaved(last, run, _places(last, run))
        self._runs.append(run)


def _digests(keys: Sequence[str]) -> NDArray[np.uint64]:
    """Digest keys to [N, 2] uint64."""
    joined = b"".join(
        hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        for key in keys
    )
    return np.frombuffer(joined, "<u8").reshape(-1, 2)


def _merged(first: _Run, second: _Run) -> _Run:
    """Merge two runs, the second numbered right after the first."""
    places = _places(first.high, second.high)
    behind = second.offsets + np.uint16(first.high.size)
    return _Run(
        first=first.first,
        high=_interleaved(first.high, second.high, places),
        low=_interleaved(first.low, second.low, places),
        offsets=_interleaved(first.offsets, behind, places),
    )


def _places(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Find where the values of a second sorted array come to stand among those of a first."""
    places = np.searchsorted(first, second, side="right")
    places += np.arange(second.size)
    return places


def _interleaved(
    first: NDArray[_Scalar], second: NDArray[_Scalar], places: NDArray[np.int64]
) -> NDArray[_Scalar]:
    """Put values at their places among others, with little memory but for the result."""
    merged: NDArray[_Scalar] = _pages(first.size + second.size, first.dtype)
    others = np.ones(merged.size, bool)
    others[places] = False
    merged[others] = first
    merged[places] = second
    return merged


def _kept(values: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """Copy an array that is to stay."""
    pages: NDArray[_Scalar] = _pages(values.size, values.dtype)
    pages[:] = values
    return pages


def _pages(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Make an array of zeros in pages of its own, which the system has back when it is freed."""
    num_bytes = size * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE), dtype)
