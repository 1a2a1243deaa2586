"""The work on parts, in processes beside the job's where a part is large enough to be worth one.

Sorting, Parquet and checksums of a part keep a core busy, and where several threads of the job's
process did that, the loop that feeds the engine would wait for the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from rollout.errors import DatasetError, RolloutError
from rollout.part_template import PartTemplate
from rollout.part_wire import pack_rows, receive, send
from rollout.part_work import BadRow, PartWork
from rollout.rows import RolloutRow
from rollout.schema.records import RowGroup
from rollout.shard import ShardInfo

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
# raw bytes of a part that is worth starting a process, and of one worth handing to an idle process;
# smaller ones hold up the job's own loop less
PROCESS_BYTES: Final = 2 * 2**20
IDLE_PROCESS_BYTES: Final = 128 * 2**10


class Part(Protocol):
    """One part in work."""

    bad_rows: list[BadRow]
    """The rows that may not reach a file."""

    def write(
        self, path: Path, rows: Sequence[RolloutRow], fingerprint: str, row_group_bytes: int
    ) -> ShardInfo:
        """Write some of the part's rows to a shard and read it back; see `PartWork.write`."""


class PartPool:
    """Hands out the means to work on parts; used from several threads."""

    def __init__(self, process_bytes: int = PROCESS_BYTES) -> None:
        """Start nothing.

        Args:
            process_bytes: raw bytes of a part from which on a process works on it.
        """
        self._process_bytes = process_bytes
        self._template = PartTemplate()
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._all: list[_Process] = []
        self._wanted = 0
        self._starting = False

    def start(self, count: int) -> None:
        """Start processes before there is a part, which would wait for their imports.

        Where another thread is at it, that one starts these too, and this call returns at once.

        Args:
            count: how many there are to be.

        Raises:
            OSError: the system starts no process.
        """
        with self._lock:
            self._wanted = max(self._wanted, count)
            if self._starting:
                return
            self._starting = True
        try:
            while self._are_missing():
                self._idle.put(self._new())
        except BaseException:
            with self._lock:
                self._starting = False
            raise

    @contextmanager
    def part(self, rows: Sequence[RolloutRow]) -> Iterator[Part]:
        """Read and check a part's rows; as many parts at once as there are callers.

        Args:
            rows: of one part.

        Raises:
            OSError: the spool can't be read.
        """
        process = self._process_for(sum(row.num_bytes for row in rows))
        if process is None:
            yield _LocalPart(rows)
            return
        try:
            yield _ProcessPart(process, rows)
        finally:
            process.drop()
            self._idle.put(process)

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            for process in self._all:
                process.close()
            self._all.clear()
        self._template.close()

    def _process_for(self, num_bytes: int) -> _Process | None:
        if num_bytes < min(self._process_bytes, IDLE_PROCESS_BYTES):
            return None
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return None if num_bytes < self._process_bytes else self._new()

    def _are_missing(self) -> bool:
        with self._lock:
            self._starting = len(self._all) < self._wanted
            return self._starting

    def _new(self) -> _Process:
        process = _Process(self._template)
        with self._lock:
            self._all.append(process)
        return process


class _LocalPart:
    def __init__(self, rows: Sequence[RolloutRow]) -> None:
        self._rows = rows
        self._work = PartWork(rows)
        self.bad_rows = self._work.bad_rows

    def write(
        self, path: Path, rows: Sequence[RolloutRow], fingerprint: str, row_group_bytes: int
    ) -> ShardInfo:
        return self._work.write(path, _order(self._rows, rows), fingerprint, row_group_bytes)


class _ProcessPart:
    def __init__(self, process: _Process, rows: Sequence[RolloutRow]) -> None:
        self._process = process
        self._rows = rows
        self.bad_rows = [BadRow(**bad) for bad in process.load(rows)]

    def write(
        self, path: Path, rows: Sequence[RolloutRow], fingerprint: str, row_group_bytes: int
    ) -> ShardInfo:
        head = {
            "do": "write",
            "path": str(path.absolute()),
            "order": _order(self._rows, rows),
            "fingerprint": fingerprint,
            "row_group_bytes": row_group_bytes,
        }
        info = self._process.write(head, self._rows)
        groups = tuple(RowGroup(**group) for group in info.pop("row_groups"))
        return ShardInfo(**info, row_groups=groups)


class _Process:
    """A process that works on one part at a time; started again once if it dies."""

    def __init__(self, template: PartTemplate) -> None:
        self._template = template
        self._process = template.start()

    def load(self, rows: Sequence[RolloutRow]) -> list[dict[str, Any]]:
        """Hand over a part's rows; return the bad ones."""
        return self._twice(lambda: self._load(rows))

    def write(self, head: dict[str, Any], rows: Sequence[RolloutRow]) -> dict[str, Any]:
        """Write the part that was handed over."""
        fresh = self._process

        def ask() -> dict[str, Any]:
            if self._process is not fresh:
                self._load(rows)
            info: dict[str, Any] = self._ask(head)["info"]
            return info

        return self._twice(ask)

    def drop(self) -> None:
        """Let go of the part's memory."""
        try:
            self._ask({"do": "drop"})
        except (EOFError, BrokenPipeError):
            pass  # one that is dead holds none, and is started again for the next part
        except (OSError, RolloutError) as error:
            # the part itself is done with: that must not fail by this
            _log.warning("a process that writes shards is started again: %s", error)
            self._restart()

    def close(self) -> None:
        """End it."""
        self._close_pipes()
        self._process.wait()

    def _load(self, rows: Sequence[RolloutRow]) -> list[dict[str, Any]]:
        bad: list[dict[str, Any]] = self._ask({"do": "load"}, memoryview(pack_rows(rows)))["bad"]
        return bad

    def _ask(self, head: dict[str, Any], body: bytes | memoryview = b"") -> dict[str, Any]:
        send(self._process.stdin, head, body)
        answer, _ = receive(self._process.stdout)
        if "os_error" in answer:
            raise OSError(*answer["os_error"])
        if "dataset_error" in answer:
            raise DatasetError(answer["dataset_error"])
        if "error" in answer:
            raise RolloutError(f"a part could not be written: {answer['error']}")
        return answer

    def _twice(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except (EOFError, BrokenPipeError):
            _log.warning("a process that writes shards ended with code %d; again", self._restart())
        try:
            return ask()
        except (EOFError, BrokenPipeError) as error:
            raise RolloutError(
                f"the processes that write shards end with code {self._restart()} (-9: killed, "
                "perhaps out of memory): lower output.shard_bytes or output.commit_threads"
            ) from error

    def _restart(self) -> int:
        self._close_pipes()
        code = self._process.wait()
        self._process = self._template.start()
        return code

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _order(part: Sequence[RolloutRow], rows: Sequence[RolloutRow]) -> list[int]:
    """Return where in a part its rows are."""
    index = {id(row): i for i, row in enumerate(part)}
    return [index[id(row)] for row in rows]
