"""Rows and shards that agree with their digests and are wrong all the same."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from blake3 import blake3
from dataset_tools import open_writer, rows_of
from loader_cases import write
from synthetic import make_row, plan

from rollout import verify_shard
from rollout.dataset import read_dataset
from rollout.rows import RolloutRow
from rollout.schema.columns import FINGERPRINT_KEY, FORMAT_VERSION, SCHEMA, VERSION_KEY
from rollout.schema.records import CommitRecord, RowGroup
from rollout.shard import write_shard
from rollout.storage import Storage
from rollout.verify import verify_dataset

Change = Callable[[pa.Table], pa.Table]


def record_of(path: Path) -> CommitRecord:
    """Return the record of a dataset's only shard."""
    (record,) = read_dataset(Storage.open(path)).shards
    return record


def faults_of(path: Path) -> list[tuple[str, str]]:
    report = verify_dataset(Storage.open(path))
    return [(fault.file, fault.problem) for fault in report.faults]


def _writes(field: str, change: Callable[[Any], Any]) -> Callable[[RolloutRow], None]:
    def apply(row: RolloutRow) -> None:
        setattr(row, field, change(getattr(row, field)))

    return apply


BAD_ROWS: dict[str, tuple[Callable[[RolloutRow], None], str]] = {
    "sampled logprob": (
        _writes("sampled_logprobs", lambda a: np.nextafter(a, np.float32(-9))),
        "sampled_logprob_mismatch",
    ),
    "sampled token": (_writes("token_ids", lambda a: a + 1), "sampled_not_in_support"),
    "group size": (_writes("group_size", lambda _: 0), "group_size is 0"),
    "metadata": (_writes("metadata", lambda _: "{'a': 1}"), "its metadata is no JSON"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_that_was_written_wrong_is_named(tmp_path: Path, name: str) -> None:
    # as a writer with a defect would: bytes and records agree
    change, problem = BAD_ROWS[name]
    storage = Storage.open(tmp_path / "run")
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a", "b"))
    rows = [*rows_of("a", 4), *rows_of("b", 4)]
    change(rows[6])
    record = writer.commit_part("u0", rows)
    assert record is not None
    ((file, found),) = faults_of(tmp_path / "run")
    assert file == record.file
    assert found.startswith("rollout 'b.2': ")
    assert problem in found
    assert verify_dataset(storage, rows=False).faults == []


@pytest.mark.parametrize("name", ["one", "all"])
def test_groups_that_are_mixed_up_are_named(tmp_path: Path, name: str) -> None:
    storage = Storage.open(tmp_path / "run")
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a", "b"))
    rows = [*rows_of("a", 4), *rows_of("b", 4)]
    for row in rows[6:7] if name == "one" else rows[4:]:
        row.group_id = "g.a"
    writer.commit_part("u0", rows)
    ((_, found),) = faults_of(tmp_path / "run")
    assert (
        found
        == {
            "one": "rollout 'b.2': is of group g.a, its prompt's rows before it are of g.b",
            "all": "two of its prompts have the same group_id",
        }[name]
    )


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    field = SCHEMA.field(name)
    return table.set_column(SCHEMA.get_field_index(name), field, values.cast(field.type))


def _plus_one(name: str) -> Change:
    return lambda table: _replaced(table, name, pc.add(table[name], 1))


def _no_tail_mass(table: pa.Table) -> pa.Table:
    return _replaced(table, "tail_mass", pa.nulls(table.num_rows))


def _deep_metadata(table: pa.Table) -> pa.Table:
    return _replaced(table, "metadata", pa.array(["[" * 100_000] * table.num_rows))


def _other_words(table: pa.Table) -> pa.Table:
    fields = [field.with_metadata({"unit": "other"}) for field in SCHEMA]
    return table.cast(pa.schema(fields, metadata=SCHEMA.metadata))


FOREIGN: dict[str, tuple[Change, str]] = {
    "prompt tokens": (_plus_one("num_prompt_tokens"), "its counts say (8, 4, 47), its lists hold"),
    "tokens": (_plus_one("num_tokens"), "its counts say (7, 5, 47), its lists hold (7, 4, 47)"),
    "entries": (_plus_one("num_support_entries"), "its counts say (7, 4, 48), its lists hold"),
    "tail mass": (_no_tail_mass, "no tail_mass beside its support"),
    "metadata": (_deep_metadata, "its metadata is no JSON: maximum recursion depth"),
    "schema": (_other_words, "its schema is not the one of its format version"),
}


def replace_shard(path: Path, data: bytes) -> None:
    """Put other bytes in place of a dataset's only shard, and let its record tell of them."""
    record = record_of(path)
    (path / str(record.file)).write_bytes(data)
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    group = RowGroup(offset=4, size=end - 4, blake3=blake3(data[4:end]).hexdigest(), rows=4)
    changed = dataclasses.replace(
        record,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        row_groups=(group,),
        footer_blake3=blake3(data[end:]).hexdigest(),
    )
    (path / "_commit/u000000-00000.json.gz").write_bytes(changed.to_bytes())


@pytest.mark.parametrize("name", FOREIGN)
def test_what_another_program_wrote_is_checked(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run"
    write(str(path), [rows_of("a", 4)])
    record = record_of(path)
    change, problem = FOREIGN[name]
    sink = pa.BufferOutputStream()
    table = change(pq.read_table(path / str(record.file)))
    with pq.ParquetWriter(sink, table.schema) as writer:
        fingerprint = read_dataset(Storage.open(path)).record.fingerprint
        keys = {VERSION_KEY: str(FORMAT_VERSION), FINGERPRINT_KEY: fingerprint}
        writer.add_key_value_metadata(keys)
        writer.write_table(table)
    replace_shard(path, sink.getvalue().to_pybytes())
    ((file, found),) = faults_of(path)
    assert file == record.file
    assert problem in found


@pytest.mark.parametrize("name", ["prompt_token_ids", "token_ids", "draw_entries"])
def test_the_largest_id_counts_wherever_it_stands(tmp_path: Path, name: str) -> None:
    storage = Storage.open(tmp_path / "run")
    writer = open_writer(storage)
    writer.append_plan(plan("u0", "a"))
    row = make_row("a", kind="none", draws=2)
    largest = np.uint64(200_000)
    ids = getattr(row, name)
    ids[-1] = largest | np.uint64(0xBF800000 << 32) if name == "draw_entries" else largest
    record = writer.commit_part("u0", [row])
    assert record is not None
    assert record.max_token_id == largest
    assert verify_dataset(storage).faults == []


def test_a_shard_of_another_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run"
    write(str(path), [rows_of("a", 4)])
    write_shard(tmp_path / "other", rows_of("a", 4), "ab" * 32)
    replace_shard(path, (tmp_path / "other").read_bytes())
    ((_, found),) = faults_of(path)
    assert found == "it was written by a run with another fingerprint"


def test_a_page_that_was_damaged_before_its_commit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run"
    write(str(path), [rows_of("a", 4)])
    record = record_of(path)
    data = bytearray((path / str(record.file)).read_bytes())
    column = pq.read_metadata(path / str(record.file)).row_group(0).column(0)
    data[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    replace_shard(path, bytes(data))
    ((_, found),) = faults_of(path)
    assert found.startswith("row group 0 is damaged: ")


def test_supports_out_of_order_or_with_an_id_twice() -> None:
    listed = make_row(lengths=[1, 4, 2]).support_entries
    assert listed is not None
    offsets = np.array([0, 1, 5, 7])
    entries = np.concatenate([np.sort(listed[a:b]) for a, b in itertools.pairwise(offsets)])
    for start, end in ((1, 5), (5, 7)):
        wrong = entries.copy()
        wrong[start:end] = wrong[start:end][::-1]
        assert verify_shard.order_problem(wrong, offsets) == "a support is not in canonical order"
    # the same number in two tokens is fine, twice in one is not
    falling = np.array([9, 8], np.uint64)
    assert verify_shard.order_problem(falling, np.array([0, 2])) is not None
    assert verify_shard.order_problem(falling, np.array([0, 1, 2])) is None
    last = np.array([7, 9, 8], np.uint64)
    assert verify_shard.order_problem(last, np.array([0, 0, 3])) is not None  # an empty one first
    assert verify_shard.order_problem(last, np.array([0, 2, 3, 3])) is None  # an empty one last
    ids = np.array([7, 7, 8, 9, 10, 7, 8], np.uint64) | np.uint64(0xBF000000_00000000)
    assert verify_shard.order_problem(ids, offsets) is None
    ids[2] = ids[1] + (np.uint64(1) << np.uint64(32))
    ids[3:5] += np.uint64(2) << np.uint64(32)
    assert verify_shard.order_problem(ids, offsets) == "a support lists an id twice"
