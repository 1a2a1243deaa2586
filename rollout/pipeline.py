"""`rollout generate`: prompts -> engine -> capture -> dataset."""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout.assemble import Assembler, CapturedTokens, Failure, suggested_capacity
from rollout.capture import request as kinds
from rollout.config import JobConfig, SamplingConfig
from rollout.dataset import DatasetWriter, dataset_exists
from rollout.engine import Engine, Finished, sampling_params
from rollout.progress import Progress
from rollout.resolve import ResolvedJob, resolve_job
from rollout.rows import BadRowError, Rejection, RolloutRow, check_row
from rollout.spool import SpoolReader
from rollout.storage import Storage
from rollout.summary import Summary
from rollout.units import UnitBuffers
from rollout.work import (
    Missing,
    SetAside,
    UnitClosed,
    UnitOpened,
    WorkItem,
    WorkStats,
    group_id,
    missing_work,
    rollout_seed,
)

_log = logging.getLogger(__name__)
_WINDOW = 3  # requests in flight for each that the engine runs at once
_ROWS_SECONDS = 60.0  # how long a returned request waits for its captured rows


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """A rollout in flight."""

    unit: str
    item: Missing
    sample_index: int
    prompt_token_ids: list[int]


@dataclass(kw_only=True, slots=True)
class _Returned:
    """A rollout that the engine has returned, waiting for its captured rows."""

    request: _Request
    finished: Finished
    since: float = field(default_factory=time.monotonic)


def generate(config: JobConfig, *, show_progress: bool = True) -> Summary:
    """Run a job until every rollout that it asks for is committed or set aside.

    Args:
        config: the job.
        show_progress: whether to write the progress line.

    Returns:
        What was done; also of what did not work.

    Raises:
        RolloutError: the job can't start, or can't go on; what was finished by then is committed.
    """
    job = resolve_job(config)
    storage = Storage.open(config.output.path, config.output.storage_options)
    storage.probe()
    exists = dataset_exists(storage, job.record)
    with tempfile.TemporaryDirectory(prefix="rollout-spool-") as folder:
        engine = LazyEngine(job, folder)
        try:
            if not exists:
                engine.get()  # an engine that can't start leaves nothing in an empty output
            writer = DatasetWriter.open(storage, job.record)
            run = _Run(job, writer, engine, folder, Progress() if show_progress else None)
            try:
                run.work()
            finally:
                run.finish()
        finally:
            engine.close()
        writer.remove_orphans()
        return run.summary()


