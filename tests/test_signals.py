"""Signals to a job: what is finished is committed, and nobody outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import write_ids

from rollout.dataset import read_dataset
from rollout.spool_folder import remove_dead, spool_folder, spool_parent
from rollout.storage import Storage

_JOB = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from fake_engine import fake_engine, fake_job
from rollout.errors import RolloutError
from rollout.pipeline import generate
prompts, output = Path(sys.argv[1]), sys.argv[2]
with fake_engine() as engine:
    engine.step_seconds, engine.log = 0.02, Path(output).with_name("log")
    {extra}
    try:
        generate(fake_job(prompts, output, output={{"flush_seconds": 3600}}), show_progress=False)
    except RolloutError as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
"""

_STUCK = "import rollout.part_work; rollout.part_work.write_shard = lambda *a, **k: time.sleep(60)"


@contextlib.contextmanager
def job(folder: Path, extra: str = "pass") -> Iterator[subprocess.Popen[str]]:
    """A job of 40 s that commits nothing of its own accord for an hour."""
    prompts = write_ids(folder / "prompts.jsonl", 8000)
    code = _JOB.format(tests=str(Path(__file__).parent), extra=extra)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(prompts), str(folder / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            log = folder / "log"
            # of five steps
            wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= 20, process)
            yield process
        finally:
            process.kill()


def wait_for(condition: object, process: subprocess.Popen[str]) -> None:
    """Wait until something is so, while a process lives."""
    assert callable(condition)
    until = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_commits_what_is_finished(number: signal.Signals, tmp_path: Path) -> None:
    with job(tmp_path) as process:
        (spool,) = spools_of(process.pid)
        start = time.monotonic()
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - start < 20
    assert process.returncode == 9
    assert f"{number.name}: committing what is finished, then leaving" in err
    view = read_dataset(Storage.open(str(tmp_path / "out")))
    assert len(view.covered) > 0
    assert f"stopped by {number.name}: {len(view.covered)} rollouts were committed" in out
    # nobody has to wait for the leases, and no spool is left
    assert list((tmp_path / "out/_lease").iterdir()) == []
    assert not spool.exists()


def test_a_second_signal_ends_the_job_at_once(tmp_path: Path) -> None:
    stuck = f"import time; {_STUCK}"
    with job(tmp_path, stuck) as process:
        process.terminate()
        time.sleep(1.0)
        assert process.poll() is None
        start = time.monotonic()
        process.terminate()
        process.communicate(timeout=30)
        assert time.monotonic() - start < 20  # and not 60
    assert process.returncode == 9


def test_what_hangs_is_left_in_the_end(tmp_path: Path) -> None:
    stuck = (
        f"import rollout.stop, time; {_STUCK}; "
        "rollout.stop.StopSignals.__init__.__kwdefaults__['leave_seconds'] = 1.5"
    )
    with job(tmp_path, stuck) as process:
        start = time.monotonic()
        process.terminate()
        process.communicate(timeout=30)
        assert 1.0 < time.monotonic() - start < 20  # and not 60
    assert process.returncode == 9


def test_the_spool_of_a_killed_job_is_removed_by_the_next(tmp_path: Path) -> None:
    with job(tmp_path) as process:
        (dead,) = spools_of(process.pid)
        process.kill()
        process.communicate(timeout=30)
    assert dead.is_dir()
    with spool_folder() as mine:
        assert Path(mine).is_dir()
        assert not dead.exists()
        remove_dead(spool_parent())
        assert Path(mine).is_dir()  # a live one stays
    assert not Path(mine).exists()


def test_a_signal_ends_a_wait_for_an_engine_that_answers_nothing(tmp_path: Path) -> None:
    # the fifth step waits for what never comes, as vLLM's client does, until it is woken
    stuck = """
    import threading
    from rollout.errors import EngineError
    woken, stock = threading.Event(), engine.step
    def step(self):
        if engine.steps < 5:
            return stock(self)
        assert woken.wait(60)
        raise EngineError("vLLM died: planted")
    engine.step, engine.wake = step, lambda self: woken.set()
"""
    with job(tmp_path, stuck) as process:
        process.terminate()
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 9
    assert "20 rollouts were committed" in out


def spools_of(pid: int) -> list[Path]:
    """The spool folders that a process holds."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return [Path(target).parent for target in links if target.endswith("/owner.lock")]
