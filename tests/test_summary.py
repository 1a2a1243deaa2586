"""Counts that reconcile, and how a person reads them."""

import json
from collections import Counter
from typing import Any

import pytest

from rollout.summary import Summary


def summary(**fields: Any) -> Summary:
    values: dict[str, Any] = {
        "prompts_read": 10,
        "rollouts_asked": 8,
        "rollouts_skipped": 2,
        "rollouts_committed": 6,
    }
    made = Summary(**(values | fields))
    return made


def test_json_keeps_every_count() -> None:
    made = summary(tokens=3, engine={"runner": "V1", "version": "1"})
    made.reasons["bad_row"] += 2
    made.reasons["prompt_too_long"] += 5
    found = json.loads(json.dumps(made.as_dict()))
    assert found["reasons"] == {"prompt_too_long": 5, "bad_row": 2}
    assert found["engine"] == {"runner": "V1", "version": "1"}
    assert (found["prompts_read"], found["rollouts_committed"], found["tokens"]) == (10, 6, 3)
    assert set(found) == set(Summary.__slots__)
    assert made.reasons["bad_row"] == 2


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, None),
        ({"rollouts_skipped": 8, "rollouts_committed": 0}, None),
        ({"rollouts_committed": 5, "rollouts_covered": 1}, None),
        ({"prompts_rejected": 3}, None),
        (
            {"rollouts_committed": 5, "rollouts_failed": 1},
            "1 of 8 rollouts failed, the same command tries them again",
        ),
        (
            {"reward_errors": 4, "first_reward_error": "KeyError: 'answer'"},
            "4 rollouts are there without a reward, since its function failed (KeyError: "
            "'answer'): `rollout join` adds rewards",
        ),
        (
            {"rollouts_committed": 5},
            "8 rollouts were asked for and 7 are accounted for",
        ),
        (
            {"rollouts_committed": 7},
            "8 rollouts were asked for and 9 are accounted for",
        ),
        (
            {
                "rollouts_asked": 0,
                "rollouts_skipped": 0,
                "rollouts_committed": 0,
                "reasons": Counter(bad_row=2, prompt_too_long=8),
            },
            "none of 10 prompts could be used (prompt_too_long: 8, bad_row: 2): `rollout inspect` "
            "names their lines",
        ),
    ],
)
def test_what_is_missing_at_the_end(fields: dict[str, Any], problem: str | None) -> None:
    made = summary(**fields)
    assert made.problem() == problem
    assert made.reconciles is (problem is None or "accounted" not in problem)


def test_all_problems_are_named() -> None:
    problem = summary(rollouts_failed=1, reward_errors=1, first_reward_error="x").problem()
    assert problem is not None
    assert [part.split()[-2] for part in problem.split("; ")] == ["them", "adds", "accounted"]


def test_the_table() -> None:
    made = summary(
        prompts_rejected=2,
        tokens=1000,
        entries=4500,
        seconds=4.0,
        largest_step=300,
        support_capacity=4096,
        suggested_capacity=512,
        reward_errors=1,
        first_reward_error="ValueError: no\nanswer " + "x" * 200,
        seconds_waited=1.25,
        seconds_held=0.5,
    )
    made.reasons["bad_row"] += 2
    lines = made.table().splitlines()
    assert lines[:5] == [
        "prompts       10 read, 2 rejected",
        "rollouts      8 asked, 2 already there, 6 committed, 0 failed",
        "tokens        1000 in 4.0 s, 250 tokens/s",
        "support       4500 entries, mean 4.5 a token",
        "largest step  300 entries of a capacity of 4096; 512 would do",
    ]
    assert "reason        bad_row: 2" in lines
    assert lines[-1].startswith("reward        1 failed: ValueError: no answer xxx")
    assert max(map(len, lines)) == 100
    assert made.table().isascii()


def test_what_others_wrote_fits_the_terminal_and_does_not_drive_it() -> None:
    lines = (
        summary(reward_errors=1, first_reward_error="\x1b[2J" + "\u6f22" * 90).table().split("\n")
    )
    assert lines[-1].startswith("reward        1 failed: \\x1b[2J\u6f22")
    assert 98 <= len(lines[-1]) + lines[-1].count("\u6f22") <= 100


def test_the_table_counts_what_other_processes_did() -> None:
    shared = summary(rollouts_committed=3, rollouts_elsewhere=2, rollouts_covered=1)
    assert shared.reconciles
    assert (
        "rollouts      8 asked, 2 already there, 3 by other processes, 3 committed, 0 failed"
        in shared.table().splitlines()
    )


def test_the_table_of_a_run_that_sampled_nothing() -> None:
    table = summary(rollouts_skipped=7, rollouts_committed=0, rollouts_failed=1).table()
    assert "0 in 0.0 s, 0 tokens/s" in table
    assert "mean 0.0 a token" in table
    assert "largest step" not in table
    assert "nothing was left" not in table


def test_the_table_of_a_finished_job() -> None:
    made = summary(
        prompts_rejected=1,
        prompts_orphaned=2,
        rollouts_skipped=8,
        rollouts_committed=0,
        reasons=Counter(bad_row=1),
    )
    assert made.table().splitlines() == [
        "prompts       10 read, 1 rejected",
        "rollouts      8 asked, 8 already there, 0 committed, 0 failed",
        "finished      nothing was left to do: all 8 rollouts that the job asks for are there",
        "orphaned      2 prompts of earlier runs are not in the file any more; their rollouts stay",
        "reason        bad_row: 1",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"rollouts_skipped": 7, "rollouts_committed": 1},
        {"rollouts_skipped": 7, "rollouts_committed": 0, "rollouts_elsewhere": 1},
        {"rollouts_skipped": 0, "rollouts_committed": 0, "rollouts_asked": 0},
    ],
    ids=["committed", "elsewhere", "none asked"],
)
def test_what_is_no_finished_job(fields: dict[str, Any]) -> None:
    assert "nothing was left" not in summary(**fields).table()
