"""Kill jobs, and check after each death that nothing is lost or doubled.

    python tests/kill_harness.py FOLDER --kills 200
    python tests/kill_harness.py FOLDER --kills 20 --engine vllm --prompts 5000

On the fake engine, small jobs are killed before and after each call to the storage that writes, in
turn; the other kills come at a random time or call in larger jobs, several in each. Jobs run in
forked children, so that a run costs no imports. A person may let it run much longer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, fake_engine, fake_job, write_ids

from rollout.config import JobConfig
from rollout.dataset import read_dataset
from rollout.engine import Finished
from rollout.pipeline import generate
from rollout.schema.layout import COMMIT_FOLDER
from rollout.schema.records import CommitRecord
from rollout.storage import Storage
from rollout.verify import verify_dataset

_CALLS = ("create_exclusive", "write_bytes", "put_file", "delete")
_SAMPLES = 2
_UNIT = 8  # prompts
_SMALL = 10  # prompts of a job that is killed at each call in turn
_GROUPS_PER_STEP = 10


@dataclass(kw_only=True)
class Totals:
    """What the kills of one process came to."""

    kills: int = 0
    calls: int = 0
    """Kills at a call of the storage."""
    datasets: int = 0
    asked: int = 0
    generated: int = 0


class Case:
    """One dataset that is made by jobs which are killed."""

    def __init__(
        self, folder: Path, prompts: int, totals: Totals, run: Callable[..., None]
    ) -> None:
        folder.mkdir(parents=True)
        self.output, self.log = folder / "out", folder / "log"
        self.log.touch()
        self.asked = _SAMPLES * prompts
        self._source = write_ids(folder / "prompts.jsonl", prompts)
        self._result = folder / "result"
        self._totals = totals
        self._run = run
        self._done = 0

    def start(self, call: int | None = None) -> int:
        """Run the job in a child, which may kill itself at a call."""
        self._result.unlink(missing_ok=True)
        return in_child(lambda: self._run(self._source, self.output, self.log, call, self._result))

    def end(self, child: int) -> bool:
        """Wait for a run, and check what it left; returns whether it was killed."""
        code = ended(child)
        assert code in (0, -signal.SIGKILL), f"a run ended with {code}"
        assert ended(in_child(self._check)) == 0, f"{self.output} is not whole"
        self._done = int(self._result.read_text())
        self._totals.kills += code != 0
        return code != 0

    def finish(self) -> None:
        """Run to the end; another run then changes nothing."""
        while self.end(self.start()):
            raise AssertionError("killed by another")
        assert self._done == self.asked, f"{self._done} of {self.asked}"
        before = snapshot(self.output)
        assert ended(self.start()) == 0
        assert snapshot(self.output) == before, "a further run changed something"
        self._totals.datasets += 1
        self._totals.asked += self.asked
        self._totals.generated += len(self.log.read_text().splitlines())

    def _check(self) -> None:
        """Read by records: every rollout once, all files whole, never fewer than before."""
        found = 0
        if (self.output / "_dataset.json").exists():
            report = verify_dataset(Storage.open(self.output), rows=False)
            assert not report.faults, report.faults
            found = report.rollouts
        assert found >= self._done, f"{found} rollouts, there were {self._done}"
        self._result.write_text(str(found))


def in_child(function: Callable[[], Any]) -> int:
    """Start a function in a forked child."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a child: its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(call: int | None, result: Path) -> None:
    """Kill this process at a call to the storage, counted from 0, before and after each.

    Args:
        call: which; None kills at none.
        result: where the number of calls so far is kept.
    """
    count = itertools.count()

    def step() -> None:
        number = next(count)
        if number == call:
            os.kill(os.getpid(), signal.SIGKILL)
        result.write_text(str(number + 1))

    def wrapped(stock: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            step()
            found = stock(*args, **kwargs)
            step()
            if found is True and COMMIT_FOLDER in args[1]:
                _AsFastAsTheDisk.committed += CommitRecord.from_bytes(args[2]).rows
            return found

        return run

    for name in _CALLS:
        setattr(Storage, name, wrapped(getattr(Storage, name)))


def snapshot(output: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file."""
    files = (path for path in output.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


class _AsFastAsTheDisk(FakeEngine):
    """Waits where more is returned than a unit and a half that is not committed."""

    returned = committed = 0

    def step(self) -> list[Finished]:
        pace = _AsFastAsTheDisk
        while pace.returned - pace.committed > 3 * _UNIT * _SAMPLES // 2:
            time.sleep(0.0005)
        found = super().step()
        pace.returned += len(found)
        return found


def run_fake(source: Path, output: Path, log: Path, call: int | None, result: Path) -> None:
    """One run of a job on the fake engine, as a child's whole life."""
    config = fake_job(
        source,
        output,
        sampling={"n": _SAMPLES, "max_tokens": 1},
        output={"unit_prompts": _UNIT, "commit_threads": 1},
    )
    die_at(call, result)
    with fake_engine(_AsFastAsTheDisk, reward=lambda row, text, ids: ids[0] % 7) as engine:
        engine.log = log
        _generate(config)


def run_vllm(source: Path, output: Path, log: Path, call: int | None, result: Path) -> None:
    """One run of a job on vLLM's CPU build, in a fresh process group."""
    from engine_jobs import make_job
    from tiny_model import make_tiny_model

    from rollout.engine import Engine

    model = source.parent / "model"
    if not model.exists():
        make_tiny_model(model)
    stock = Engine.step

    def step(self: Engine) -> Any:
        found = stock(self)
        with log.open("a") as file:
            file.write("".join(f"{one.internal_id}\n" for one in found))
        return found

    Engine.step = step  # type: ignore[method-assign]
    reward = source.parent / "reward.py"
    reward.write_text("def reward(row, text, ids):\n    return ids[0] % 7\n")
    config = make_job(
        model,
        source,
        output,
        sampling={"n": _SAMPLES, "max_tokens": 8, "top_p": 0.9},
        output={"unit_prompts": 8, "flush_seconds": 0.5},
        reward=f"{reward}:reward",
    )
    _generate(config)


def _generate(config: JobConfig) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    generate(config, show_progress=False)


def at_each_call(folder: Path, totals: Totals, share: int, shares: int) -> None:
    """Kill small jobs at every call in turn: once in their first run, and once when resumed."""
    counting = Case(folder / "counting", _SMALL, Totals(), run_fake)
    assert ended(counting.start()) == 0
    calls = int((folder / "counting/result").read_text())
    for call in range(share, calls, shares):
        case = Case(folder / f"call-{call}", _SMALL, totals, run_fake)
        totals.calls += case.end(case.start(call))
        case.finish()


def at_any_time(
    folder: Path, totals: Totals, kills: int, each: int, prompts: int, rng: random.Random
) -> None:
    """Kill larger jobs at random times and calls."""
    for number in itertools.count():
        if totals.kills >= kills:
            return
        case = Case(folder / f"time-{number}", prompts, totals, run_fake)
        for _ in range(min(each, kills - totals.kills)):
            if totals.kills % 3 == 2:
                totals.calls += case.end(case.start(rng.randrange(8, 200)))
                continue
            child = case.start()
            time.sleep(rng.uniform(0.0, 0.6))
            os.kill(child, signal.SIGKILL)
            case.end(child)
        case.finish()


def real_engine(folder: Path, totals: Totals, kills: int, prompts: int, rng: random.Random) -> None:
    """Kill one job on vLLM again and again, some time after its engine is there."""
    case = Case(folder / "vllm", prompts, totals, run_vllm)
    while totals.kills < kills:
        before = case.log.stat().st_size
        child = case.start()
        while case.log.stat().st_size == before:
            time.sleep(0.05)
            gone, status = os.waitpid(child, os.WNOHANG)
            assert not gone, f"a run ended by itself with {os.waitstatus_to_exitcode(status)}"
        time.sleep(rng.uniform(0.0, 3.0))
        os.kill(child, signal.SIGKILL)
        case.end(child)
        done = len(case.log.read_text().splitlines())
        print(f"kill {totals.kills}: {done} generated of {case.asked} asked", file=sys.stderr)
    case.finish()


def check_readers(outputs: list[Path]) -> int:
    """Read as people and trainers do, without the records or through the loader; count rollouts."""
    import polars as pl
    import pyarrow.dataset as ds

    from rollout.loader import RolloutLoader

    found = 0
    for output in outputs:
        keys = [key for record in read_dataset(Storage.open(output)).commits for key in record.keys]
        asked = len(set(keys))
        assert len(keys) == asked, f"{output}: a rollout is there twice"
        ids = pl.scan_parquet(f"{output}/data/*.parquet").select("rollout_id").collect()
        assert ids.height == ids.n_unique() == asked, f"{output}: polars sees {ids.height}"
        assert ds.dataset(output / "data").count_rows() == asked
        loader = RolloutLoader(
            output, vocab_size=2**17, groups_per_step=_GROUPS_PER_STEP, token_budget=2**14
        )
        loaded = [one for batch in loader for one in batch.rollout_ids]
        assert sorted(loaded) == sorted(ids["rollout_id"]), f"{output}: the loader sees others"
        found += asked
    return found


def main() -> None:
    """Kill as often as asked, and print what it came to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=300, help="of each larger dataset")
    parser.add_argument("--kills-each", type=int, default=2, help="kills of each of them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["fake", "vllm"], default="fake")
    arguments = parser.parse_args()

    def work(number: int, count: int) -> None:
        folder, totals = arguments.folder / str(number), Totals()
        folder.mkdir(parents=True)
        rng = random.Random(f"{arguments.seed} {number}")
        if arguments.engine == "vllm":
            real_engine(folder, totals, arguments.kills, arguments.prompts, rng)
        else:
            at_each_call(folder, totals, number, count)
            kills = -(-arguments.kills // count)
            at_any_time(folder, totals, kills, arguments.kills_each, arguments.prompts, rng)
        (folder / "totals.json").write_text(json.dumps(vars(totals)))

    count = 1 if arguments.engine == "vllm" else arguments.processes
    workers = [in_child(lambda n=n: work(n, count)) for n in range(count)]  # type: ignore[misc]
    codes = [ended(worker) for worker in workers]
    assert codes == [0] * count, f"workers ended with {codes}"
    found = [json.loads((arguments.folder / f"{n}/totals.json").read_text()) for n in range(count)]
    totals = {name: sum(one[name] for one in found) for name in found[0]}
    outputs = sorted(p for p in arguments.folder.glob("*/*/out") if p.parent.name != "counting")
    assert len(outputs) == totals["datasets"]
    assert check_readers(outputs) == totals["asked"]
    print(json.dumps(totals))


if __name__ == "__main__":
    main()
