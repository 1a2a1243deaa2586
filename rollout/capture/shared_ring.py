"""The memory that the sampling process and the one that takes its steps share.

A page of control words, then slots, one for each step in flight: the device's header, what the
host knows of the rows, and room for the entries. The sampling process fills slot `number % slots`
and the device marks it ready with the step's number + 1; the other process reads it and counts up
`consumed`. Nothing here waits, and nothing needs more than that 8 aligned bytes are written at
once.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_PAGE: Final = 4096
_READY_AT: Final = 128  # bytes
_ERROR_AT: Final = 2048
_ERROR_BYTES: Final = _PAGE - _ERROR_AT
_MAX_SLOTS: Final = (_ERROR_AT - _READY_AT) // 8
_ID_BYTES: Final = 256  # of a row's request id, mostly
_HEAD: Final = struct.Struct("<qqqd")  # of a step: its number, rows, bytes of ids, seconds waited
_SAME_IDS: Final = -1  # in place of the bytes: the request ids are those of the step before


@dataclass(frozen=True, kw_only=True, slots=True)
class RingLayout:
    """Sizes of a shared ring; travels as JSON."""

    slots: int
    max_rows: int
    capacity: int
    """Entries of a step."""
    header_bytes: int
    header: dict[str, tuple[int, str, tuple[int, ...]]]
    """Of each field of the device's header: first byte, dtype, shape."""

    @property
    def rows_bytes(self) -> int:
        """Bytes for what the host knows of a step's rows."""
        return _up(_HEAD.size + self.max_rows * (4 + 1 + _ID_BYTES), _PAGE)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return _up(self.header_bytes, _PAGE) + self.rows_bytes + _up(8 * self.capacity, _PAGE)

    @property
    def num_bytes(self) -> int:
        """Bytes of the ring."""
        return _PAGE + self.slots * self.slot_bytes

    def record(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RingStep:
    """What is in a slot, as views."""

    step: int
    waited: float
    request_ids: list[str]
    positions: npt.NDArray[np.int32]
    kinds: npt.NDArray[np.int8]
    header: dict[str, npt.NDArray[Any]]
    """The device's header, each field [max_rows, ...] (offsets: one more)."""
    entries: npt.NDArray[np.uint64]
    """[capacity]."""


class _SlotRows:
    """Views of what the host knows of a slot's rows; made once, since each step needs them."""

    __slots__ = ("head", "ids", "kinds", "last_kinds", "positions")

    def __init__(self, memory: npt.NDArray[np.uint8], max_rows: int) -> None:
        positions_end = _HEAD.size + 4 * max_rows
        kinds_end = positions_end + max_rows
        self.head = memoryview(memory[: _HEAD.size])  # type: ignore[arg-type]
        # the array that is in `kinds`
        self.last_kinds: npt.NDArray[np.int8] | None = None
        self.positions = memory[_HEAD.size : positions_end].view(np.int32)
        self.kinds = memory[positions_end:kinds_end].view(np.int8)
        self.ids = memory[kinds_end:]


class _Word:
    """A control word as an attribute."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, ring: SharedRing, owner: type) -> int:
        return ring.words[self._index]

    def __set__(self, ring: SharedRing, value: int) -> None:
        ring.words[self._index] = value


class SharedRing:
    """One side's view of the ring."""

    queued = _Word(0)
    """Steps handed over so far."""
    consumed = _Word(1)
    """Steps taken so far."""
    closing = _Word(2)
    """1 once nothing is handed over any more."""
    taking = _Word(3)
    """1 while a process takes steps."""

    def __init__(self, file: int, layout: RingLayout) -> None:
        """Map the ring.

        Args:
            file: descriptor of the memory, of `layout.num_bytes`.
            layout: its sizes.

        Raises:
            ValueError: too many slots.
        """
        if not 1 <= layout.slots <= _MAX_SLOTS:
            raise ValueError(f"slots: got {layout.slots}, expected 1 to {_MAX_SLOTS}")
        self.layout = layout
        self.file = file
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(
            mmap.mmap(file, layout.num_bytes), np.uint8
        )
        """All of it."""
        # read and written in each step, where a view of memory costs half of what an array does
        self.words = _int64_view(self.memory[:_READY_AT])
        """Control words: what is not an attribute here is 0."""
        self.ready: npt.NDArray[np.int64] = self.memory[
            _READY_AT : _READY_AT + 8 * layout.slots
        ].view(np.int64)
        """[slots] number + 1 of the step that is there."""
        self._rows = [
            _SlotRows(self._rows_memory(slot), layout.max_rows) for slot in range(layout.slots)
        ]
        self._last_ids: list[str] | None = None

    @classmethod
    def create(cls, layout: RingLayout) -> SharedRing:
        """Make a ring of zeros, which goes with the last process that has it.

        Raises:
            OSError: there is no memory for it.
        """
        file = os.memfd_create("rollout-ring")
        os.posix_fallocate(file, 0, layout.num_bytes)
        return cls(file, layout)

    @property
    def error(self) -> str | None:
        """Why steps are no longer taken, or null."""
        text = bytes(self.memory[_ERROR_AT:_PAGE]).rstrip(b"\0").decode(errors="replace")
        return text or None

    @error.setter
    def error(self, text: str | None) -> None:
        data = (text or "").encode()[:_ERROR_BYTES].ljust(_ERROR_BYTES, b"\0")
        self.memory[_ERROR_AT:_PAGE] = np.frombuffer(data, np.uint8)

    def header(self, slot: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a slot's header."""
        start = _PAGE + slot * self.layout.slot_bytes
        return self.memory[start : start + self.layout.header_bytes]

    def entries(self, slot: int) -> npt.NDArray[np.int64]:
        """Return a slot's room for entries."""
        end = _PAGE + (slot + 1) * self.layout.slot_bytes
        start = end - _up(8 * self.layout.capacity, _PAGE)
        return self.memory[start : start + 8 * self.layout.capacity].view(np.int64)

    def step_need(self, slot: int) -> memoryview[int]:
        """Return [1] int64, the entries that the step in a slot needs; 0 before the first."""
        start, dtype, shape = self.layout.header["offsets"]
        end = start + math.prod(shape) * np.dtype(dtype).itemsize
        # rows that are not there need nothing
        return _int64_view(self.header(slot)[start:end])[-1:]

    def put_rows(
        self,
        slot: int,
        *,
        step: int,
        waited: float,
        request_ids: list[str],
        positions: npt.NDArray[np.int32],
        kinds: npt.NDArray[np.int8],
    ) -> None:
        """Write what the host knows of a step's rows.

        Raises:
            ValueError: the request ids are too long.
        """
        n = len(request_ids)
        rows = self._rows[slot]
        id_bytes = _SAME_IDS
        # they change when a request comes or goes, which most steps see none of
        if request_ids is not self._last_ids and request_ids != self._last_ids:
            ids = "\n".join(request_ids).encode()
            id_bytes = len(ids)
            if id_bytes > rows.ids.size:
                raise ValueError(f"{id_bytes} bytes of request ids, expected {_ID_BYTES} a row")
            rows.ids[:id_bytes] = np.frombuffer(ids, np.uint8)
            self._last_ids = request_ids
        _HEAD.pack_into(rows.head, 0, step, n, id_bytes, waited)
        rows.positions[:n] = positions
        if kinds is not rows.last_kinds:
            rows.kinds[:n] = kinds
            rows.last_kinds = kinds

    def forget_ids(self) -> None:
        """Begin anew: the next step's request ids are given again."""
        self._last_ids = None

    def step(self, slot: int) -> RingStep:
        """Return what is in a slot; each step once and in order."""
        rows = self._rows[slot]
        number, n, id_bytes, waited = _HEAD.unpack_from(rows.head)
        if id_bytes != _SAME_IDS:
            ids = bytes(rows.ids[:id_bytes]).decode()
            self._last_ids = ids.split("\n") if n else []
        assert self._last_ids is not None
        header = self.header(slot)
        fields: dict[str, npt.NDArray[Any]] = {}
        for name, (start, dtype, shape) in self.layout.header.items():
            size = math.prod(shape) * np.dtype(dtype).itemsize
            fields[name] = header[start : start + size].view(dtype).reshape(shape)
        return RingStep(
            step=number,
            waited=waited,
            request_ids=self._last_ids,
            positions=rows.positions[:n],
            kinds=rows.kinds[:n],
            header=fields,
            entries=self.entries(slot).view(np.uint64),
        )

    def _rows_memory(self, slot: int) -> npt.NDArray[np.uint8]:
        start = _PAGE + slot * self.layout.slot_bytes + _up(self.layout.header_bytes, _PAGE)
        return self.memory[start : start + self.layout.rows_bytes]


def _int64_view(memory: npt.NDArray[np.uint8]) -> memoryview[int]:
    return memoryview(memory).cast("q")  # type: ignore[arg-type]


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
