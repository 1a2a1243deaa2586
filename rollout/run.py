"""One run of a job: a bounded window of requests, from admission to the hand-over for commit."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rollout.assemble import Assembler, Failure, suggested_capacity
from rollout.capture import request as kinds
from rollout.committer import Committer
from rollout.config import SamplingConfig
from rollout.dataset import DatasetWriter
from rollout.engine import Engine, Finished, RequestError, sampling_params
from rollout.engine_start import LazyEngine
from rollout.finish import Finisher, Request
from rollout.progress import Progress
from rollout.resolve import ResolvedJob
from rollout.rows import Rejection
from rollout.spool import SpoolReader
from rollout.summary import Summary
from rollout.units import UnitBuffers
from rollout.work import (
    Missing,
    SetAside,
    UnitClosed,
    UnitOpened,
    WorkItem,
    WorkStats,
    missing_work,
    rollout_seed,
)

_log = logging.getLogger(__name__)
_WINDOW = 3  # requests in flight for each that the engine runs at once
_LOG_SECONDS = 60.0
_ROWS_SECONDS = 60.0  # how long a returned request waits for its captured rows


@dataclass(kw_only=True, slots=True)
class _Returned:
    """A rollout that the engine has returned, waiting for its captured rows."""

    request: Request
    finished: Finished
    since: float = field(default_factory=time.monotonic)


class Run:
    """Feeds the engine and takes in what comes back."""

    def __init__(
        self,
        job: ResolvedJob,
        writer: DatasetWriter,
        engine: LazyEngine,
        progress: Progress | None = None,
    ) -> None:
        """Prepare; nothing starts before `work`.

        Args:
            job: what to do.
            writer: where it goes.
            engine: what samples; started with the first request.
            progress: where to show how far it is.
        """
        self._job = job
        self._writer = writer
        self._engine = engine
        self._progress = progress
        config = job.config
        self._budget = config.capture.spool_bytes
        self._reader = SpoolReader(engine.spool_folder)
        self._assembler = Assembler(capacity=config.capture.support_capacity)
        self._committer = Committer(writer, config.prompts.path, config.output.commit_threads)
        self._units = UnitBuffers(self._committer.commit, config.output)
        self._finisher = Finisher(job)
        self._work_stats = WorkStats()
        self._in_flight: dict[str, Request] = {}
        self._returned: dict[str, _Returned] = {}
        self._reasons: Counter[str] = Counter()
        self._rejected_prompts = 0
        self._rejected_rollouts = 0
        self._failed = 0
        self._finished = 0
        self._tokens = 0
        self._entries = 0
        self._held_since: float | None = None
        self._held = 0.0
        self._logged = time.monotonic()
        self._start_time: float | None = None
        self._last_returned: float | None = None
        self._end_time: float | None = None

    def work(self) -> None:
        """Keep the window full until nothing is left, then wait for the last commit."""
        requests = self._requests(missing_work(self._job.config, self._writer, self._work_stats))
        exhausted = False
        while True:
            while not exhausted and len(self._in_flight) < self._window():
                request = next(requests, None)
                exhausted = request is None
                if request is not None:
                    self._start(request)
            if not self._in_flight and not self._returned:
                if exhausted:
                    break
                # held back and nothing to step: only commits can make room, so commit everything
                self._units.flush()
                time.sleep(0.01)
                continue
            self._step(self._engine.get())
            self._units.tick()
            self._show()
            self._log_largest_step()
        self._units.flush()
        self._committer.wait()
        self._end_time = time.monotonic()

    def finish(self) -> None:
        """Commit what is finished, also after an error, and end the threads."""
        try:
            self._units.flush()
            self._committer.wait()
        finally:
            self._committer.close()
            if self._progress is not None:
                self._progress.close()

    def summary(self) -> Summary:
        """Count up what was done."""
        stats, capture, commits = self._work_stats, self._assembler.stats, self._committer.stats
        start = self._start_time or 0.0
        return Summary(
            prompts_read=stats.prompts + stats.rejected,
            prompts_rejected=stats.rejected + self._rejected_prompts,
            prompts_truncated=self._job.renderer.truncated,
            rollouts_asked=stats.asked - self._rejected_rollouts,
            rollouts_skipped=stats.already_committed,
            rollouts_committed=commits.rows,
            rollouts_failed=self._failed + commits.bad_rows.total(),
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
            seconds_sampling=(self._last_returned or start) - start,
            replaced_rows=capture.replaced_rows,
            rollouts_covered=commits.covered,
            seconds_waited=capture.waited,
            seconds_held=self._held,
            engine=self._writer.engine,
        )

    def _window(self) -> int:
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
            self._drop_widest()
        return 0 if over else _WINDOW * engine.max_num_seqs

    def _host_bytes(self) -> int:
        """Count what the host holds: unread spool, rows in work, finished rollouts."""
        return (
            self._reader.backlog_bytes()
            + self._assembler.num_bytes
            + self._units.num_bytes
            + self._committer.pending_bytes
        )

    def _drop_widest(self) -> None:
        widest = self._assembler.widest()
        if widest is None or widest not in self._in_flight:
            return
        self._assembler.close(widest)
        self._engine.get().abort([widest])
        detail = (
            f"the host holds more than twice capture.spool_bytes ({self._budget}): the output is "
            "slower than the engine; raise it, use a faster output or a smaller max_num_seqs"
        )
        failure = Failure(request_id=widest, reason="spool_full", detail=detail)
        self._fail(self._in_flight.pop(widest), failure)

    def _requests(self, items: Iterator[WorkItem]) -> Iterator[Request]:
        """Follow the units and render their prompts; what can't run is set aside on the way."""
        for item in items:
            if isinstance(item, UnitOpened):
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
            self._rejected_rollouts += item.prompt.sampling.n
            self._reasons[rendered.reason] += 1
            self._units.reject(item.unit, rendered)
            return
        for index in item.sample_indices:
            yield Request(item=item, sample_index=index, prompt_token_ids=rendered)

    def _start(self, request: Request) -> None:
        engine = self._engine.get()
        if self._start_time is None:
            self._start_time = time.monotonic()
        prompt, sampling = request.item.prompt, request.item.prompt.sampling
        seed = rollout_seed(self._engine.seed, prompt.key, request.sample_index)
        params = sampling_params(
            sampling,
            kind=_row_kind(sampling, self._job.config.capture.top),
            draw_seed=seed,
            seed=None if self._job.config.sampling.seed is None else seed,
            stop_ids=self._job.stop_ids,
        )
        self._units.start(request.unit)
        name = f"{prompt.key[:16]}-{request.sample_index}"
        try:
            internal = engine.add(name, request.prompt_token_ids, params)
        except RequestError as error:
            failure = Failure(request_id=name, reason="request_refused", detail=str(error))
            self._fail(request, failure, stage="sample")
            return
        self._in_flight[internal] = request

    def _step(self, engine: Engine) -> None:
        running = engine.has_unfinished
        if running:
            for finished in engine.step():
                self._last_returned = time.monotonic()
                self._returned[finished.internal_id] = _Returned(
                    request=self._in_flight.pop(finished.internal_id), finished=finished
                )
        else:
            engine.flush_capture()  # nothing more is coming: what is missing now stays missing
        self._collect(final=not running)

    def _collect(self, *, final: bool) -> None:
        """Take in captured rows, fail what can't be recorded, finish what is whole."""
        for failure in self._assembler.feed(self._reader.poll()):
            self._assembler.close(failure.request_id)
            if failure.request_id in self._in_flight:
                self._engine.get().abort([failure.request_id])
                self._fail(self._in_flight.pop(failure.request_id), failure)
            elif failure.request_id in self._returned:
                self._fail(self._returned.pop(failure.request_id).request, failure)
        now = time.monotonic()
        for internal_id, returned in list(self._returned.items()):
            token_ids = np.array(returned.finished.token_ids, np.int32)
            captured = self._assembler.take(internal_id, token_ids)
            if captured is None:
                if now - returned.since < _ROWS_SECONDS and not final:
                    continue
                self._engine.get().flush_capture()  # raises where the capture itself has failed
                captured = self._assembler.missing(internal_id, len(token_ids))
            del self._returned[internal_id]
            if isinstance(captured, Failure):
                self._fail(returned.request, captured)
                continue
            if not self._writer.engine:
                self._writer.engine = self._engine.get().facts()
            row = self._finisher.row(returned.request, returned.finished, token_ids, captured)
            self._finished += 1
            self._tokens += len(token_ids)
            self._entries += 0 if row.support_entries is None else row.support_entries.size
            self._units.add(returned.request.unit, row)

    def _fail(self, request: Request, failure: Failure, stage: str = "capture") -> None:
        self._failed += 1
        self._reasons[failure.reason] += 1
        self._units.fail(request.unit, self._finisher.rejection(request, failure, stage))

    def _show(self) -> None:
        if self._progress is not None:
            self._progress.update(
                rollouts=self._finished,
                total=self._work_stats.asked - self._work_stats.already_committed,
                tokens=self._tokens,
                entries=self._entries,
                largest=self._assembler.stats.largest_step,
                stalled=self._assembler.stats.waited + self._held,
            )

    def _log_largest_step(self) -> None:
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            largest = self._assembler.stats.largest_step
            _log.info(
                "largest step so far: %d entries of a capacity of %d, %d would do",
                largest,
                self._job.config.capture.support_capacity,
                suggested_capacity(largest),
            )


def _row_kind(sampling: SamplingConfig, top: int) -> int:
    if sampling.temperature == 0.0:
        return kinds.GREEDY
    return {"kept": kinds.KEPT, "top": kinds.TOP, "none": kinds.NONE}[sampling.support_kind(top)]
