"""What `rollout generate` says of a job that is finished already."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import yaml
from click.testing import CliRunner, Result
from fake_engine import FakeEngine, fake_engine, fake_job, write_ids

from rollout.claims import Claims
from rollout.cli import main
from rollout.engine import Finished
from rollout.pipeline import generate as run_job
from rollout.prompts import Prompt
from rollout.rows import Rejection


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Write a job of three prompts with two rollouts each."""
    path = tmp_path / "job.yaml"
    data = {
        "model": {"path": "fake"},
        "prompts": {"path": str(write_ids(tmp_path / "p.jsonl", 3))},
        "sampling": {"max_tokens": 2, "top_p": 0.9, "n": 2},
        "output": {"path": str(tmp_path / "out")},
        "engine": {"max_model_len": 64},
    }
    path.write_text(yaml.safe_dump(data))
    return path


def generate(job: Path, *more: str) -> Result:
    result = CliRunner().invoke(main, ["generate", "--config", str(job), *more])
    assert result.exit_code == 0, result.output
    return result


def test_a_finished_job_says_so_and_what_is_there(job: Path) -> None:
    with fake_engine():
        assert "6/6 rollouts" in generate(job).stderr
    with fake_engine() as engine:
        again = generate(job)
        assert engine.started == 0
    assert again.stderr.splitlines() == [
        "6 of 6 rollouts of the 3 prompts planned so far are there; looking for further prompts"
    ]
    assert again.stdout.splitlines()[:-1] == [
        "prompts       3 read, 0 rejected",
        "rollouts      6 asked, 6 already there, 0 committed, 0 failed",
        "finished      nothing was left to do: all 6 rollouts that the job asks for are there",
    ]
    with fake_engine():
        more = generate(job, "--set", "sampling.n=3")
    assert "going on: 6 of 9 rollouts of the 3 prompts" in more.stderr
    assert "3/3 rollouts" in more.stderr
    assert "nothing was left" not in more.stdout


def without_p1(_: object, prompt: Prompt, limit: int | None) -> list[int] | Rejection:
    if prompt.prompt_id != "p1":
        return prompt.prompt_token_ids or []
    return Rejection(
        prompt_key=prompt.key,
        prompt_id=prompt.prompt_id,
        sample_index=None,
        file="p.jsonl",
        line=prompt.line,
        stage="render",
        reason="prompt_too_long",
        detail="",
        num_prompt_tokens=None,
    )


def test_a_rejected_prompt_is_not_left_to_do(job: Path) -> None:
    with mock.patch("fake_engine._Renderer.render", without_p1):
        with fake_engine():
            assert "4/4 rollouts" in generate(job).stderr
        with fake_engine():
            again = generate(job)
    assert "0/" not in again.stderr
    assert "rollouts      4 asked, 4 already there, 0 committed, 0 failed" in again.stdout
    assert "nothing was left to do: all 4 rollouts" in again.stdout


def test_a_prompt_that_is_rejected_after_some_of_its_rollouts(job: Path) -> None:
    with fake_engine():
        generate(job, "--set", "sampling.n=1")
    with fake_engine(), mock.patch("fake_engine._Renderer.render", without_p1):
        again = generate(job)
    assert "2/2 rollouts" in again.stderr
    assert "rollouts      5 asked, 3 already there, 2 committed, 0 failed" in again.stdout


def test_what_another_run_does_meanwhile_is_not_left_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    working, waited_for = threading.Event(), threading.Event()

    class Held(FakeEngine):
        """Goes on once the other run has found its unit taken."""

        def step(self) -> list[Finished]:
            working.set()
            assert waited_for.wait(60)
            return super().step()

    def any_free(claims: Claims, units: Iterable[str]) -> bool:
        waited_for.set()
        return look(claims, units)

    look = Claims.any_free
    config = fake_job(write_ids(tmp_path / "p.jsonl", 3), f"memory://{tmp_path.name}")
    with (
        mock.patch.object(Claims, "any_free", any_free),
        fake_engine(Held),
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(run_job, config, show_progress=False)
        assert working.wait(60)
        second = run_job(config, show_progress=True)
        assert first.result().rollouts_committed == 3
    assert (second.rollouts_asked, second.rollouts_elsewhere) == (3, 3)
    assert "rollouts, " not in capsys.readouterr().err
    assert "3 by other processes, 0 committed" in second.table()
