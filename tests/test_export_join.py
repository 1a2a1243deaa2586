"""`rollout export` and `rollout join` against the rows that were written."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from prepared_runs import PreparedRun, complete_run, damaged_run
from synthetic import make_record, make_row, plan
from test_frames import run_elsewhere

from rollout.cli import main
from rollout.dataset import DatasetWriter, read_dataset
from rollout.full_rows import read_full_rows
from rollout.inspect import inspect_dataset
from rollout.rows import RolloutRow, check_row
from rollout.schema.entries import unpack_entries
from rollout.storage import Storage


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return complete_run(tmp_path_factory.mktemp("run [1] \u00e9"))


def call(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result.output


def stored(path: Path) -> list[RolloutRow]:
    view = read_dataset(Storage.open(path))
    return [row for record in view.shards for row in read_full_rows(view, record)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return bool(one == other)


def test_json_lines_hold_every_value(tmp_path: Path) -> None:
    rows = [
        make_row(
            "p0",
            index,
            kind=kind,
            draws=3,
            metadata='{"answer": {"$float": "nan"}, "\u00fc": [1]}',
            text="a\u2028b \u00e9",
            reward=0.1,
        )
        for index, kind in enumerate(("kept", "top", "none"))
    ]
    writer = DatasetWriter.open(Storage.open(tmp_path / "run"), make_record())
    writer.append_plan(plan("u000000", "p0"))
    writer.commit_part("u000000", rows)
    out = tmp_path / "rows.jsonl.gz"
    said = call("export", tmp_path / "run", "-o", out, "--supports")
    assert said == f"{out}: 3 rollouts\n"
    with gzip.open(out, "rt", encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    for row, line in zip(rows, found, strict=True):
        assert line["rollout_id"] == row.rollout_id
        assert line["token_ids"] == row.token_ids.tolist()
        assert line["sampled_logprobs"] == row.sampled_logprobs.tolist()
        assert (line["text"], line["reward"]) == (row.text, float(np.float32(0.1)))
        assert line["metadata"] == {"answer": {"$float": "nan"}, "\u00fc": [1]}
        assert row.draw_entries is not None
        drawn = [one for token in line["draws"] for one in token["ids"]]
        assert drawn == unpack_entries(row.draw_entries)[0].tolist()
        assert [len(token["ids"]) for token in line["draws"]] == [3] * 4
        if row.support_kind == "none":
            assert line["support"] is None
            continue
        assert row.support_offsets is not None
        assert row.support_entries is not None
        for t, token in enumerate(line["support"]):
            own = np.sort(row.support_entries[row.support_offsets[t] : row.support_offsets[t + 1]])
            ids, logprobs = unpack_entries(own)
            assert (token["ids"], token["logprobs"]) == (ids.tolist(), logprobs.tolist())
    plain = tmp_path / "rows.jsonl"
    call("export", tmp_path / "run", "-o", plain)
    lines = [json.loads(line) for line in plain.read_text(encoding="utf-8").split("\n")[:-1]]
    assert all("support" not in line and "support_entries" not in line for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rows.jsonl",
        "rows.jsonl.gz",
        "run",
    ]


def test_what_is_there_is_not_overwritten_and_a_lost_shard_ends_it(tmp_path: Path) -> None:
    run = damaged_run(tmp_path)
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    assert "exists, choose another name" in call("export", run.path, "-o", out, code=4)
    assert out.read_text() == "mine"
    for form in ("jsonl", "huggingface"):
        new = tmp_path / form
        assert "is missing" in call("export", run.path, "-o", new, "--format", form, code=7)
        assert not new.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.jsonl", "run"]


_LOAD = """
import json
import datasets
rows = datasets.load_dataset({folder!r}, split="train", cache_dir={cache!r})
names = ("rollout_id", "token_ids", "reward")
print(json.dumps([rows.column_names, *(rows[:][name] for name in names)]))
"""


@pytest.mark.parametrize("supports", [False, True])
def test_hugging_face_loads_the_folder(run: PreparedRun, tmp_path: Path, supports: bool) -> None:
    out = tmp_path / "hf"
    flag = "--supports" if supports else "--no-supports"
    call("export", run.path, "-o", out, "--format", "huggingface", flag)
    if supports:
        # a folder for another reader is one of whole rows
        found = pq.read_table(out / "data")
        entries = np.concatenate([r.support_entries for r in stored(run.path)])
        flat = found["support_entries"].combine_chunks().flatten().to_numpy()
        assert flat.tobytes() == entries.tobytes()
        return
    names, ids, tokens, rewards = run_elsewhere(
        _LOAD.format(folder=str(out), cache=str(tmp_path / "cache")), tmp_path
    )
    assert "support_entries" not in names
    assert ids == [row.rollout_id for row in run.rows]
    assert tokens == [row.token_ids.tolist() for row in run.rows]
    assert rewards == [row.reward for row in run.rows]
    assert "abab" in (out / "README.md").read_text()


def test_rewards_are_joined_by_id_and_nothing_else_changes(
    run: PreparedRun, tmp_path: Path
) -> None:
    ids = [row.rollout_id for row in run.rows]
    values = tmp_path / "rewards.parquet"
    given = {one: index / 7 for index, one in enumerate(ids[:60])}
    pl.DataFrame(
        {
            "rollout_id": [*given, "stranger 1", "stranger 2"],
            "reward": [*given.values(), 1.0, 2.0],
            "advantage": [None, *([0.5] * 61)],
        }
    ).write_parquet(values)
    new = tmp_path / "new [2]"
    said = call("join", run.path, values, "-o", new)
    assert said.splitlines() == [
        "60 of 80 rollouts got values",
        f"20 rollouts without a value, left as they were: {', '.join(ids[60:65])}, ...",
        "2 ids in the file that no rollout has: stranger 1, stranger 2",
    ]
    before, after = stored(run.path), stored(new)
    assert [row.rollout_id for row in after] == ids
    for old, joined in zip(before, after, strict=True):
        for field in fields(RolloutRow):
            if field.name not in ("reward", "advantage"):
                assert same(getattr(old, field.name), getattr(joined, field.name)), field.name
        expected = given.get(old.rollout_id, old.reward)
        assert joined.reward == np.float32(expected)
        assert joined.advantage == (0.5 if old.rollout_id in ids[1:60] else None)
        check_row(joined)
    report = inspect_dataset(new)
    assert (report.complete, report.prompts_complete, report.engines) == (
        True,
        20,
        ("vllm 0.32.0",),
    )
    assert (
        read_dataset(Storage.open(new)).record.fingerprint == inspect_dataset(run.path).fingerprint
    )


def test_a_join_that_was_cut_short_continues(
    run: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tmp_path / "rewards.jsonl"
    values.write_text(
        "".join(json.dumps({"rollout_id": r.rollout_id, "reward": 2.0}) + "\n" for r in run.rows)
    )
    original = DatasetWriter.commit_part
    calls = 0

    def fails_on_the_third(self: DatasetWriter, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(self, *args)

    new = tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(DatasetWriter, "commit_part", fails_on_the_third)
        CliRunner().invoke(main, ["join", str(run.path), str(values), "-o", str(new)])
    assert inspect_dataset(new).rollouts_committed == 40
    assert call("join", run.path, values, "-o", new) == "80 of 80 rollouts got values\n"
    assert [row.reward for row in stored(new)] == [2.0] * 80
    # other values may not be mixed in, and the dataset itself is no output
    values.write_text(values.read_text().replace("2.0", "3.0"))
    for target in (new, run.path):
        said = call("join", run.path, values, "-o", target, code=4)
        assert "holds another dataset: choose an empty folder" in said


def test_rejections_come_along(tmp_path: Path) -> None:
    run = damaged_run(tmp_path)
    view = read_dataset(Storage.open(run.path))
    lost = next(record for record in view.shards if record.unit == "u000002")
    values = tmp_path / "rewards.csv"
    values.write_text("rollout_id,reward\nx,1.0\n")
    assert "is missing" in call("join", run.path, values, "-o", tmp_path / "new", code=7)
    # a run that lacks nothing but what was set aside
    (run.path / "_commit" / "u000002-00000.json.gz").unlink()
    assert lost.file is not None
    call("join", run.path, values, "-o", tmp_path / "newer")
    report = inspect_dataset(tmp_path / "newer")
    assert report.rejections == inspect_dataset(run.path).rejections
    assert report.rollouts_missing == 20


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"id": ["a"], "reward": [1.0]}, "expected `rollout_id` and `reward` or `advantage`"),
        ({"rollout_id": ["a"], "score": [1.0]}, "expected `rollout_id` and `reward`"),
        ({"rollout_id": ["a", "a"], "reward": [1.0, 1.0]}, "'a' is there twice"),
        (
            {"rollout_id": ["a", "b"], "reward": [1.0, float("nan")]},
            "'b' has no finite float32 as reward",
        ),
        ({"rollout_id": ["a"], "advantage": [-1e39]}, "'a' has no finite float32 as advantage"),
        ({"rollout_id": ["a", None], "reward": [1.0, 1.0]}, "None has no rollout_id"),
        ({"rollout_id": ["a"], "reward": ["much"]}, "a column is no number"),
    ],
)
def test_a_bad_table_is_refused_before_anything_is_written(
    run: PreparedRun, tmp_path: Path, table: dict[str, Any], said: str
) -> None:
    pl.DataFrame(table).write_parquet(tmp_path / "values.parquet")
    out = tmp_path / "new"
    got = call("join", run.path, tmp_path / "values.parquet", "-o", out, code=3)
    assert said in " ".join(got.split())
    assert not out.exists()


def test_a_table_of_another_kind_is_refused(run: PreparedRun, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "x.parquet").write_text("no parquet")
    out = tmp_path / "new"
    assert ".parquet, .csv, .jsonl" in call("join", run.path, tmp_path / "x.txt", "-o", out, code=3)
    assert "can't be read" in call("join", run.path, tmp_path / "x.parquet", "-o", out, code=3)
