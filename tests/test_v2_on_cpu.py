"""The V2 runner's adapter under the asynchronous scheduler, on a machine without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.engine
def test_v2_adapter_records_what_the_v2_sampler_drew_from() -> None:
    script = Path(__file__).with_name("v2_on_cpu.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rollouts on the V2 runner" in done.stdout
