"""What becomes of finished rollouts whose output fails, of bad ones, and of what they hold."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import make_record, make_rejection, make_row, plan
from waiting import wait_for

from rollout.committer import Committer
from rollout.dataset import DatasetWriter, read_dataset
from rollout.errors import OutputError
from rollout.pending import PendingParts
from rollout.rows import RolloutRow
from rollout.schema.records import CommitRecord
from rollout.shard import write_shard
from rollout.spool_entries import HeldSegments, SpooledEntries, segment_name
from rollout.storage import Storage

STOCK = DatasetWriter.commit_part
TIMEOUT = TimeoutError("no answer")


class Case:
    """A committer over a dataset that plans a to d for u0; the output fails while `why` is set."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storage = Storage.open(str(folder / "out"), {})
        self.writer = DatasetWriter.open(self.storage, make_record(), scratch=folder / "scratch")
        self.writer.append_plan(plan("u0", "a", "b", "c", "d"))
        self.pending = PendingParts(folder / "kept", 2**30, self.writer.record.fingerprint)
        self.why: Exception | None = None
        self.callers: list[str] = []
        self.done: list[str] = []
        self.made: list[Committer] = []

        def commit_part(writer: DatasetWriter, *args: Any, **named: Any) -> CommitRecord | None:
            self.callers.append(threading.current_thread().name)
            if self.why is not None:
                raise OutputError(f"output: {self.why}") from self.why
            return STOCK(writer, *args, **named)

        monkeypatch.setattr(DatasetWriter, "commit_part", commit_part)

    def committer(self, pending: PendingParts | None, **options: Any) -> Committer:
        values = {"retry_seconds": 0.01, "last_seconds": 30.0} | options
        made = Committer(
            self.writer,
            "p.jsonl",
            2,
            part_bytes=2**20,
            pending=pending,
            on_done=self.done.append,
            **values,
        )
        self.made.append(made)
        return made

    def stored(self) -> set[tuple[str, int]]:
        """Every committed rollout."""
        return set(read_dataset(self.storage).covered)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    made = Case(tmp_path, monkeypatch)
    yield made
    for committer in made.made:
        committer.close()


def test_an_outage_keeps_parts_and_commits_them_when_the_output_is_back(case: Case) -> None:
    committer = case.committer(case.pending)
    case.why = TIMEOUT
    for prompt in "ab":
        committer.commit("u0", [make_row(prompt)], [])
    committer.finish("u0")
    wait_for(lambda: case.callers.count("rollout-upload") > 5)  # it is asked again and again
    wait_for(lambda: committer.stats.kept_rows == 2)
    committer.check()
    wait_for(lambda: committer.pending_bytes == 0)
    assert case.stored() == set()
    assert len(case.pending.parts()) == 2
    assert case.done == []  # its rollouts are on this machine only
    # the second part was kept at once
    assert len([name for name in case.callers if name.startswith("rollout-commit")]) == 1
    case.why = None
    wait_for(lambda: committer._uploader is None)
    committer.wait()
    assert case.stored() == {("a", 0), ("b", 0)}
    assert (committer.stats.rows, committer.stats.parts, committer.stats.kept_rows) == (2, 2, 0)
    assert (committer.stats.tokens, committer.stats.entries) == (8, 94)
    assert case.pending.parts() == []


