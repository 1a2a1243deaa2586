"""Launches that come again, as CUDA graphs: one call in place of a dozen.

A sampling step is bound by its host as often as by its device, and there each call to the driver
counts. What a graph holds is fixed: whoever uses one names in its key everything that may differ.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

import torch

MAX_GRAPHS: Final = 512
"""Graphs that are kept; each holds some kilobytes."""


class LaunchGraphs:
    """Runs launches, from the third time on as a graph."""

    def __init__(self, device: torch.device) -> None:
        """Start with no graph.

        Args:
            device: a CUDA device.
        """
        # a capture needs a stream of its own; nothing runs there
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph | None] = OrderedDict()

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Do on the current stream what `launch` does.

        Args:
            key: stands for every address and value that `launch` passes to the device.
            launch: allocates nothing and waits for nothing.
        """
        graphs = self._graphs
        graph = graphs.get(key)
        if graph is not None:
            graphs.move_to_end(key)
            graph.replay()
            return
        if key not in graphs:
            # compiles what is new; what does not come again is not worth a graph
            launch()
            graphs[key] = None
            if len(graphs) > MAX_GRAPHS:
                graphs.popitem(last=False)
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
