"""Finished rollouts on their way to the dataset: buffered by unit, committed by rule.

A unit is committed when nothing of it is in flight any more; earlier, in part, when its buffer has
grown to the size of a shard or when the oldest finished rollout has waited long enough.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from rollout.config import OutputConfig
from rollout.rows import Rejection, RolloutRow

# raw bytes of a part at the end of a job: the last one takes as long as it is large, and small ones
# make many files
_LEAST_LAST_BYTES: Final = 8 * 2**20
_MOST_LAST_BYTES: Final = 64 * 2**20


@dataclass(kw_only=True, slots=True)
class _Buffer:
    rows: list[RolloutRow] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    num_bytes: int = 0
    memory_bytes: int = 0
    since: float = 0.0


class UnitBuffers:
    """Buffers of the units in work."""

    def __init__(
        self,
        commit: Callable[[str, list[RolloutRow], list[Rejection]], None],
        config: OutputConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        done: Callable[[str], None] = lambda unit: None,
    ) -> None:
        """Start with nothing in work.

        Args:
            commit: takes a part: a unit with its finished rollouts and rejections.
            config: the job's `output` section.
            clock: seconds.
            done: told of each unit of which nothing is left for now, after its last part.
        """
        self._done = done
        self._take_part = commit
        self._config = config
        self._clock = clock
        self._buffers: dict[str, _Buffer] = {}
        self._in_flight: Counter[str] = Counter()
        self._open: set[str] = set()
        self._part_bytes = config.shard_bytes
        self._added = 0
        self._added_bytes = 0
        self._hurried = False

    @property
    def num_bytes(self) -> int:
        """Bytes in memory of the finished rollouts that are still here."""
        return sum(buffer.memory_bytes for buffer in self._buffers.values())

    def open(self, unit: str) -> None:
        """Announce that rollouts of a unit may still be started."""
        self._open.add(unit)

    def close(self, unit: str) -> None:
        """Announce that no further rollout of a unit will be started."""
        self._open.discard(unit)
        self._commit_if_done(unit)

    def start(self, unit: str) -> None:
        """Count a rollout in flight."""
        self._in_flight[unit] += 1

    def add(self, unit: str, row: RolloutRow) -> None:
        """Take a finished rollout."""
        buffer = self._buffer(unit)
        buffer.rows.append(row)
        buffer.num_bytes += row.num_bytes
        buffer.memory_bytes += row.memory_bytes
        self._added += 1
        self._added_bytes += row.num_bytes
        self._end(unit)
        if buffer.num_bytes >= self._part_bytes:
            self._commit(unit)

    def fail(self, unit: str, rejection: Rejection) -> None:
        """Take a rollout in flight that failed."""
        self._buffer(unit).rejected.append(rejection)
        self._end(unit)

    def reject(self, unit: str, rejection: Rejection) -> None:
        """Take a prompt that never started."""
        self._buffer(unit).rejected.append(rejection)

    def hurry(self, parts: int) -> None:
        """Commit smaller parts from now on: little is left to sample, so many can be in work.

        Call it again as less is left: a part is one of so many shares of that.

        Args:
            parts: how many are written at once.
        """
        if not self._added:
            return  # nothing says how large rollouts get
        self._hurried = True
        in_flight = self._in_flight.total() * self._added_bytes // self._added
        left = in_flight + sum(buffer.num_bytes for buffer in self._buffers.values())
        last_bytes = min(max(left // parts, _LEAST_LAST_BYTES), _MOST_LAST_BYTES)
        self._part_bytes = min(self._config.shard_bytes, last_bytes)
        for unit, buffer in list(self._buffers.items()):
            if buffer.num_bytes >= self._part_bytes:
                self._commit(unit)

    def tick(self) -> None:
        """Commit what has waited long enough."""
        now = self._clock()
        late = [u for u, b in self._buffers.items() if now - b.since >= self._config.flush_seconds]
        for unit in late:
            self._commit(unit)

    def flush(self) -> None:
        """Commit everything that is finished.

        Raises:
            RolloutError: a part can't be taken; it stays buffered.
        """
        for unit in list(self._buffers):
            self._commit(unit)

    def _buffer(self, unit: str) -> _Buffer:
        if unit not in self._buffers:
            self._buffers[unit] = _Buffer(since=self._clock())
        return self._buffers[unit]

    def _end(self, unit: str) -> None:
        assert self._in_flight[unit] > 0, f"nothing of unit {unit} is in flight"
        self._in_flight[unit] -= 1
        self._commit_if_done(unit)

    def _commit_if_done(self, unit: str) -> None:
        if unit not in self._open and self._in_flight[unit] == 0:
            del self._in_flight[unit]
            if unit in self._buffers:
                self._commit(unit)
            self._done(unit)

    def _commit(self, unit: str) -> None:
        buffer = self._buffers.get(unit)
        if buffer is None:
            return
        parts = buffer.num_bytes // self._part_bytes if self._hurried else 1
        while parts > 1 and len(buffer.rows) > 1:
            taken, size = 0, 0
            while taken < len(buffer.rows) - 1 and size < buffer.num_bytes // parts:
                size += buffer.rows[taken].num_bytes
                taken += 1
            self._take_part(unit, buffer.rows[:taken], [])
            # only now: what could not be handed over can be tried again
            for row in buffer.rows[:taken]:
                buffer.num_bytes -= row.num_bytes
                buffer.memory_bytes -= row.memory_bytes
            del buffer.rows[:taken]
            parts -= 1
        self._take_part(unit, buffer.rows, buffer.rejected)
        del self._buffers[unit]
