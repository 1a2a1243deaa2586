"""Tell a waiting job that its engine's process is gone.

vLLM's client waits for the next output without a limit, and an engine that was killed sends none:
its own monitor marks the engine dead but wakes nobody.
"""

from __future__ import annotations

import contextlib
import threading
from multiprocessing.connection import wait
from typing import Any

_SECONDS = 0.5


class EngineWatch:
    """Watches the processes of a vLLM client that waits for them."""

    def __init__(self, client: Any) -> None:
        """Start watching; there is nothing to watch for an engine in this process.

        Args:
            client: vLLM's `engine_core`.
        """
        self._client = client
        self._ended = threading.Event()
        manager = getattr(getattr(client, "resources", None), "engine_manager", None)
        self._processes = list(getattr(manager, "processes", None) or [])
        if self._processes and hasattr(client, "outputs_queue"):
            threading.Thread(target=self._watch, name="rollout-engine-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching, before the engine is shut down."""
        self._ended.set()

    def wake(self) -> None:
        """Let whoever waits for the engine stop waiting, with an error."""
        if hasattr(self._client, "outputs_queue"):
            self._fail(RuntimeError("the job is leaving"))

    def _fail(self, error: Exception) -> None:
        self._client.outputs_queue.put_nowait(error)
        for future in list(getattr(self._client, "utility_results", {}).values()):
            # answered or cancelled meanwhile
            with contextlib.suppress(Exception):
                future.set_exception(error)

    def _watch(self) -> None:
        sentinels = [process.sentinel for process in self._processes]
        while not self._ended.is_set():
            if not wait(sentinels, timeout=_SECONDS):
                continue
            codes = [process.exitcode for process in self._processes]
            self._fail(RuntimeError(f"an engine process ended with exit codes {codes}"))
            # again and again: a call may have started to wait just after
            self._ended.wait(_SECONDS)
