"""When the job's engine starts, and with which seed."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rollout.engine import Engine
from rollout.errors import EngineError
from rollout.resolve import ResolvedJob

_log = logging.getLogger(__name__)


class LazyEngine:
    """The job's engine, started when it is first needed: a finished job needs none."""

    def __init__(self, job: ResolvedJob, spool_folder: str) -> None:
        """Start nothing.

        Args:
            job: what to start it with.
            spool_folder: where its capture writes.
        """
        self._job = job
        self.spool_folder = spool_folder
        """Where the capture of the current engine writes: another folder for each."""
        self._engine: Engine | None = None
        # without a seed of the job's every run draws afresh: a resumed one must not repeat itself
        seed = job.config.sampling.seed
        self.seed = secrets.randbits(31) if seed is None else seed
        self.deaths: list[str] = []
        """What each death was, and what was in flight."""
        self.while_starting: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered while an engine starts."""

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
            with self.while_starting():
                engine = self._start()
            # from here on it is closed with the job, whatever happens
            self._engine = engine
            engine.start_capture(self.spool_folder)
        return self._engine

    def restart(self, error: EngineError, batch: str) -> None:
        """Give up a dead engine, so that the next `get` starts another.

        Args:
            error: what it died of.
            batch: what it had in flight.

        Raises:
            EngineError: it has died more often than the job allows.
        """
        self.deaths.append(f"{error}; {batch}")
        allowed = self._job.config.failures.engine_restarts
        died = len(self.deaths)
        _log.warning("the engine died, %d of %d restarts used: %s; %s", died, allowed, error, batch)
        self._discard()
        if died > allowed:
            raise EngineError(
                f"the engine died {died} times, failures.engine_restarts allows {allowed} "
                f"restarts: {error}; {batch}; what was finished is committed, and the same command "
                "goes on from there"
            ) from error
        if self._job.config.sampling.seed is None:
            # an engine with the same seed would draw what the last one drew
            self.seed = secrets.randbits(31)
        base = self.spool_folder.removesuffix(f"/engine-{died - 1}")
        self.spool_folder = f"{base}/engine-{died}"

    def wake(self) -> None:
        """Let a call that waits for the engine fail; from any thread."""
        if self._engine is not None:
            self._engine.wake()

    def close(self) -> None:
        """Stop the engine if it runs."""
        self._discard()

    def _start(self) -> Engine:
        job = self._job
        return Engine(
            job.files,
            job.config.capture,
            job.config.engine,
            seed=self.seed % 2**31,
            has_tokenizer=job.renderer.has_tokenizer,
        )

    def _discard(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


class KeptEngine:
    """One engine for several jobs after each other, whose weights are reloaded in between.

    A job with another architecture, `capture` or `engine` section than the last one's, with weights
    that are no local folder, or with tied embeddings (which vLLM's CPU build does not reload) gets
    a new engine. Whether a reload took is for the caller to prove on what the job wrote, as
    `rollout.agreement` does.
    """

    def __init__(self, seed: int) -> None:
        """Start nothing.

        Args:
            seed: of each engine that is started; jobs with a seed of their own keep it for their
                requests.
        """
        self._seed = seed
        self._engine: Engine | None = None
        self._kind: dict[str, Any] = {}
        self._weights = ""
        self._num_jobs = 0

    def lend(self, job: ResolvedJob, spool_folder: str) -> LazyEngine:
        """Return the engine of one job; its `close` leaves the engine running.

        Args:
            job: what is to be sampled.
            spool_folder: where the capture writes during this job.
        """
        self._num_jobs += 1
        return _LentEngine(job, spool_folder, self, self._seed + self._num_jobs)

    def get(self, job: ResolvedJob, seed: int) -> Engine:
        """Return the running engine with the weights of a job.

        Args:
            job: the job.
            seed: of the engine, where a new one is started.

        Raises:
            EngineError: it does not start, or does not take the weights.
        """
        files = job.files
        kind = {
            "config": files.config,
            "dtype": files.dtype,
            "capture": job.config.capture,
            "engine": job.config.engine,
        }
        if self._engine is not None and kind == self._kind:
            if files.weights_digest == self._weights:
                return self._engine
            if files.revision is None and not files.record()["tie_word_embeddings"]:
                self._engine.reload_weights(files.path)
                self._weights = files.weights_digest
                return self._engine
        self.close()
        self._engine = Engine(
            files,
            job.config.capture,
            job.config.engine,
            seed=seed % 2**31,
            has_tokenizer=job.renderer.has_tokenizer,
        )
        self._kind, self._weights = kind, files.weights_digest
        return self._engine

    def close(self) -> None:
        """Stop the engine if it runs."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


class _LentEngine(LazyEngine):
    """A kept engine for the time of one job."""

    def __init__(self, job: ResolvedJob, spool_folder: str, kept: KeptEngine, seed: int) -> None:
        super().__init__(job, spool_folder)
        self._kept = kept
        if job.config.sampling.seed is None:
            self.seed = seed

    def close(self) -> None:
        if self._engine is not None:
            self._engine.stop_capture()
            self._engine = None

    def _start(self) -> Engine:
        return self._kept.get(self._job, self.seed)

    def _discard(self) -> None:
        # a dead engine serves no later job either
        self._engine = None
        self._kept.close()
