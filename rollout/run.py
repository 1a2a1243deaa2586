"""One run of a job: from the prompts that are missing to the hand-over for commit."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator

from rollout.assemble import suggested_capacity
from rollout.claims import Claims
from rollout.committer import Committer
from rollout.dataset import DatasetWriter
from rollout.engine_start import LazyEngine
from rollout.errors import StoppedError, TooManyFailedError
from rollout.finish import Finisher, Request
from rollout.lease import Leases
from rollout.pending import PendingParts
from rollout.progress import Progress
from rollout.resolve import ResolvedJob
from rollout.rows import Rejection
from rollout.summary import Summary
from rollout.units import UnitBuffers
from rollout.window import Lost, Whole, Window
from rollout.work import (
    Missing,
    SetAside,
    UnitClosed,
    UnitOpened,
    Waiting,
    WorkItem,
    WorkStats,
    missing_work,
)

_log = logging.getLogger(__name__)
_WINDOW = 3  # requests in flight for each that the engine runs at once
_LOG_SECONDS = 60.0
_RETRY_SECONDS = 15.0  # between looks at an output that takes nothing
_IDLE_SECONDS = 0.02
_FIRST_BYTES = 2**20  # captured entries after which their rate tells how many processes it takes
# bytes of entries a second for each; one writes more where cores are free
_PROCESS_RATE = 64 * 2**20
_OTHER_CORES = 4  # for the engine, the job and the process that takes steps
_FEWEST_THREADS, _MOST_THREADS = 4, 16  # fewer would wait for storage, more for the disk
# a job's last requests, in what the engine takes at once: many of them end in little time, when
# large parts that were begun before would keep those who write busy
LAST_ROUNDS = 2
_ENOUGH_ENDED = 64  # rollouts after which the share of failed ones says something


class Run:
    """Feeds the engine and takes in what comes back."""

    def __init__(
        self,
        job: ResolvedJob,
        writer: DatasetWriter,
        engine: LazyEngine,
        progress: Progress | None = None,
        *,
        spool_bytes: int,
        leases: Leases | None = None,
        pending: PendingParts | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare; nothing starts before `work`.

        Args:
            job: what to do.
            writer: where it goes.
            engine: what samples; started with the first request.
            progress: where to show how far it is.
            spool_bytes: captured data on the host after which no request is admitted.
            leases: by which processes share the output; unset, all of it is this one's.
            pending: where to keep what the output does not take.
            stopping: whether to commit what is finished and leave.
        """
        self._job = job
        self._writer = writer
        self._engine = engine
        self._progress = progress
        self._stopping = stopping
        config = job.config
        self._budget = spool_bytes
        self._window = Window(job, engine, stopping, spool_bytes=spool_bytes)
        self._cores = len(os.sched_getaffinity(0))  # of these; the engine may bind this thread
        threads = self._threads = config.output.commit_threads or _threads(self._cores)
        self._claims = Claims(leases, most=threads)
        self._committer = Committer(
            writer,
            config.prompts.name,
            threads,
            part_bytes=config.output.shard_bytes,
            pending=pending,
            on_done=self._claims.release,
            retry_seconds=min(_RETRY_SECONDS, config.output.retry_seconds),
            last_seconds=config.output.retry_seconds,
        )
        self._units = UnitBuffers(
            self._committer.commit, config.output, done=self._committer.finish
        )
        self._finisher = Finisher(job)
        self._work_stats = WorkStats()
        self._reasons: Counter[str] = Counter()
        self._rejected_prompts = 0
        self._rejected_rollouts = 0
        self._failed = 0
        self._finished = 0
        self._tokens = 0
        self._entries = 0
        self._prepared = 0
        self._held_since: float | None = None
        self._held = 0.0
        self._logged = time.monotonic()
        self._start_time: float | None = None
        self._end_time: float | None = None

    def work(self) -> None:
        """Keep the window full until nothing is left, then wait for the last commit.

        Raises:
            StoppedError: asked to; what was finished is handed over.
            TooManyFailedError: more rollouts failed than the job allows.
        """
        requests = self._requests()
        exhausted = False
        while not exhausted or not self._window.empty:
            self._check()
            room = self._room()
            while not exhausted and self._window.num_in_flight < room:
                try:
                    request = next(requests)
                except StopIteration:
                    exhausted = True
                    break
                if request is None:
                    break  # others hold what is left
                self._start(request)
                if room == 1:
                    room = self._room()  # the engine is there now, and says how much it takes
            if self._window.empty:
                if not exhausted:
                    # nothing to step: only a commit can make room, or another process
                    if room == 0:
                        self._units.flush()
                    time.sleep(_IDLE_SECONDS)
            else:
                self._step()
            if exhausted:
                self._hurry()
            self._units.tick()
            self._show()
            self._log_largest_step()
        self._units.flush()
        self._committer.wait()
        self._end_time = time.monotonic()

    def finish(self) -> None:
        """Commit what is finished, also after an error, and end the threads."""
        try:
            if self._stopping() and not self._window.empty:
                self._window.drain()
            self._take_ended()
            self._units.flush()
            self._committer.wait()
        finally:
            self._committer.close()
            if self._progress is not None:
                self._progress.close()

    def summary(self) -> Summary:
        """Count up what was done."""
        stats, capture, commits = self._work_stats, self._window.stats, self._committer.stats
        start = self._start_time or 0.0
        rejected = self._rejected_prompts + stats.rejected_elsewhere
        return Summary(
            prompts_read=stats.prompts + stats.rejected,
            prompts_rejected=stats.rejected + rejected,
            prompts_truncated=self._job.renderer.truncated,
            prompts_orphaned=stats.orphaned,
            rollouts_asked=stats.asked - self._rejected_rollouts,
            rollouts_skipped=stats.already_committed,
            rollouts_elsewhere=stats.elsewhere,
            rollouts_committed=commits.rows,
            rollouts_failed=self._failed + commits.bad_rows.total() + stats.failed_elsewhere,
            max_failed_share=self._job.config.failures.max_failed_share,
            reasons=self._reasons + commits.bad_rows,
            reward_errors=self._finisher.reward_errors,
            first_reward_error=self._finisher.first_reward_error,
            parts=commits.parts,
            tokens=commits.tokens,
            entries=commits.entries,
            largest_step=capture.largest_step,
            support_capacity=self._job.config.capture.support_capacity,
            suggested_capacity=suggested_capacity(capture.largest_step),
            seconds=(self._end_time or time.monotonic()) - start if start else 0.0,
            seconds_sampling=(self._window.last_returned or start) - start,
            replaced_rows=capture.replaced_rows,
            rollouts_covered=commits.covered,
            seconds_waited=capture.waited,
            seconds_held=self._held,
            engine=self._writer.engine,
            engine_deaths=list(self._engine.deaths),
        )

    def _check(self) -> None:
        """Raise where the job is not to go on."""
        if self._stopping():
            raise StoppedError("stopped by a signal")
        self._committer.check()
        failed = self._failed + self._committer.stats.bad_rows.total()
        ended = self._finished + self._failed
        share = self._job.config.failures.max_failed_share
        if ended >= _ENOUGH_ENDED and failed > share * ended:
            common = ", ".join(reason for reason, _ in self._reasons.most_common(3))
            raise TooManyFailedError(
                f"{failed} of {ended} rollouts failed ({common}), failures.max_failed_share "
                f"allows {share:g}; the rejected table of the output names each"
            )

    def _room(self) -> int:
        """Return how many requests may be in flight: none while the host holds too much."""
        engine = self._engine.running
        if engine is None:
            return 1
        now = time.monotonic()
        over = self._host_bytes() > self._budget
        if self._held_since is not None:
            self._held += now - self._held_since
        self._held_since = now if over else None
        if self._host_bytes() > 2 * self._budget:
            self._window.drop_widest(
                f"the host holds more than twice capture.spool_bytes ({self._budget}): the output "
                "is slower than the engine, or what is in flight needs more: raise it, use a "
                "faster output or a smaller max_num_seqs"
            )
            self._take_ended()
        return 0 if over else _WINDOW * engine.max_num_seqs

    def _host_bytes(self) -> int:
        """Count what the host holds: unread spool, rows in work, finished rollouts."""
        return self._window.num_bytes + self._units.num_bytes + self._committer.pending_bytes

    def _requests(self) -> Iterator[Request | None]:
        """Follow the units and render their prompts; what can't run is set aside on the way.

        Yields:
            A request, or null where there is none for now.
        """
        items: Iterator[WorkItem] = missing_work(
            self._job.config, self._writer, self._work_stats, claims=self._claims
        )
        for item in items:
            if isinstance(item, Waiting):
                yield None
            elif isinstance(item, UnitOpened):
                self._units.open(item.unit)
            elif isinstance(item, UnitClosed):
                self._units.close(item.unit)
            elif isinstance(item, SetAside):
                self._reasons[item.rejection.reason] += 1
                self._units.reject(item.unit, item.rejection)
            else:
                yield from self._render(item)

    def _render(self, item: Missing) -> Iterator[Request]:
        # a limit that the job states needs no engine: a finished job with long prompts starts none
        stated = self._job.config.engine.get("max_model_len")
        limit = stated if isinstance(stated, int) else self._engine.get().max_model_len
        rendered = self._job.renderer.render(item.prompt, limit)
        if isinstance(rendered, Rejection):
            self._rejected_prompts += 1
            # what is there of it by earlier runs stays asked for
            self._rejected_rollouts += len(item.sample_indices)
            self._reasons[rendered.reason] += 1
            self._units.reject(item.unit, rendered)
            return
        for index in item.sample_indices:
            yield Request(item=item, sample_index=index, prompt_token_ids=rendered)

    def _start(self, request: Request) -> None:
        self._engine.get()
        if self._start_time is None:
            self._start_time = time.monotonic()
        self._units.start(request.unit)
        try:
            self._window.start(request)
        finally:
            self._take_ended()

    def _step(self) -> None:
        try:
            self._window.step()
        finally:
            self._take_ended()
        self._prepare()

    def _prepare(self) -> None:
        """Start as many processes that write as the rate of entries asks for."""
        captured = 8 * self._window.stats.entries
        if captured < _FIRST_BYTES or self._start_time is None:
            return
        rate = captured / max(time.monotonic() - self._start_time, 1.0)
        # some at least, since units may end together
        wanted = self._cores // _OTHER_CORES + math.ceil(rate / _PROCESS_RATE)
        if wanted > self._prepared:
            self._prepared = wanted
            self._committer.prepare(wanted)

    def _hurry(self) -> None:
        """Hand over smaller parts once little is left."""
        engine = self._engine.running
        if engine is None:
            return
        if self._window.num_in_flight < LAST_ROUNDS * engine.max_num_seqs:
            self._units.hurry(self._threads)

    def _take_ended(self) -> None:
        for ended in self._window.take_ended():
            if isinstance(ended, Lost):
                self._failed += 1
                self._reasons[ended.failure.reason] += 1
                rejection = self._finisher.rejection(ended.request, ended.failure, ended.stage)
                self._units.fail(ended.request.unit, rejection)
            else:
                self._finish_whole(ended)

    def _finish_whole(self, whole: Whole) -> None:
        # replaced and never changed, since a commit under way reads it
        self._writer.engine = dict(self._window.facts) | {
            "largest_step": self._window.stats.largest_step,
            "support_capacity": self._job.config.capture.support_capacity,
        }
        row = self._finisher.row(whole.request, whole.finished, whole.token_ids, whole.captured)
        self._finished += 1
        self._tokens += len(whole.token_ids)
        self._entries += row.num_entries
        self._units.add(whole.request.unit, row)

    def _show(self) -> None:
        if self._progress is not None:
            stats = self._work_stats
            done_by_others = stats.already_committed + stats.elsewhere + stats.failed_elsewhere
            self._progress.update(
                rollouts=self._finished,
                total=stats.asked - self._rejected_rollouts - done_by_others,
                tokens=self._tokens,
                entries=self._entries,
                largest=self._window.stats.largest_step,
                stalled=self._window.stats.waited + self._held,
            )

    def _log_largest_step(self) -> None:
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            largest = self._window.stats.largest_step
            _log.info(
                "largest step so far: %d entries of a capacity of %d, %d would do",
                largest,
                self._job.config.capture.support_capacity,
                suggested_capacity(largest),
            )


def _threads(cores: int) -> int:
    """Choose how many parts are written side by side, at a lower priority than the engine."""
    return min(max(cores - _OTHER_CORES, _FEWEST_THREADS), _MOST_THREADS)
