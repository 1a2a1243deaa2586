"""Jobs that are killed again and again lose nothing and repeat little."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_killed_jobs_end_with_every_rollout_once(tmp_path: Path) -> None:
    # checks after every death what a reader by records sees; see the script for all that it asserts
    script = Path(__file__).parent / "kill_harness.py"
    command = [sys.executable, str(script), str(tmp_path / "runs"), "--kills", "8"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["kills"] >= 8
    assert result["generated"] <= 1.1
