"""The documentation against the code: every command is run, every name looked up."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from docs_commands import PAGES, README, ROOT, Block, blocks, commands, load_script, recipe, run

from rollout.cli import main
from rollout.report import InspectReport
from rollout.schema.columns import SCHEMA

SET_BY_SCRIPTS = (
    "GOMP_SPINCOUNT",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "TORCH_COMPILE_DISABLE",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)


def lowered(path: Path, pattern: str, value: str) -> None:
    """Lower a size in a file that a page has its reader write."""
    text = path.read_text(encoding="utf-8")
    found, count = re.subn(pattern, value, text)
    assert count == 1, pattern
    path.write_text(found, encoding="utf-8")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a reader has it: the quickstart's files, and the job files of the pages."""
    monkeypatch.chdir(tmp_path)
    # what scripts set for themselves is gone after the test
    for name in SET_BY_SCRIPTS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    quickstart = ROOT / "jobs" / "quickstart"
    Path("jobs/quickstart").mkdir(parents=True)
    for name in ("task.py", "job.yaml"):
        shutil.copy(quickstart / name, f"jobs/quickstart/{name}")
    prompts = (quickstart / "prompts.jsonl").read_text().splitlines(keepends=True)
    Path("jobs/quickstart/prompts.jsonl").write_text("".join(prompts[:8]))
    lowered(Path("jobs/quickstart/job.yaml"), r"(bytes:) 268435456", r"\1 67108864")
    job = next(b for b in blocks(README) if b.language == "yaml" and "sampling:" in b.text)
    Path("job.yaml").write_text(job.text)
    lowered(Path("job.yaml"), r"bytes: 268435456", "bytes: 67108864, enforce_eager: true")
    replay = next(b for b in blocks(ROOT / "docs" / "replay.md") if b.language == "yaml").text
    Path("replay.yaml").write_text(replay)
    lowered(Path("replay.yaml"), r"groups_per_step: \d+", "groups_per_step: 4")
    lowered(Path("replay.yaml"), r"epochs: +\d+", "epochs: 1")
    return tmp_path


def run_page(page: Path) -> dict[str, str]:
    """Run a page from top to bottom; its Python blocks share their names.

    Returns:
        What each command printed.
    """
    done: dict[str, str] = {}
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.language == "python":
            exec(compile(block.text, str(page), "exec"), names)
        done |= {command: run(command) for command in commands(block)}
    return done


@pytest.mark.engine
def test_every_command_of_the_readme_and_the_docs_runs(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_page(README)
    # the README's job is the quickstart's, which is there already
    assert "64 asked, 64 already there" in done[next(c for c in done if c.endswith("stopped"))]
    assert "vllm==" in done[next(command for command in done if command.startswith("pip "))]
    for page in PAGES:
        done |= run_page(page)
    joined = " ".join(done)
    for name in main.commands:
        assert f"rollout {name}" in joined, name
    shown = json.loads(run("rollout inspect out/joined --json"))
    assert shown["complete"] is True
    assert shown["rewards"]["maximum"] <= 1.0
    assert (workplace / "out" / "rows.jsonl.gz").exists()
    assert "reverse-004" in capsys.readouterr().out
    # three arms, one of each setting
    table = done[next(command for command in done if "ablations.py" in command)]
    assert len([line for line in table.splitlines() if line.startswith("| ")]) == 1 + 3
    assert len(list((workplace / "out/reverse-text").glob("*/rounds.jsonl"))) == 2


def test_a_command_that_nothing_runs_is_refused() -> None:
    with pytest.raises(AssertionError, match="which no test runs"):
        run("curl example.org")
    with pytest.raises(AssertionError, match="in no bash block"):
        commands(Block(language="", text="for i in 1 2; do\n  rollout inspect $i\ndone\n"))


def test_commands_inside_of_sentences_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts start; what they measure takes minutes, and a GPU."""
    pages = [README, *PAGES]
    code = {found for p in pages for found in re.findall(r"`([^`\n]+)`", p.read_text())}
    scripts = set()
    for text in code:
        first, *rest = text.split()
        if first == "rollout":
            assert rest[0] in main.commands, text
        elif first == "make":
            assert recipe(rest[0]), text
        elif first == "pytest":
            assert f'"{rest[1]}: ' in (ROOT / "pyproject.toml").read_text(), text
        elif text.removeprefix("python ").startswith("jobs/") and ".py" in text:
            scripts.add(text.removeprefix("python ").partition(":")[0])
    started = 0
    for script in sorted(scripts):
        name, *words = script.split()
        found = load_script(ROOT / name).get("main")
        if isinstance(found, click.Command):
            shown = CliRunner().invoke(found, [*words, "--help"])
            assert shown.exit_code == 0, shown.output
            started += 1
        elif found is not None and "argparse" in (ROOT / name).read_text(encoding="utf-8"):
            monkeypatch.setattr(sys, "argv", [name, *words, "--help"])
            with pytest.raises(SystemExit, match="0"):
                found()
            started += 1
    assert started >= 6


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
