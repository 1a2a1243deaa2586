"""Commits in the background: checking, packing order, Parquet, verification and upload.

All of it is work of numpy, Arrow and the storage, which let go of the interpreter's lock, so that
threads beside the loop that feeds the engine are enough. Parts of one unit are committed one after
the other, units side by side.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rollout.dataset import DatasetWriter
from rollout.rows import BadRowError, Rejection, RolloutRow, check_row


@dataclass(kw_only=True, slots=True)
class CommitStats:
    """What has been committed."""

    rows: int = 0
    parts: int = 0
    tokens: int = 0
    entries: int = 0
    covered: int = 0
    """Rollouts that another process had committed meanwhile."""
    bad_rows: Counter[str] = field(default_factory=Counter)
    """Rollouts that may not reach a file, by reason; recorded as rejected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    unit: str
    rows: Sequence[RolloutRow]
    rejected: Sequence[Rejection]
    num_bytes: int


class Committer:
    """Commits parts with a pool of threads."""

    def __init__(self, writer: DatasetWriter, prompts_path: str, threads: int) -> None:
        """Start the threads.

        Args:
            writer: the dataset.
            prompts_path: the prompts file, named in rejections.
            threads: parts of different units committed at once.
        """
        self._writer = writer
        self._prompts_path = prompts_path
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="rollout-commit")
        self._lock = threading.Condition()
        self._waiting: dict[str, deque[_Part]] = {}
        self._pending = 0
        self._pending_bytes = 0
        self._error: BaseException | None = None
        self.stats = CommitStats()

    @property
    def pending_bytes(self) -> int:
        """Raw bytes handed over and not yet committed."""
        return self._pending_bytes

    def commit(self, unit: str, rows: Sequence[RolloutRow], rejected: Sequence[Rejection]) -> None:
        """Hand over the next part of a unit.

        Args:
            unit: the unit of the rows' prompts.
            rows: finished rollouts, not to be changed any more.
            rejected: what was set aside.

        Raises:
            RolloutError: an earlier commit failed.
        """
        size = sum(row.num_bytes for row in rows)
        part = _Part(unit=unit, rows=rows, rejected=rejected, num_bytes=size)
        with self._lock:
            self._raise()
            self._pending += 1
            self._pending_bytes += size
            if unit in self._waiting:
                self._waiting[unit].append(part)  # the thread of this unit takes it up
                return
            self._waiting[unit] = deque()
        self._pool.submit(self._run, part)

    def wait(self) -> None:
        """Return once everything handed over is committed.

        Raises:
            RolloutError: a commit failed; what follows it in its unit is not committed.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._pending == 0)
            self._raise()

    def close(self) -> None:
        """End the threads; call `wait` before."""
        self._pool.shutdown()

    def _run(self, part: _Part | None) -> None:
        while part is not None:
            failed: BaseException | None = None
            try:
                self._commit(part)
            except BaseException as error:  # handed to whoever commits or waits next
                failed = error
            with self._lock:
                self._error = self._error or failed
                self._pending -= 1
                self._pending_bytes -= part.num_bytes
                queue = self._waiting[part.unit]
                if failed is not None:
                    self._pending -= len(queue)
                    queue.clear()
                unit = part.unit
                part = queue.popleft() if queue else None
                if part is None:
                    del self._waiting[unit]
                self._lock.notify_all()

    def _commit(self, part: _Part) -> None:
        good, rejected = [], list(part.rejected)
        for row in part.rows:
            try:
                check_row(row)
            except BadRowError as error:
                rejected.append(self._reject(row, error))
            else:
                good.append(row)
        record = self._writer.commit_part(part.unit, good, rejected)
        with self._lock:
            self.stats.bad_rows.update(r.reason for r in rejected[len(part.rejected) :])
            self.stats.covered += len(good) - (0 if record is None else record.rows)
            if record is not None:
                self.stats.parts += 1
                self.stats.rows += record.rows
                self.stats.tokens += record.tokens
                self.stats.entries += record.entries

    def _reject(self, row: RolloutRow, error: BadRowError) -> Rejection:
        return Rejection(
            prompt_key=row.prompt_key,
            prompt_id=row.prompt_id,
            sample_index=row.sample_index,
            file=self._prompts_path,
            stage="capture",
            reason=error.reason,
            detail=error.detail,
            num_prompt_tokens=row.prompt_token_ids.size,
        )

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
