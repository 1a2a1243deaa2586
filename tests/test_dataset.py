"""The commit protocol: what counts, counts once, whatever races, dies or is damaged."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from fake_store import FakeStore
from synthetic import make_record, make_rejection, make_row, plan

from rollout.dataset import DatasetView, DatasetWriter, read_dataset
from rollout.errors import DatasetError, OutputError
from rollout.rows import RolloutRow
from rollout.schema.columns import SCHEMA
from rollout.storage import Storage

TESTS = Path(__file__).parent


@pytest.fixture(params=["local", "memory", "fakestore"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    FakeStore.reset()
    yield Storage.open(
        {
            "local": str(tmp_path / "run [7b] \u00e9"),
            "memory": f"memory://{uuid.uuid4().hex}/run",
            "fakestore": "fakestore://bucket/run",
        }[request.param]
    )
    FakeStore.reset()


def open_writer(storage: Storage, **inputs: Any) -> DatasetWriter:
    return DatasetWriter.open(storage, make_record(**inputs))


def rows_of(prompts: str, samples: int = 2) -> list[RolloutRow]:
    return [make_row(prompt, i) for prompt in prompts.split() for i in range(samples)]


def stored_ids(view: DatasetView) -> list[str]:
    """Every rollout_id that a reader by records sees."""
    found: list[str] = []
    for record in view.shards:
        view.verify(record)
        with view.open_shard(record) as shard:
            assert shard.schema_arrow.equals(SCHEMA, check_metadata=True)
            ids = shard.read(columns=["rollout_id"])["rollout_id"].to_pylist()
        assert ids == [f"{key}.{index}" for key, index in record.keys]
        found += ids
    return found


def data_files(storage: Storage) -> list[str]:
    return [f"data/{base}" for base in storage.list("data")]


def test_a_committed_part_is_read_back(storage: Storage) -> None:
    writer = open_writer(storage)
    assert writer.append_plan(plan("u0", "a", "b")) == 2
    rows = [make_row("b", 1), make_row("a", 0), make_row("b", 0), make_row("a", 2)]
    record = writer.commit_part("u0", rows)
    assert record is not None
    # by group in order of first appearance, then by sample
    assert record.keys == (("b", 0), ("b", 1), ("a", 0), ("a", 2))
    assert [(g.group_id, g.first_row, g.num_rows) for g in record.groups] == [
        ("g.b", 0, 2),
        ("g.a", 2, 2),
    ]
    assert (record.rows, record.tokens, record.entries) == (4, 16, 4 * 47)
    assert (record.unit, record.part, record.rejected_file) == ("u0", 0, None)
    view = read_dataset(storage)
    assert view.record == make_record()
    assert view.commits == (record,)
    assert view.covered == writer.covered == set(record.keys)
    assert view.rejected == ()
    assert stored_ids(view) == ["b.0", "b.1", "a.0", "a.2"]
    assert [(e.prompt_key, e.unit) for e in view.plan] == [("a", "u0"), ("b", "u0")]


def test_a_resumed_writer_knows_what_is_covered(storage: Storage) -> None:
    first = open_writer(storage)
    first.append_plan(plan("u0", "a", "b") + plan("u1", "c"))
    first.commit_part("u0", rows_of("a"), [make_rejection("x")])
    second = open_writer(storage)
    assert second.plan == {"a": "u0", "b": "u0", "c": "u1"}
    assert second.covered == {("a", 0), ("a", 1)}
    assert second.rejected_prompts == {"x"}
    record = second.commit_part("u0", rows_of("b", 1))
    assert record is not None
    assert record.part == 1
    assert stored_ids(read_dataset(storage)) == ["a.0", "a.1", "b.0"]


def test_a_key_is_committed_once(storage: Storage) -> None:
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a", "b"))
    writer.commit_part("u0", rows_of("a"))
    assert writer.commit_part("u0", rows_of("a")) is None
    record = writer.commit_part("u0", rows_of("a b"))
    assert record is not None
    assert record.keys == (("b", 0), ("b", 1))
    assert len(data_files(storage)) == len(read_dataset(storage).commits) == 2


def test_a_stale_writer_sees_what_another_committed(storage: Storage) -> None:
    first = open_writer(storage)
    first.append_plan(plan("u0", "a", "b", "c"))
    second = open_writer(storage)
    first.commit_part("u0", rows_of("a"))
    first.commit_part("u0", rows_of("b"))
    record = second.commit_part("u0", rows_of("a b c"))
    assert record is not None
    assert (record.part, record.keys) == (2, (("c", 0), ("c", 1)))


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
    assert resumed.covered == {("a", 0), ("a", 1)}
    resumed.remove_orphans()
    assert data_files(storage) == [record.file for record in resumed.commits if record.file]
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
    writer.commit_part(writer.plan[prompt], rows, [make_rejection(f"bad {prompt}")])
    if prompt == "p9":
        writer.remove_orphans()
print(sorted(writer.covered) == sorted((p, i) for p in prompts for i in range(3)))
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
    assert [racer.communicate()[0] for racer in racers] == ["True\n", "True\n"]
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


def test_scans_of_the_data_folder_agree_after_a_clean_end(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path / "out")
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a", "b") + plan("u1", "c"))
    writer.commit_part("u0", rows_of("a"), [make_rejection("x")])
    writer.commit_part("u1", rows_of("c"))
    writer.commit_part("u0", rows_of("b"))
    writer.remove_orphans()
    data = tmp_path / "out" / "data"
    want = sorted(stored_ids(read_dataset(storage)))
    assert sorted(pl.scan_parquet(data).collect()["rollout_id"]) == want
    assert sorted(pl.scan_parquet(data / "*.parquet").collect()["rollout_id"]) == want
    assert sorted(pads.dataset(data).to_table()["rollout_id"].to_pylist()) == want
    assert sorted(pq.read_table(data)["rollout_id"].to_pylist()) == want


def test_shards_are_readable_by_others(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path / "out")
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a"))
    writer.commit_part("u0", rows_of("a"))
    plain = tmp_path / "plain"
    plain.touch()
    for name in [*data_files(storage), "_commit/u0-00000.json", "_dataset.json"]:
        assert (tmp_path / "out" / name).stat().st_mode == plain.stat().st_mode


def test_whole_prompts_are_rejected_once(storage: Storage) -> None:
    writer = open_writer(storage)
    rejected = [make_rejection("x"), make_rejection("y", line=None), make_rejection("x")]
    record = writer.commit_part("u0", [], rejected)
    assert record is not None
    assert (record.file, record.rows, record.rejected_rows) == (None, 0, 2)
    assert record.rejected_keys == (("x", None), ("y", None))
    # the same prompts on a re-run, and from a writer that has not seen the first record
    assert writer.commit_part("u0", [], rejected) is None
    assert open_writer(storage).commit_part("u1", [], rejected) is None
    view = read_dataset(storage)
    assert view.rejected == (rejected[0], rejected[1])
    assert storage.list("_rejected") == [str(record.rejected_file).split("/")[1]]
    assert data_files(storage) == []


def test_a_rejection_recorded_by_two_units_counts_once(storage: Storage) -> None:
    first, second = open_writer(storage), open_writer(storage)
    assert first.commit_part("u0", [], [make_rejection("x")]) is not None
    assert second.commit_part("u1", [], [make_rejection("x")]) is not None
    assert read_dataset(storage).rejected == (make_rejection("x"),)


def test_a_rejected_rollout_is_superseded_by_a_committed_one(storage: Storage) -> None:
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a"))
    failed = [make_rejection("a", 0), make_rejection("a", 1)]
    writer.commit_part("u0", [make_row("a", 2)], failed)
    assert writer.covered == {("a", 2)}
    assert read_dataset(storage).rejected == tuple(failed)
    # the next run gets one of them, and fails the other for another reason
    again = make_rejection("a", 1, reason="nonfinite_logits")
    writer.commit_part("u0", [make_row("a", 0)], [again, make_rejection("a", 2)])
    view = read_dataset(storage)
    assert view.covered == {("a", 0), ("a", 2)}
    assert view.rejected == (again,)


def test_a_row_wins_over_its_own_rejection_in_one_part(storage: Storage) -> None:
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a"))
    record = writer.commit_part("u0", [make_row("a", 0)], [make_rejection("a", 0)])
    assert record is not None
    assert (record.rows, record.rejected_rows, record.rejected_file) == (1, 0, None)


def test_rejections_are_readable_in_polars(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path / "out")
    item = make_rejection("x", 3, prompt_id="user x", num_prompt_tokens=77)
    open_writer(storage).commit_part("u0", [], [item])
    frame = pl.read_parquet(tmp_path / "out/_rejected/*.parquet")
    assert frame.to_dicts() == [
        {
            "prompt_key": "x",
            "prompt_id": "user x",
            "sample_index": 3,
            "file": "prompts.jsonl",
            "line": 3,
            "stage": "capture",
            "reason": "support_capacity",
            "detail": "for people",
            "num_prompt_tokens": 77,
        }
    ]


def test_a_planned_prompt_keeps_its_unit(storage: Storage) -> None:
    first, second = open_writer(storage), open_writer(storage)
    assert first.append_plan(plan("u0", "a", "b")) == 2
    assert second.append_plan(plan("u1", "c", "b", "d", "c")) == 2
    assert first.append_plan(plan("u7", "d", "a")) == 0
    assert first.append_plan(plan("u8", "e")) == 1
    want = {"a": "u0", "b": "u0", "c": "u1", "d": "u1", "e": "u8"}
    assert first.plan == want
    assert list(open_writer(storage).plan.items()) == list(want.items())
    assert {entry.prompt_key: entry.unit for entry in read_dataset(storage).plan} == want
    assert len(storage.list("_plan")) == 3


def test_rows_must_be_planned_for_their_unit_and_unique(storage: Storage) -> None:
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a"))
    with pytest.raises(ValueError, match="planned for unit u0, got unit u1"):
        writer.commit_part("u1", rows_of("a"))
    with pytest.raises(ValueError, match="planned for unit None"):
        writer.commit_part("u0", rows_of("b"))
    with pytest.raises(ValueError, match="given twice"):
        writer.commit_part("u0", rows_of("a") + rows_of("a"))
    with pytest.raises(ValueError, match="letters, digits or underscores"):
        writer.commit_part("u-0", rows_of("a"))
    with pytest.raises(ValueError, match="letters, digits or underscores"):
        writer.append_plan(plan("../u", "z"))
    assert data_files(storage) == []


def test_the_same_fingerprint_continues_another_is_refused(storage: Storage) -> None:
    open_writer(storage, seed=1)
    open_writer(storage, seed=1)
    with pytest.raises(OutputError, match="another run") as caught:
        open_writer(storage, seed=1, sampling={"temperature": 0.5}, dtype="float32")
    message = str(caught.value)
    assert "`sampling.temperature` is 1.0 there and 0.5 now" in message
    assert "`dtype` is '(absent)' there and 'float32' now" in message
    assert "seed" not in message


def test_a_folder_with_data_but_no_record_is_refused(storage: Storage) -> None:
    storage.create_exclusive("data/x.parquet", b"something")
    with pytest.raises(OutputError, match=r"`data/` holds files but there is no _dataset\.json"):
        open_writer(storage)


def test_what_is_no_dataset_is_said_in_one_sentence(storage: Storage) -> None:
    with pytest.raises(DatasetError, match=r"is not a dataset: there is no _dataset\.json in it$"):
        read_dataset(storage)


def test_a_newer_dataset_is_refused_in_one_sentence(storage: Storage) -> None:
    raw = json.loads(make_record().to_json()) | {"format_version": 2, "whatever": []}
    storage.create_exclusive("_dataset.json", json.dumps(raw).encode())
    for reading in (lambda: read_dataset(storage), lambda: open_writer(storage)):
        with pytest.raises(DatasetError, match="format version 2, expected at most 1: install"):
            reading()


@pytest.mark.parametrize("name", ["_dataset.json", "_commit/u0-00000.json"])
def test_a_damaged_record_is_named(storage: Storage, name: str) -> None:
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a"))
    writer.commit_part("u0", rows_of("a"))
    storage.write_bytes(name, storage.read_bytes(name)[:40])
    with pytest.raises(DatasetError, match=f"{name}: not JSON"):
        read_dataset(storage)


def test_a_missing_commit_record_is_noticed(storage: Storage) -> None:
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a", "b"))
    writer.commit_part("u0", rows_of("a"))
    writer.commit_part("u0", rows_of("b"))
    storage.delete("_commit/u0-00000.json")
    with pytest.raises(DatasetError, match="a commit record is missing although later parts"):
        read_dataset(storage)


def test_damaged_and_missing_shards_are_named(storage: Storage) -> None:
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a"))
    record = writer.commit_part("u0", rows_of("a"))
    assert record is not None
    assert record.file is not None
    view = read_dataset(storage)
    view.verify(record)
    data = bytearray(storage.read_bytes(record.file))
    data[record.row_groups[0].size // 2] ^= 1
    storage.write_bytes(record.file, bytes(data))
    with pytest.raises(DatasetError, match=f"{record.file}: shard: "):
        view.verify(record)
    storage.delete(record.file)
    for reading in (view.verify, view.open_shard):
        with pytest.raises(DatasetError, match=f"{record.file} is missing"):
            reading(record)


def test_large_parts_have_several_row_groups_and_groups_across_them(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path / "out")
    writer = DatasetWriter.open(storage, make_record(), row_group_bytes=2000)
    writer.append_plan(plan("u0", "a", "b"))
    record = writer.commit_part("u0", rows_of("a b", samples=6))
    assert record is not None
    assert len(record.row_groups) == 3
    assert sum(group.rows for group in record.row_groups) == record.rows == 12
    assert record.file is not None
    data = storage.read_bytes(record.file)
    ends = [group.offset + group.size for group in record.row_groups]
    assert [group.offset for group in record.row_groups] == [4, *ends[:-1]]
    assert ends[-1] < len(data)
    frame = pl.read_parquet(tmp_path / "out" / record.file)
    for group in record.groups:
        part = frame.slice(group.first_row, group.num_rows)
        assert part["group_id"].unique().to_list() == [group.group_id]
        assert part["sample_index"].to_list() == list(range(group.num_rows))


def test_a_failed_upload_leaves_no_scratch_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage.open(tmp_path / "out")
    scratch = tmp_path / "scratch"
    writer = DatasetWriter.open(storage, make_record(), scratch=scratch)
    writer.append_plan(plan("u0", "a"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rollout.dataset.write_shard", full)
        with pytest.raises(OutputError, match="no space left"):
            writer.commit_part("u0", rows_of("a"))
    assert list(scratch.iterdir()) == []
    assert writer.commit_part("u0", rows_of("a")) is not None
    assert list(scratch.iterdir()) == []


def test_units_and_parts_sort_as_a_reader_sees_them(storage: Storage) -> None:
    writer = open_writer(storage)
    prompts = [f"p{i}" for i in range(6)]
    writer.append_plan(
        itertools.chain.from_iterable(plan(f"u{i % 2}", prompt) for i, prompt in enumerate(prompts))
    )
    for i, prompt in reversed(list(enumerate(prompts))):
        writer.commit_part(f"u{i % 2}", rows_of(prompt, 1))
    order = [(record.unit, record.part) for record in read_dataset(storage).commits]
    assert order == [(u, p) for u in ("u0", "u1") for p in range(3)]
    assert writer.commits == list(read_dataset(storage).commits)
