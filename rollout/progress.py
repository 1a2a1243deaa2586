"""The live line of a job: a bar on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import IO, Any

from tqdm import tqdm

_PLAIN_SECONDS = 10.0
_BAR_SECONDS = 0.1


class Progress:
    """Shows rollouts, tokens/s, mean support and the largest step."""

    def __init__(
        self,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show nothing yet; the clock starts with the first counts.

        Args:
            stream: where to write; standard error by default.
            clock: seconds.
        """
        self._stream = stream or sys.stderr
        self._clock = clock
        self._start: float | None = None
        self._last = 0.0
        self._waiting: str | None = None
        self._terminal = self._stream.isatty()
        self._bar: tqdm[Any] | None = None

    def update(
        self,
        *,
        rollouts: int,
        total: int,
        tokens: int,
        entries: int,
        largest: int,
        stalled: float = 0.0,
    ) -> None:
        """Show new counts; where there is nothing to do, show nothing.

        Args:
            rollouts: finished in this run.
            total: what this run has to do, as far as known.
            tokens: sampled in them.
            entries: support entries of them.
            largest: most entries of one step.
            stalled: seconds that the capture or the output held sampling back; shown if any.
        """
        now = self._clock()
        if self._start is None:
            self._start = self._last = now
        elapsed = now - self._start
        rate = tokens / elapsed if elapsed > 0 else 0.0
        mean = entries / tokens if tokens else 0.0
        text = f"{rate:.0f} tokens/s, mean support {mean:.1f}, largest step {largest}"
        if stalled >= 0.05:
            text += f", stalled {stalled:.1f} s"
        if self._terminal and total and self._bar is None:
            self._bar = tqdm(total=total, unit=" rollouts", file=self._stream, dynamic_ncols=True)
        if self._bar is not None:
            self._bar.total = total
            self._bar.n = rollouts
            self._bar.set_postfix_str(text, refresh=False)
            if now - self._last >= _BAR_SECONDS:
                self._last = now
                self._bar.refresh()
            return
        # "0/0 rollouts" would look like a fault
        self._waiting = f"{rollouts}/{total} rollouts, {text}" if total else None
        if now - self._last >= _PLAIN_SECONDS:
            self._last = now
            self._print()

    def close(self) -> None:
        """Leave the last line standing."""
        if self._bar is not None:
            # what it waited for may all have been done by others
            self._bar.leave = bool(self._bar.total)
            self._bar.refresh()
            self._bar.close()
        else:
            self._print()

    def _print(self) -> None:
        if self._waiting is not None:
            print(self._waiting, file=self._stream, flush=True)
            self._waiting = None
