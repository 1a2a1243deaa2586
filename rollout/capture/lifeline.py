"""Engine processes end with their job, however that ends.

A job that is killed can't tell anybody, so each worker watches the job's process and, when it is
gone, ends itself and the engine process above it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from typing import Final

JOB_PID: Final = "ROLLOUT_JOB_PID"
"""Environment variable with the job's process id, inherited by its engine's processes."""


def follow_job() -> None:
    """Watch the job from a thread; nothing to do in the job's own process."""
    job = int(os.environ.get(JOB_PID, os.getpid()))
    if job == os.getpid():
        return
    # Ctrl-C reaches every process of the terminal; this one ends when the job says so
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        descriptor = os.pidfd_open(job)
    except ProcessLookupError:
        _end(job)
        return
    except OSError:
        return  # no such call on this kernel
    threading.Thread(target=_watch, args=(descriptor, job), daemon=True).start()


def _watch(descriptor: int, job: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    parent = os.getppid()
    poll.poll()
    if parent not in (job, 1) and parent == os.getppid():
        with contextlib.suppress(OSError):
            os.kill(parent, signal.SIGKILL)
    _end(job)


def _end(job: int) -> None:
    os.write(2, f"the job (process {job}) is gone: leaving\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
