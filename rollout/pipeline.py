"""`rollout generate`: prompts -> engine -> capture -> dataset."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rollout.config import JobConfig
from rollout.dataset import DatasetWriter, dataset_exists
from rollout.engine_start import KeptEngine, LazyEngine
from rollout.progress import Progress
from rollout.resolve import resolve_job
from rollout.run import Run
from rollout.storage import Storage
from rollout.summary import Summary

_MEMORY_DISK = Path("/dev/shm")


def generate(
    config: JobConfig, *, show_progress: bool = True, kept: KeptEngine | None = None
) -> Summary:
    """Run a job until every rollout that it asks for is committed or set aside.

    Args:
        config: the job.
        show_progress: whether to write the progress line.
        kept: an engine that outlives the job; unset, the job starts and stops its own.

    Returns:
        What was done; also of what did not work.

    Raises:
        RolloutError: the job can't start, or can't go on; what was finished by then is committed.
    """
    job = resolve_job(config)
    storage = Storage.open(config.output.path, config.output.storage_options)
    storage.probe()
    exists = dataset_exists(storage, job.record)
    parent = str(_MEMORY_DISK) if _MEMORY_DISK.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="rollout-spool-", dir=parent) as folder:
        engine = LazyEngine(job, folder) if kept is None else kept.lend(job, folder)
        try:
            if not exists:
                engine.get()  # an engine that can't start leaves nothing in an empty output
            writer = DatasetWriter.open(storage, job.record)
            run = Run(job, writer, engine, Progress() if show_progress else None)
            try:
                run.work()
            finally:
                run.finish()
        finally:
            engine.close()
        writer.remove_orphans()
        return run.summary()