class LazyEngine:
    """The job's engine, started when it is first needed: a finished job needs none."""

    def __init__(self, job: ResolvedJob, spool_folder: str) -> None:
        """Start nothing.

        Args:
            job: what to start it with.
            spool_folder: where its capture writes.
        """
        self._job = job
        self._spool_folder = spool_folder
        self._engine: Engine | None = None
        # without a seed of the job's every run draws afresh: a resumed one must not repeat itself
        seed = job.config.sampling.seed
        self.seed = secrets.randbits(31) if seed is None else seed

    @property
    def running(self) -> Engine | None:
        """The engine, if it has been started."""
        return self._engine

    def get(self) -> Engine:
        """Return the engine, starting it the first time.

        Raises:
            EngineError: it does not start.
        """
        if self._engine is None:
            job = self._job
            self._engine = Engine(
                job.files,
                job.config.capture,
                job.config.engine,
                seed=self.seed % 2**31,
                has_tokenizer=job.renderer.has_tokenizer,
            )
            self._engine.start_capture(self._spool_folder)
        return self._engine

    def close(self) -> None:
        """Stop the engine if it runs."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


class _Run:
    """One run of a job: a window of requests over an engine that starts with the first of them."""

    def __init__(
        self,
        job: ResolvedJob,
        writer: DatasetWriter,
        engine: LazyEngine,
        folder: str,
        progress: Progress | None,
    ) -> None:
        self._job = job
        self._writer = writer
        self._engine = engine
        self._progress = progress
        config = job.config
        self._reader = SpoolReader(folder)
        self._assembler = Assembler(capacity=config.capture.support_capacity)
        self._units = UnitBuffers(writer, config.output)
        self._work_stats = WorkStats()
        self._in_flight: dict[str, _Request] = {}
        self._returned: dict[str, _Returned] = {}
        self._summary = Summary(support_capacity=config.capture.support_capacity)
        self._tokens = 0
        self._entries = 0
        self._first_request: float | None = None

    def work(self) -> None:
        """Keep the window full until there is nothing left."""
        items = missing_work(self._job.config, self._writer, self._work_stats)
        requests = self._requests(items)
        exhausted = False
        while True:
            while not exhausted and len(self._in_flight) < self._window():
                request = next(requests, None)
                exhausted = request is None
                if request is not None:
                    self._start(request)
            if not self._in_flight and not self._returned:
                break
            engine = self._engine.get()
            if engine.has_unfinished:
                for finished in engine.step():
                    request = self._in_flight.pop(finished.internal_id)
                    self._returned[finished.internal_id] = _Returned(
                        request=request, finished=finished
                    )
            else:
                engine.flush_capture()  # nothing more is coming: what is missing stays missing
            self._collect()
            self._units.tick()
            self._show()

    def finish(self) -> None:
        """Commit what is finished, also after an error."""
        self._units.flush()
        if self._progress is not None:
            self._progress.close()

    def summary(self) -> Summary:
        """Count up what was done."""
        stats, summary, capture = self._work_stats, self._summary, self._assembler.stats
        summary.prompts_read = stats.prompts + stats.rejected
        summary.prompts_rejected += stats.rejected
        summary.rollouts_asked += stats.asked
        summary.rollouts_skipped = stats.already_committed
        summary.rollouts_committed = self._units.committed_rows
        summary.parts = self._units.committed_parts
        summary.tokens = self._tokens
        summary.entries = self._entries
        summary.largest_step = capture.largest_step
        summary.suggested_capacity = suggested_capacity(capture.largest_step)
        summary.replaced_rows = capture.replaced_rows
        if self._first_request is not None:
            summary.seconds = time.monotonic() - self._first_request
        return summary

    def _window(self) -> int:
        engine = self._engine.running
        return 1 if engine is None else _WINDOW * engine.max_num_seqs

    def _requests(self, items: Iterator[WorkItem]) -> Iterator[_Request]:
        """Follow the units and render their prompts; what can't run is set aside on the way."""
        for item in items:
            if isinstance(item, UnitOpened):
                self._units.open(item.unit)
            elif isinstance(item, UnitClosed):
                self._units.close(item.unit)
            elif isinstance(item, SetAside):
                self._summary.reasons[item.rejection.reason] += 1
                self._units.reject(item.unit, item.rejection)
            else:
                yield from self._render(item)

    def _render(self, item: Missing) -> Iterator[_Request]:
        engine = self._engine.get()
        rendered = self._job.renderer.render(item.prompt, engine.max_model_len)
        if isinstance(rendered, Rejection):
            self._summary.prompts_rejected += 1
            self._summary.rollouts_asked -= item.prompt.sampling.n
            self._summary.reasons[rendered.reason] += 1
            self._units.reject(item.unit, rendered)
            return
        for index in item.sample_indices:
            yield _Request(unit=item.unit, item=item, sample_index=index, prompt_token_ids=rendered)

    def _start(self, request: _Request) -> None:
        engine = self._engine.get()
        if self._first_request is None:
            self._first_request = time.monotonic()
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
        internal = engine.add(name, request.prompt_token_ids, params)
        self._in_flight[internal] = request

    def _collect(self) -> None:
        """Take in captured rows, fail what can't be recorded, finish what is whole."""
        for failure in self._assembler.feed(self._reader.poll()):
            self._assembler.close(failure.request_id)
            if failure.request_id in self._in_flight:
                self._engine.get().abort([failure.request_id])
                self._fail(self._in_flight.pop(failure.request_id), failure)
            elif failure.request_id in self._returned:
                self._fail(self._returned.pop(failure.request_id).request, failure)
        engine = self._engine.running
        engine_idle = engine is None or not engine.has_unfinished
        now = time.monotonic()
        for internal_id, returned in list(self._returned.items()):
            token_ids = np.array(returned.finished.token_ids, np.int32)
            captured = self._assembler.take(internal_id, token_ids)
            if captured is None:
                if now - returned.since < _ROWS_SECONDS and not engine_idle:
                    continue
                captured = self._assembler.missing(internal_id, len(token_ids))
            del self._returned[internal_id]
            if isinstance(captured, Failure):
                self._fail(returned.request, captured)
            else:
                self._finish(returned, token_ids, captured)

    def _finish(
        self, returned: _Returned, token_ids: np.ndarray[Any, Any], captured: CapturedTokens
    ) -> None:
        request, finished = returned.request, returned.finished
        text = finished.text
        if text is None:
            text = self._job.renderer.decode(finished.token_ids)
        row = self._row(request, finished, token_ids, captured, text)
        try:
            check_row(row)
        except BadRowError as error:
            failure = Failure(
                request_id=finished.internal_id, reason=error.reason, detail=error.detail
            )
            self._fail(request, failure)
            return
        if not self._writer.engine:
            self._writer.engine = self._engine.get().facts()
        self._tokens += len(token_ids)
        self._entries += 0 if row.support_entries is None else row.support_entries.size
        self._units.add(request.unit, row)

    def _row(
        self,
        request: _Request,
        finished: Finished,
        token_ids: np.ndarray[Any, Any],
        captured: CapturedTokens,
        text: str | None,
    ) -> RolloutRow:
        prompt = request.item.prompt
        group = group_id(self._job.record.fingerprint, prompt.key)
        return RolloutRow(
            prompt_key=prompt.key,
            rollout_id=f"{group}-{request.sample_index}",
            group_id=group,
            prompt_id=prompt.prompt_id,
            sample_index=request.sample_index,
            group_size=prompt.sampling.n,
            prompt_token_ids=np.array(request.prompt_token_ids, np.int32),
            token_ids=token_ids,
            text=text,
            sampled_logprobs=captured.sampled_logprobs,
            temperature=prompt.sampling.temperature,
            policy_step=self._job.config.model.policy_step,
            support_kind=captured.support_kind,
            support_offsets=captured.support_offsets,
            support_entries=captured.support_entries,
            tail_mass=captured.tail_mass,
            draw_entries=captured.draw_entries,
            finish_reason=finished.finish_reason,
            stop_reason=finished.stop_reason,
            reward=self._reward(request, text, finished.token_ids),
            metadata=prompt.metadata,
        )

    def _reward(self, request: _Request, text: str | None, token_ids: list[int]) -> float | None:
        """Call the user's function; a rollout is kept even where it raises."""
        reward = self._job.reward
        if reward is None:
            return None
        try:
            value = float(reward.function(request.item.prompt.row, text or "", token_ids))
            if not np.isfinite(np.float32(value)):
                raise ValueError(f"got {value}, expected a finite number")
        except Exception as error:  # the user's code may raise anything
            self._summary.reward_errors += 1
            if self._summary.first_reward_error is None:
                self._summary.first_reward_error = f"{type(error).__name__}: {error}"
                _log.exception("reward %s failed; the rollout is kept without one", reward.name)
            return None
        return value

    def _fail(self, request: _Request, failure: Failure) -> None:
        prompt = request.item.prompt
        _log.warning(
            "rollout %s of prompt %s failed: %s: %s",
            request.sample_index,
            prompt.prompt_id,
            failure.reason,
            failure.detail,
        )
        self._summary.rollouts_failed += 1
        self._summary.reasons[failure.reason] += 1
        self._units.fail(
            request.unit,
            Rejection(
                prompt_key=prompt.key,
                prompt_id=prompt.prompt_id,
                sample_index=request.sample_index,
                file=self._job.config.prompts.path,
                line=prompt.line,
                stage="capture",
                reason=failure.reason,
                detail=failure.detail,
                num_prompt_tokens=len(request.prompt_token_ids),
            ),
        )

    def _show(self) -> None:
        if self._progress is not None:
            self._progress.update(
                rollouts=self._units.committed_rows + self._units.buffered_rows,
                total=self._work_stats.asked - self._work_stats.already_committed,
                tokens=self._tokens,
                entries=self._entries,
                largest=self._assembler.stats.largest_step,
            )


def _row_kind(sampling: SamplingConfig, top: int) -> int:
    if sampling.temperature == 0.0:
        return kinds.GREEDY
    return {"kept": kinds.KEPT, "top": kinds.TOP, "none": kinds.NONE}[sampling.support_kind(top)]
