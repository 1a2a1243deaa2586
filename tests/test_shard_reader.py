"""Row groups come by one request each, vouched for by digest and page checksums."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import pytest
from dataset_tools import STORAGES, new_storage
from fake_store import ClientError, FakeStore
from loader_cases import group, ids_of, open_loader, write
from s3_server import s3_server

from rollout import shard_footers, shard_reader
from rollout.dataset import read_dataset
from rollout.errors import DatasetError
from rollout.sparse_file import SparseFile, joined_ranges
from rollout.storage import Storage


def three_parts(url: str, **options: Any) -> int:
    """Nine groups in three shards; returns the number of row groups."""
    parts = [[row for i in range(n, n + 3) for row in group(i)] for n in (0, 3, 6)]
    write(url, parts, row_group_bytes=2000)
    return sum(len(record.row_groups) for record in read_dataset(Storage.open(url)).shards)


@pytest.fixture
def store() -> tuple[str, int]:
    storage = new_storage("fakestore", Path("/"))
    return storage.url, three_parts(storage.url)


def count_gets() -> Counter[str]:
    """Count the requests for shards from here on."""
    requests: Counter[str] = Counter()

    def count(operation: str, path: str) -> None:
        if path.endswith(".parquet"):
            assert operation == "get"
            requests[path] += 1

    FakeStore.fail = count
    return requests


def test_one_request_a_row_group_and_one_a_footer(store: tuple[str, int]) -> None:
    url, row_groups = store
    requests = count_gets()
    loader = open_loader(url)
    assert sorted(requests.values()) == [1, 1, 1]
    first = ids_of(loader)
    assert len(first) == 36
    assert requests.total() == row_groups + 3
    requests.clear()
    assert sorted(ids_of(loader)) == sorted(first)
    # footers and scalars are kept
    assert requests.total() == row_groups
    requests.clear()
    # a worker process is given the footers
    assert sorted(ids_of(copy.copy(open_loader(url)))) == sorted(first)
    assert requests.total() == 3 + row_groups


def test_footers_beyond_the_bound_are_asked_for_again(
    store: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, row_groups = store
    largest = max(
        record.size - sum((group.offset + group.size) for group in record.row_groups[-1:])
        for record in read_dataset(Storage.open(url)).shards
    )
    monkeypatch.setattr(shard_footers, "_KEPT_BYTES", largest)
    requests = count_gets()
    loader = open_loader(url)
    assert len(loader._kept_footers) == 1
    assert len(ids_of(loader)) == 36
    assert requests.total() == 3 + row_groups + 2


def flip_in_last_footer(storage: Storage) -> str:
    """Flip a bit of the footer of a dataset's last shard, and return its name."""
    record = read_dataset(storage).shards[-1]
    assert record.file is not None
    data = bytearray(storage.read_bytes(record.file))
    # in the footer, before its length and the magic bytes
    data[-300] ^= 1
    storage.delete(record.file)
    storage.write_bytes(record.file, bytes(data))
    return record.file


@pytest.mark.parametrize("kind", STORAGES)
def test_a_footer_that_no_first_batch_needs_is_checked_before_it(tmp_path: Path, kind: str) -> None:
    storage = new_storage(kind, tmp_path)
    three_parts(storage.url)
    settings: dict[str, Any] = {"shuffle": False, "groups_per_step": 1}
    first = next(iter(open_loader(storage.url, **settings)))
    assert set(first.rollout_ids) <= {f"p0.{i}" for i in range(4)}
    file = flip_in_last_footer(storage)
    with pytest.raises(DatasetError, match=f"{file}: its footer changed after it was committed"):
        open_loader(storage.url, **settings)


def test_a_rank_reads_few_bytes_of_other_ranks_row_groups(store: tuple[str, int]) -> None:
    url, row_groups = store
    settings: dict[str, Any] = {"groups_per_step": 3, "splits": 3, "world_size": 3}
    loaders = [open_loader(url, rank=rank, **settings) for rank in range(3)]
    requests: Counter[str] = Counter()
    FakeStore.fail = lambda operation, path: requests.update([path])
    ids = [ids_of(loader) for loader in loaders]
    assert sorted(chain.from_iterable(ids)) == sorted(
        f"p{g}.{i}" for g in range(9) for i in range(4)
    )
    # whole row groups are read once, some twice where two ranks meet; the rest is scalars
    assert requests.total() <= 3 * row_groups + 2 * row_groups


