"""Row groups come by one request each, vouched for by digest and page checksums."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from dataset_tools import new_storage
from fake_store import ClientError, FakeStore
from loader_cases import group, ids_of, open_loader, write
from s3_server import s3_server
from torch import Tensor

from rollout import shard_reader
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


def test_one_request_a_row_group_and_one_a_footer(store: tuple[str, int]) -> None:
    url, row_groups = store
    loader = open_loader(url)
    requests: Counter[str] = Counter()

    def count(operation: str, path: str) -> None:
        assert operation == "get"
        requests[path] += 1

    FakeStore.fail = count
    first = ids_of(loader)
    assert len(first) == 36
    assert requests.total() == row_groups + 3
    requests.clear()
    assert sorted(ids_of(loader)) == sorted(first)
    # footers and scalars are kept
    assert requests.total() == row_groups


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
    assert requests.total() <= 3 * (row_groups + 3) + 2 * row_groups


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
    requests: Counter[str] = Counter()
    loader = open_loader(url, cache_folder=tmp_path / "cache")
    FakeStore.fail = lambda operation, path: requests.update([path])
    assert ids_of(loader) == want
    assert requests.total() == 3
    # a damaged copy is fetched again, and mended
    for copy in (tmp_path / "cache").iterdir():
        data = copy.read_bytes()
        copy.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert ids_of(open_loader(url, cache_folder=tmp_path / "cache")) == want
    requests.clear()
    assert ids_of(open_loader(url, cache_folder=tmp_path / "cache")) == want
    assert not any(path.endswith("0.parquet") and n > 1 for path, n in requests.items())


def test_s3_in_ranges(tmp_path: Path) -> None:
    three_parts(str(tmp_path / "run"))
    with s3_server("bucket") as endpoint:
        options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": endpoint}}
        fs = fsspec.filesystem("s3", **options)
        fs.put(str(tmp_path / "run") + "/", "bucket/run/", recursive=True)
        loader = open_loader("s3://bucket/run", storage_options=options)
        local = open_loader(str(tmp_path / "run"))
        assert ids_of(loader) == ids_of(local)
        # in a spawned process too, where the filesystem is made anew
        resumed = open_loader("s3://bucket/run", storage_options=options)
        resumed.load_state_dict(loader.state_dict())
        assert ids_of(resumed) == ids_of(local)


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


@pytest.mark.parametrize("piece_bytes", [1, 400])
def test_pieces_of_a_row_group_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    kinds: list[dict[str, Any]] = [
        {"kind": "top", "draws": 2},
        {"kind": "none"},
        {"kind": "none", "draws": 3},
        {},
    ]
    rows = [row for i, fields in enumerate(kinds * 2) for row in group(i, **fields)]
    write(str(tmp_path), [rows])
    (whole,) = open_loader(str(tmp_path), groups_per_step=8, token_budget=10_000)
    monkeypatch.setattr(shard_reader, "_PIECE_BYTES", piece_bytes)
    (pieces,) = open_loader(str(tmp_path), groups_per_step=8, token_budget=10_000)
    assert sorted(whole.rollout_ids) == sorted(row.rollout_id for row in rows)
    for field in dataclasses.fields(whole):
        want, got = getattr(whole, field.name), getattr(pieces, field.name)
        same = torch.equal(got, want) if isinstance(want, Tensor) else got == want
        assert same, field.name


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
