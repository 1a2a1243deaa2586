"""The spool: what the sampling process writes and the assembling process reads, step by step.

A folder of segment files on a local (best: memory-backed) disk. Each file is a sequence of blocks,
one a sampling step: a fixed header with the lengths of everything that follows, then flat arrays.
Checksums cover the header and all arrays but the entries. A block is complete once the file is as
long as its header says, since a file only ever grows; so no other signal is needed between the
processes. The reader reads all but the entries and says where those lie; a file is unlinked once it
is read and nobody needs entries of it any more (`rollout.spool_entries`).
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.errors import EngineError
from rollout.spool_entries import SEGMENT_BITS, HeldSegments, segment_name

SEGMENT_BYTES = 64 * 2**20  # a new file after this much, so that what was taken can be released
_MAGIC = 0x31534C52  # "RLS1"
# magic, rows, draws a row, checksum of the arrays but the entries, step, need, entries, id bytes,
# seconds waited
_FIELDS = struct.Struct("<IIIIQQQQd")
_CHECK = struct.Struct("<I4x")  # checksum of the fields
_HEADER_BYTES = _FIELDS.size + _CHECK.size

FLAG_NONFINITE = 1  # NaN or +inf among the row's logits
FLAG_EMPTY = 2  # every id masked
FLAG_OVERFLOW = 4  # the step's entries up to this row exceed the capacity; none of its are stored
FLAG_SAMPLED_MISSING = 8  # the sampled id is not in the kept set
FLAG_LOST = 16  # nothing of the row was recorded: no buffer came free in time


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """What one sampling step recorded but the entries, N rows in the batch's order."""

    step: int
    """Number of the step since the capture was armed."""
    need: int
    """Entries that the step's rows needed, whether or not they fitted."""
    waited: float = 0.0
    """Seconds that sampling waited for a buffer."""
    request_ids: list[str]
    """[N] the engine's internal ids; empty for rows that sampled nothing that counts."""
    positions: npt.NDArray[np.int32]
    """[N] index of the sampled token in the request's output."""
    sampled: npt.NDArray[np.int32]
    """[N] sampled ids."""
    kinds: npt.NDArray[np.int8]
    """[N] what was recorded of the row (`rollout.kernels.support_capture`)."""
    flags: npt.NDArray[np.int32]
    """[N] FLAG_* bits."""
    counts: npt.NDArray[np.int32]
    """[N] entries that the row needed."""
    sampled_logprobs: npt.NDArray[np.float32]
    """[N] log q of the sampled ids, nats."""
    tail_mass: npt.NDArray[np.float32]
    """[N] probability outside the recorded ids."""
    draws: npt.NDArray[np.uint64]
    """[N, K] packed draws."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBlock(StepRows):
    """What one sampling step recorded, as it is written."""

    entries: npt.NDArray[np.uint64]
    """[E] packed entries of the rows that fitted, in the batch's order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredStep(StepRows):
    """What one sampling step recorded, as it is read: its entries are still in the spool."""

    segments: HeldSegments
    segment: int
    """Number of the segment that the entries are in."""
    address: int
    """Where they start; see `rollout.spool_entries`."""
    num_entries: int
    """Entries of the rows that fitted, E."""


