"""Counts of what was planned, from records that are odd."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from synthetic import make_record, make_rejection, make_row, plan

from rollout.completeness import count_completeness
from rollout.dataset import DatasetWriter, read_dataset
from rollout.rows import PlanEntry
from rollout.sidecars import plan_bytes
from rollout.storage import Storage


def open_run(path: Path, n: int, *prompts: str) -> DatasetWriter:
    """A run whose job asks for n samples of each prompt, all of them planned."""
    record = replace(make_record(), provenance={"job": {"sampling": {"n": n}}})
    writer = DatasetWriter.open(Storage.open(path), record)
    writer.append_plan(plan("u000000", *prompts))
    return writer


def counts(path: Path) -> tuple[int, int, int, int]:
    """Rollouts that are planned, committed, rejected and missing."""
    found = count_completeness(read_dataset(Storage.open(path)), None)
    names = ("planned", "committed", "rejected", "missing")
    planned, committed, rejected, missing = (found[f"rollouts_{name}"] for name in names)
    return planned, committed, rejected, missing


def test_a_rollout_that_two_records_name_counts_once(tmp_path: Path) -> None:
    writer = open_run(tmp_path, 4, "a", "b")
    record = writer.commit_part("u000000", [make_row("a", i) for i in range(3)])
    assert record is not None
    assert counts(tmp_path) == (8, 3, 0, 5)
    # as only damage can do
    again = replace(record, part=1)
    writer.storage.write_bytes("_commit/u000000-00001.json.gz", again.to_bytes())
    assert counts(tmp_path) == (8, 3, 0, 5)


def test_a_failed_sample_was_asked_for_though_n_is_lower_now(tmp_path: Path) -> None:
    writer = open_run(tmp_path, 1, "a", "b")
    writer.commit_part("u000000", [make_row("a", 0)], [make_rejection("a", 2)])
    assert counts(tmp_path) == (2 + 1, 1, 1, 1)


def test_a_failed_sample_of_a_prompt_that_was_set_aside_counts_with_it(tmp_path: Path) -> None:
    writer = open_run(tmp_path, 2, "a", "b")
    writer.commit_part("u000000", [], [make_rejection("a", 1)])
    assert counts(tmp_path) == (4, 0, 1, 3)
    writer.commit_part("u000000", [], [make_rejection("a")])
    assert counts(tmp_path) == (2, 0, 0, 2)


def test_the_first_plan_of_a_prompt_stands(tmp_path: Path) -> None:
    writer = open_run(tmp_path, 1, "a")
    other = PlanEntry(prompt_key="a", prompt_id="user a", unit="u000009")
    name = "_plan/000001.parquet"
    writer.storage.write_bytes(name, plan_bytes([other], writer.record.fingerprint))
    view = read_dataset(writer.storage)
    assert [entry.unit for entry in view.plan] == ["u000000"]
    assert DatasetWriter.open(writer.storage, writer.record).ledger.units_of(["a"]) == ["u000000"]
