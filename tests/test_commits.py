"""Records read side by side: their order, what fails in between, and what is held at a time."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rollout.commits import read_ahead
from rollout.errors import DatasetError
from rollout.storage import Storage

NAMES = [f"_commit/{number:03d} [1] \u00e9.json" for number in range(100)]


def write(storage: Storage, missing: str) -> None:
    for name in NAMES:
        if name != missing:
            storage.write_bytes(name, name.encode())


@pytest.mark.parametrize("where", ["local", "memory"])
def test_files_come_in_order_and_errors_in_their_place(where: str, tmp_path: Path) -> None:
    url = str(tmp_path / "a [b] *") if where == "local" else f"memory://{uuid.uuid4().hex}/a [b]"
    storage = Storage.open(url)
    write(storage, NAMES[37])
    found = list(read_ahead(storage, NAMES))
    assert [name for name, _ in found] == NAMES
    assert isinstance(found[37][1], FileNotFoundError)
    del found[37]
    assert all(data == name.encode() for name, data in found)
    assert list(read_ahead(storage, [])) == []


def test_what_failed_is_read_again_and_what_stays_broken_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = Storage.open(f"memory://{uuid.uuid4().hex}", retry_seconds=0.01)
    write(storage, "")
    original, calls = MemoryFileSystem.cat_file, dict.fromkeys(NAMES, 0)

    def cat_file(self: Any, path: str, *args: Any, **kwargs: Any) -> bytes:
        name = path.split("/", 2)[-1]
        calls[name] += 1
        if name == NAMES[5] or (name == NAMES[60] and calls[name] == 1):
            raise OSError("busy")
        return bytes(original(self, path, *args, **kwargs))

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    found = dict(read_ahead(storage, NAMES))
    assert found[NAMES[60]] == NAMES[60].encode()
    assert isinstance(found[NAMES[5]], DatasetError)
    assert f"can't read {NAMES[5]}: OSError: busy" in str(found[NAMES[5]])
    assert sum(isinstance(data, bytes) for data in found.values()) == 99


def test_only_a_few_files_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage.open(f"memory://{uuid.uuid4().hex}")
    write(storage, "")
    asked: list[str] = []
    original = Storage.read_many

    def read_many(self: Storage, names: Any) -> Any:
        asked.extend(names)
        return original(self, names)

    monkeypatch.setattr(Storage, "read_many", read_many)
    for taken, _ in enumerate(read_ahead(storage, NAMES), start=1):
        assert len(asked) - taken < 3 * 16
    assert sorted(asked) == NAMES
