"""When the job's engine starts, and with which seed."""

from __future__ import annotations

import secrets

from rollout.engine import Engine
from rollout.resolve import ResolvedJob


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
            self._engine.start_capture(self.spool_folder)
        return self._engine

    def close(self) -> None:
        """Stop the engine if it runs."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
