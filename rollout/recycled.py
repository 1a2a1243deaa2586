"""Arrays whose memory is used again once nobody holds them.

Fresh memory costs a page fault every 4 KiB, which for a batch of supports takes as long as filling
it. So a batch's large arrays are taken from memory that earlier batches gave back.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_IDLE: Final = 8
_UNIT_BYTES: Final = 2**20


class RecycledArrays:
    """Gives arrays out, and takes their memory back when the last view of one is gone.

    A tensor made of an array holds it, so the memory is never shared by two live batches.
    """

    def __init__(self) -> None:
        # the oldest falls out; appending is safe from whichever thread drops an array
        self._idle: deque[NDArray[np.uint8]] = deque(maxlen=_IDLE)

    def empty(self, count: int, dtype: Any) -> NDArray[Any]:
        """Return an array of so many elements whose content is undefined."""
        size = count * np.dtype(dtype).itemsize
        if size < _UNIT_BYTES:
            return np.empty(count, dtype)
        memory = self._take(size)
        # a view of its own, since finalizers are called when this object goes
        array: NDArray[Any] = np.frombuffer(memory, dtype=dtype, count=count)
        weakref.finalize(array, self._idle.append, memory)
        return array

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def _take(self, size: int) -> NDArray[np.uint8]:
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.popleft()
            except IndexError:
                break
            if size <= memory.size <= 2 * size + _UNIT_BYTES:
                return memory
            self._idle.append(memory)
        # some room, so that the next batch, which is seldom as large, fits too
        return np.empty((size + size // 4) // _UNIT_BYTES * _UNIT_BYTES + _UNIT_BYTES, np.uint8)
