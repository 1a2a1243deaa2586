"""Rewards of functions that do what users' functions do: a rollout is kept whatever one does."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from fake_engine import fake_engine, fake_job, write_ids

from rollout.pipeline import generate
from rollout.summary import Summary


def _run(
    tmp_path: Path, reward: Callable[..., Any], samples: int = 1
) -> tuple[Summary, list[float | None]]:
    prompts = write_ids(tmp_path / "prompts.jsonl", 3)
    with fake_engine(reward=reward):
        job = fake_job(prompts, tmp_path / "out", sampling={"n": samples})
        summary = generate(job, show_progress=False)
    found = pl.read_parquet(f"{tmp_path}/out/data/*.parquet").sort("prompt_id")
    return summary, found["reward"].to_list()


def _raise(error: BaseException) -> float:
    raise error


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda: _raise(KeyError("answer")), "KeyError: 'answer'"),
        # a checker that runs what the model wrote: a program may end with exit()
        (lambda: exec("import sys\nsys.exit(3)"), "SystemExit: 3"),
        (lambda: None, "TypeError: "),
        (lambda: float("nan"), "ValueError: got nan, expected a finite number"),
        (lambda: -float("inf"), "ValueError: got -inf, expected a finite number"),
        (lambda: 1e39, "ValueError: got 1e+39, expected a finite number that float32 holds"),
    ],
    ids=["raises", "exits", "none", "nan", "infinite", "too large"],
)
def test_a_rollout_whose_reward_fails_is_kept_without_one(
    tmp_path: Path, second: Callable[[], Any], message: str
) -> None:
    summary, rewards = _run(tmp_path, lambda row, text, ids: second() if row["id"] == "p1" else 1.5)
    assert rewards == [1.5, None, 1.5]
    assert (summary.rollouts_committed, summary.reward_errors) == (3, 1)
    assert summary.first_reward_error is not None
    assert summary.first_reward_error.startswith(message)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float16(0.5), 0.5),
        (np.array(0.25), 0.25),
        (np.int64(3), 3.0),
        (True, 1.0),
        (-sys.float_info.min, 0.0),
        (float(np.finfo(np.float32).min), float(np.finfo(np.float32).min)),
    ],
    ids=["float16", "array", "int64", "boolean", "tiny", "smallest"],
)
def test_numbers_of_any_kind_are_taken(tmp_path: Path, value: Any, expected: float) -> None:
    summary, rewards = _run(tmp_path, lambda row, text, ids: value)
    assert rewards == [expected] * 3
    assert summary.reward_errors == 0


def test_rewards_of_two_functions_are_not_mixed_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def one(row: dict[str, Any], text: str, ids: list[int]) -> float:
        return 1.0

    def two(row: dict[str, Any], text: str, ids: list[int]) -> float:
        return 2.0

    _run(tmp_path, one)
    _run(tmp_path, one)
    assert caplog.messages == []
    _, rewards = _run(tmp_path, two, samples=2)
    assert Counter(rewards) == {1.0: 3, 2.0: 3}
    (said,) = caplog.messages
    assert "the rollouts there were scored by task.py:one, new ones are by task.py:two" in said
