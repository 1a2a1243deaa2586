"""Arrays whose memory is used again once nobody holds them.

Fresh memory costs a page fault every 4 KiB, which for supports takes as long as decoding them. So
large arrays are taken from memory that earlier ones gave back.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_IDLE: Final = 16
_UNIT_BYTES: Final = 2**20


class RecycledArrays:
    """Gives arrays out, and takes their memory back when the last view of one is gone.

    A tensor or a view of an array holds it, so memory is never shared by two live arrays. Idle
    memory goes where it is of the wrong size; safe to use from several threads.

    Args:
        most_bytes: idle memory goes too where it and what is given out exceed this.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most = most_bytes
        self._total = 0
        self._idle: list[NDArray[np.uint8]] = []
        # appending is safe from whichever thread drops an array, inside any other call
        self._returned: deque[NDArray[np.uint8]] = deque()
        self._lock = threading.Lock()

    def empty(self, count: int, dtype: Any) -> NDArray[Any]:
        """Return an array of so many elements whose content is undefined."""
        size = count * np.dtype(dtype).itemsize
        if size < _UNIT_BYTES:
            return np.empty(count, dtype)
        memory = self._take(size)
        # over a memoryview: views of the array then hold the array, and not the memory below it
        array: NDArray[Any] = np.frombuffer(memory.data, dtype=dtype, count=count)
        weakref.finalize(array, self._returned.append, memory)
        return array

    def __getstate__(self) -> dict[str, Any]:
        return {"most_bytes": self._most}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _take(self, size: int) -> NDArray[np.uint8]:
        with self._lock:
            while self._returned:
                self._idle.append(self._returned.popleft())
            for place, memory in enumerate(self._idle):
                if size <= memory.size <= 2 * size + _UNIT_BYTES:
                    return self._idle.pop(place)
            # some room, so that the next array, which is seldom as large, fits too
            size = (size + size // 8) // _UNIT_BYTES * _UNIT_BYTES + _UNIT_BYTES
            self._total += size
            while self._idle and (
                len(self._idle) >= _IDLE or (self._most is not None and self._total > self._most)
            ):
                self._total -= self._idle.pop(0).size
            return np.empty(size, np.uint8)
