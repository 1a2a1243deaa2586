"""Launches that come again, as CUDA graphs: one call in place of a dozen.

A sampling step is bound by its host as often as by its device, and there each call to the driver
counts. What a graph holds is fixed: whoever uses one names in its key everything that may differ.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

import torch

GRAPHS_PER_SLOT: Final = 32
"""Graphs that are kept for each slot of a ring; each holds some kilobytes."""


class LaunchGraphs:
    """Runs launches, as graphs where they come often."""

    def __init__(self, device: torch.device, slots: int) -> None:
        """Start with no graph.

        Args:
            device: a CUDA device.
            slots: of the ring.
        """
        self.most = GRAPHS_PER_SLOT * slots
        """Graphs that are kept."""
        # a capture needs a stream of its own; nothing runs there
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # null for a key that has come once
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph | None] = OrderedDict()

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Do on the current stream what `launch` does.

        Args:
            key: stands for every address and value that `launch` passes to the device.
            launch: allocates nothing and waits for nothing.
        """
        graphs = self._graphs
        if key not in graphs:
            # as it is: it may have to compile, and may never come again
            launch()
            graphs[key] = None
            if len(graphs) > self.most:
                graphs.popitem(last=False)
            return
        graphs.move_to_end(key)
        found = graphs[key]
        if found is not None:
            found.replay()
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        graphs[key] = graph
        graph.replay()
