"""Which units a process takes, where others want some too."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.claims import Claims
from rollout.lease import Leases
from rollout.storage import Storage

UNITS = [f"u{i}" for i in range(7)]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage.open(tmp_path)


def test_a_process_alone_takes_all() -> None:
    assert Claims().take(UNITS) == (UNITS, [])


def test_half_of_what_is_free_is_left_to_others(storage: Storage) -> None:
    first, second = (Claims(Leases(storage), most=10) for _ in range(2))
    assert first.take(UNITS) == (UNITS[:4], [])
    assert second.take(UNITS) == (UNITS[4:], UNITS[:4])
    # those that were left are asked for again: in the end nothing is
    assert first.take(UNITS[4:5]) == ([], ["u4"])
    first.release("u0")
    assert second.take(["u0"]) == (["u0"], [])


def test_no_more_are_taken_than_are_committed_side_by_side(storage: Storage) -> None:
    assert Claims(Leases(storage), most=2).take(UNITS) == (["u0", "u1"], [])


def test_others_are_looked_at_now_and_then(storage: Storage) -> None:
    other = Leases(storage)
    assert other.acquire("u0")
    eager, patient = (Claims(Leases(storage), poll=seconds) for seconds in (0.0, 3600.0))
    assert [claims.any_free(["u0"]) for claims in (eager, patient)] == [False, False]
    other.release("u0")
    assert [claims.any_free(["u0"]) for claims in (eager, patient)] == [True, False]
