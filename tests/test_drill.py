"""One prompt, one sample, one token: what `rollout inspect` shows where runs are odd."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from prepared_runs import PreparedRun, complete_run
from synthetic import make_record, make_row, plan

from rollout.cli import main
from rollout.dataset import DatasetWriter
from rollout.full_rows import read_rows
from rollout.rows import RolloutRow
from rollout.storage import Storage


def write(path: Path, *rows: RolloutRow) -> Path:
    """A run of one unit that was never a job's."""
    writer = DatasetWriter.open(Storage.open(path), make_record())
    writer.append_plan(plan("u000000", *dict.fromkeys(row.prompt_key for row in rows)))
    writer.commit_part("u000000", rows)
    return path


def say(path: Path, *args: str) -> str:
    result = CliRunner().invoke(main, ["inspect", str(path), "--prompt", *args])
    assert result.exit_code == 0, result.output
    return result.output


def ask(path: Path, *args: str) -> Any:
    return json.loads(say(path, *args, "--json"))


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return complete_run(tmp_path_factory.mktemp("complete"))


def test_the_samples_of_a_group_that_nobody_has_are_missing(tmp_path: Path) -> None:
    # no job is recorded, so the rows alone say how many were asked for
    path = write(tmp_path / "run", make_row("p0", 2, group_size=5))
    statuses = [sample["status"] for sample in ask(path, "user p0")["samples"]]
    assert statuses == ["missing", "missing", "committed", "missing", "missing"]


def test_seven_characters_of_a_key_are_too_few(complete: PreparedRun) -> None:
    assert ask(complete.path, "key-03-0")["prompt_id"] == "task 03"
    result = CliRunner().invoke(main, ["inspect", str(complete.path), "--prompt", "key-03-"])
    assert (result.exit_code, "no prompt 'key-03-' in it" in result.output) == (7, True)


def test_a_rank_counts_the_ids_that_are_more_probable(complete: PreparedRun) -> None:
    places = [
        (row, position, entries)
        for row in complete.rows
        if row.support_offsets is not None and row.support_entries is not None
        for position, entries in enumerate(
            np.split(row.support_entries, row.support_offsets[1:-1].tolist())
        )
    ]
    seen = set()
    for row, position, entries in places:
        # by log q and not by the order in the file
        logprobs = (entries >> np.uint64(32)).astype(np.uint32).view(np.float32)
        own = float(row.sampled_logprobs[position])
        rank = 1 + int((logprobs > own).sum())
        far = rank > 24
        if (far, rank == 1) in seen:
            continue
        seen.add((far, rank == 1))
        args = (row.prompt_id, "--sample", str(row.sample_index), "--token", str(position))
        assert ask(complete.path, *args)["tokens"][0]["rank"] == rank
        lines = say(complete.path, *args).splitlines()
        (chosen,) = (line for line in lines if line.startswith("*"))
        assert chosen[1:].split()[0] == str(rank)
        assert any(f"rank {rank}" in line for line in lines)
    assert seen >= {(False, True), (False, False), (True, False)}


def test_a_token_table_draws_the_share_of_what_was_sampled(complete: PreparedRun) -> None:
    row = next(r for r in complete.rows if (r.prompt_id, r.sample_index) == ("task 04", 2))
    text = say(complete.path, "task 04", "--sample", "2")
    table = text[text.index("   pos") :].splitlines()[1:]
    bars = [line.count("#") for line in table]
    assert bars == [round(10 * math.exp(float(q))) for q in row.sampled_logprobs]
    assert len(set(bars)) > 3


def test_a_long_rollout_says_how_many_tokens_it_leaves_out(tmp_path: Path) -> None:
    path = write(tmp_path / "run", make_row("p0", 0, lengths=[2] * 405))
    text = say(path, "user p0", "--sample", "0")
    assert "\n   399 " in text
    assert "\n   400 " not in text
    assert "... and 5 more tokens: --json has all, --token shows one" in text
    assert len(ask(path, "user p0", "--sample", "0")["tokens"]) == 405


def test_what_is_no_number_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # our writer refuses it, another's may not
    def spoiled(*args: Any) -> Iterator[dict[str, Any]]:
        for row in read_rows(*args):
            yield row | {"sampled_logprobs": np.array([-0.5, np.nan, -1.5], np.float32)}

    path = write(tmp_path / "run", make_row("p0", 0, lengths=[3, 3, 3]))
    monkeypatch.setattr("rollout.drill.read_rows", spoiled)
    (sample,) = (s for s in ask(path, "user p0")["samples"] if s["status"] == "committed")
    assert (sample["nonfinite_logprobs"], sample["mean_logprob"]) == (1, -1.0)
    assert "1 NaN or infinite log q!" in say(path, "user p0")
    (token,) = ask(path, "user p0", "--sample", "0", "--token", "1")["tokens"]
    assert token["logprob"] is None


def test_why_it_stopped_and_which_weights_it_came_from(tmp_path: Path) -> None:
    row = make_row("p0", 0, finish_reason="stop", stop_reason="</end>", policy_step=7)
    text = say(write(tmp_path / "run", row), "user p0", "--sample", "0")
    assert "4 tokens, finish stop (</end>), temperature 1, policy step 7" in text
