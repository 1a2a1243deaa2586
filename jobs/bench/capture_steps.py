"""What the capture adds to single steps of the engine: full batches that only decode."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from capture_arms import Load, cpu_milliseconds, run_capture, set_fused
from random_model import prompt_ids

from rollout.capture.request import KEPT, NONE, TOP, extra_args
from rollout.engine_start import LazyEngine
from rollout.spool import SpoolReader

BLOCK = 10  # steps between switches
SETTLED = 3  # steps after a switch that are not counted: the engine runs ahead


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Milliseconds of the recorded steps."""

    device: list[float]
    """The capture's own time on the device, by CUDA events around it."""
    launch: list[float]
    """The launching thread's time in the capture."""
    take: float
    """CPU time of the process that takes the steps, a step."""


def step_milliseconds(engine: LazyEngine, model: Path, folder: Path, load: Load) -> StepTimes:
    """Time the capture of single steps in one job."""
    rpc = engine.get()._llm.collective_rpc
    rpc(_set_timed, args=(True,))
    run_capture(engine, model, folder, load)
    replies = rpc(_set_timed, args=(False,))
    return StepTimes(**next(reply for reply in replies if reply is not None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Switched:
    """Mean milliseconds of a step in blocks of steps, neighbours of each other."""

    without: list[float]
    recorded: list[float]
    waited_without: list[float]
    """What of it the engine's thread waited for the device: where that is nothing, steps take as
    long as the host needs."""
    waited_recorded: list[float]


def switched_steps(engine: LazyEngine, folder: Path, load: Load, *, tokens: int) -> Switched:
    """Sample one full batch, the capture switched on and off every few steps.

    Nothing drifts in the time of a few steps, so that a per cent shows where whole jobs one after
    the other differ by ten.

    Args:
        engine: the engine, of vLLM's V2 runner.
        folder: for the spool, which is read and dropped.
        load: as for whole jobs; its requests' number and lengths do not matter.
        tokens: tokens of each of the requests, as many as run at once.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = engine.get()._llm
    sampling = load.sampling
    truncated = sampling["top_p"] < 1.0 or sampling["top_k"] > 0
    kind = KEPT if truncated else TOP if load.capture.get("top", 128) else NONE
    params = SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=extra_args(kind, 0),
        **sampling,
    )
    engine.get().start_capture(str(folder))
    llm.collective_rpc(_set_switched, args=(True,))
    core, rows = llm.llm_engine, engine.get().max_num_seqs
    for index in range(rows):
        prompt = {"prompt_token_ids": prompt_ids(index)}
        core.add_request(f"switched-{index}", prompt, params)
    reader, left = SpoolReader(folder), rows
    while left:
        left -= sum(output.finished for output in core.step())
        for _ in reader.poll():
            pass  # a segment of which nothing is held goes
    replies = llm.collective_rpc(_set_switched, args=(False,))
    engine.get().stop_capture()
    reader.close()
    starts, waits, counts = next(reply for reply in replies if reply is not None)
    blocks = []
    for first in range(0, len(starts) - BLOCK, BLOCK):
        if min(counts[first : first + BLOCK + 1]) == rows:
            steps = slice(first + SETTLED, first + BLOCK + 1)
            mean, waited = (1e3 * float(np.diff(times[steps]).mean()) for times in (starts, waits))
            blocks.append((first // BLOCK % 2 == 0, mean, waited))
    pairs = [
        sorted((first, second))
        for first, second in zip(blocks[::2], blocks[1::2], strict=False)
        if first[0] != second[0]
    ]
    return Switched(
        without=[pair[0][1] for pair in pairs],
        recorded=[pair[1][1] for pair in pairs],
        waited_without=[pair[0][2] for pair in pairs],
        waited_recorded=[pair[1][2] for pair in pairs],
    )


def _set_switched(worker: Any, on: bool) -> tuple[list[float], list[float], list[int]] | None:
    """In the worker: record every other block of steps.

    Args:
        worker: vLLM's worker.
        on: whether to begin or to end it.

    Returns:
        At the end: of each step when it began, the seconds waited for the device by then, its rows.
    """
    adapter, follower = worker._adapter, worker._follower
    if adapter is None and follower is None:
        return None
    runner = worker.model_runner
    if on:
        inner = runner.sample
        on_step, on_drawn = (None, None) if adapter is None else (adapter.on_step, adapter.on_drawn)
        following = follower is not None and follower.following
        starts: list[float] = []
        waits: list[float] = []
        counts: list[int] = []
        waited = 0.0
        wait = torch.cuda.Event.synchronize

        def timed_wait(event: Any) -> None:
            nonlocal waited
            start = time.perf_counter()
            wait(event)
            waited += time.perf_counter() - start

        def sample(hidden_states: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            recorded = len(starts) // BLOCK % 2 == 0
            if adapter is not None:
                adapter.on_step = on_step if recorded else None
                adapter.on_drawn = on_drawn if recorded else None
            if follower is not None:  # on every rank in the same steps
                follower.following = following and recorded
            set_fused(worker, not recorded)
            starts.append(time.perf_counter())
            waits.append(waited)
            counts.append(len(batch.req_ids))
            return inner(hidden_states, batch, *args, **kwargs)

        worker._bench = (inner, wait, on_drawn, following, starts, waits, counts)
        runner.sample = sample
        torch.cuda.Event.synchronize = timed_wait  # type: ignore[method-assign,assignment]
        return None
    set_fused(worker, False)
    runner.sample, wait, on_drawn, following, starts, waits, counts = worker._bench
    if adapter is not None:
        adapter.on_drawn = on_drawn
    if follower is not None:
        follower.following = following
    torch.cuda.Event.synchronize = wait  # type: ignore[method-assign]
    return starts, waits, counts


def _set_timed(worker: Any, on: bool) -> dict[str, Any] | None:
    """In the worker: put events around every recorded step, or return what they say."""
    core = worker._capture
    if core is None:
        return None
    recorder = core.recorder
    if on:
        record, stop = recorder.record, recorder.stop
        events, launch, take = [], [], []
        started: dict[int, float] = {}  # CPU time of a process before its first step

        def timed_record(*args: Any) -> Any:
            pid = recorder._process.pid
            if pid not in started:
                started[pid] = cpu_milliseconds(pid)
            first, last = _event(), _event()
            first.record()
            start = time.perf_counter()
            drawn = record(*args)
            launch.append(1e3 * (time.perf_counter() - start))
            last.record()
            events.append((first, last))
            return drawn

        def timed_stop() -> None:
            if recorder._process is not None:
                recorder.flush()
                pid = recorder._process.pid
                take.append(cpu_milliseconds(pid) - started.get(pid, 0.0))
            stop()

        worker._bench = (record, stop, events, launch, take)
        recorder.record, recorder.stop = timed_record, timed_stop
        return None
    record, stop, events, launch, take = worker._bench
    recorder.record, recorder.stop = record, stop
    torch.cuda.synchronize()
    return {
        "device": [first.elapsed_time(last) for first, last in events],
        "launch": launch,
        "take": sum(take) / len(events),
    }


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
