"""Engines in processes of their own: their death, and that of the job above them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_jobs import read_rows, write_prompts
from tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

SECONDS = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A job that takes a while, with vLLM's engine in a process of its own."""
    rows = [{"id": f"p{i}", "prompt": f"prompt {i}"} for i in range(48)]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    data: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "prompts": {"path": str(prompts)},
        "sampling": {"max_tokens": 200, "top_p": 0.9, "ignore_eos": True},
        "output": {"path": str(tmp_path / "out"), "flush_seconds": 0.2, "unit_prompts": 4},
        "engine": {
            "max_num_seqs": 4,
            "max_model_len": 256,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 2**26,
        },
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(data))
    command = [str(Path(sys.executable).parent / "rollout"), "generate", "--json"]
    with subprocess.Popen(
        [*command, "--config", str(path)],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_for(lambda: bool(list((tmp_path / "out/_commit").glob("*.json.gz"))), process)
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something is so, while a process lives."""
    until = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.05)


def engines_of(pid: int) -> list[int]:
    """The processes that follow a job."""
    marker = f"ROLLOUT_JOB_PID={pid}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            follows = marker in (folder / "environ").read_bytes()
            if follows and int(folder.name) != pid and b"\0" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_until_gone(pid: int) -> None:
    """Wait until no process follows a job any more."""
    until = time.monotonic() + 15
    while engines_of(pid):
        assert time.monotonic() < until, "an engine outlives its job"
        time.sleep(0.1)


def test_a_killed_engine_is_replaced_and_none_outlives_a_killed_job(
    job: subprocess.Popen[str], tmp_path: Path
) -> None:
    dead = engines_of(job.pid)
    assert dead
    for engine in dead:
        os.kill(engine, signal.SIGKILL)
    # sampling goes on with another one
    before = len(read_rows(tmp_path / "out"))
    wait_for(lambda: len(read_rows(tmp_path / "out")) > before + 16, job)
    living = engines_of(job.pid)
    assert living
    assert not set(living) & set(dead)
    job.kill()
    _, err = job.communicate(timeout=10)
    assert "the engine died, 1 of 3 restarts used" in err
    assert "rollouts in flight: p" in err
    wait_until_gone(job.pid)
    keys = [(row["prompt_id"], row["sample_index"]) for row in read_rows(tmp_path / "out")]
    assert len(keys) == len(set(keys))


def test_an_interrupt_to_the_whole_group_commits_and_leaves(
    job: subprocess.Popen[str], tmp_path: Path
) -> None:
    # as a terminal does: the engine gets it too
    before = len(read_rows(tmp_path / "out"))
    for pid in (job.pid, *engines_of(job.pid)):
        os.kill(pid, signal.SIGINT)
    start = time.monotonic()
    _, err = job.communicate(timeout=60)
    assert time.monotonic() - start < 30
    assert job.returncode == 9, err
    assert "rollouts were committed; the same command goes on" in err
    assert 48 > len(read_rows(tmp_path / "out")) >= before > 0
    wait_until_gone(job.pid)
