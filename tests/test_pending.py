"""Kept parts that are damaged: named, with what to do, and never uploaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from dataset_tools import open_writer, rows_of
from synthetic import plan

from rollout.dataset import read_dataset
from rollout.errors import DatasetError
from rollout.pending import PendingParts
from rollout.storage import Storage


def _flip_a_page(shard: Path, description: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)


def _cut_the_shard(shard: Path, description: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1])


def _change_a_sample(shard: Path, description: Path) -> None:
    found = json.loads(description.read_text())
    found["keys"][0][1] += 5
    description.write_text(json.dumps(found))


def _name_a_rollout_less(shard: Path, description: Path) -> None:
    found = json.loads(description.read_text())
    del found["keys"][-1]
    description.write_text(json.dumps(found))


def _cut_the_description(shard: Path, description: Path) -> None:
    description.write_text(description.read_text()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip_a_page, "can't be uploaded: "),
        (_cut_the_shard, "can't be uploaded: shard: not a readable parquet file"),
        (_change_a_sample, "can't be uploaded: it holds other rollouts than its description says"),
        (_name_a_rollout_less, "can't be uploaded: it has 4 rollouts, expected 3"),
        (_cut_the_description, "damaged: "),
    ],
    ids=lambda made: getattr(made, "__name__", None),
)
def test_a_damaged_part_is_named_and_stays(
    tmp_path: Path, damage: Callable[[Path, Path], None], message: str
) -> None:
    writer = open_writer(Storage.open(tmp_path / "out"))
    writer.append_plan(plan("u0", "a", "b"))
    pending = PendingParts(tmp_path / "kept", 2**20, writer.record.fingerprint)
    assert pending.save("u0", rows_of("a b"), [])
    (description,) = pending.folder.glob("*.json")
    shard = description.with_suffix(".parquet")
    damage(shard, description)
    with pytest.raises(DatasetError) as found:
        pending.commit_all(writer)
    said = str(found.value)
    assert said.startswith((f"{shard}: {message}", f"{description}: {message}"))
    assert "remove it and " in said
    assert "sampled again" in said
    assert read_dataset(writer.storage).shards == ()
    # what the message says helps
    shard.unlink()
    description.unlink()
    assert pending.commit_all(writer) == 0
