"""Commits in the background: checking, packing order, Parquet, verification and upload.

Threads wait for the processes that do the work (`rollout.part_pool`) and for the storage. Parts are
written side by side, and while there is room for their shards none waits for another: whoever has
written the first of a unit commits it and those behind it that are written. Entries stay in the
spool until they are committed or kept.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollout.dataset import DatasetWriter
from rollout.early_shard import written_early
from rollout.errors import DatasetError, OutputError, RolloutError
from rollout.part_pool import Part, PartPool
from rollout.part_queue import MadePart, PartQueue, QueuedPart
from rollout.part_work import BadRow, WriteShard, by_prompt
from rollout.pending import PendingParts
from rollout.rows import Rejection, RolloutRow
from rollout.schema.records import CommitRecord
from rollout.shard import ShardInfo
from rollout.storage_errors import may_pass

_log = logging.getLogger(__name__)
_LAST_RETRY_SECONDS = 1.0
# parts of the largest size for each thread that may be made before their turn, and the share of the
# free disk that their raw bytes may have
_EARLY_PARTS, _EARLY_SHARE = 2, 4


@dataclass(kw_only=True, slots=True)
class CommitStats:
    """What has been committed."""

    rows: int = 0
    parts: int = 0
    tokens: int = 0
    entries: int = 0
    covered: int = 0
    """Rollouts that another process had committed meanwhile."""
    kept_rows: int = 0
    """Rollouts that the output has not taken yet, in the local folder."""
    bad_rows: Counter[str] = field(default_factory=Counter)
    """Rollouts that may not reach a file, by reason; recorded as rejected."""


class Committer:
    """Commits parts with a pool of threads; what the output does not take is kept locally.

    While the output is out, parts go to the local folder at once and one thread asks the output
    from time to time; when it is back that thread uploads what was kept. An error that no waiting
    mends stops the job, with everything finished kept.
    """

    def __init__(
        self,
        writer: DatasetWriter,
        prompts_path: str,
        threads: int,
        *,
        part_bytes: int,
        pending: PendingParts | None = None,
        on_done: Callable[[str], None] = lambda unit: None,
        retry_seconds: float = 15.0,
        last_seconds: float = 300.0,
    ) -> None:
        """Start the threads.

        Args:
            writer: the dataset.
            prompts_path: the prompts file, named in rejections.
            threads: parts in work at once.
            part_bytes: raw bytes of the largest of them.
            pending: where to keep what the output does not take; unset, that stops the job.
            on_done: called with each unit given to `finish`, once its parts are committed.
            retry_seconds: between looks at an output that was out.
            last_seconds: how long `wait` waits for it.
        """
        self._writer = writer
        self._prompts_path = prompts_path
        self._pending_parts = pending
        self._on_done = on_done
        self._retry_seconds = retry_seconds
        self._last_seconds = last_seconds
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="rollout-commit")
        self._parts = PartPool()
        self._lock = threading.Condition()
        free = writer.free_bytes() // _EARLY_SHARE
        self._queue = PartQueue(min(free, _EARLY_PARTS * threads * part_bytes))
        self._pending = 0
        self._pending_bytes = 0
        self._error: BaseException | None = None
        self._outage: RolloutError | None = None
        self._uploader: threading.Thread | None = None
        self._giving_up = threading.Event()
        self.stats = CommitStats()

    @property
    def pending_bytes(self) -> int:
        """Bytes in memory of what is neither committed nor kept on the disk."""
        return self._pending_bytes

    def commit(self, unit: str, rows: Sequence[RolloutRow], rejected: Sequence[Rejection]) -> None:
        """Hand over the next part of a unit.

        Args:
            unit: the unit of the rows' prompts.
            rows: finished rollouts, not to be changed any more.
            rejected: what was set aside.

        Raises:
            RolloutError: an earlier commit failed, and there is no folder to keep this one in.
        """
        self._hand_over(
            QueuedPart(
                unit=unit,
                rows=rows,
                rejected=rejected,
                memory_bytes=sum(row.memory_bytes for row in rows),
                num_bytes=sum(row.num_bytes for row in rows),
            )
        )

    def finish(self, unit: str) -> None:
        """Announce that nothing of a unit is left for now.

        Raises:
            RolloutError: see `commit`.
        """
        self._hand_over(QueuedPart(unit=unit, last=True))

    def prepare(self, processes: int) -> None:
        """Start what works on parts, so that the first of them need not wait.

        Args:
            processes: how many parts may be large at once; more than threads are of no use.
        """
        self._pool.submit(self._parts.start, min(processes, self._threads))

    def check(self) -> None:
        """Say whether commits can't go on.

        Raises:
            RolloutError: why.
        """
        with self._lock:
            if self._error is not None:
                raise self._error

    def wait(self) -> None:
        """Return once everything handed over is committed.

        Raises:
            RolloutError: something is not; the message says where it is kept.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._pending == 0)
        uploader = self._uploader
        self._giving_up.set()
        if uploader is not None:
            uploader.join()
        if self.stats.kept_rows and self._error is None and self._outage is None:
            self._upload_kept()  # kept just when the output came back
        error = self._error or self._outage
        if error is None:
            return
        if self.stats.kept_rows and isinstance(error, RolloutError) and self._pending_parts:
            raise OutputError(
                f"{error}; {self.stats.kept_rows} finished rollouts are kept in "
                f"{self._pending_parts.folder}: the same command uploads them first"
            ) from error
        raise error

    def close(self) -> None:
        """End the threads; call `wait` before."""
        self._pool.shutdown()
        self._parts.close()

    def _hand_over(self, part: QueuedPart) -> None:
        with self._lock:
            if self._pending_parts is None and self._error is not None:
                raise self._error
            self._pending += 1
            self._pending_bytes += part.memory_bytes
        if part.last:
            # whoever commits the part before it takes it up: the unit's lease is not to wait
            # behind the parts of others
            part.made = MadePart(write=functools.partial(self._write_part, part))
        self._queue.add(part)
        self._pool.submit(self._run, part)

    def _run(self, part: QueuedPart) -> None:
        if not part.last:
            self._queue.put_made(part, self._make(part))
        while (first := self._queue.take(part.unit)) is not None:
            failed: BaseException | None = None
            try:
                self._commit_or_keep(*first)
            except BaseException as error:  # handed to whoever commits or waits next
                failed = error
            with self._lock:
                self._error = self._error or failed
                self._queue.remove(first[0])  # now that the next one sees the error
                self._pending -= 1
                self._pending_bytes -= first[0].memory_bytes
                self._lock.notify_all()

    def _make(self, part: QueuedPart) -> MadePart:
        """Check a part's rows and write them to a shard, unless the output takes none."""
        write: WriteShard = functools.partial(self._write_part, part)
        made = MadePart(write=write)
        self._queue.wait_for_room(part)
        try:
            with self._parts.part(part.rows) as work:
                good, rejected = self._checked(part, work)
                good = by_prompt(good)  # as the shard has them, which may be kept in their place
                if good and not (self._error or self._outage):
                    shard = written_early(self._writer, good, work.write, again=write)
                    write = made.early.enter_context(shard)
        except BaseException as error:  # raised at the part's turn
            return replace(made, error=error)
        return replace(made, rows=good, rejected=rejected, write=write)

    def _write_part(
        self,
        part: QueuedPart,
        path: Path,
        rows: Sequence[RolloutRow],
        fingerprint: str,
        row_group_bytes: int,
    ) -> ShardInfo:
        """Write some of a part's rows at its turn; see `rollout.part_work.PartWork.write`."""
        with self._parts.part(part.rows) as work:
            return work.write(path, rows, fingerprint, row_group_bytes)

    def _commit_or_keep(self, part: QueuedPart, made: MadePart) -> None:
        if part.last:
            if self._error is None and self._outage is None:
                self._on_done(part.unit)
            return
        with made.early:
            if made.error is not None:
                raise made.error
            self._commit_made(part, made)
        for row in part.rows:
            if row.stored_entries is not None:
                row.stored_entries.release()

    def _commit_made(self, part: QueuedPart, made: MadePart) -> None:
        pending = self._pending_parts
        stuck = self._error or self._outage
        if stuck is None or pending is None:
            try:
                self._commit(part.unit, made.rows, made.rejected, made.write)
                return
            except (OutputError, DatasetError) as error:
                if pending is None:
                    raise
                self._out(error)
        assert pending is not None
        saved = self._save(pending, part.unit, made)
        self._ask_again()
        if saved:
            return
        # no room, so the rollouts stay in memory and no more are admitted, until the output is back
        _log.warning("%s is full: waiting for the output", pending.folder)
        self._commit(part.unit, made.rows, made.rejected, made.write)

    def _out(self, error: RolloutError) -> None:
        """Note that the output takes nothing."""
        with self._lock:
            cause = error.__cause__
            if cause is not None and not may_pass(cause):
                self._error = self._error or error
                return
            if self._outage is None:
                _log.warning("%s; keeping what is finished locally", error)
                self._outage = error

    def _ask_again(self) -> None:
        """Have an output that is out asked from time to time, once there is something to upload."""
        with self._lock:
            if self._outage is not None and self._uploader is None:
                self._uploader = threading.Thread(
                    target=self._upload_kept, name="rollout-upload", daemon=True
                )
                self._uploader.start()

    def _save(self, pending: PendingParts, unit: str, made: MadePart) -> bool:
        try:
            saved = pending.save(unit, made.rows, made.rejected, made.write)
        except OSError as error:
            raise OutputError(
                f"output: takes nothing, and {pending.folder} neither: {error}"
            ) from error
        if saved:
            with self._lock:
                self.stats.kept_rows += len(made.rows)
        return saved

    def _upload_kept(self) -> None:
        """Upload what is kept once the output is back; given up some time after the job's end."""
        assert self._pending_parts is not None
        deadline: float | None = None
        while deadline is None or time.monotonic() < deadline:
            if self._giving_up.wait(self._retry_seconds):
                # the job waits for nothing else any more
                deadline = deadline or time.monotonic() + self._last_seconds
                time.sleep(min(_LAST_RETRY_SECONDS, self._last_seconds / 4))
            if self._writer.storage.given_up.is_set():
                deadline = 0.0
            try:
                for part in self._pending_parts.parts():
                    with self._lock:
                        self.stats.kept_rows -= len(part.keys)
                    try:
                        for record in self._pending_parts.commit(part, self._writer):
                            self._count(record)
                    except BaseException:
                        with self._lock:
                            self.stats.kept_rows += len(part.keys)
                        raise
            except (OutputError, DatasetError) as error:
                with self._lock:
                    self._outage = error
                continue
            except BaseException as error:
                with self._lock:
                    self._error = self._error or error
                return
            with self._lock:
                if not self._pending_parts.parts():
                    _log.warning("the output is back; everything that was kept is uploaded")
                    self._outage = None
                    self._uploader = None
                    return

    def _checked(self, part: QueuedPart, work: Part) -> tuple[list[RolloutRow], list[Rejection]]:
        bad = {row.index for row in work.bad_rows}
        good = [row for index, row in enumerate(part.rows) if index not in bad]
        rejected = [*part.rejected, *(self._reject(part.rows[b.index], b) for b in work.bad_rows)]
        with self._lock:
            self.stats.bad_rows.update(r.reason for r in rejected[len(part.rejected) :])
        return good, rejected

    def _commit(
        self, unit: str, rows: list[RolloutRow], rejected: list[Rejection], write: WriteShard
    ) -> None:
        record = self._writer.commit_part(unit, rows, rejected, write)
        with self._lock:
            self.stats.covered += len(rows) - (0 if record is None else record.rows)
        if record is not None:
            self._count(record)

    def _reject(self, row: RolloutRow, bad: BadRow) -> Rejection:
        return Rejection(
            prompt_key=row.prompt_key,
            prompt_id=row.prompt_id,
            sample_index=row.sample_index,
            file=self._prompts_path,
            stage="capture",
            reason=bad.reason,
            detail=bad.detail,
            num_prompt_tokens=row.prompt_token_ids.size,
        )

    def _count(self, record: CommitRecord) -> None:
        with self._lock:
            self.stats.parts += 1
            self.stats.rows += record.rows
            self.stats.tokens += record.tokens
            self.stats.entries += record.entries