def test_a_part_that_is_kept_just_when_the_output_comes_back_is_uploaded_too(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = case.committer(case.pending)
    stock = case.pending.save

    def save(unit: str, rows: list[RolloutRow], *args: Any) -> bool:
        if rows[0].prompt_key == "b":
            case.why = None
            wait_for(lambda: committer._uploader is None)
        return stock(unit, rows, *args)

    monkeypatch.setattr(case.pending, "save", save)
    case.why = TIMEOUT
    for prompt in "ab":
        committer.commit("u0", [make_row(prompt)], [])
    committer.wait()
    assert case.stored() == {("a", 0), ("b", 0)}
    assert case.pending.parts() == []


def test_an_output_is_not_back_while_the_first_part_is_being_kept(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    committer = case.committer(case.pending)
    stock = case.pending.save

    def save(*args: Any) -> bool:
        time.sleep(0.1)  # ten times what lies between two looks at the output
        return stock(*args)

    monkeypatch.setattr(case.pending, "save", save)
    case.why = TIMEOUT
    committer.commit("u0", [make_row("a")], [])
    wait_for(lambda: committer.stats.kept_rows == 1)
    assert "the output is back" not in caplog.text
    case.why = None
    committer.wait()
    assert case.stored() == {("a", 0)}


def test_an_output_that_stays_out_is_waited_for_so_long(case: Case) -> None:
    committer = case.committer(case.pending, last_seconds=0.1)
    case.why = TIMEOUT
    committer.commit("u0", [make_row("a"), make_row("b")], [])
    with pytest.raises(OutputError, match=r"no answer; 2 finished rollouts are kept in .*kept:"):
        committer.wait()
    case.why = None
    assert case.pending.commit_all(case.writer) == 2
    assert case.stored() == {("a", 0), ("b", 0)}


def test_what_no_waiting_mends_stops_the_job_with_everything_kept(case: Case) -> None:
    committer = case.committer(case.pending)
    case.why = PermissionError("read-only")
    committer.commit("u0", [make_row("a")], [])
    wait_for(lambda: committer.pending_bytes == 0)
    with pytest.raises(OutputError, match="read-only"):
        committer.check()
    committer.commit("u0", [make_row("b")], [make_rejection("c")])
    with pytest.raises(OutputError, match="read-only; 2 finished rollouts are kept in"):
        committer.wait()
    case.why = None
    assert case.pending.commit_all(case.writer) == 2
    assert case.stored() == {("a", 0), ("b", 0)}
    assert [item.prompt_key for item in read_dataset(case.storage).rejected] == ["c"]


def test_parts_without_room_wait_for_the_output(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = PendingParts(tmp_path / "kept", 0, case.writer.record.fingerprint)
    committer = case.committer(full)
    failures = [TIMEOUT]
    stock = committer._commit

    def commit(*args: Any) -> None:
        case.why = failures.pop() if failures else None
        stock(*args)

    monkeypatch.setattr(committer, "_commit", commit)
    committer.commit("u0", [make_row("a")], [])
    wait_for(lambda: case.stored() == {("a", 0)})
    wait_for(lambda: committer._uploader is None)
    committer.wait()
    assert (committer.stats.rows, committer.stats.kept_rows) == (1, 0)


def test_without_a_folder_an_error_is_told_and_what_came_before_is_still_tried(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = case.committer(None)
    first, second = threading.Event(), threading.Event()
    stock = committer._commit

    def commit(unit: str, rows: list[RolloutRow], *args: Any) -> None:
        if rows[0].prompt_key == "a":
            first.wait(30)
            case.why = TIMEOUT
        else:
            case.why = None
            second.set()
        stock(unit, rows, *args)

    monkeypatch.setattr(committer, "_commit", commit)
    committer.commit("u0", [make_row("a")], [])
    committer.commit("u0", [make_row("b")], [])
    first.set()
    assert second.wait(30)
    with pytest.raises(OutputError, match="no answer"):
        committer.wait()
    with pytest.raises(OutputError, match="no answer"):
        committer.commit("u0", [make_row("c")], [])
    assert case.stored() == {("b", 0)}
    assert committer.pending_bytes == 0


def test_bad_rollouts_are_set_aside_by_name(case: Case) -> None:
    committer = case.committer(None)
    rows = [make_row(prompt) for prompt in "abc"]
    rows[1] = dataclasses.replace(rows[1], sampled_logprobs=rows[1].sampled_logprobs + 1)
    committer.commit("u0", rows, [make_rejection("d")])
    committer.wait()
    assert case.stored() == {("a", 0), ("c", 0)}
    given, bad = sorted(
        read_dataset(case.storage).rejected, key=lambda item: item.stage != "render"
    )
    assert given.key == ("d", None)
    assert (bad.key, bad.prompt_id, bad.file) == (("b", 0), "user b", "p.jsonl")
    assert (bad.stage, bad.reason, bad.num_prompt_tokens) == ("capture", "bad_numerics", 7)
    assert "sampled_logprobs[0]" in str(bad.detail)
    assert committer.stats.bad_rows == {"bad_numerics": 1}
    assert (committer.stats.rows, committer.stats.covered) == (2, 0)


@pytest.mark.parametrize("same_disk", [True, False])
def test_a_shard_that_is_there_is_the_one_that_is_kept(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_disk: bool
) -> None:
    """So that a full disk need not have room for another one; where it can't move it is written."""
    written: list[Path] = []
    stock, stock_replace = write_shard, Path.replace

    def write(path: Path, *args: Any, **named: Any) -> Any:
        written.append(path)
        return stock(path, *args, **named)

    def replace(self: Path, target: Path) -> Path:
        if self.suffix == ".part" and not same_disk:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return stock_replace(self, target)

    monkeypatch.setattr("rollout.part_work.write_shard", write)
    monkeypatch.setattr(Path, "replace", replace)
    case.why = TIMEOUT
    committer = case.committer(case.pending)
    committer.commit("u0", [make_row("b"), make_row("a", 1), make_row("b", 1)], [])
    wait_for(lambda: committer.stats.kept_rows == 3)
    assert [path.parent for path in written] == [
        tmp_path / "scratch",
        *([] if same_disk else [case.pending.folder]),
    ]
    assert not any((tmp_path / "scratch").iterdir())
    case.why = None
    committer.wait()
    assert case.stored() == {("b", 0), ("a", 1), ("b", 1)}


@pytest.mark.parametrize("out", [False, True], ids=["committed", "kept"])
def test_the_spool_gets_its_room_back(case: Case, tmp_path: Path, out: bool) -> None:
    rows = [make_row(prompt) for prompt in "abc"]
    held = HeldSegments(tmp_path)
    stored = []
    for index, row in enumerate(rows):
        assert row.support_entries is not None
        assert row.support_offsets is not None
        (tmp_path / segment_name(index)).write_bytes(row.support_entries.tobytes())
        held.hold(index, row.support_entries.nbytes)
        held.seal(index, row.support_entries.nbytes)
        entries = SpooledEntries(
            segments=held,
            addresses=(index << 40) + 8 * row.support_offsets[:-1],
            counts=np.diff(row.support_offsets).astype(np.int32),
        )
        stored.append(dataclasses.replace(row, support_entries=None, stored_entries=entries))
    # a bad one holds nothing either
    stored[2] = dataclasses.replace(stored[2], sampled_logprobs=stored[2].sampled_logprobs + 1)
    committer = case.committer(case.pending)
    case.why = TIMEOUT if out else None
    committer.commit("u0", stored, [])
    wait_for(lambda: committer.pending_bytes == 0)
    assert held.num_bytes == 0
    assert list(tmp_path.glob("*.spool")) == []
    case.why = None
    wait_for(lambda: committer._uploader is None)
    committer.wait()
    assert case.stored() == {("a", 0), ("b", 0)}


def test_what_was_not_committed_stays_in_the_spool(case: Case, tmp_path: Path) -> None:
    row = make_row("a")
    assert row.support_entries is not None
    assert row.support_offsets is not None
    held = HeldSegments(tmp_path)
    (tmp_path / segment_name(0)).write_bytes(row.support_entries.tobytes())
    held.hold(0, row.support_entries.nbytes)
    held.seal(0, row.support_entries.nbytes)
    entries = SpooledEntries(
        segments=held,
        addresses=8 * row.support_offsets[:-1],
        counts=np.diff(row.support_offsets).astype(np.int32),
    )
    case.why = PermissionError("denied")
    committer = case.committer(None)
    committer.commit(
        "u0", [dataclasses.replace(row, support_entries=None, stored_entries=entries)], []
    )
    with pytest.raises(OutputError, match="denied"):
        committer.wait()
    assert held.num_bytes == row.support_entries.nbytes
