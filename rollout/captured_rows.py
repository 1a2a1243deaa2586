"""The captured rows of one request while the engine works on it, by output position."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from rollout.spool_entries import HeldSegments

HOLE = -1  # stands for the kind of a position that has not come


class CapturedRows:
    """The rows of one request so far, by position."""

    __slots__ = (
        "addresses",
        "counts",
        "draws",
        "kinds",
        "logprobs",
        "num_entries",
        "sampled",
        "segments",
        "tails",
    )

    def __init__(self, segments: HeldSegments) -> None:
        self.segments = segments
        self.sampled = array("i")
        self.kinds = array("b")
        self.logprobs = array("f")
        self.tails = array("f")
        self.addresses = array("q")
        self.counts = array("i")
        self.draws: list[npt.NDArray[np.uint64] | None] = []
        self.num_entries = 0

    def put(
        self,
        position: int,
        sampled: int,
        kind: int,
        logprob: float,
        tail: float,
        address: int,
        count: int,
        draws: npt.NDArray[np.uint64] | None,
    ) -> bool:
        """Set a position.

        Returns:
            Whether it was there before.
        """
        self.num_entries += count
        while position > len(self.kinds):
            self._append(0, HOLE, 0.0, 0.0, 0, 0, None)
        if position == len(self.kinds):
            self._append(sampled, kind, logprob, tail, address, count, draws)
            return False
        there = self.kinds[position] != HOLE
        if there:
            self._release(slice(position, position + 1))
        self.sampled[position] = sampled
        self.kinds[position] = kind
        self.logprobs[position] = logprob
        self.tails[position] = tail
        self.addresses[position] = address
        self.counts[position] = count
        self.draws[position] = draws
        return there

    def _append(
        self,
        sampled: int,
        kind: int,
        logprob: float,
        tail: float,
        address: int,
        count: int,
        draws: npt.NDArray[np.uint64] | None,
    ) -> None:
        self.sampled.append(sampled)
        self.kinds.append(kind)
        self.logprobs.append(logprob)
        self.tails.append(tail)
        self.addresses.append(address)
        self.counts.append(count)
        self.draws.append(draws)

    def holes(self, num_tokens: int) -> list[int]:
        """Return which of the first positions have not come."""
        there = self.kinds[:num_tokens]
        return [i for i in range(num_tokens) if i >= len(there) or there[i] == HOLE]

    def release(self, start: int) -> None:
        """Give up the entries of the positions from `start` on."""
        self._release(slice(start, None))

    def _release(self, which: slice) -> None:
        counts = np.array(self.counts[which], np.int32)
        self.num_entries -= int(counts.sum(dtype=np.int64))
        if counts.any():
            self.segments.release(np.array(self.addresses[which], np.int64), counts)
