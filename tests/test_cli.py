"""What the command says and with which exit code it ends."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rollout import errors
from rollout.cli import main
from rollout.config import JobConfig
from rollout.summary import Summary
from rollout.version import VERSION

JOB = """\
model: {path: no/such/model}
prompts: {path: PROMPTS}
sampling: {max_tokens: 4}
output: {path: OUTPUT}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    text = JOB.replace("PROMPTS", str(tmp_path / "prompts.jsonl"))
    path.write_text(text.replace("OUTPUT", str(tmp_path / "out")))
    return path


def run(*args: Any) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def error_line(result: Result, code: int) -> str:
    """The one line that an expected error leaves, whatever else was printed."""
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "Traceback" not in result.output
    return line.removeprefix("error: ")


def fake_pipeline(monkeypatch: pytest.MonkeyPatch, result: Summary | Exception) -> list[JobConfig]:
    """Stand in for the module that would start an engine."""
    asked: list[JobConfig] = []

    def generate(config: JobConfig, *, show_progress: bool) -> Summary:
        assert show_progress
        asked.append(config)
        if isinstance(result, Exception):
            raise result
        return result

    module = types.ModuleType("rollout.pipeline")
    module.generate = generate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rollout.pipeline", module)
    return asked


CODES = {
    "RolloutError": 1,
    "ConfigError": 2,
    "InputError": 3,
    "OutputError": 4,
    "EngineError": 5,
    "IncompleteError": 6,
    "DatasetError": 7,
    "TrainingError": 8,
    "StoppedError": 9,
    "TooManyFailedError": 10,
    "DamagedError": 11,
}


def test_every_error_class_has_a_code() -> None:
    found = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.RolloutError)
    }
    assert found == CODES


@pytest.mark.parametrize("name", CODES)
def test_expected_errors_are_one_line_and_a_code(
    job: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fake_pipeline(monkeypatch, getattr(errors, name)("first\nsecond: \u00e9"))
    result = run("generate", "--config", job)
    assert error_line(result, CODES[name]) == "first second: \u00e9"
    assert result.stdout == ""


def test_codes_are_documented() -> None:
    words = " ".join(run("--help").output.split())
    for code in (0, *sorted(set(CODES.values()) - {1})):
        assert f"{code} " in words[words.index("Exit codes:") :]


def test_other_errors_keep_their_traceback(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pipeline(monkeypatch, ZeroDivisionError("a mistake of ours"))
    result = run("generate", "--config", job)
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


def test_overrides_reach_the_job(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = Summary(prompts_read=1, rollouts_asked=1, rollouts_committed=1)
    asked = fake_pipeline(monkeypatch, done)
    result = run(
        "generate", "--config", job, "--set", "sampling.top_p=0.9", "--set", "capture.top=3"
    )
    assert result.exit_code == 0, result.output
    assert (asked[0].sampling.top_p, asked[0].capture.top) == (0.9, 3)
    assert result.stdout.splitlines()[0] == "prompts       1 read, 0 rejected"
    assert result.stdout.splitlines()[-1] == f"look at it:   rollout inspect {job.parent / 'out'}"


def test_json_is_all_of_standard_output(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = Summary(prompts_read=2, rollouts_asked=1, rollouts_failed=1)
    done.reasons["bad_row"] += 1
    fake_pipeline(monkeypatch, done)
    result = run("generate", "--config", job, "--json")
    assert error_line(result, 6) == "1 of 1 rollouts failed, the same command tries them again"
    found = json.loads(result.stdout)
    assert (found["prompts_read"], found["reasons"]) == (2, {"bad_row": 1})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompts_read": 3}, "none of 3 prompts could be used"),
        ({"rollouts_asked": 2, "rollouts_committed": 1}, "2 rollouts were asked for and 1 are acc"),
        (
            {"rollouts_asked": 1, "rollouts_committed": 1, "reward_errors": 1},
            "1 rollouts are there without a reward",
        ),
    ],
)
def test_an_incomplete_job_prints_what_it_did_and_fails(
    job: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    fake_pipeline(monkeypatch, Summary(**fields))
    result = run("generate", "--config", job)
    assert error_line(result, 6).startswith(message)
    assert result.stdout.startswith("prompts ")


def test_a_wrong_job_file(job: Path, tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    line = error_line(run("generate", "--config", missing), 2)
    assert line == f"job file {missing}: No such file or directory"
    line = error_line(run("generate", "--config", job, "--set", "sampling.temperture=1"), 2)
    assert line == "sampling.temperture: unknown key; did you mean `temperature`?"
    line = error_line(run("generate", "--config", job, "--set", "x"), 2)
    assert line.startswith("override 'x': expected dotted.key=value")
    job.write_bytes(b"\x80\xff")
    assert "expected YAML in UTF-8" in error_line(run("generate", "--config", job), 2)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_input_that_is_not_there(job: Path, tmp_path: Path, dry: tuple[str, ...]) -> None:
    line = error_line(run("generate", "--config", job, *dry), 3)
    prompts = tmp_path / "prompts.jsonl"
    assert line == f"prompts {prompts} can't be read: No such file or directory"
    prompts.write_text('{"prompt": "x"}\n')
    line = error_line(run("generate", "--config", job, *dry), 3)
    assert line == "model no/such/model: no such folder"
    line = error_line(run("generate", "--config", job, *dry, "--set", "reward=no.py:f"), 3)
    assert line == "reward no.py:f: FileNotFoundError: no file no.py"
    assert not (tmp_path / "out").exists()


def test_no_dataset(tmp_path: Path) -> None:
    assert "is not a dataset" in error_line(run("inspect", tmp_path), 7)


@pytest.mark.parametrize(
    "args",
    [
        ("generate",),
        ("generate", "--config"),
        ("generate", "--config", "x", "--nope"),
        ("nope",),
        ("inspect",),
        ("inspect", "a", "b"),
    ],
)
def test_usage_errors(args: tuple[str, ...]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert result.stdout == ""


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"rollout, version {VERSION}\n"


def test_what_others_wrote_into_an_error_does_not_reach_the_terminal_as_it_stands(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pipeline(monkeypatch, errors.EngineError("it said \x1b[31mred\x1b[0m\nand\tmore"))
    line = error_line(run("generate", "--config", job), 5)
    assert line == r"it said \x1b[31mred\x1b[0m and\tmore"


def test_a_tolerance_below_nothing_is_refused(tmp_path: Path) -> None:
    result = run("agree", tmp_path, "--model", "m", "--tolerance", "-0.1")
    assert result.exit_code == 2
    assert "--tolerance" in result.output
