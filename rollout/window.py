"""The requests in flight: started, stepped, matched with their captured rows, started again.

An engine that dies takes with it only what it had not finished: what it had returned and captured
is still in the spool, the rest is asked of the next engine.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rollout.assemble import Assembler, CapturedTokens, CaptureStats, Failure
from rollout.capture import request as kinds
from rollout.config import SamplingConfig
from rollout.engine import Finished, RequestError, sampling_params
from rollout.engine_start import LazyEngine
from rollout.errors import EngineError
from rollout.finish import Request
from rollout.resolve import ResolvedJob
from rollout.spool import SpoolReader
from rollout.spool_entries import HeldSegments
from rollout.work import rollout_seed

_log = logging.getLogger(__name__)
_ROWS_SECONDS = 60.0  # how long a returned request waits for its captured rows
_NAMED = 20  # rollouts that the message about a dead engine names


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """A rollout that the engine has returned, with all of its captured rows."""

    request: Request
    finished: Finished
    token_ids: npt.NDArray[np.int32]
    """[T]."""
    captured: CapturedTokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A rollout that can't be recorded."""

    request: Request
    failure: Failure
    stage: str = "capture"


@dataclass(kw_only=True, slots=True)
class _Returned:
    """A rollout that the engine has returned, waiting for its captured rows."""

    request: Request
    finished: Finished
    since: float = field(default_factory=time.monotonic)


