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
    memory_bytes: int = 0
    num_bytes: int = 0
    """Raw bytes of the rows, more than a shard of them takes."""
    last: bool = False
    """Stands for no rows, but for the end of its unit."""
    made: MadePart | None = None
    """Null until it can be committed."""
    has_room: bool = False
    """Whether its bytes are counted among those that are made."""
    taken: bool = False
    """Whether a thread commits it."""


class PartQueue:
    """The parts of each unit, in the order of their commits; used from several threads."""

    def __init__(self, most_bytes: int) -> None:
        """Start with none.

        Args:
            most_bytes: raw bytes of the parts that are made before their turn: the shards of these
                wait on a disk, where the one whose turn it is must have room.
        """
        self._lock = threading.Condition()
        self._parts: dict[str, deque[QueuedPart]] = {}
        self._most_bytes = most_bytes
        self._early_bytes = 0

    def add(self, part: QueuedPart) -> None:
        """Put a part behind those of its unit."""
        with self._lock:
            self._parts.setdefault(part.unit, deque()).append(part)

    def wait_for_room(self, part: QueuedPart) -> None:
        """Return once a part may be made: there is room, or it is its turn; so one always may."""
        with self._lock:
            queue = self._parts[part.unit]
            self._lock.wait_for(
                lambda: queue[0] is part or self._early_bytes + part.num_bytes <= self._most_bytes
            )
            self._early_bytes += part.num_bytes
            part.has_room = True

    def put_made(self, part: QueuedPart, made: MadePart) -> None:
        """Say that a part can be committed; then `take` its unit's first."""
        with self._lock:
            part.made = made

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
            self._early_bytes -= part.num_bytes if part.has_room else 0
            self._lock.notify_all()
