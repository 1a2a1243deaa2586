"""The folder of a job's spool, held by a lock, so that what dead jobs left can be told and removed.

A lock and no process id: the system releases it however the holder ends, and it means the same in
every container that shares the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rollout.host_memory import free_bytes

_MEMORY_DISK: Final = Path("/dev/shm")
_ENOUGH_MEMORY: Final = 16 * 2**30
_LEAST_SHARE: Final = 4  # many containers have 64 MiB of it, and a large disk
_PREFIX: Final = "rollout-job-"
_LOCK: Final = "owner.lock"
_UNLOCKED_SECONDS: Final = 60.0  # a folder gets its lock at once, or its maker has died


def spool_parent() -> Path:
    """Where spools are: a memory-backed disk, or the temporary folder if that has far more room."""
    temporary = Path(tempfile.gettempdir())
    if not _MEMORY_DISK.is_dir():
        return temporary
    free = free_bytes(_MEMORY_DISK)
    roomy = free >= min(_ENOUGH_MEMORY, free_bytes(temporary) // _LEAST_SHARE)
    return _MEMORY_DISK if roomy else temporary


@contextlib.contextmanager
def spool_folder(parent: Path | None = None) -> Iterator[str]:
    """Make a folder that is removed at the end, and remove those whose jobs have died.

    Args:
        parent: where; default: `spool_parent`.

    Yields:
        The folder.
    """
    # first, since the memory disk may be full of what a killed job left
    for place in (_MEMORY_DISK, Path(tempfile.gettempdir())) if parent is None else (parent,):
        remove_dead(place)
    parent = spool_parent() if parent is None else parent
    folder, lock = _locked_folder(parent)
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_dead(parent: Path) -> list[str]:
    """Remove the spool folders whose lock nobody holds; other users' are left alone.

    Returns:
        The names of the removed folders.
    """
    removed = []
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, not ours, or in use
            if _is_dead(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder.name)
    return removed


def _is_dead(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _UNLOCKED_SECONDS
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _locked_folder(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # another job may have taken the folder for a dead one's just before it was locked
        if os.fstat(lock).st_nlink and folder.is_dir():
            return folder, lock
        os.close(lock)
