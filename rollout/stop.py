"""SIGTERM and Ctrl-C: the first asks a job to commit and leave, a second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Final, Self

from rollout.errors import StoppedError

WAKE_SECONDS: Final = 3.0  # then a step that waits for the engine is ended
HURRY_SECONDS: Final = 12.0  # then the storage is given up, and what is left is kept locally
LEAVE_SECONDS: Final = 25.0  # then the process ends, whatever hangs
_SAME_SECONDS: Final = 0.3  # a terminal and a wrapper may both deliver one Ctrl-C
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Turns signals into a request to stop, while it is entered in the main thread."""

    def __init__(
        self, *, hurry_seconds: float = HURRY_SECONDS, leave_seconds: float = LEAVE_SECONDS
    ) -> None:
        """Listen to nothing yet.

        Args:
            hurry_seconds: after the signal, when `on_hurry` is called.
            leave_seconds: after the signal, when the process is ended.
        """
        self._seconds = {"wake": WAKE_SECONDS, "hurry": hurry_seconds, "leave": leave_seconds}
        self._since = 0.0
        self._previous: dict[signal.Signals, object] = {}
        self._timers: list[threading.Timer] = []
        self._interruptible = 0
        self.signal: signal.Signals | None = None
        """What asked to stop."""
        self.on_wake: Callable[[], None] = lambda: None
        """Called from another thread a little after the signal."""
        self.on_hurry: Callable[[], None] = lambda: None
        """Called from another thread when time runs out."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        for timer in self._timers:
            timer.cancel()

    @property
    def requested(self) -> bool:
        """Whether the job is to commit what is finished and leave."""
        return self.signal is not None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal raise KeyboardInterrupt here: for waits with nothing finished in hand.

        Raises:
            KeyboardInterrupt: a signal came, before or meanwhile.
        """
        self._interruptible += 1
        try:
            if self.requested:
                raise KeyboardInterrupt
            yield
        finally:
            self._interruptible -= 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is not None:
            if now - self._since > _SAME_SECONDS:
                os._exit(StoppedError.exit_code)
            return
        self.signal, self._since = signal.Signals(number), now
        # not by logging: it may be what the signal interrupted
        text = f"{self.signal.name}: committing what is finished, then leaving; again: at once\n"
        os.write(2, text.encode())
        self._timers = [
            threading.Timer(self._seconds["wake"], lambda: self.on_wake()),
            threading.Timer(self._seconds["hurry"], lambda: self.on_hurry()),
            threading.Timer(self._seconds["leave"], os._exit, (StoppedError.exit_code,)),
        ]
        for timer in self._timers:
            timer.daemon = True
            timer.start()
        if self._interruptible:
            raise KeyboardInterrupt
