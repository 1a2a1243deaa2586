"""Finished parts on the local disk: whole or not there, and the same when they are uploaded."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_record, make_rejection, make_row, plan

from rollout.dataset import DatasetWriter, read_dataset
from rollout.pending import PendingParts
from rollout.storage import Storage
from rollout.verify import verify_dataset


def open_writer(folder: Path) -> DatasetWriter:
    return DatasetWriter.open(Storage.open(folder / "out"), make_record(), scratch=folder / "tmp")


def kept(folder: Path, budget: int = 2**30) -> PendingParts:
    return PendingParts(folder / "kept", budget, make_record().fingerprint)


def stored(writer: DatasetWriter) -> dict[str, list[tuple[str, int]]]:
    """The rollouts of each unit."""
    assert verify_dataset(writer.storage).faults == []
    found: dict[str, list[tuple[str, int]]] = {}
    for record in read_dataset(writer.storage).shards:
        found.setdefault(record.unit, []).extend(record.keys)
    return found


def test_an_output_that_was_made_anew_gets_every_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.pending.ROW_GROUP_BYTES", 300)  # a row group for each
    rows = [
        make_row("b", 1, text="ünïcöde", reward=0.5, policy_step=7),
        make_row("a", 0, kind="top", draws=2, metadata='{"a": 1}'),
        make_row("b", 0, kind="none", stop_reason="."),
    ]
    assert kept(tmp_path).save("u0", rows, [make_rejection("c"), make_rejection("b", 2)])
    writer, plain = open_writer(tmp_path), open_writer(tmp_path / "plain")
    assert kept(tmp_path).commit_all(writer) == 3
    assert stored(writer) == {"u0": [("b", 0), ("b", 1), ("a", 0)]}
    assert [item.key for item in read_dataset(writer.storage).rejected] == [("c", None), ("b", 2)]
    plain.append_plan(plan("u0", "a", "b"))
    record = plain.commit_part("u0", rows)
    (uploaded,) = read_dataset(writer.storage).shards
    assert record is not None
    assert uploaded.sha256 == record.sha256
    assert not (tmp_path / "kept").exists()
    assert kept(tmp_path).commit_all(writer) == 0


def test_rows_go_to_the_units_that_the_output_plans_them_for(tmp_path: Path) -> None:
    rows = [make_row("a"), make_row("b")]
    assert kept(tmp_path).save("u0", rows, [make_rejection("c")])
    writer = open_writer(tmp_path)
    writer.append_plan([*plan("u0", "a", "c"), *plan("u1", "b")])
    assert kept(tmp_path).commit_all(writer) == 2
    assert stored(writer) == {"u0": [("a", 0)], "u1": [("b", 0)]}
    named = {record.unit: record.rejected_keys for record in read_dataset(writer.storage).commits}
    assert named == {"u0": (("c", None),), "u1": ()}


def test_no_more_is_kept_than_there_is_room_for(tmp_path: Path) -> None:
    pending = kept(tmp_path, budget=100_000)
    assert pending.num_bytes() == 0
    assert not pending.save("u0", [make_row("b", lengths=[13_000])], [])
    assert pending.save("u0", [make_row("a")], [])
    size = pending.num_bytes()
    assert 4_000 < size < 100_000
    assert not pending.save("u0", [make_row("b", lengths=[12_000])], [])  # 96 kB
    assert pending.num_bytes() == size
    assert [part.keys for part in pending.parts()] == [(("a", 0),)]


def test_a_part_is_on_the_disk_before_it_counts_and_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    stock = os.fsync
    folder = tmp_path / "kept"

    def sync(file: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{file}"))
        assert name.stat().st_size > 0
        synced.append((name.suffix, any(folder.glob("*.json"))))
        stock(file)

    monkeypatch.setattr(os, "fsync", sync)
    assert kept(tmp_path).save("u0", [make_row("a")], [])
    assert synced == [(".parquet", False), (".new", False)]
    assert folder.stat().st_mode & 0o77 == 0


def test_what_the_disk_does_not_take_leaves_nothing(tmp_path: Path) -> None:
    def half(path: Path, *_: Any) -> Any:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        kept(tmp_path).save("u0", [make_row("a")], [], half)
    assert list((tmp_path / "kept").iterdir()) == []


def test_what_another_process_has_uploaded_is_left_out(tmp_path: Path) -> None:
    pending = kept(tmp_path)
    assert pending.save("u0", [make_row("a")], [])
    (part,) = pending.parts()
    writer = open_writer(tmp_path)
    assert len(pending.commit(part, writer)) == 1
    assert pending.commit(part, writer) == []
    (tmp_path / "kept" / "0.json").symlink_to(tmp_path / "gone")
    assert pending.parts() == []


def test_files_whose_description_never_came_go_after_an_hour(tmp_path: Path) -> None:
    pending, writer = kept(tmp_path), open_writer(tmp_path)
    (tmp_path / "kept").mkdir()
    files = [tmp_path / "kept" / f"{name}.parquet" for name in ("old", "new")]
    for path in files:
        path.touch()
    hours = time.time() - 7200
    os.utime(files[0], (hours, hours))
    assert pending.commit_all(writer) == 0
    assert list((tmp_path / "kept").iterdir()) == [files[1]]


def test_each_output_and_run_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = {
        PendingParts.of(base, output, fingerprint, 1).folder
        for base in (None, str(tmp_path))
        for output in ("s3://a", "s3://b")
        for fingerprint in ("x", "y")
    }
    assert len(folders) == 8
    parents = {folder.parent for folder in folders}
    assert parents == {tmp_path, tmp_path / "cache/rollout/pending"}
