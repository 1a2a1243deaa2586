"""How many entries of a step are copied to the host before anyone there knows how many there are.

Each amount is a launch of its own that is prepared once (`rollout.capture.launch_graphs`), so it
changes seldom: it follows what steps need upwards at once and downwards late.
"""

from __future__ import annotations

from typing import Final

LEAST: Final = 4096  # entries; their copy takes no longer than that of one
_SPARE: Final = 8  # an eighth more than was needed: steps differ by a few per cent
_WASTED: Final = 8  # times more than needed before the amount falls


class CopyAhead:
    """The amount, from what steps have needed."""

    def __init__(self, capacity: int) -> None:
        """Start with the least.

        Args:
            capacity: entries that a step's buffers hold.
        """
        self._capacity = capacity
        self._entries = min(LEAST, capacity)

    def after(self, need: int) -> int:
        """Return how many entries of the next step are to be copied ahead.

        Args:
            need: entries that a recent step needed, perhaps more than the capacity.
        """
        if self._entries < need or self._entries > max(_WASTED * need, LEAST):
            wanted = max(need + need // _SPARE, LEAST)
            # to two significant bits, so that there are few amounts
            unit = 1 << max(wanted.bit_length() - 3, 0)
            self._entries = min(-(-wanted // unit) * unit, self._capacity)
        return self._entries
