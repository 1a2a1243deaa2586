"""Time work on a CUDA device: as a graph, or launched ahead of a device that is kept busy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

BUSY_CYCLES = 20_000_000  # of the device's clock, some 10 ms: what the host is ahead by
MOST_CYCLES = 320_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Milliseconds of one step over the timed rounds."""

    median: float
    low: float
    """The tenth percentile."""
    high: float
    """The ninetieth."""
    host_waits: bool = False
    """Whether the work waits for the device, so that launches are part of its time."""

    @classmethod
    def of(cls, milliseconds: list[float], *, host_waits: bool = False) -> Times:
        """Summarise some rounds.

        Args:
            milliseconds: of each round, at least one.
            host_waits: see the field.
        """
        times = sorted(milliseconds)
        tenth = len(times) // 10
        return cls(
            median=statistics.median(times),
            low=times[tenth],
            high=times[-1 - tenth],
            host_waits=host_waits,
        )


def copy_bandwidth(device: torch.device, replays: int) -> float:
    """Measure a large copy.

    Args:
        device: the device.
        replays: timed copies.

    Returns:
        Bytes read plus bytes written per second.
    """
    source = torch.randint(0, 1 << 30, (1 << 28,), device=device)
    target = torch.empty_like(source)
    # by a kernel: a graph gives plain copies to the slower copy engine
    times = time_graph(lambda: torch.neg(source, out=target), 1, replays)
    return 2 * source.numel() * 8 / (times.median * 1e-3)


def time_graph(work: Callable[[], object], repeats: int, replays: int) -> Times:
    """Time work that waits for nothing, as a CUDA graph.

    Args:
        work: launches everything that is timed, `repeats` steps of it.
        repeats: steps in one call of `work`.
        replays: timed replays.

    Returns:
        Of one step, over the replays.
    """
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = _events()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return Times.of(times)


def time_in_turn(
    works: Mapping[str, Callable[[], object]],
    prepare: Callable[[], object],
    repeats: int,
    rounds: int,
) -> dict[str, Times]:
    """Time several works, one after the other in each round, so that a drift meets all of them.

    Args:
        works: what is timed, by name; each launches `repeats` steps.
        prepare: launched before each work and not timed.
        repeats: steps in one call of a work.
        rounds: timed rounds; two more go ahead.

    Returns:
        Of one step, by the works' names.
    """
    for _ in range(2):
        for work in works.values():
            prepare()
            work()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in works}
    late: dict[str, int] = dict.fromkeys(works, 0)
    for _ in range(rounds):
        for name, work in works.items():
            elapsed, ahead = _time_behind(prepare, work)
            times[name].append(elapsed / repeats)
            late[name] += not ahead
    return {name: Times.of(times[name], host_waits=late[name] > 0) for name in works}


def _time_behind(prepare: Callable[[], object], work: Callable[[], object]) -> tuple[float, bool]:
    """Return the milliseconds of work that is launched while the device is busy, and if it was."""
    cycles = BUSY_CYCLES
    while True:
        prepare()
        start, end = _events()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        # a device that had come to `start` by now may have waited for launches
        ahead = not start.query()  # type: ignore[no-untyped-call]
        end.synchronize()
        if ahead or cycles >= MOST_CYCLES:
            return start.elapsed_time(end), ahead
        cycles *= 4


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return start, end
