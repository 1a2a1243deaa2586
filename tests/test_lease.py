"""Leases with a clock that the test moves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dataset_tools import STORAGES, new_storage
from fake_store import FakeStore
from waiting import wait_for

from rollout.errors import DatasetError, OutputError
from rollout.lease import Leases, has_died, process_name
from rollout.storage import Storage


class Clock:
    """Seconds since the epoch, moved by hand."""

    now = 1_000.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    yield new_storage(request.param, tmp_path)
    FakeStore.reset()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def leases(storage: Storage, clock: Clock, owner: str) -> Leases:
    return Leases(storage, seconds=60, owner=owner, clock=clock)


def test_one_of_two_holds_a_unit(storage: Storage, clock: Clock) -> None:
    a, b = leases(storage, clock, "a"), leases(storage, clock, "b")
    assert a.acquire("u0")
    assert not b.acquire("u0")
    assert b.acquire("u1")
    assert a.acquire("u0")
    assert (sorted(a.held), sorted(b.held)) == (["u0"], ["u1"])
    holder = b.holder("u0")
    assert holder is not None
    assert (holder.owner, holder.expires_at) == ("a", 1_060.0)
    a.release("u0")
    assert b.holder("u0") is None
    assert b.acquire("u0")
    assert storage.list("_lease") == ["u0", "u1"]


def test_an_expired_lease_is_taken_over(storage: Storage, clock: Clock) -> None:
    a, b = leases(storage, clock, "a"), leases(storage, clock, "b")
    assert a.acquire("u0")
    clock.now += 59
    assert not b.acquire("u0")
    clock.now += 2
    assert b.acquire("u0")
    # the first owner notices, and does not take back or delete what is not its own
    a.renew()
    assert a.held == frozenset()
    a.release("u0")
    holder = a.holder("u0")
    assert holder is not None
    assert holder.owner == "b"


def test_renewed_leases_last(storage: Storage, clock: Clock) -> None:
    a, b = leases(storage, clock, "a"), leases(storage, clock, "b")
    assert a.acquire("u0")
    for _ in range(10):
        clock.now += 30
        a.renew()
        assert not b.acquire("u0")
    assert sorted(a.held) == ["u0"]


def test_a_lease_ends_at_its_time_and_is_free_then(storage: Storage, clock: Clock) -> None:
    a, b = leases(storage, clock, "a"), leases(storage, clock, "b")
    assert b.is_free("u0")
    assert a.acquire("u0")
    assert not a.is_free("u0")  # of its owner, too
    clock.now += 60
    assert a.is_free("u0")
    assert b.acquire("u0")


def test_one_that_is_held_is_taken_anew(storage: Storage, clock: Clock) -> None:
    a, b = leases(storage, clock, "a"), leases(storage, clock, "b")
    assert a.acquire("u0")
    clock.now += 50
    assert a.acquire("u0")
    clock.now += 50
    assert not b.acquire("u0")


def test_leases_are_written_again_after_a_third_of_their_time(
    storage: Storage, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[float] = []
    stock = Storage.write_bytes

    def write(self: Storage, name: str, data: bytes) -> None:
        written.append(clock.now)
        stock(self, name, data)

    monkeypatch.setattr(Storage, "write_bytes", write)
    a = leases(storage, clock, "a")
    assert a.acquire("u0")
    for _ in range(8):
        clock.now += 7
        a.renew()
    assert written == [1_021.0, 1_042.0]


def test_one_that_was_given_back_is_not_renewed(storage: Storage, clock: Clock) -> None:
    a, b = leases(storage, clock, "a"), leases(storage, clock, "b")
    assert a.acquire("u0")
    a.release("u0")
    assert a.held == frozenset()
    clock.now += 30
    a.renew()
    assert b.holder("u0") is None


def fail(*_: object) -> None:
    raise OutputError("the output is out")


def test_a_thread_renews_until_the_end_whatever_fails(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a = Leases(storage, seconds=0.04, owner="a")
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write_bytes", fail)
        assert a.acquire("u0")
        first = a.holder("u0")
        a.start_renewing()
        wait_for(lambda: "leases can't be renewed: the output is out" in caplog.text)
    wait_for(lambda: a.holder("u0") != first)
    a.close()
    assert a._thread is not None
    assert not a._thread.is_alive()
    assert a.holder("u0") is None
    assert a.held == frozenset()


def test_a_storage_that_can_not_be_read_says_nothing_of_a_lease(
    storage: Storage, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise DatasetError("the storage can't be read")

    a, b = leases(storage, clock, "a"), leases(storage, clock, "b")
    assert a.acquire("u0")
    clock.now += 30
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "read_bytes", unreadable)
        calls: list[Callable[[], object]] = [
            lambda: b.acquire("u0"),
            lambda: b.is_free("u0"),
            a.renew,
        ]
        for call in calls:
            with pytest.raises(DatasetError, match="can't be read"):
                call()
    a.renew()  # it is still held
    clock.now += 50
    assert not b.acquire("u0")


@pytest.mark.parametrize("call", ["release", "close"])
def test_what_can_not_be_given_back_expires(
    storage: Storage,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    a, b = leases(storage, clock, "a"), leases(storage, clock, "b")
    assert a.acquire("u0")
    assert a.acquire("u1")
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "delete", fail)
        if call == "release":
            a.release("u0")
        else:
            a.close()  # an output that is out is asked once
    assert caplog.text.count("its lease is left to expire: the output is out") == 1
    a.renew()
    assert not b.acquire("u0")
    clock.now += 60
    assert b.acquire("u0")


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"\xff",
        b"[]",
        b"7",
        b'{"owner": "b"}',
        b'{"expires_at": 1e9}',
        b'{"owner": "b", "expires_at": null}',
        b'{"owner": "b", "expires_at": "soon"}',
    ],
)
def test_a_damaged_lease_counts_as_expired(storage: Storage, clock: Clock, data: bytes) -> None:
    storage.write_bytes("_lease/u0", data)
    assert leases(storage, clock, "a").acquire("u0")


def test_the_lease_of_a_process_that_has_died_is_free(storage: Storage, clock: Clock) -> None:
    a, b = leases(storage, clock, "a"), leases(storage, clock, "b")
    assert a.acquire("u0")
    lease = json.loads(storage.read_bytes("_lease/u0"))
    assert lease["process"] == process_name()
    lease["process"] = lease["process"] + "0"  # started later: another one with this number
    storage.write_bytes("_lease/u0", json.dumps(lease).encode())
    assert b.is_free("u0")
    assert b.acquire("u0")


def test_only_processes_of_this_boot_and_namespace_are_known_to_have_died() -> None:
    boot, space, number, started = process_name().split(" ")
    assert has_died(f"{boot} {space} {number} {started}0")
    assert not has_died(f"{boot}0 {space} {number} {started}0")
    assert not has_died(f"{boot} {space}0 {number} {started}0")


def test_the_name_of_a_program_may_hold_anything() -> None:
    name = "a) S 1 (b"
    script = f"open('/proc/self/comm', 'w').write({name!r}); print(flush=True); input()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        stat = Path(f"/proc/{child.pid}/stat").read_text()
        assert f"({name})" in stat
        assert process_name(child.pid).split(" ")[3] == stat.split(name)[1].split()[20]
        child.communicate(b"\n")


def test_owners_differ_by_default(storage: Storage) -> None:
    assert Leases(storage).owner != Leases(storage).owner


def test_unit_names_are_checked(storage: Storage, clock: Clock) -> None:
    with pytest.raises(ValueError, match="letters, digits or underscores"):
        leases(storage, clock, "a").acquire("../data/x")


def test_a_process_that_nobody_waited_for_has_died() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        name = process_name(child.pid)
        assert name
        assert not has_died(name)
        child.kill()
        # gone, but its entry stays until the parent asks how it ended
        while process_name(child.pid):
            pass
        assert Path(f"/proc/{child.pid}/stat").exists()
        assert has_died(name)
