"""Leases with a clock that the test moves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dataset_tools import STORAGES, new_storage
from fake_store import FakeStore

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


def test_a_damaged_lease_counts_as_expired(storage: Storage, clock: Clock) -> None:
    storage.write_bytes("_lease/u0", b"{")
    assert leases(storage, clock, "a").acquire("u0")


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
