"""Storage on local files, in memory, and on an object store that fails."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tenacity
from dataset_tools import STORAGES, new_storage
from fake_store import ClientError, FakeStore, LockedStore

from rollout.errors import DatasetError, OutputError
from rollout.storage import Storage

SECRET = "s3cr3t-value"


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    yield new_storage(request.param, tmp_path)
    FakeStore.reset()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """The object store, with waits between retries that take no time."""
    monkeypatch.setattr(tenacity, "wait_random_exponential", lambda **_: tenacity.wait_none())
    FakeStore.reset()
    yield Storage.open("fakestore://bucket/run", {"secret": SECRET}, retry_seconds=30)
    FakeStore.reset()


def test_create_exclusive_keeps_the_first(storage: Storage) -> None:
    assert storage.create_exclusive("a/b/x.json", b"first")
    assert not storage.create_exclusive("a/b/x.json", b"second")
    assert storage.read_bytes("a/b/x.json") == b"first"
    assert storage.list("a/b") == ["x.json"]


def test_threads_racing_to_create_have_one_winner(storage: Storage) -> None:
    gate = threading.Barrier(8)

    def race(worker: int) -> list[int]:
        won = []
        for number in range(40):
            gate.wait()
            if storage.create_exclusive(f"r/{number}", b"%d" % worker):
                won.append(number)
        return won

    if storage.url.startswith("fakestore"):
        # this one looks before it writes, as a server would under its own lock
        lock = threading.Lock()
        put = FakeStore.pipe_file

        def locked(self: FakeStore, *args: Any, **options: Any) -> None:
            with lock:
                put(self, *args, **options)

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as pool:
            patch.setattr(FakeStore, "pipe_file", locked)
            wins = list(pool.map(race, range(8)))
    else:
        with ThreadPoolExecutor(8) as pool:
            wins = list(pool.map(race, range(8)))
    assert sorted(number for won in wins for number in won) == list(range(40))
    for worker, won in enumerate(wins):
        assert all(storage.read_bytes(f"r/{number}") == b"%d" % worker for number in won)


RACER = """
import sys
from rollout.storage import Storage
storage = Storage.open(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(sum(storage.create_exclusive(f"r/{i}", sys.argv[2].encode()) for i in range(300)))
"""


def test_processes_racing_to_create_have_one_winner(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path / "out"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    wins = [int(racer.communicate()[0]) for racer in racers]
    assert sum(wins) == 300
    storage = Storage.open(tmp_path / "out")
    written = [storage.read_bytes(f"r/{i}") for i in range(300)]
    assert [written.count(b"a"), written.count(b"b")] == wins


def test_write_bytes_replaces(storage: Storage) -> None:
    storage.write_bytes("_lease/u", b"one")
    storage.write_bytes("_lease/u", b"two!")
    assert storage.read_bytes("_lease/u") == b"two!"


def test_put_file_uploads_and_leaves_nothing_else(storage: Storage, tmp_path: Path) -> None:
    local = tmp_path / "shard.part"
    data = os.urandom(300_000)
    local.write_bytes(data)
    storage.put_file(local, "data/u-00000-ab.parquet")
    local.unlink()
    assert storage.read_bytes("data/u-00000-ab.parquet") == data
    assert storage.list("data") == ["u-00000-ab.parquet"]
    source = storage.local_or_stream("data/u-00000-ab.parquet")
    if isinstance(source, str):
        assert Path(source).read_bytes() == data
    else:
        source.seek(1000)
        assert source.read(10) == data[1000:1010]


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM])
def test_put_file_copies_where_it_may_not_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    local = tmp_path / "shard.part"
    local.write_bytes(b"data")
    link = os.link

    def picky(source: Path, target: Path) -> None:
        if source == local:
            raise OSError(code, os.strerror(code))
        link(source, target)

    monkeypatch.setattr(os, "link", picky)
    storage = Storage.open(tmp_path / "out")
    storage.put_file(local, "data/x")
    assert storage.read_bytes("data/x") == b"data"
    assert not os.path.samefile(local, tmp_path / "out/data/x")
    assert list(storage.scratch_folder().iterdir()) == []


def test_put_file_does_not_replace_a_local_file(tmp_path: Path) -> None:
    local = tmp_path / "shard.part"
    local.write_bytes(b"data")
    storage = Storage.open(tmp_path / "out", retry_seconds=0)
    assert storage.create_exclusive("data/x", b"other")
    with pytest.raises(OutputError, match="can't write data/x"):
        storage.put_file(local, "data/x")
    assert storage.read_bytes("data/x") == b"other"


def test_local_files_have_the_usual_permissions(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    storage = Storage.open(tmp_path / "out")
    storage.create_exclusive("data/x", b"")
    assert (tmp_path / "out/data/x").stat().st_mode == plain.stat().st_mode


def test_list_names_files_only_and_sees_other_clients(storage: Storage) -> None:
    assert storage.list("data") == []
    for name in ("data/b", "data/a", "data/deep/c", "top"):
        storage.create_exclusive(name, b"x")
    assert storage.list("data") == ["a", "b"]
    other = Storage.open(storage.url)
    other.create_exclusive("data/0", b"x")
    assert storage.list("data") == ["0", "a", "b"]
    assert storage.size("data/0") is not None
    other.delete("data/0")
    assert storage.list("data") == ["a", "b"]
    assert storage.size("data/0") is None


def test_missing_files(storage: Storage) -> None:
    assert storage.size("x") is None
    storage.delete("x")
    with pytest.raises(FileNotFoundError):
        storage.read_bytes("x")
    with pytest.raises(FileNotFoundError):
        storage.local_or_stream("x")


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x"])
def test_names_stay_inside_the_folder(storage: Storage, name: str) -> None:
    with pytest.raises(ValueError, match="inside the folder"):
        storage.read_bytes(name)


def test_probe_leaves_nothing(storage: Storage) -> None:
    storage.probe()
    assert storage.list("") == []


def test_probe_says_why_a_local_folder_is_no_good(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"file/out: can't create _probe.*NotADirectoryError"):
        Storage.open(tmp_path / "file" / "out").probe()


def test_unknown_protocol_is_an_output_error() -> None:
    with pytest.raises(OutputError, match="nosuch"):
        Storage.open("nosuch://bucket/run")


@pytest.mark.parametrize(
    "error", [PermissionError(f"{SECRET} is no key"), ClientError("AccessDenied"), TimeoutError()]
)
def test_a_storage_that_takes_no_connection_is_an_output_error(error: Exception) -> None:
    LockedStore.refusals[:] = [error, ZeroDivisionError("bug")]
    with pytest.raises(OutputError, match=f"lockedstore.*{type(error).__name__}") as caught:
        Storage.open("lockedstore://bucket/run", {"key": SECRET})
    assert SECRET not in str(caught.value)
    with pytest.raises(ZeroDivisionError):
        Storage.open("lockedstore://bucket/run", {"key": SECRET})


@pytest.mark.usefixtures("store")
def test_a_new_connection_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage.open("lockedstore://bucket/run", {"key": LockedStore.KEY})
    monkeypatch.setattr(LockedStore, "fail", fail_times(1, TimeoutError("slow")))
    # the network is still down when the store is asked again
    LockedStore.refusals[:] = [TimeoutError("no route")] * 2
    assert storage.create_exclusive("x", b"data")
    assert (storage.read_bytes("x"), LockedStore.refusals) == (b"data", [])


@pytest.mark.parametrize("exclusive", [True, False])
def test_probe_warns_of_storages_that_only_look_before_they_write(
    store: Storage,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    exclusive: bool,
) -> None:
    if exclusive:
        monkeypatch.setattr("rollout.storage._CONDITIONAL_PUT", {"fakestore"})
    with caplog.at_level(logging.WARNING):
        store.probe()
    assert store.exclusive is exclusive
    assert ("can't promise exclusive writes" in caplog.text) is not exclusive


def test_probe_refuses_a_store_that_overwrites(store: Storage) -> None:
    FakeStore.overwrites = True
    with pytest.raises(OutputError, match="creating a file that exists overwrites it"):
        store.probe()


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (PermissionError("read-only bucket"), "PermissionError: read-only bucket"),
        (FileNotFoundError("no such bucket"), "no such bucket"),
        (ClientError("AuthorizationHeaderMalformed"), "AuthorizationHeaderMalformed"),
        (PermissionError(f"key {SECRET} is unknown"), r"key \*\*\* is unknown"),
    ],
    ids=["read only", "no bucket", "wrong region", "secret in message"],
)
def test_probe_fails_at_once_with_the_cause(store: Storage, error: Exception, what: str) -> None:
    calls = []

    def fail(operation: str, path: str) -> None:
        calls.append(operation)
        raise error

    FakeStore.fail = fail
    with pytest.raises(OutputError, match=what) as caught:
        store.probe()
    assert calls == ["put"]
    assert SECRET not in str(caught.value)


def fail_times(times: int, error: Exception) -> Callable[[str, str], None]:
    left = [times]

    def fail(operation: str, path: str) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EBUSY, "SlowDown"), TimeoutError("slow"), ClientError("InternalError")],
    ids=["busy", "timeout", "client"],
)
def test_passing_failures_are_retried(store: Storage, error: Exception) -> None:
    FakeStore.fail = fail_times(4, error)
    assert store.create_exclusive("x", b"data")
    assert store.read_bytes("x") == b"data"


def test_lasting_failures_end_with_the_cause(store: Storage) -> None:
    patient = Storage.open(store.url, retry_seconds=0)
    FakeStore.fail = fail_times(10**6, TimeoutError("slow"))
    with pytest.raises(OutputError, match="can't create x: TimeoutError: slow"):
        patient.create_exclusive("x", b"")
    with pytest.raises(DatasetError, match="can't read x: TimeoutError: slow"):
        patient.read_bytes("x")


def test_mistakes_in_the_code_are_not_retried_or_hidden(store: Storage) -> None:
    FakeStore.fail = fail_times(1, ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError):
        store.read_bytes("x")


def test_expired_credentials_are_waited_for_with_a_new_connection(
    store: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expired = PermissionError("The provided token has expired.")
    expired.__cause__ = ClientError("ExpiredToken")
    FakeStore.fail = fail_times(3, expired)
    local = tmp_path / "shard"
    local.write_bytes(b"work")
    connections = FakeStore.connections
    with caplog.at_level(logging.WARNING):
        store.put_file(local, "data/x")
    assert store.read_bytes("data/x") == b"work"
    assert FakeStore.connections == connections + 3
    assert caplog.text.count("credentials expired") == 3
    assert SECRET not in caplog.text


def test_a_put_whose_answer_got_lost_still_wins(store: Storage) -> None:
    def lose(path: str) -> None:
        FakeStore.after_put = None
        raise TimeoutError("no answer")

    FakeStore.after_put = lose
    assert store.create_exclusive("x", b"mine")
    assert store.read_bytes("x") == b"mine"
    assert not store.create_exclusive("x", b"theirs")


def test_a_short_upload_is_noticed(store: Storage, tmp_path: Path) -> None:
    def cut(path: str) -> None:
        FakeStore.objects[path] = FakeStore.objects[path][:-1]

    FakeStore.after_put = cut
    local = tmp_path / "shard"
    local.write_bytes(b"12345")
    with pytest.raises(OutputError, match="4 bytes arrived, expected 5"):
        Storage.open(store.url, retry_seconds=0).put_file(local, "data/x")


def test_secrets_are_not_shown() -> None:
    storage = Storage.open(f"fakestore://user:{SECRET}@host/run", {"secret": SECRET})
    assert SECRET not in repr(storage) + storage.url