class Window:
    """Requests from their start to their end, whichever engine runs them."""

    def __init__(
        self,
        job: ResolvedJob,
        engine: LazyEngine,
        stopping: Callable[[], bool],
        *,
        spool_bytes: int,
    ) -> None:
        """Start with nothing in flight.

        Args:
            job: what is sampled.
            engine: what samples; started with the first request.
            stopping: whether the job is about to leave, so that no engine is started again.
            spool_bytes: captured data after which no request is admitted.
        """
        self._job = job
        self._engine = engine
        self._stopping = stopping
        self._reader = SpoolReader(engine.spool_folder)
        self._older: list[HeldSegments] = []  # of engines that died
        self._compact_at = self._budget = spool_bytes // 2
        self._assembler = Assembler(capacity=job.config.capture.support_capacity)
        self._in_flight: dict[str, Request] = {}
        self._returned: dict[str, _Returned] = {}
        self._ended: list[Whole | Lost] = []
        self.facts: dict[str, object] = {}
        """What samples, as the engine tells it once it has sampled; see `Engine.facts`."""
        self.last_returned: float | None = None
        """When the engine last returned a rollout."""

    @property
    def num_in_flight(self) -> int:
        """Requests that the engine works on."""
        return len(self._in_flight)

    @property
    def empty(self) -> bool:
        """Whether nothing is in flight and nothing waits for its rows."""
        return not self._in_flight and not self._returned

    @property
    def num_bytes(self) -> int:
        """Bytes of the spool on the host: unread, or still needed."""
        return self._reader.num_bytes() + sum(segments.num_bytes for segments in self._older)

    @property
    def stats(self) -> CaptureStats:
        """Counts of the capture."""
        return self._assembler.stats

    def take_ended(self) -> list[Whole | Lost]:
        """Return what has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def start(self, request: Request) -> None:
        """Ask the engine for a rollout.

        Raises:
            EngineError: the engine died too often.
        """
        try:
            self._add(request)
        except EngineError as error:
            self._recover(error, [request])

    def step(self) -> None:
        """Run the engine for a step and take in what was captured.

        Raises:
            EngineError: the engine died too often; what ended before is there to be taken.
        """
        try:
            engine = self._engine.get()
            running = engine.has_unfinished
            if running:
                for finished in engine.step():
                    self.last_returned = time.monotonic()
                    self._returned[finished.internal_id] = _Returned(
                        request=self._in_flight.pop(finished.internal_id), finished=finished
                    )
            else:
                engine.flush_capture()  # nothing more is coming: what is missing stays missing
            self._collect(final=not running)
        except EngineError as error:
            self._recover(error, [])

    def drain(self) -> None:
        """Take in what the engine has returned, without waiting for what it still works on."""
        try:
            if self._returned:
                self._engine.get().flush_capture()
                self._collect(final=True)
        except EngineError as error:
            _log.warning("the engine is gone: %s", error)
            self._collect_spool()

    def drop_widest(self, detail: str) -> None:
        """Give up the request in flight that holds the most captured rows.

        Args:
            detail: why, for the table of rejected rows.
        """
        widest = self._assembler.widest()
        if widest is None or widest not in self._in_flight:
            return
        self._assembler.close(widest)
        request = self._in_flight.pop(widest)
        failure = Failure(request_id=widest, reason="spool_full", detail=detail)
        self._ended.append(Lost(request=request, failure=failure))
        try:
            self._engine.get().abort([widest])
        except EngineError as error:
            self._recover(error, [])

    def _add(self, request: Request) -> None:
        engine = self._engine.get()
        prompt, sampling = request.item.prompt, request.item.prompt.sampling
        seed = rollout_seed(self._engine.seed, prompt.key, request.sample_index)
        params = sampling_params(
            sampling,
            kind=_row_kind(sampling, self._job.config.capture.top),
            draw_seed=seed,
            seed=None if self._job.config.sampling.seed is None else seed,
            stop_ids=self._job.stop_ids,
        )
        name = f"{prompt.key[:16]}-{request.sample_index}"
        try:
            internal = engine.add(name, request.prompt_token_ids, params)
        except RequestError as error:
            failure = Failure(request_id=name, reason="request_refused", detail=str(error))
            self._ended.append(Lost(request=request, failure=failure, stage="sample"))
            return
        self._in_flight[internal] = request

    def _collect(self, *, final: bool) -> None:
        """Take in captured rows, fail what can't be recorded, finish what is whole."""
        for failure in self._assembler.feed(self._reader.poll()):
            self._assembler.close(failure.request_id)
            if failure.request_id in self._in_flight:
                request = self._in_flight.pop(failure.request_id)
                self._ended.append(Lost(request=request, failure=failure))
                self._engine.get().abort([failure.request_id])
            elif failure.request_id in self._returned:
                request = self._returned.pop(failure.request_id).request
                self._ended.append(Lost(request=request, failure=failure))
        self._compact()
        now = time.monotonic()
        for internal_id, returned in list(self._returned.items()):
            if not self.facts:
                self.facts = self._engine.get().facts()
            if self._finish(internal_id, returned):
                continue
            if now - returned.since >= _ROWS_SECONDS or final:
                self._engine.get().flush_capture()  # raises where the capture itself has failed
                missing = self._assembler.missing(internal_id, len(returned.finished.token_ids))
                del self._returned[internal_id]
                self._ended.append(Lost(request=returned.request, failure=missing))

    def _compact(self) -> None:
        """Keep a few long requests from holding everything that was sampled beside them."""
        segments = self._reader.segments
        if segments.num_bytes > self._compact_at:
            try:
                self._assembler.compact(segments)
            except OSError as error:
                # nothing has changed: no more is admitted until something is committed
                _log.warning("the spool can't be compacted: %s", error)
            # not again at every step where that did not help
            self._compact_at = max(self._budget, segments.num_bytes + self._budget // 4)
        elif segments.num_bytes < self._budget:
            self._compact_at = self._budget

    def _finish(self, internal_id: str, returned: _Returned) -> bool:
        """End a returned request whose rows are all there."""
        token_ids = np.array(returned.finished.token_ids, np.int32)
        captured = self._assembler.take(internal_id, token_ids)
        if captured is None:
            return False
        del self._returned[internal_id]
        request = returned.request
        self._ended.append(
            Lost(request=request, failure=captured)
            if isinstance(captured, Failure)
            else Whole(
                request=request,
                finished=returned.finished,
                token_ids=token_ids,
                captured=captured,
            )
        )
        return True

    def _collect_spool(self) -> None:
        """Finish what a dead engine has returned and captured."""
        if not self.facts:
            return  # nobody can tell any more what has sampled it
        try:
            for failure in self._assembler.feed(self._reader.poll()):
                self._assembler.close(failure.request_id)
        except EngineError as error:
            _log.warning("the dead engine's spool ends here: %s", error)
        for internal_id, returned in list(self._returned.items()):
            self._finish(internal_id, returned)

    def _recover(self, error: EngineError, more: list[Request]) -> None:
        """Go on after the engine's death with what it had in flight."""
        self._collect_spool()
        left = [returned.request for returned in self._returned.values()]
        left += [*self._in_flight.values(), *more]
        for internal_id in (*self._returned, *self._in_flight):
            self._assembler.close(internal_id)
        self._returned.clear()
        self._in_flight.clear()
        if self._stopping():
            return
        todo = deque(left)
        while True:
            # raises when it has died too often
            self._engine.restart(error, _named([*self._in_flight.values(), *todo]))
            self._reader.close()
            self._older.append(self._reader.segments)
            self._reader = SpoolReader(self._engine.spool_folder)
            todo.extend(self._in_flight.values())
            self._in_flight.clear()
            try:
                while todo:
                    self._add(todo[0])
                    todo.popleft()
            except EngineError as again:
                error = again
            else:
                return


def _named(requests: list[Request]) -> str:
    names = [f"{r.item.prompt.prompt_id[:80]}#{r.sample_index}" for r in requests[:_NAMED]]
    more = f" and {len(requests) - _NAMED} more" if len(requests) > _NAMED else ""
    return f"{len(requests)} rollouts in flight: {', '.join(names) or 'none'}{more}"


def _row_kind(sampling: SamplingConfig, top: int) -> int:
    if sampling.temperature == 0.0:
        return kinds.GREEDY
    return {"kept": kinds.KEPT, "top": kinds.TOP, "none": kinds.NONE}[sampling.support_kind(top)]
