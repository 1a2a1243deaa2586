"""`rollout generate`: prompts -> engine -> capture -> dataset."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from rollout.config import JobConfig, OutputConfig
from rollout.dataset import DatasetWriter, dataset_exists
from rollout.engine_start import KeptEngine, LazyEngine
from rollout.errors import RolloutError, StoppedError
from rollout.host_memory import spool_budget
from rollout.lease import Leases
from rollout.pending import PendingParts
from rollout.progress import Progress
from rollout.resolve import ResolvedJob, other_reward, resolve_job
from rollout.run import Run
from rollout.spool_folder import spool_folder
from rollout.stop import StopSignals
from rollout.storage import Storage
from rollout.summary import Summary

_log = logging.getLogger(__name__)


def generate(
    config: JobConfig, *, show_progress: bool = True, kept: KeptEngine | None = None
) -> Summary:
    """Run a job until every rollout that it asks for is committed or set aside.

    In the main thread, SIGTERM and SIGINT make it commit what is finished and leave.

    Args:
        config: the job.
        show_progress: whether to write the progress line.
        kept: an engine that outlives the job; unset, the job starts and stops its own.

    Returns:
        What was done; also of what did not work.

    Raises:
        StoppedError: a signal came; what was finished is committed.
        RolloutError: the job can't start, or can't go on; what was finished by then is committed.
    """
    with StopSignals() as signals:
        try:
            with signals.interruptible():
                job = resolve_job(config)
                storage = _open(config.output)
                storage.probe()
                exists = dataset_exists(storage, job.record)
            signals.on_hurry = storage.given_up.set
            with spool_folder() as folder:
                spool_bytes = spool_budget(config.capture.spool_bytes, Path(folder))
                _log.info("spool: %s, no request is admitted at %d bytes", folder, spool_bytes)
                engine = LazyEngine(job, folder) if kept is None else kept.lend(job, folder)
                signals.on_wake = engine.wake
                engine.while_starting = signals.interruptible
                try:
                    if not exists:
                        engine.get()  # an engine that can't start leaves an empty output empty
                    return _run(
                        job,
                        storage,
                        engine,
                        signals,
                        spool_bytes=spool_bytes,
                        show_progress=show_progress,
                    )
                finally:
                    engine.close()
        except KeyboardInterrupt:
            if signals.signal is None:
                raise
            raise StoppedError(
                f"stopped by {signals.signal.name}; the same command goes on from here"
            ) from None


def _open(output: OutputConfig) -> Storage:
    return Storage.open(output.path, output.storage_options, retry_seconds=output.retry_seconds)


def _what_is_there(config: JobConfig, writer: DatasetWriter) -> str:
    """Say how far earlier runs of the job came."""
    done, prompts = writer.ledger.num_covered, writer.ledger.num_planned
    asked = max(prompts * config.sampling.n, done)
    there = f"{done} of {asked} rollouts of the {prompts} prompts planned so far are there"
    return f"going on: {there}" if done < asked else f"{there}; looking for further prompts"


def _warn_of_what_is_there(job: ResolvedJob, writer: DatasetWriter) -> None:
    """Say what a run that goes on does not put right."""
    other = other_reward(writer.record, job.record) if writer.ledger.num_covered else None
    if other is not None:
        _log.warning("reward: %s", other)
    lost = writer.missing_files()
    if lost:
        _log.warning(
            "output %s: %s is missing although a commit record names it%s: its rollouts count and "
            "are not sampled again: copy the dataset again, `rollout verify` names what is lost",
            writer.storage.url,
            lost[0],
            f", and {len(lost) - 1} more" if len(lost) > 1 else "",
        )


def _run(
    job: ResolvedJob,
    storage: Storage,
    engine: LazyEngine,
    signals: StopSignals,
    *,
    spool_bytes: int,
    show_progress: bool,
) -> Summary:
    """Do the work, with what protects it around it."""
    output = job.config.output
    with signals.interruptible():
        writer = DatasetWriter.open(storage, job.record)
    if show_progress and writer.ledger.num_covered:
        print(_what_is_there(job.config, writer), file=sys.stderr)
    _warn_of_what_is_there(job, writer)
    pending = None
    if storage.outlives_process:
        pending = PendingParts.of(
            output.pending_path, storage.identity, job.record.fingerprint, output.pending_bytes
        )
        pending.commit_all(writer)
    leases = Leases(storage)
    leases.start_renewing()
    run = Run(
        job,
        writer,
        engine,
        Progress() if show_progress else None,
        spool_bytes=spool_bytes,
        leases=leases,
        pending=pending,
        stopping=lambda: signals.requested,
    )
    try:
        try:
            run.work()
        finally:
            run.finish()
    except RolloutError as error:
        if signals.signal is None:
            raise
        committed = run.summary().rollouts_committed
        also = "" if isinstance(error, StoppedError) else f"; {error}"
        raise StoppedError(
            f"stopped by {signals.signal.name}: {committed} rollouts were committed; the same "
            f"command goes on from here{also}"
        ) from error
    finally:
        leases.close()
    writer.remove_orphans()
    return run.summary()
