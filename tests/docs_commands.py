"""The commands of the pages, and how a test runs them: as they stand, with their sizes lowered."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

from rollout.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"

_COMMAND = re.compile(r"\s*(rollout|make|python|pip|pytest|zcat|\$) ")
_SMALL_ENGINE = ("engine.max_num_seqs=16", "engine.kv_cache_memory_bytes=67108864", "sampling.n=4")
_SMALL_STEPS = ("data.groups_per_step=2", "epochs=1")
_SMALL_ROUNDS = (
    *("--rounds", "1", "--prompts", "4", "--held-out", "8"),
    *(word for value in _SMALL_ENGINE for word in ("--generate-set", value)),
    *(word for value in _SMALL_STEPS for word in ("--replay-set", value)),
)
# one arm of each setting that the page names
_ARMS = ("0.95: full vocabulary, not", "1 rounds old: full support, centred", "8 draws")
_SMALL_MODEL = ("layers=1", "hidden_size=64", "intermediate_size=64", "batch_size=8")
# what is put behind a script's own arguments, where the last of several counts
_LOWERED = {
    "make_model.py": ("--steps", "1"),
    "rounds.py": _SMALL_ROUNDS,
    "ablations.py": (
        *(*_SMALL_ROUNDS, "--seeds", "1"),
        *(word for name in _ARMS for word in ("--match", name)),
    ),
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    for language, text in re.findall(
        r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S
    ):
        yield Block(language=language, text=text)


def commands(block: Block) -> list[str]:
    """The commands of a block: every line of a bash block, and none of another."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "bash":
        return [line for line in lines if line.strip()]
    assert not [line for line in lines if _COMMAND.match(line)], "a command in no bash block"
    return []


def run(command: str) -> str:
    """Run one command of a page in the current folder, and return what it printed.

    Commands run in this process, so that the engine's modules are loaded once.
    """
    name, *args = shlex.split(command, comments=True)
    if name == "rollout":
        return _invoke(main, args, command)
    if name == "python":
        script, *args = args
        return run_script(script, args)
    if name == "make":
        return _make(args)
    if name == "pip":
        return _pip(args)
    if name == "zcat":
        return subprocess.run(
            command, shell=True, check=True, capture_output=True, text=True
        ).stdout
    raise AssertionError(f"a page has the command {command!r}, which no test runs")


def run_script(script: str, args: list[str]) -> str:
    """Run a script of the repository with a page's arguments, its sizes lowered."""
    path = ROOT / script
    expanded = [word for arg in args for word in _expand(arg)]
    expanded += _LOWERED.get(path.name, ())
    if path.name == "make_model.py" and "large" in expanded:
        expanded += [word for value in _SMALL_MODEL for word in ("--set", value)]
    found = load_script(path)["main"]
    assert isinstance(found, click.Command), script
    return _invoke(found, expanded, f"python {script} {' '.join(args)}")


def load_script(path: Path) -> dict[str, Any]:
    """Run the top level of a script, which may import what lies beside it."""
    sys.path.insert(0, str(path.parent))
    try:
        return runpy.run_path(str(path), run_name="page")
    finally:
        sys.path.remove(str(path.parent))


def recipe(target: str) -> list[str]:
    """The lines that make runs for a target, once everything is installed."""
    shown = subprocess.run(
        ["make", "-n", "-C", str(ROOT), "-o", ".venv/.installed", "--no-print-directory", target],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return shown.replace("\\\n", " ").splitlines()


def _make(targets: list[str]) -> str:
    """Run what a target runs; that of the tests is what is running."""
    (target,) = targets
    lines = recipe(target)
    if target in ("test", "test-browser"):
        # CI runs exactly these, on a clean clone
        script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
        assert target in shlex.split(script.splitlines()[-1], comments=True)[1:]
        assert any(line.startswith(".venv/bin/pytest") for line in lines)
        return ""
    return "".join(run(line.removeprefix(".venv/bin/")) for line in lines)


def _pip(args: list[str]) -> str:
    """Resolve what an install would install against the package index; download no package."""
    command, editable, target = args
    assert (command, editable) == ("install", "-e")
    extras = re.fullmatch(r"\.\[(.+)\]", target)
    assert extras is not None
    resolver = [str(Path(sys.executable).parent / "uv"), "pip", "compile", "--no-header", "--quiet"]
    for extra in extras[1].split(","):
        resolver += ["--extra", extra]
    found = subprocess.run(
        [*resolver, str(ROOT / "pyproject.toml")],
        env={**os.environ, "UV_HTTP_RETRIES": "10"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def _expand(arg: str) -> list[str]:
    """What a shell makes of a pattern."""
    return sorted(map(str, Path().glob(arg))) if "*" in arg else [arg]


def _invoke(command: click.Command, args: list[str], said: str) -> str:
    found = CliRunner().invoke(command, args, catch_exceptions=False)
    assert found.exit_code == 0, f"{said}\n{found.output}"
    return found.output
