"""Wait for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

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
