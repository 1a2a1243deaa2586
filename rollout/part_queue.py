"""Parts on their way to a commit: made in any order, committed in that of their unit.

The commits of a unit have numbers without a hole, so one thread at a time commits its parts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from rollout.part_work import WriteShard
from rollout.rows import Rejection, RolloutRow


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MadePart:
    """What was made of a part before its turn."""

    rows: list[RolloutRow] = field(default_factory=list)
    """Those that may reach a file."""
    rejected: list[Rejection] = field(default_factory=list)
    write: WriteShard
    """Writes them, or takes the shard that is there."""
    early: ExitStack = field(default_factory=ExitStack)
    """Holds that shard."""
    error: BaseException | None = None
    """Why there is nothing."""


@dataclass(kw_only=True, slots=True, eq=False)
class QueuedPart:
    """Finished rollouts of a unit, or its end."""

    unit: str
    rows: Sequence[RolloutRow] = ()
    rejected: Sequence[Rejection] = ()
    num_bytes: int = 0
    """Bytes in memory."""
    last: bool = False
    """Stands for no rows, but for the end of its unit."""
    made: MadePart | None = None
    """Null until it can be committed."""
    taken: bool = False
    """Whether a thread commits it."""


class PartQueue:
    """The parts of each unit, in the order of their commits; used from several threads."""

    def __init__(self, most_made: int) -> None:
        """Start with none.

        Args:
            most_made: parts whose shards may wait for their turn: they take room on a disk.
        """
        self._lock = threading.Condition()
        self._parts: dict[str, deque[QueuedPart]] = {}
        self._most_made = most_made
        self._made = 0

    def add(self, part: QueuedPart) -> None:
        """Put a part behind those of its unit."""
        with self._lock:
            self._parts.setdefault(part.unit, deque()).append(part)

    def wait_for_room(self, part: QueuedPart) -> None:
        """Return once a part may be made: few others wait, or it is its turn, so one always may."""
        with self._lock:
            queue = self._parts[part.unit]
            self._lock.wait_for(lambda: self._made < self._most_made or queue[0] is part)

    def put_made(self, part: QueuedPart, made: MadePart) -> None:
        """Say that a part can be committed; then `take` its unit's first."""
        with self._lock:
            part.made = made
            self._made += 1

    def take(self, unit: str) -> tuple[QueuedPart, MadePart] | None:
        """Return a unit's first part to the thread that is to commit it.

        Null if it is not made, or with another thread: that one takes the next.
        """
        with self._lock:
            queue = self._parts.get(unit)
            if not queue or queue[0].made is None or queue[0].taken:
                return None
            queue[0].taken = True
            return queue[0], queue[0].made

    def remove(self, part: QueuedPart) -> None:
        """Let a part go that is done with; then `take` the next."""
        with self._lock:
            queue = self._parts[part.unit]
            assert queue[0] is part, "another part's turn"
            queue.popleft()
            if not queue:
                del self._parts[part.unit]
            self._made -= 1
            self._lock.notify_all()
