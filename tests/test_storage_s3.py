"""The storage and the dataset on an S3 server, through s3fs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import NoCredentialsError  # type: ignore[import-untyped]
from dataset_tools import covered, data_files, open_writer, rows_of, stored_ids
from s3_server import s3_server
from synthetic import make_rejection, plan, realistic_rows

from rollout.dataset import read_dataset
from rollout.errors import DatasetError, OutputError
from rollout.shard import open_shard, write_shard
from rollout.storage import Storage


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server("bucket") as url:
        yield url


def s3_options(endpoint: str, **options: Any) -> dict[str, Any]:
    client = {"endpoint_url": endpoint, "region_name": "us-east-1"}
    return {"key": "testing", "secret": "s3cr3t-value", "client_kwargs": client} | options


@pytest.fixture
def url() -> str:
    return f"s3://bucket/{uuid.uuid4().hex}/run [7b] \u00e9"


@pytest.fixture
def storage(endpoint: str, url: str) -> Storage:
    return Storage.open(url, s3_options(endpoint), retry_seconds=5)


@pytest.fixture
def other(endpoint: str, url: str) -> Storage:
    """Another client of the same folder, with caches of its own."""
    return Storage.open(url, s3_options(endpoint, default_block_size=2**20), retry_seconds=5)


def test_probe_and_exclusive_create(storage: Storage) -> None:
    storage.probe()
    assert storage.exclusive
    assert storage.list("") == []
    assert storage.create_exclusive("a/x", b"first")
    assert not storage.create_exclusive("a/x", b"second")
    assert storage.read_bytes("a/x") == b"first"


def test_racing_clients_have_one_winner(storage: Storage, other: Storage) -> None:
    def race(client: Storage) -> list[bool]:
        data = uuid.uuid4().bytes
        return [client.create_exclusive(f"r/{i}", data) for i in range(20)]

    with ThreadPoolExecutor(4) as pool:
        wins = list(pool.map(race, [storage, other, storage, other]))
    assert [sum(column) for column in zip(*wins, strict=True)] == [1] * 20


def test_another_clients_writes_are_seen_at_once(storage: Storage, other: Storage) -> None:
    storage.write_bytes("d/a", b"1")
    assert storage.list("d") == other.list("d") == ["a"]
    storage.write_bytes("d/b", b"2")
    assert other.list("d") == ["a", "b"]
    assert other.size("d/b") is not None
    other.delete("d/a")
    assert storage.list("d") == ["b"]
    assert storage.size("d/a") is None
    storage.delete("d/a")


def test_a_shard_is_streamed_without_reading_all_of_it(storage: Storage, tmp_path: Path) -> None:
    rows = realistic_rows(6, tokens=256)
    path = tmp_path / "shard"
    info = write_shard(path, rows, "f", row_group_bytes=400_000)
    assert len(info.row_groups) >= 4
    storage.put_file(path, "data/x.parquet")
    stream = storage.local_or_stream("data/x.parquet")
    assert not isinstance(stream, str)
    fetched: list[int] = []
    fetch = stream.cache.fetcher  # type: ignore[attr-defined]

    def counted(start: int, end: int) -> bytes:
        data: bytes = fetch(start, end)
        fetched.append(len(data))
        return data

    stream.cache.fetcher = counted  # type: ignore[attr-defined]
    with open_shard(stream) as shard:
        table = shard.read_row_group(1)
    first = info.row_groups[0].rows
    assert table["rollout_id"][0].as_py() == rows[first].rollout_id
    assert sum(fetched) < info.row_groups[1].size + 100_000 < info.size


def test_dataset_with_a_race_an_orphan_and_a_resume(
    storage: Storage, other: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner = open_writer(storage)
    winner.append_plan(plan("u0", "a", "b", "c"))
    loser = open_writer(other)
    upload = loser._upload

    def interrupted(*args: Any) -> Any:
        record = upload(*args)
        monkeypatch.undo()
        winner.commit_part("u0", rows_of("a b"), [make_rejection("x")])
        return record

    monkeypatch.setattr(loser, "_upload", interrupted)
    record = loser.commit_part("u0", rows_of("b c"), [make_rejection("x"), make_rejection("y")])
    assert record is not None
    assert (record.part, record.keys) == (1, (("c", 0), ("c", 1)))
    view = read_dataset(storage)
    assert stored_ids(view) == ["a.0", "a.1", "b.0", "b.1", "c.0", "c.1"]
    assert [item.prompt_key for item in view.rejected] == ["x", "y"]
    resumed = open_writer(other)
    assert covered(resumed, "a b c") == {(p, i) for p in "abc" for i in (0, 1)}
    assert resumed.remove_orphans() == 2
    assert data_files(storage) == [commit.file for commit in view.commits]


@pytest.mark.parametrize(
    ("bucket", "options", "cause"),
    [
        ("nosuchbucket", {}, "bucket does not exist"),
        ("bucket", {"key": None, "secret": None}, "Unable to locate credentials"),
    ],
    ids=["no bucket", "no credentials"],
)
def test_probe_names_the_cause(
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    bucket: str,
    options: dict[str, Any],
    cause: str,
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    storage = Storage.open(f"s3://{bucket}/run", s3_options(endpoint, **options))
    with pytest.raises(OutputError, match=cause):
        storage.probe()


def test_credentials_that_were_never_there_are_not_waited_for(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    url = "s3://bucket/run"
    storage = Storage.open(url, s3_options(endpoint, key=None, secret=None), retry_seconds=60)
    monkeypatch.setattr(storage.given_up, "wait", lambda timeout: pytest.fail("it waits"))
    with pytest.raises(DatasetError, match=r"can't read x: .* Unable to locate credentials"):
        storage.read_bytes("x")
    # those that were there may come back: an instance's are fetched anew every few hours
    storage = Storage.open(url, s3_options(endpoint), retry_seconds=60)
    storage.write_bytes("x", b"1")
    answers = iter([NoCredentialsError(), None])

    def cat_file(*_: Any, **__: Any) -> bytes:
        if error := next(answers):
            raise error
        return b"1"

    monkeypatch.setattr(storage._fs, "cat_file", cat_file)
    monkeypatch.setattr(storage, "_connect", lambda *, fresh: None)
    assert storage.read_bytes("x") == b"1"