class SpoolWriter:
    """Appends blocks to segment files; one writer a folder."""

    def __init__(self, folder: str | Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._segment_bytes = segment_bytes
        self._index = -1
        self._file = -1
        self._size = 0
        self._broken = False
        self._next_segment()

    def append(self, block: StepBlock) -> int:
        """Write one block.

        Returns:
            Bytes written.

        Raises:
            OSError: the disk is full or gone; the spool ends with the block before.
            ValueError: the arrays do not fit together.
        """
        if self._broken:
            raise OSError(f"spool {self._folder}: a block was cut short, nothing can follow it")
        rows, draws = block.draws.shape
        ids = "\n".join(block.request_ids).encode()
        head = [
            _bytes_of(part)
            for part in (
                block.positions,
                block.sampled,
                block.flags,
                block.counts,
                block.sampled_logprobs,
                block.tail_mass,
                block.draws,
                block.kinds,
            )
            if part.nbytes
        ]
        head.append(memoryview(ids))
        _check_block(block, ids, head)
        checksum = 0
        for part in head:
            checksum = zlib.crc32(part, checksum)
        fields = _FIELDS.pack(
            _MAGIC,
            rows,
            draws,
            checksum,
            block.step,
            block.need,
            block.entries.size,
            len(ids),
            block.waited,
        )
        entries_at = _entries_offset(rows, draws, len(ids))
        length = _HEADER_BYTES + sum(part.nbytes for part in head)
        size = entries_at + block.entries.nbytes
        if self._size and self._size + size > self._segment_bytes:
            self._next_segment()
        # padded, since entries are read in place as uint64
        parts = [memoryview(fields), memoryview(_CHECK.pack(zlib.crc32(fields))), *head]
        parts.append(memoryview(bytes(entries_at - length)))
        if block.entries.nbytes:
            parts.append(_bytes_of(block.entries))
        try:
            self._write_all(parts)
        except BaseException:
            self._broken = True
            raise
        self._size += size
        return size

    def close(self) -> None:
        """Close the current segment."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _next_segment(self) -> None:
        previous = self._file
        self._index += 1
        path = self._folder / segment_name(self._index)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._size = 0
        if previous >= 0:
            os.close(previous)

    def _write_all(self, parts: list[memoryview]) -> None:
        while parts:
            written = os.writev(self._file, parts)
            # a large write may be cut short
            while parts and written >= parts[0].nbytes:
                written -= parts.pop(0).nbytes
            if written:
                parts[0] = parts[0][written:]


class SpoolReader:
    """Reads the blocks of a folder in order; each segment goes once it is read and not needed."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._index = 0
        self._offset = 0
        self._file = -1
        self.segments = HeldSegments(folder)
        """Which of the segments are still needed."""

    def poll(self) -> Iterator[StoredStep]:
        """Yield the blocks that are complete and not yet read; never waits.

        Raises:
            EngineError: a block is damaged.
        """
        while True:
            yield from self._poll_segment()
            if not (self._folder / segment_name(self._index + 1)).exists():
                return
            # the next segment exists, so this one is final: read what came in between, then seal it
            yield from self._poll_segment()
            path = self._folder / segment_name(self._index)
            size = path.stat().st_size
            if size != self._offset:
                raise EngineError(f"spool {path}: the block at byte {self._offset} is cut short")
            os.close(self._file)
            self.segments.seal(self._index, size)
            self._index += 1
            self._offset = 0
            self._file = -1

    def num_bytes(self) -> int:
        """Count the bytes on disk that are not yet read or still needed."""
        unread, index = -self._offset, self._index
        while True:
            try:
                unread += (self._folder / segment_name(index)).stat().st_size
            except FileNotFoundError:
                return max(unread, 0) + self.segments.num_bytes
            index += 1

    def close(self) -> None:
        """Read no more; what is held stays until it is released."""
        if self._file >= 0:
            self.segments.seal(self._index, os.fstat(self._file).st_size)
            os.close(self._file)
            self._file = -1

    def _poll_segment(self) -> Iterator[StoredStep]:
        path = self._folder / segment_name(self._index)
        if self._file < 0:
            try:
                self._file = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                return
        size = os.fstat(self._file).st_size
        while (end := self._block_end(size, path)) is not None:
            step = self._parse(path)
            self._offset = end
            yield step

    def _block_end(self, size: int, path: Path) -> int | None:
        """Return where the next block ends, or null while it is not complete."""
        if size < self._offset + _HEADER_BYTES:
            return None
        header = os.pread(self._file, _HEADER_BYTES, self._offset)
        magic, rows, draws, _, _, _, entries, id_bytes, _ = _FIELDS.unpack_from(header)
        (checksum,) = _CHECK.unpack_from(header, _FIELDS.size)
        if magic != _MAGIC or checksum != zlib.crc32(header[: _FIELDS.size]):
            raise EngineError(f"spool {path}: no block at byte {self._offset}: the file is damaged")
        end: int = self._offset + _entries_offset(rows, draws, id_bytes) + 8 * entries
        return end if end <= size else None

    def _parse(self, path: Path) -> StoredStep:
        header = os.pread(self._file, _HEADER_BYTES, self._offset)
        fields = _FIELDS.unpack_from(header)
        _, rows, draws, checksum, step, need, entries, id_bytes, waited = fields
        length = rows * (6 * 4 + 8 * draws + 1) + id_bytes
        data = os.pread(self._file, length, self._offset + _HEADER_BYTES)
        if zlib.crc32(data) != checksum:
            raise EngineError(
                f"spool {path}: checksum of the block at byte {self._offset} differs: damaged"
            )
        start = 0

        def take(dtype: type[np.generic], count: int) -> npt.NDArray[Any]:
            nonlocal start
            array: npt.NDArray[Any] = np.frombuffer(data, dtype, count, start)
            start += array.nbytes
            return array

        positions, sampled, flags, counts = (take(np.int32, rows) for _ in range(4))
        sampled_logprobs, tail_mass = take(np.float32, rows), take(np.float32, rows)
        draw_entries = take(np.uint64, rows * draws)
        kinds = take(np.int8, rows)
        at = self._offset + _entries_offset(rows, draws, id_bytes)
        return StoredStep(
            step=step,
            need=need,
            waited=waited,
            request_ids=data[start:].decode().split("\n") if rows else [],
            positions=positions,
            sampled=sampled,
            kinds=kinds,
            flags=flags,
            counts=counts,
            sampled_logprobs=sampled_logprobs,
            tail_mass=tail_mass,
            draws=draw_entries.reshape(rows, draws),
            segments=self.segments,
            segment=self._index,
            address=(self._index << SEGMENT_BITS) + at,
            num_entries=entries,
        )


def _check_block(block: StepBlock, ids: bytes, head: list[memoryview]) -> None:
    """Refuse what would be read back as something else."""
    rows, draws = block.draws.shape
    if len(block.request_ids) != rows or ids.count(b"\n") != max(rows - 1, 0):
        raise ValueError(
            f"{len(block.request_ids)} request ids for {rows} rows, expected as many, without "
            "line breaks"
        )
    size = sum(part.nbytes for part in head)
    expected = rows * (6 * 4 + 8 * draws + 1) + len(ids)
    if size != expected or block.entries.dtype != np.uint64:
        raise ValueError(f"a block's arrays have {size} bytes, expected {expected}")


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _entries_offset(rows: int, draws: int, id_bytes: int) -> int:
    """Return where a block's entries start, aligned for uint64."""
    length: int = _HEADER_BYTES + rows * (6 * 4 + 8 * draws + 1) + id_bytes
    return length + -length % 8
