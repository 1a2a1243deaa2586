"""Wait for what other threads and processes do, and look past it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 30.0


def wait_for(condition: Callable[[], bool]) -> None:
    """Return once something is so.

    Args:
        condition: asked again and again.

    Raises:
        AssertionError: it is not, after 30 s.
    """
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def open_below(folder: Path) -> list[str]:
    """The files below a folder that this process has open; other threads close theirs meanwhile."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return sorted(name for name in found if name.startswith(str(folder)))
