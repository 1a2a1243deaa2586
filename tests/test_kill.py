"""U15: jobs that are killed again and again lose nothing and repeat little."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    # in memory where that has room: what a killed process has written is there either way
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2**28
    path = Path(tempfile.mkdtemp(dir=memory if roomy else None))
    yield path
    shutil.rmtree(path)


def test_u15_killed_jobs_end_with_every_rollout_once(folder: Path) -> None:
    # checks after every death what a reader by records sees; see the script for all that it asserts
    script = Path(__file__).parent / "kill_harness.py"
    command = [sys.executable, str(script), str(folder / "runs"), "--kills", "200"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["kills"] >= 200
    # two at least for each write of a job: before it, and after
    assert result["calls"] >= 30
    assert result["asked"] <= result["generated"] <= 1.1 * result["asked"]
