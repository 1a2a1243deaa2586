"""Writers that race, die or clean up: what counts, counts once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from dataset_tools import (
    STORAGES,
    covered,
    data_files,
    new_storage,
    open_writer,
    rows_of,
    stored_ids,
)
from fake_store import FakeStore
from synthetic import make_rejection, make_row, plan

from rollout.dataset import DatasetWriter, read_dataset
from rollout.storage import Storage

TESTS = Path(__file__).parent


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    yield new_storage(request.param, tmp_path)
    FakeStore.reset()


def commit_during_upload(
    monkeypatch: pytest.MonkeyPatch, slow: DatasetWriter, action: Any, times: int = 1
) -> None:
    """Let something happen between a writer's upload and its commit record."""
    upload = slow._upload
    left = [times]

    def interrupted(*args: Any) -> Any:
        record = upload(*args)
        if left[0]:
            left[0] -= 1
            action()
        return record

    monkeypatch.setattr(slow, "_upload", interrupted)


@pytest.mark.parametrize("theirs", ["a", "b", "a b"], ids=["overlap", "disjoint", "more"])
def test_the_loser_of_a_race_leaves_an_orphan_and_commits_the_rest(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    winner = open_writer(storage)
    winner.append_plan(plan("u0", "a", "b", "c"))
    loser = open_writer(storage)
    commit_during_upload(monkeypatch, loser, lambda: winner.commit_part("u0", rows_of(theirs)))
    record = loser.commit_part("u0", rows_of("a c"))
    assert record is not None
    assert record.part == 1
    view = read_dataset(storage)
    keys = [key for commit in view.commits for key in commit.keys]
    assert sorted(keys) == sorted({(p, i) for p in {*theirs.split(), "a", "c"} for i in (0, 1)})
    assert sorted(stored_ids(view)) == sorted(f"{p}.{i}" for p, i in keys)
    # the orphan is there, no reader by records sees it, and it goes
    assert len(data_files(storage)) == 3
    assert loser.remove_orphans() == 1
    assert data_files(storage) == [commit.file for commit in read_dataset(storage).commits]
    assert loser.remove_orphans() == 0


def test_the_loser_with_nothing_left_commits_nothing(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner = open_writer(storage)
    winner.append_plan(plan("u0", "a"))
    loser = open_writer(storage)
    rejected = [make_rejection("x")]
    commit_during_upload(
        monkeypatch, loser, lambda: winner.commit_part("u0", rows_of("a"), rejected)
    )
    assert loser.commit_part("u0", rows_of("a"), rejected) is None
    view = read_dataset(storage)
    assert len(view.commits) == len(view.rejected) == 1
    assert winner.remove_orphans() == 2
    assert storage.list("_rejected") == [str(view.commits[0].rejected_file).split("/")[1]]


def test_orphans_of_a_live_writer_are_removed_without_harm(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = open_writer(storage)
    slow.append_plan(plan("u0", "a"))
    cleaner = open_writer(storage)
    removed: list[int] = []
    commit_during_upload(
        monkeypatch, slow, lambda: removed.append(cleaner.remove_orphans()), times=2
    )
    record = slow.commit_part("u0", rows_of("a"), [make_rejection("x")])
    assert removed == [2, 2]
    assert record is not None
    assert record.part == 2
    view = read_dataset(storage)
    assert [(c.rows, c.file is None) for c in view.commits] == [(0, True), (0, True), (2, False)]
    assert stored_ids(view) == ["a.0", "a.1"]
    assert len(view.rejected) == 1


class Died(BaseException):
    """Stands for a process that ends in the middle."""


@pytest.mark.parametrize("step", ["put_file", "write_bytes", "create_exclusive"])
def test_a_writer_that_dies_before_its_record_loses_nothing_committed(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a", "b"))
    writer.commit_part("u0", rows_of("a"))

    def die(*_: Any) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(storage, step, die)
        with pytest.raises(Died):
            writer.commit_part("u0", rows_of("b"), [make_rejection("x")])
    assert stored_ids(read_dataset(storage)) == ["a.0", "a.1"]
    resumed = open_writer(storage)
    assert covered(resumed, "a b x") == {("a", 0), ("a", 1)}
    resumed.remove_orphans()
    assert data_files(storage) == [shard.file for shard in read_dataset(storage).shards]
    record = resumed.commit_part("u0", rows_of("a b"), [make_rejection("x")])
    assert record is not None
    assert record.keys == (("b", 0), ("b", 1))
    assert len(read_dataset(storage).rejected) == 1


def test_orphan_removal_leaves_foreign_files(storage: Storage) -> None:
    writer = open_writer(storage)
    storage.create_exclusive("data/notes.txt", b"mine")
    assert writer.remove_orphans() == 0
    assert storage.list("data") == ["notes.txt"]


RACER = """
import sys
sys.path.insert(0, sys.argv[1])
from synthetic import make_record, make_rejection, make_row, plan
from rollout.dataset import DatasetWriter
from rollout.storage import Storage

writer = DatasetWriter.open(Storage.open(sys.argv[2]), make_record())
prompts = [f"p{i}" for i in range(24)]
for number, prompt in enumerate(prompts):
    writer.append_plan(plan(f"u{number % 2}", prompt))
print("ready", flush=True)
sys.stdin.readline()
order = prompts if sys.argv[3] == "a" else prompts[:2] + prompts[:1:-1]
for prompt in order:
    rows = [make_row(prompt, i, text=sys.argv[3]) for i in range(3)]
    (unit,) = writer.ledger.units_of([prompt])
    writer.commit_part(unit, rows, [make_rejection(f"bad {prompt}")])
    if prompt == "p9":
        writer.remove_orphans()
print(all(writer.covers(p, i) for p in prompts for i in range(3)), writer.ledger.num_covered == 72)
"""


def test_two_processes_racing_on_one_unit_commit_every_key_once(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(TESTS), str(tmp_path / "out"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    assert [racer.communicate()[0] for racer in racers] == ["True True\n"] * 2
    assert [racer.returncode for racer in racers] == [0, 0]
    storage = Storage.open(tmp_path / "out")
    view = read_dataset(storage)
    expected = sorted(f"p{p}.{i}" for p in range(24) for i in range(3))
    assert sorted(stored_ids(view)) == expected
    assert len(view.plan) == 24
    # a prompt of an odd number is in the other unit: its rejection may be recorded in both
    assert sorted(item.prompt_key for item in view.rejected) == sorted(
        f"bad p{p}" for p in range(24)
    )
    open_writer(storage).remove_orphans()
    frame = pl.read_parquet(tmp_path / "out/data/*.parquet")
    assert sorted(frame["rollout_id"]) == expected
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "_commit",
        "_dataset.json",
        "_plan",
        "_rejected",
        "data",
    ]


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from synthetic import make_record, make_row, plan
from rollout.dataset import DatasetWriter
from rollout.storage import Storage

writer = DatasetWriter.open(Storage.open(sys.argv[2]), make_record())
writer.append_plan(plan("u0", "a", "b"))
writer.commit_part("u0", [make_row("a", 0)])
link, calls = os.link, []
def dying_link(source, target):
    calls.append(target)
    if len(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    link(source, target)
os.link = dying_link
writer.commit_part("u0", [make_row("b", 0)])
"""


@pytest.mark.parametrize("step", [1, 2], ids=["before the shard", "before the record"])
def test_a_killed_writer_leaves_a_dataset_that_resumes(tmp_path: Path, step: int) -> None:
    out = tmp_path / "out"
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(TESTS), str(out), str(step)], check=False
    )
    assert process.returncode == -9
    assert all(path.suffix == ".part" for path in (out / "_scratch").iterdir())
    storage = Storage.open(out)
    assert stored_ids(read_dataset(storage)) == ["a.0"]
    writer = open_writer(storage)
    assert writer.remove_orphans() == step - 1
    writer.commit_part("u0", [make_row("a", 0), make_row("b", 0)])
    assert sorted(pl.read_parquet(out / "data/*.parquet")["rollout_id"]) == ["a.0", "b.0"]
