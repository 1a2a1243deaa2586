"""The cache of row groups: bounded, whole, in order of use, and shared by processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
from pathlib import Path

import pytest
from blake3 import blake3

from rollout.errors import ConfigError
from rollout.row_group_cache import RowGroupCache


def content(number: int, size: int = 1000) -> bytes:
    return random.Random(number).randbytes(size)


def digest(data: bytes) -> str:
    return blake3(data).hexdigest()


def put(cache: RowGroupCache, number: int, size: int = 1000) -> str:
    data = content(number, size)
    cache.put(digest(data), data)
    return digest(data)


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    cache = RowGroupCache(tmp_path, 5000)
    names = [put(cache, number) for number in range(5)]
    for age, name in enumerate(names):
        os.utime(tmp_path / name, (age, age))
    assert cache.get(names[0]) == content(0)
    names.append(put(cache, 5))
    assert {path.name for path in tmp_path.iterdir()} == set(names) - {names[1]}
    assert cache.get(names[1]) is None


def test_the_bound_holds_after_every_addition(tmp_path: Path) -> None:
    cache = RowGroupCache(tmp_path, 10_000)
    rng = random.Random(0)
    for number in range(60):
        put(cache, number, rng.randrange(1, 4000))
        assert used(tmp_path) <= 10_000
    assert used(tmp_path) > 6000


def test_a_row_group_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    cache = RowGroupCache(tmp_path, 500)
    assert cache.get(put(cache, 0)) is None
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_removed_and_never_returned(tmp_path: Path) -> None:
    cache = RowGroupCache(tmp_path, 5000)
    name = put(cache, 0)
    (tmp_path / name).write_bytes(content(0)[:-1])
    assert cache.get(name) is None
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(bytes(9000))
    cache = RowGroupCache(tmp_path, 3000)
    names = [put(cache, number) for number in range(5)]
    assert (tmp_path / "notes.txt").exists()
    assert [cache.get(name) is not None for name in names].count(True) == 3


def test_what_a_killed_process_left_half_written_is_removed_later(tmp_path: Path) -> None:
    stale, fresh = (tmp_path / f"{'a' * 64}.{c * 32}.part" for c in "bc")
    for path in (stale, fresh):
        path.write_bytes(bytes(100))
    os.utime(stale, (1, 1))
    put(RowGroupCache(tmp_path, 5000), 0)
    assert not stale.exists()
    assert fresh.exists()


def test_a_full_disk_is_told_once_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = RowGroupCache(tmp_path, 5000)
    kept = put(cache, 0)

    def fail(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with caplog.at_level(logging.WARNING):
        put(cache, 1)
        put(cache, 2)
    assert caplog.text.count("no longer written to: [Errno 28] No space left") == 1
    assert cache.get(kept) == content(0)


def hammer(folder: Path, seed: int) -> None:
    """Read and add row groups in a random order, as a rank would."""
    cache = RowGroupCache(folder, 64_000)
    rng = random.Random(seed)
    for _ in range(400):
        number = rng.randrange(120)
        data = cache.get(digest(content(number)))
        if data is None:
            put(cache, number)
        else:
            assert data == content(number)


def test_a_folder_that_can_not_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cache_folder .*/file/cache can't be made: Not a dir"):
        RowGroupCache(tmp_path / "file" / "cache", 5000)


def test_processes_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=hammer, args=(tmp_path, seed)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    # 1/64 of the bound for each process
    assert 40_000 < used(tmp_path) <= 67_000
    assert all(digest(path.read_bytes()) == path.name for path in tmp_path.iterdir())
