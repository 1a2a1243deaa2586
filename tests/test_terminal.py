"""What `rollout inspect` prints, in a terminal of 100 columns."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from click.testing import CliRunner
from prepared_runs import damaged_run, half_run

from rollout.cli import main


def shown(command: list[str], folder: Path) -> str:
    """Run a command in a terminal of its own and return what is on its screen, with escapes."""
    tmux = shutil.which("tmux")
    assert tmux is not None, "install tmux: make test-browser"
    server = [tmux, "-L", uuid.uuid4().hex, "-f", "/dev/null"]
    done = folder / "done"
    line = f"{shlex.join(command)}; touch {shlex.quote(str(done))}; sleep 60"
    # the terminal's own language, not that of who runs the tests
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "TMUX": ""}
    start = ["new-session", "-d", "-x", "100", "-y", "70", line]
    subprocess.run([*server, *start], check=True, env=environment)
    try:
        end = time.monotonic() + 60
        while not done.exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        capture = [*server, "capture-pane", "-p", "-e"]
        return subprocess.run(capture, check=True, capture_output=True, text=True).stdout
    finally:
        subprocess.run([*server, "kill-server"], check=True)


@pytest.mark.browser
@pytest.mark.parametrize(
    "args",
    [[], ["--prompt", "task 00"], ["--prompt", "task 01", "--sample", "2", "--token", "17"]],
    ids=["overview", "prompt", "token"],
)
def test_a_terminal_shows_every_line_whole(args: list[str], tmp_path: Path) -> None:
    run = damaged_run(tmp_path) if args else half_run(tmp_path / "a [b] \u00fc")
    command = [str(Path(sys.executable).parent / "rollout"), "inspect", str(run.path), *args]
    screen = shown(command, tmp_path)
    assert "\x1b" not in screen
    printed = CliRunner().invoke(main, command[1:]).output
    # the line of polars is there to be copied, and as long as the path
    lines = [line for line in printed.splitlines() if "scan_parquet" not in line]
    on_screen = screen.splitlines()
    assert len(lines) >= 8
    assert [line for line in lines if line.rstrip() not in on_screen] == []
