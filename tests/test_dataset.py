"""What a dataset holds: every rollout and every rejection once, or one clear sentence."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.dataset as pads
import pyarrow.parquet as pq
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
from synthetic import make_record, make_rejection, make_row, plan

from rollout.dataset import DatasetWriter, read_dataset
from rollout.errors import DatasetError, OutputError
from rollout.storage import Storage


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    yield new_storage(request.param, tmp_path)
    FakeStore.reset()


def test_a_committed_part_is_read_back(storage: Storage) -> None:
    writer = open_writer(storage)
    assert writer.append_plan(plan("u0", "a", "b")) == 2
    rows = [make_row("b", 1), make_row("a", 0), make_row("b", 0), make_row("a", 2)]
    record = writer.commit_part("u0", rows)
    assert record is not None
    # by prompt in order of first appearance, then by sample
    assert record.keys == (("b", 0), ("b", 1), ("a", 0), ("a", 2))
    assert [(g.prompt_key, g.first_row, g.num_rows) for g in record.groups] == [
        ("b", 0, 2),
        ("a", 2, 2),
    ]
    assert (record.rows, record.tokens, record.entries) == (4, 16, 4 * 47)
    assert (record.unit, record.part, record.rejected_file) == ("u0", 0, None)
    view = read_dataset(storage)
    assert view.record == make_record()
    assert view.commits == (record,)
    assert view.covered == covered(writer, "a b c") == set(record.keys)
    assert view.rejected == ()
    assert stored_ids(view) == ["b.0", "b.1", "a.0", "a.2"]
    assert [(e.prompt_key, e.unit) for e in view.plan] == [("a", "u0"), ("b", "u0")]


def test_a_resumed_writer_knows_what_is_covered(storage: Storage) -> None:
    first = open_writer(storage)
    first.append_plan(plan("u0", "a", "b") + plan("u1", "c"))
    first.commit_part("u0", rows_of("a"), [make_rejection("x")])
    second = open_writer(storage)
    assert second.ledger.units_of(["a", "b", "c", "x"]) == ["u0", "u0", "u1", None]
    assert covered(second, "a b c x") == {("a", 0), ("a", 1)}
    numbers = second.ledger.numbers(["a", "b", "c", "x"])
    assert [second.ledger.is_set_aside(number) for number in numbers] == [False] * 3 + [True]
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
    for name in [*data_files(storage), "_commit/u0-00000.json.gz", "_dataset.json"]:
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
    assert covered(writer, "a") == {("a", 2)}
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
    for writer in (first, open_writer(storage)):
        assert writer.ledger.units_of(list(want)) == list(want.values())
        assert writer.ledger.num_planned == 5
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


@pytest.mark.parametrize(
    ("version", "what"), [(1, "generate it again"), (3, "install a newer rollout")]
)
def test_another_format_is_refused_in_one_sentence(
    storage: Storage, version: int, what: str
) -> None:
    raw = json.loads(make_record().to_json()) | {"format_version": version, "whatever": []}
    storage.create_exclusive("_dataset.json", json.dumps(raw).encode())
    for reading in (lambda: read_dataset(storage), lambda: open_writer(storage)):
        with pytest.raises(DatasetError, match=f"format version {version}, expected 2: {what}$"):
            reading()


@pytest.mark.parametrize(
    ("name", "what"),
    [("_dataset.json", "not JSON"), ("_commit/u0-00000.json.gz", "not a whole gzip file")],
)
def test_a_damaged_record_is_named(storage: Storage, name: str, what: str) -> None:
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a"))
    writer.commit_part("u0", rows_of("a"))
    storage.write_bytes(name, storage.read_bytes(name)[:40])
    with pytest.raises(DatasetError, match=f"{name}: {what}"):
        read_dataset(storage)


def test_a_missing_commit_record_is_noticed(storage: Storage) -> None:
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a", "b"))
    writer.commit_part("u0", rows_of("a"))
    writer.commit_part("u0", rows_of("b"))
    storage.delete("_commit/u0-00000.json.gz")
    with pytest.raises(DatasetError, match="a commit record is missing although later parts"):
        read_dataset(storage)


def test_a_missing_shard_is_named(storage: Storage) -> None:
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a"))
    record = writer.commit_part("u0", rows_of("a"))
    assert record is not None
    assert record.file is not None
    view = read_dataset(storage)
    storage.delete(record.file)
    with pytest.raises(DatasetError, match=f"{record.file} is missing"):
        view.open_shard(record)


def test_a_plan_with_a_hole_is_refused(storage: Storage) -> None:
    writer = open_writer(storage)
    for prompt in "abc":
        writer.append_plan(plan("u0", prompt))
    assert [entry.prompt_key for entry in read_dataset(storage).plan] == ["a", "b", "c"]
    storage.delete("_plan/000001.parquet")
    with pytest.raises(DatasetError, match=r"_plan/000001\.parquet is missing: copy the dataset"):
        len(read_dataset(storage).plan)
    with pytest.raises(DatasetError, match=r"_plan/000001\.parquet is missing: copy the dataset"):
        len(read_dataset(storage).plan_ids)


def test_a_writer_names_the_files_that_are_gone(storage: Storage) -> None:
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a", "b", "c"))
    parts = [writer.commit_part("u0", rows_of(prompt)) for prompt in "ab"]
    parts.append(writer.commit_part("u0", [], [make_rejection("c")]))
    assert writer.missing_files() == open_writer(storage).missing_files() == []
    lost = []
    for part in (parts[1], parts[2]):
        assert part is not None
        lost.append(part.file or part.rejected_file)
        storage.delete(lost[-1] or "")
    assert open_writer(storage).missing_files() == lost


def test_large_parts_have_several_row_groups_and_groups_across_them(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path / "out")
    writer = DatasetWriter.open(storage, make_record(), row_group_bytes=2000)
    writer.append_plan(plan("u0", "a", "b"))
    record = writer.commit_part("u0", rows_of("a b", samples=6))
    assert record is not None
    assert [group.rows for group in record.row_groups] == [3, 3, 3, 3]
    assert record.rows == 12
    assert record.file is not None
    data = storage.read_bytes(record.file)
    ends = [group.offset + group.size for group in record.row_groups]
    assert [group.offset for group in record.row_groups] == [4, *ends[:-1]]
    assert ends[-1] < len(data)
    frame = pl.read_parquet(tmp_path / "out" / record.file)
    for group in record.groups:
        part = frame.slice(group.first_row, group.num_rows)
        assert part["group_id"].unique().to_list() == [f"g.{group.prompt_key}"]
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
        patch.setattr("rollout.part_work.write_shard", full)
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
