"""Which units a process works on, where several share an output."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rollout.lease import Leases


class Claims:
    """Which units this process may work on: without leases, all of them."""

    def __init__(self, leases: Leases | None = None, *, most: int = 1, poll: float = 2.0) -> None:
        """Claim nothing yet.

        Args:
            leases: the leases of this process, where others may share the output.
            most: units taken at once, to be committed side by side.
            poll: seconds between looks at the leases of others.
        """
        self._leases = leases
        self._most = most
        self._poll = poll
        self._next = 0.0

    def take(self, units: Sequence[str]) -> tuple[list[str], list[str]]:
        """Take some of these units.

        Args:
            units: in order.

        Returns:
            Those that are this process's now, and those that others hold. What is in neither is to
            be asked for again: half of what is free is left to others, so that all end together.
        """
        if self._leases is None:
            return list(units), []
        most = min(self._most, -(-len(units) // 2))
        taken: list[str] = []
        others: list[str] = []
        for unit in units:
            if len(taken) == most:
                break
            (taken if self._leases.acquire(unit) else others).append(unit)
        return taken, others

    def release(self, unit: str) -> None:
        """Give back a unit that is done."""
        if self._leases is not None:
            self._leases.release(unit)

    def any_free(self, units: Iterable[str]) -> bool:
        """Whether one of these units may be taken by now; says no between looks."""
        assert self._leases is not None
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._poll
        return any(self._leases.is_free(unit) for unit in units)
