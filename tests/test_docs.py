"""The documentation against the code: every command is run, every name looked up."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from quickstart_scripts import load_script

from rollout.cli import main
from rollout.report import InspectReport
from rollout.schema.columns import SCHEMA

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"

# not run here: CI runs `make test` on a clean clone; the quickstart's parts and the scripts of the
# figures (runs of minutes) have tests of their own; the ablations train for long and have none
ELSEWHERE = (
    "make quickstart",
    "make test",
    "python jobs/quickstart/make_model.py",
    "python jobs/reverse_text/rounds.py",
    "python jobs/reverse_text/figure.py",
    "python jobs/reverse_text/ablations.py",
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    for language, text in re.findall(
        r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S
    ):
        yield Block(language=language, text=text)


def commands(block: Block) -> list[str]:
    """The commands of a block: all of a bash block, lines that start like one of a plain block."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "bash":
        return [line for line in lines if line.strip()]
    if block.language == "":
        return [line for line in lines if re.match(r"(rollout|make|python|pip) ", line)]
    return []


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a reader has it: the jobs, a model, and the job file of the README."""
    monkeypatch.chdir(tmp_path)
    # the reward function's module is named after its file
    (tmp_path / "jobs" / "quickstart").mkdir(parents=True)
    quickstart = ROOT / "jobs" / "quickstart"
    shutil.copy(quickstart / "task.py", "jobs/quickstart/task.py")
    prompts = (quickstart / "prompts.jsonl").read_text().splitlines(keepends=True)
    Path("jobs/quickstart/prompts.jsonl").write_text("".join(prompts[:8]))
    # hardly trained: what it says does not matter here
    script = load_script("make_model")
    found = CliRunner().invoke(script.main, ["--steps", "1"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    job = next(b for b in blocks(README) if b.language == "yaml" and "sampling:" in b.text)
    limits = "enforce_eager: true, max_model_len: 64, kv_cache_memory_bytes: 67108864"
    small = job.text.replace("engine:   {", f"engine:   {{{limits}, ")
    assert small != job.text
    Path("job.yaml").write_text(small)
    replay = next(b for b in blocks(ROOT / "docs" / "replay.md") if b.language == "yaml").text
    replay = re.sub(r"groups_per_step: \d+", "groups_per_step: 4", replay)
    Path("replay.yaml").write_text(re.sub(r"epochs: +\d+", "epochs: 1", replay))
    return tmp_path


def run(command: str) -> str:
    """Run one command of a page, in this process: the engine's modules are loaded once."""
    name, *args = shlex.split(command, comments=True)
    if name == "rollout":
        found = CliRunner().invoke(main, args, catch_exceptions=False)
        assert found.exit_code == 0, f"{command}\n{found.output}"
        return found.output
    raise AssertionError(f"a page has the command {command!r}, which no test runs")


def run_page(page: Path) -> list[str]:
    """Run a page from top to bottom; its Python blocks share their names."""
    done = []
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.language == "python":
            exec(compile(block.text, str(page), "exec"), names)
            done.append("python")
        for command in commands(block):
            if not command.startswith(ELSEWHERE):
                run(command)
                done.append(command)
    return done


@pytest.mark.engine
def test_every_command_of_the_readme_and_the_docs_runs(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_page(README)
    # what the pages look at is the README's run
    assert sum(command.startswith("rollout ") for command in done) >= 3
    for page in PAGES:
        done += run_page(page)
    joined = " ".join(done)
    for name in main.commands:
        assert f"rollout {name}" in joined, name
    shown = json.loads(run("rollout inspect out/joined --json"))
    assert shown["complete"] is True
    assert shown["rewards"]["maximum"] <= 1.0
    assert (workplace / "out" / "rows.jsonl.gz").exists()
    assert "reverse-004" in capsys.readouterr().out


def test_the_job_files_reference_is_up_to_date() -> None:
    found = runpy.run_path(str(ROOT / "jobs" / "docs" / "job_file.py"))["render"]()
    page = (ROOT / "docs" / "job-file.md").read_text(encoding="utf-8")
    assert found == page, "run: python jobs/docs/job_file.py"


def test_the_readme_is_short_and_links_every_page() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 90
    linked = set(re.findall(r"\]\((docs/[^)#]+)", text))
    assert linked == {f"docs/{page.name}" for page in PAGES}


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_format_names_every_column() -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    table = text[text.index("## Columns") : text.index("A packed entry")]
    named = {
        name
        for line in table.splitlines()
        if line.startswith("| ") and not line.startswith("| column")
        for name in line.split("|")[1].strip().split(", ")
    }
    assert named == set(SCHEMA.names)


def test_the_json_of_inspect_is_documented() -> None:
    text = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")
    table = text[text.index("| keys of the overview") : text.index("`--prompt` gives")]
    named = set()
    for line in table.splitlines()[2:]:
        cell = line.split("|")[1].strip() if line.startswith("| ") else ""
        first = cell.split(", ")[0]
        for name in filter(None, cell.split(", ")):
            named.add(first.partition("_")[0] + name if name.startswith("_") else name)
    fields = set(InspectReport.__dataclass_fields__) | {"complete", "rollouts_unreadable"}
    assert named == fields


def test_every_message_of_the_troubleshooting_exists() -> None:
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("rollout", "schema", "kernels")
        for path in (ROOT / folder).rglob("*.py")
    )
    # join the pieces of long messages
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    found = [
        quoted
        for line in page.splitlines()
        if line.startswith("| `")
        for quoted in re.findall(r"`([^`]+)`", line.split("|")[1])
    ]
    assert len(found) > 25
    assert [text for text in found if text not in source] == []
