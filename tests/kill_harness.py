"""Kill jobs on the fake engine, and check after each death that nothing is lost or doubled.

A script: `python tests/kill_harness.py FOLDER --kills 200`; a person may let it run much longer.
Jobs run in forked children, so that a run costs no imports. Half of the kills come at a random
time, the others before or after a call to the storage, one call after the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_engine import fake_engine, fake_job, write_ids

from rollout.config import JobConfig
from rollout.dataset import read_dataset
from rollout.pipeline import generate
from rollout.storage import Storage

_CALLS = ("create_exclusive", "write_bytes", "put_file", "delete")


def in_child(function: Callable[[], Any]) -> int:
    """Start a function in a forked child; its result goes to a file named after the child."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function()
        code = 0
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a child: its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(call: int) -> None:
    """Kill this process at a call to the storage, counted from 0, before and after each."""
    count = itertools.count()

    def wrapped(stock: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if next(count) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            result = stock(*args, **kwargs)
            if next(count) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for name in _CALLS:
        setattr(Storage, name, wrapped(getattr(Storage, name)))


def check(output: Path, least: int, result: Path) -> None:
    """Read by records: every rollout once, all files there and whole, never fewer than before."""
    if not (output / "_dataset.json").exists():
        assert least == 0
        result.write_text("0")
        return
    view = read_dataset(Storage.open(str(output)))
    keys = [key for record in view.commits for key in record.keys]
    assert len(keys) == len(set(keys)), "a rollout is there twice"
    assert len(keys) >= least, f"{len(keys)} rollouts, there were {least}"
    for record in view.shards:
        view.verify(record)
    result.write_text(str(len(keys)))


def check_end(output: Path, asked: int) -> None:
    """Read as people do, without the records."""
    import polars as pl
    import pyarrow.dataset as ds

    ids = pl.scan_parquet(f"{output}/data/*.parquet").select("rollout_id").collect()
    assert ids.height == ids.n_unique() == asked, f"polars sees {ids.height} of {asked}"
    assert ds.dataset(output / "data").count_rows() == asked


def snapshot(output: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file."""
    files = (path for path in output.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def run_job(config: JobConfig, log: Path, call: int | None) -> None:
    """One run of a job, as a child's whole life."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    if call is not None:
        die_at(call)
    with fake_engine() as engine:
        engine.log = log
        engine.step_seconds = 0.004
        generate(config, show_progress=False)


def one_dataset(folder: Path, prompts: int, kills: int, rng: random.Random) -> tuple[int, float]:
    """Kill a job until it is done; returns the kills, and rollouts generated for each asked."""
    source = write_ids(folder / "prompts.jsonl", prompts)
    output, log, result = folder / "out", folder / "log", folder / "result"
    log.touch()
    config = fake_job(
        source,
        output,
        sampling={"n": 2},
        output={"unit_prompts": 64, "flush_seconds": 0.02},
    )
    done = killed = 0
    call = rng.randrange(40)
    while True:
        by_call = killed < kills and killed % 2 == 0
        chosen = call if by_call else None
        call += rng.randrange(1, 8)
        child = in_child(lambda chosen=chosen: run_job(config, log, chosen))  # type: ignore[misc]
        if killed < kills and not by_call:
            time.sleep(rng.uniform(0.0, 1.0))
            os.kill(child, signal.SIGKILL)
        code = ended(child)
        assert code in (0, -signal.SIGKILL), f"a run ended with {code}"
        reader = in_child(lambda least=done: check(output, least, result))  # type: ignore[misc]
        assert ended(reader) == 0
        done = int(result.read_text())
        if code == 0:
            break
        killed += 1
    asked = 2 * prompts
    assert done == asked, f"{done} of {asked}"
    assert ended(in_child(lambda: check_end(output, asked))) == 0
    before = snapshot(output)
    assert ended(in_child(lambda: run_job(config, log, None))) == 0
    assert snapshot(output) == before, "a further run changed something"
    return killed, len(log.read_text().splitlines()) / asked


def main() -> None:
    """Kill as often as asked, and print what it came to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=2500, help="of each dataset")
    parser.add_argument("--kills-each", type=int, default=4, help="kills of each dataset")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    killed = 0
    shares: list[float] = []
    while killed < arguments.kills:
        folder = arguments.folder / f"{len(shares)}"
        folder.mkdir(parents=True)
        kills, share = one_dataset(folder, arguments.prompts, arguments.kills_each, rng)
        killed += kills
        shares.append(share)
        shutil.rmtree(folder)
    print(json.dumps({"kills": killed, "datasets": len(shares), "generated": max(shares)}))


if __name__ == "__main__":
    main()
