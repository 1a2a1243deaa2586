"""How much of a host's memory a job's spool may take."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Final

from rollout.errors import ConfigError

_log = logging.getLogger(__name__)
_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_LEAST: Final = 8 * 2**30  # where a quarter of what is free holds that
_ROOM: Final = 64 * 2**20


def spool_budget(stated: int | None, folder: Path) -> int:
    """Return the bytes of captured data on the host after which no request is admitted.

    A job may hold twice as much for a while, and on a host of several GPUs there are likely as many
    jobs: a quarter of what is free is shared out among them.

    Args:
        stated: what the job says; unset, it goes by what is free.
        folder: the spool's.

    Raises:
        ConfigError: next to nothing is free.
    """
    free = free_bytes(folder)
    if stated is None:
        if free < _ROOM:
            raise ConfigError(
                f"capture: {folder} has room for {free} bytes, expected {_ROOM} at least for what "
                "is captured and not yet written: free memory, or set TMPDIR to a larger disk"
            )
        return max(free // (4 * max(num_gpus(), 1)), min(_LEAST, free // 4))
    if 2 * stated > free:
        _log.warning(
            "capture.spool_bytes is %d, and twice as much may be held for a while, but %s has room "
            "for %d: the job ends with an error if that runs out; lower it, or leave it null",
            stated,
            folder,
            free,
        )
    return stated


def free_bytes(folder: Path) -> int:
    """Return the bytes that files in a folder may take now.

    Args:
        folder: one that is there; its disk may be memory.

    Returns:
        What is left of the disk, of the memory and of the limits of the process's control groups
        (version 2), whichever is least.
    """
    return min([shutil.disk_usage(folder).free, *_free_memory(), *_free_in_groups()])


def num_gpus() -> int:
    """Return the number of GPUs that NVIDIA's driver lists, used by this process or not; or 0."""
    return len(list((_PROC / "driver/nvidia/gpus").glob("*")))


def _free_memory() -> list[int]:
    """Return the memory that is available, where the system tells."""
    return [1024 * kib for kib in _numbers(_PROC / "meminfo", "MemAvailable:")]


def _free_in_groups() -> list[int]:
    """Return what each group of the process that has a limit has left of it."""
    found = []
    lines = _text(_PROC / "self/cgroup").splitlines()
    for line in lines:
        if not line.startswith("0::"):
            continue  # version 1
        group = _CGROUPS / line.removeprefix("0::").strip().lstrip("/")
        for place in (group, *group.parents):
            limit = _text(place / "memory.max").strip()
            if limit.isdigit():
                used = int(_text(place / "memory.current").strip() or 0)
                # pages of files, which go when others need the room
                used -= sum(_numbers(place / "memory.stat", "inactive_file"))
                found.append(max(int(limit) - max(used, 0), 0))
            if place == _CGROUPS:
                break
    return found


def _numbers(path: Path, name: str) -> list[int]:
    """Return the number behind a name at the start of a line, in a list, if there is one."""
    for line in _text(path).splitlines():
        first, *rest = line.split()[:2] or [""]
        if first == name and rest and rest[0].isdigit():
            return [int(rest[0])]
    return []


def _text(path: Path) -> str:
    """Return a file's text, empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