def test_a_request_that_fails_is_repeated(
    store: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    url, _ = store
    loader = open_loader(url)
    seen: Counter[str] = Counter()

    def fail_once(operation: str, path: str) -> None:
        seen[path] += 1
        if seen[path] == 1:
            raise ClientError("SlowDown")

    FakeStore.fail = fail_once
    assert len(ids_of(loader)) == 36


def test_row_groups_are_kept_by_digest(store: tuple[str, int], tmp_path: Path) -> None:
    url, row_groups = store
    want = ids_of(open_loader(url, cache_folder=tmp_path / "cache"))
    assert len(list((tmp_path / "cache").iterdir())) == row_groups
    requests = count_gets()
    assert ids_of(open_loader(url, cache_folder=tmp_path / "cache")) == want
    # the footers
    assert requests.total() == 3
    # a damaged copy is fetched again, and mended
    for kept in (tmp_path / "cache").iterdir():
        data = kept.read_bytes()
        kept.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert ids_of(open_loader(url, cache_folder=tmp_path / "cache")) == want
    requests.clear()
    assert ids_of(open_loader(url, cache_folder=tmp_path / "cache")) == want
    assert requests.total() == 3


def test_s3_in_ranges(tmp_path: Path) -> None:
    three_parts(str(tmp_path / "run"))
    with s3_server("bucket") as endpoint:
        options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": endpoint}}
        fs = fsspec.filesystem("s3", **options)
        fs.put(str(tmp_path / "run") + "/", "bucket/run/", recursive=True)
        loader = open_loader("s3://bucket/run", storage_options=options)
        local = open_loader(str(tmp_path / "run"))
        assert ids_of(loader) == ids_of(local)
        # a state is taken up there too
        resumed = open_loader("s3://bucket/run", storage_options=options)
        resumed.load_state_dict(loader.state_dict())
        assert ids_of(resumed) == ids_of(local)
        file = flip_in_last_footer(Storage.open("s3://bucket/run", options))
        with pytest.raises(DatasetError, match=f"{file}: its footer changed after"):
            open_loader("s3://bucket/run", storage_options=options)


def test_a_row_group_beyond_arrows_offsets_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_parts(str(tmp_path))
    monkeypatch.setattr(shard_reader, "MAX_ELEMENTS", 20)
    with pytest.raises(
        DatasetError,
        match=r"data/u0.*\.parquet: row group \d+ holds \d+ values in .*, expected at most 20",
    ):
        list(open_loader(str(tmp_path)))


def test_pages_of_a_shard_of_the_right_size_are_checked(tmp_path: Path) -> None:
    three_parts(str(tmp_path))
    loader = open_loader(str(tmp_path), shuffle=False, prefetch_bytes=0)
    batches = iter(loader)
    next(batches)
    for path in (tmp_path / "data").iterdir():
        data = bytearray(path.read_bytes())
        for record in loader._datasets[0].records:
            if str(record.file).endswith(path.name):
                for found in record.row_groups[-1:]:
                    data[found.offset + found.size // 2] ^= 1
        shutil.copy(path, tmp_path / "copy")
        path.unlink()
        path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"row group \d+ has digest .*: it changed after"):
        list(batches)


def test_a_sparse_file_reads_what_was_fetched_and_nothing_else() -> None:
    file = SparseFile({10: b"abcdef", 100: b"xyz"}, 1000)
    file.seek(12)
    assert bytes(file.read(3)) == b"cde"
    assert file.tell() == 15
    file.seek(-900, 2)
    assert bytes(file.read(3)) == b"xyz"
    for place, size in ((0, 1), (14, 3), (103, 1), (9, 2)):
        file.seek(place)
        with pytest.raises(OSError, match=f"bytes {place} to {place + size} were not fetched"):
            file.read(size)


def test_ranges_with_small_gaps_are_joined() -> None:
    ranges = [(100, 10), (0, 10), (12, 5), (17, 3), (50, 1)]
    assert joined_ranges(ranges, 2) == [(0, 20), (50, 1), (100, 10)]
    assert joined_ranges(ranges, 1000) == [(0, 110)]
    assert joined_ranges(ranges, 0) == [(0, 10), (12, 8), (50, 1), (100, 10)]
