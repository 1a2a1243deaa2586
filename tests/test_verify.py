"""Every fault of a dataset is named by `rollout verify`, and refused by the loader."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from dataset_tools import STORAGES, new_storage, open_writer, rows_of
from loader_cases import group, open_loader, shard_path, twelve_groups, write
from s3_server import s3_server
from synthetic import make_rejection, make_row, plan

from rollout.cli import main
from rollout.dataset import read_dataset
from rollout.errors import DamagedError, DatasetError, IncompleteError
from rollout.schema import layout
from rollout.schema.records import CommitRecord
from rollout.shard import write_shard
from rollout.storage import Storage
from rollout.table_rows import table_rows
from rollout.verify import VerifyReport, verify_dataset


def verify(path: Path | str, **options: Any) -> VerifyReport:
    return verify_dataset(Storage.open(path), **options)


def faults(report: VerifyReport) -> list[tuple[str, str]]:
    return [(fault.file, fault.problem) for fault in report.faults]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine") / "out"
    twelve_groups(str(path))
    open_writer(Storage.open(path)).commit_part("u000000", [], [make_rejection("bad")])
    return path


@pytest.fixture
def dataset(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "run"))


def records(path: Path) -> list[CommitRecord]:
    return list(read_dataset(Storage.open(path)).shards)


def rewrite(path: Path, number: int, /, **changes: Any) -> None:
    """Change fields of a commit record."""
    record = records(path)[number]
    name = path / f"_commit/u000000-{number:05d}.json.gz"
    name.write_bytes(dataclasses.replace(record, **changes).to_bytes())


@pytest.mark.parametrize("kind", STORAGES)
def test_a_whole_dataset(kind: str, tmp_path: Path) -> None:
    storage = new_storage(kind, tmp_path)
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a", "b", "x") + plan("u1", "c"))
    mixed = [make_row("b", i, kind=kind, draws=3) for i, kind in enumerate(("top", "none", "top"))]
    writer.commit_part("u0", [*rows_of("a", 4), *mixed], [make_rejection("x")])
    failed = [make_rejection("b", 3), make_rejection("unreadable")]
    writer.commit_part("u0", [], failed)
    writer.commit_part("u1", rows_of("c", 4))
    report = verify_dataset(storage)
    assert (report.faults, report.leftovers) == ([], 0)
    assert (report.parts, report.shards, report.rollouts, report.tokens) == (3, 2, 11, 44)
    assert (report.prompts_planned, report.prompts_rejected) == (4, 2)
    assert (report.rollouts_failed, report.rollouts_missing) == (1, 0)
    report.check()


def test_on_s3() -> None:
    with s3_server("bucket") as endpoint:
        options = {"endpoint_url": endpoint, "key": "k", "secret": "s"}
        storage = Storage.open("s3://bucket/run [7b]", options)
        writer = open_writer(storage)
        writer.append_plan(plan("u0", "a", "b"))
        for prompt in "ab":
            writer.commit_part("u0", rows_of(prompt, 4))
        whole = verify_dataset(storage)
        assert (whole.rollouts, whole.faults) == (8, [])
        file = str(read_dataset(storage).shards[1].file)
        data = storage.read_bytes(file)
        storage.write_bytes(file, data[:-5])
        assert faults(verify_dataset(storage)) == [
            (file, f"has {len(data) - 5} bytes, expected {len(data)}")
        ]
        storage.write_bytes(file, b"")
        assert faults(verify_dataset(storage)) == [(file, f"has 0 bytes, expected {len(data)}")]
        storage.delete(file)
        assert faults(verify_dataset(storage)) == [(file, "is missing")]


Planted = Callable[[Path], list[tuple[str, str]]]


def _truncated(path: Path) -> list[tuple[str, str]]:
    shard = shard_path(str(path))
    size = shard.stat().st_size
    os.truncate(shard, size // 2)
    return [(f"data/{shard.name}", f"has {size // 2} bytes, expected {size}")]


def _short_by_ten_rows(path: Path) -> list[tuple[str, str]]:
    shard = shard_path(str(path))
    size = shard.stat().st_size
    record = read_dataset(Storage.open(path)).record
    rows = [row for index in range(4) for row in group(index)]
    info = write_shard(shard, rows[:-10], record.fingerprint, row_group_bytes=600)
    assert info.rows == 6
    return [(f"data/{shard.name}", f"has {info.size} bytes, expected {size}")]


def _empty(path: Path) -> list[tuple[str, str]]:
    shard = shard_path(str(path))
    size = shard.stat().st_size
    shard.write_bytes(b"")
    return [(f"data/{shard.name}", f"has 0 bytes, expected {size}")]


def _swapped(path: Path) -> list[tuple[str, str]]:
    first, second = sorted((path / "data").iterdir())[:2]
    sizes = [first.stat().st_size, second.stat().st_size]
    first.rename(path / "x")
    second.rename(first)
    (path / "x").rename(second)
    return [
        (f"data/{first.name}", f"has {sizes[1]} bytes, expected {sizes[0]}"),
        (f"data/{second.name}", f"has {sizes[0]} bytes, expected {sizes[1]}"),
    ]


def _missing(path: Path) -> list[tuple[str, str]]:
    shard = shard_path(str(path))
    shard.unlink()
    return [(f"data/{shard.name}", "is missing")]


def _torn_record(path: Path) -> list[tuple[str, str]]:
    name = path / "_commit/u000000-00001.json.gz"
    os.truncate(name, name.stat().st_size // 2)
    return [("_commit/u000000-00001.json.gz", "not a whole gzip file")]


def _empty_record(path: Path) -> list[tuple[str, str]]:
    (path / "_commit/u000000-00002.json.gz").write_bytes(b"")
    return [("_commit/u000000-00002.json.gz", "not a whole gzip file")]


def _lost_record(path: Path) -> list[tuple[str, str]]:
    (path / "_commit/u000000-00000.json.gz").unlink()
    return [("_commit/u000000-00000.json.gz", "is missing although later parts exist")]


PLANTED = {
    "truncated": _truncated,
    "short by ten rows": _short_by_ten_rows,
    "empty": _empty,
    "swapped": _swapped,
    "missing": _missing,
    "torn record": _torn_record,
    "empty record": _empty_record,
    "lost record": _lost_record,
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_damage_is_named_and_the_loader_refuses_it_before_a_batch(
    dataset: Path, plant: Planted
) -> None:
    expected = plant(dataset)
    for rows in (True, False):
        report = verify(dataset, rows=rows)
        found = faults(report)
        assert [file for file, _ in found] == [file for file, _ in expected]
        for (_, problem), (_, part) in zip(found, expected, strict=True):
            assert part in problem
        with pytest.raises(DamagedError, match=expected[0][0]):
            report.check()
    with pytest.raises(DatasetError):
        next(iter(open_loader(str(dataset))))


def test_records_that_contradict_themselves_are_named(pristine: Path, tmp_path: Path) -> None:
    record = records(pristine)[1]
    indices, (first, _, *others) = record.sample_indices, record.prompt_keys

    def rejects(sample: int) -> dict[str, Any]:
        file = layout.rejected_name(record.unit, record.part, record.attempt)
        return {"rejected_file": file, "rejected_rows": 1, "rejected_keys": ((first, sample),)}

    cases: list[tuple[dict[str, Any], str]] = [
        ({"rows": 15}, "15 rollouts, but 16 sample indices"),
        ({"sample_indices": (0, 0, *indices[2:])}, "16 rollouts, but 15 different keys"),
        ({"sample_indices": (-1, *indices[1:])}, "negative"),
        ({"sample_indices": (2**62, *indices[1:])}, "it has a sample 461168601842738"),
        (rejects(-1), "negative"),
        (rejects(2**62), "it has a sample 4611686018427387904, expected less than 1048576"),
        ({"prompt_rows": (4, 4, 4, 3)}, "16 rollouts, but 15 rows of its prompts"),
        ({"prompt_rows": (4, 4, 4, 5, -1)}, "a prompt stands in it twice, or without rows"),
        ({"prompt_rows": (4, 4, 8)}, "a prompt stands in it twice, or without rows"),
        ({"prompt_keys": (first, first, *others)}, "a prompt stands in it twice, or"),
        ({"row_groups": record.row_groups[::-1]}, "row group 1 is said to start at byte"),
        ({"size": record.row_groups[-1].offset}, "its row groups end at byte"),
        ({"part": 7}, "it says that it is part 7"),
        ({"file": "../elsewhere.parquet"}, "it names '../elsewhere.parquet'"),
        ({"file": None}, "but the shard is None"),
        ({"rejected_rows": 1}, "but their table is None"),
        ({"tokens": "many"}, "a field has the wrong type"),
    ]
    for number, (changes, problem) in enumerate(cases):
        path = Path(shutil.copytree(pristine, tmp_path / str(number)))
        rewrite(path, 1, **changes)
        (found, *_) = faults(verify(path))
        assert found[0] == "_commit/u000000-00001.json.gz"
        assert problem in found[1]


def test_numbers_that_only_the_shard_can_contradict(dataset: Path) -> None:
    record = records(dataset)[1]
    groups = record.row_groups
    fewer, more = (
        dataclasses.replace(groups[i], rows=groups[i].rows + n) for i, n in ((0, -1), (1, 1))
    )
    moved = (fewer, more, *groups[2:])
    for changes, problem in (
        ({"tokens": record.tokens + 1}, f"holds {record.tokens} tokens"),
        ({"entries": 0}, f"holds {record.entries} support entries, its record says 0"),
        ({"max_token_id": 5}, "as its largest token id, its record says 5"),
        ({"sample_indices": tuple(i + 1 for i in record.sample_indices)}, "its record says 1"),
        ({"row_groups": moved}, f"its row groups have [{groups[0].rows}, "),
    ):
        name = dataset / "_commit/u000000-00001.json.gz"
        name.write_bytes(dataclasses.replace(record, **changes).to_bytes())
        (found,) = (f for f in faults(verify(dataset)) if f[0].startswith("data/"))
        assert found[0] == record.file
        assert problem in found[1]


def test_the_plan_and_the_rejected_tables_are_checked(dataset: Path) -> None:
    (table,) = (dataset / "_rejected").iterdir()
    os.truncate(table, 100)
    (dataset / "_plan/000001.parquet").unlink()
    found = dict(faults(verify(dataset)))
    assert set(found) == {"_plan/000001.parquet", f"_rejected/{table.name}"}
    assert "damaged" in found[f"_rejected/{table.name}"]
    table.unlink()
    assert dict(faults(verify(dataset)))[f"_rejected/{table.name}"] == "is missing"


def test_every_column_of_the_plan_is_checked(dataset: Path) -> None:
    name = "_plan/000000.parquet"
    column = next(
        column
        for column in pq.read_metadata(dataset / name).row_group(0).to_dict()["columns"]
        if column["path_in_schema"] == "prompt_id"  # which no count needs
    )
    data = bytearray((dataset / name).read_bytes())
    data[column["data_page_offset"] + column["total_compressed_size"] - 1] ^= 1
    (dataset / name).write_bytes(data)
    ((file, problem),) = faults(verify(dataset))
    assert file == name
    assert "CRC" in problem


def test_rollouts_committed_twice_or_unplanned_are_named(dataset: Path) -> None:
    record = records(dataset)[2]
    again = records(dataset)[0].prompt_keys
    rewrite(dataset, 2, prompt_keys=again)
    found = faults(verify(dataset, rows=False))
    assert found == [
        ("_commit/u000000-00002.json.gz", "16 of its rollouts are in an earlier record too")
    ]
    rewrite(dataset, 2, prompt_keys=tuple(f"new {key}" for key in record.prompt_keys))
    found = faults(verify(dataset, rows=False))
    assert found == [
        ("_commit/u000000-00002.json.gz", "16 of its rollouts are not planned for u000000")
    ]


def test_what_is_not_there_yet_is_no_damage(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path / "run")
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a", "b"))
    writer.commit_part("u0", rows_of("a", 3))
    storage.write_bytes("data/u0-00001-0123456789abcdef.parquet", b"half")
    report = verify_dataset(storage)
    # one sample of a group of four, and the group of which nothing is known but the plan
    assert (report.faults, report.leftovers, report.rollouts_missing) == ([], 1, 2)
    with pytest.raises(IncompleteError, match="2 rollouts are missing"):
        report.check()
    result = CliRunner().invoke(main, ["verify", str(tmp_path / "run")])
    assert result.exit_code == 6
    assert "1 files that no record names" in result.output


def test_one_row_group_is_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    wide = [[make_row(f"p{i}", lengths=[4000] * 16) for i in range(24)]]
    write(str(path), wide, row_group_bytes=2**20)
    (record,) = records(path)
    largest = 16 * 4000 * 8 * max(group.rows for group in record.row_groups)
    assert len(record.row_groups) >= 12
    held: list[int] = []
    before = pa.total_allocated_bytes()

    def spy(*args: Any) -> Any:
        held.append(pa.total_allocated_bytes() - before)
        return table_rows(*args)

    monkeypatch.setattr("rollout.verify_shard.table_rows", spy)
    assert verify(path).rollouts == 24
    assert len(held) == len(record.row_groups)
    # one, the rows of the last one, and the bytes that are decoded
    assert max(held) < 3 * largest < sum(row.num_bytes for row in wide[0]) / 3


def test_the_command_prints_json(dataset: Path) -> None:
    result = CliRunner().invoke(main, ["verify", str(dataset), "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.output)
    assert printed["verify_version"] == 1
    assert (printed["rollouts"], printed["prompts_rejected"], printed["faults"]) == (48, 1, [])
    (dataset / "_dataset.json").unlink()
    assert CliRunner().invoke(main, ["verify", str(dataset)]).exit_code == 7
