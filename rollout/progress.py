"""The live line of a job: a bar on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import IO

from tqdm import tqdm

_PLAIN_SECONDS = 10.0


class Progress:
    """Shows rollouts, tokens/s, mean support and the largest step."""

    def __init__(self, total: int | None = None, stream: IO[str] | None = None) -> None:
        """Start the clock.

        Args:
            total: rollouts to come, where known.
            stream: where to write; standard error by default.
        """
        self._stream = stream or sys.stderr
        self._start = self._last = time.monotonic()
        terminal = self._stream.isatty()
        self._bar = (
            tqdm(total=total, unit=" rollouts", file=self._stream, dynamic_ncols=True)
            if terminal
            else None
        )

    def update(self, *, rollouts: int, total: int, tokens: int, entries: int, largest: int) -> None:
        """Show new counts.

        Args:
            rollouts: finished in this run.
            total: asked for so far.
            tokens: sampled in them.
            entries: support entries of them.
            largest: most entries of one step.
        """
        now = time.monotonic()
        if self._bar is None and now - self._last < _PLAIN_SECONDS:
            return
        self._last = now
        rate = tokens / max(now - self._start, 1e-9)
        mean = entries / tokens if tokens else 0.0
        text = f"{rate:.0f} tokens/s, mean support {mean:.1f}, largest step {largest}"
        if self._bar is not None:
            self._bar.total = total
            self._bar.n = rollouts
            self._bar.set_postfix_str(text, refresh=True)
        else:
            print(f"{rollouts}/{total} rollouts, {text}", file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the last line standing."""
        if self._bar is not None:
            self._bar.close()
