"""What the tests of the dataset share: storages of three kinds, and readers by records."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from fake_store import FakeStore
from synthetic import make_record, make_row

from rollout.dataset import DatasetView, DatasetWriter
from rollout.rows import RolloutRow
from rollout.schema.columns import SCHEMA
from rollout.storage import Storage
from rollout.verify import verify_dataset

STORAGES = ("local", "memory", "fakestore")


def new_storage(kind: str, folder: Path) -> Storage:
    """An empty storage of one kind, below a local folder if it is local."""
    FakeStore.reset()
    return Storage.open(
        {
            "local": str(folder / "run [7b] *\u00e9 #1"),
            "memory": f"memory://{uuid.uuid4().hex}/run [7b] \u00e9",
            "fakestore": "fakestore://bucket/run [7b] \u00e9",
        }[kind]
    )


def open_writer(storage: Storage, **inputs: Any) -> DatasetWriter:
    """Open a writer with these fingerprint inputs."""
    return DatasetWriter.open(storage, make_record(**inputs))


def rows_of(prompts: str, samples: int = 2) -> list[RolloutRow]:
    """The first samples of each of the prompts."""
    return [make_row(prompt, i) for prompt in prompts.split() for i in range(samples)]


def stored_ids(view: DatasetView) -> list[str]:
    """Every rollout_id that a reader by records sees, each file whole."""
    assert verify_dataset(view.storage).faults == []
    found: list[str] = []
    for record in view.shards:
        with view.open_shard(record) as shard:
            assert shard.schema_arrow.equals(SCHEMA, check_metadata=True)
            ids = shard.read(columns=["rollout_id"])["rollout_id"].to_pylist()
        assert ids == [f"{key}.{index}" for key, index in record.keys]
        found += ids
    return found


def covered(writer: DatasetWriter, prompts: str, most: int = 8) -> set[tuple[str, int]]:
    """What a writer says is committed of these prompts."""
    return {(p, i) for p in prompts.split() for i in range(most) if writer.covers(p, i)}


def data_files(storage: Storage) -> list[str]:
    """Every file in the data folder."""
    return [f"data/{base}" for base in storage.list("data")]
