"""When finished rollouts are committed."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import make_record, make_rejection, make_row, plan

from rollout.config import OutputConfig
from rollout.dataset import DatasetWriter, read_dataset
from rollout.errors import OutputError
from rollout.rows import Rejection, RolloutRow
from rollout.spool_entries import HeldSegments, SpooledEntries
from rollout.storage import Storage
from rollout.units import UnitBuffers


class Clock:
    """A clock that stands still until it is set."""

    now = 100.0

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self.now


class Case:
    """Buffers over a dataset that plans a, b, c for u0 and d, e for u1.

    Parts are noted as `unit: rollouts | rejected`, and committed unless `fails`; units that are
    done with how many parts there were.
    """

    def __init__(self, folder: Path, **config: Any) -> None:
        self.clock = Clock()
        self.storage = Storage.open(str(folder / "out"), {})
        self.writer = DatasetWriter.open(self.storage, make_record())
        self.writer.append_plan([*plan("u0", "a", "b", "c"), *plan("u1", "d", "e")])
        self.parts: list[str] = []
        self.done: list[tuple[str, int]] = []
        self.fails = False
        values = {"path": "x", "flush_seconds": 60} | config
        self.units = UnitBuffers(
            self._commit,
            OutputConfig.model_validate(values),
            self.clock,
            done=lambda unit: self.done.append((unit, len(self.parts))),
        )

    def _commit(self, unit: str, rows: list[RolloutRow], rejected: list[Rejection]) -> None:
        if self.fails:
            raise OutputError("the disk is full")
        done = " ".join(row.rollout_id for row in rows)
        self.parts.append(f"{unit}: {done} | {len(rejected)}")
        self.writer.commit_part(unit, rows, rejected)

    def stored(self) -> set[tuple[str, int]]:
        """Every committed rollout."""
        return set(read_dataset(self.storage).covered)

    def run(self, unit: str, prompt: str, index: int = 0, **fields: Any) -> RolloutRow:
        """Start a rollout and return what it will end with."""
        self.units.start(unit)
        return make_row(prompt, index, **fields)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def rejection(prompt: str, index: int | None = None) -> Rejection:
    return make_rejection(prompt, index)


def test_a_unit_is_committed_once_nothing_of_it_is_in_flight(case: Case) -> None:
    units = case.units
    units.open("u0")
    rows = [case.run("u0", prompt) for prompt in "abc"]
    units.add("u0", rows[1])
    units.add("u0", rows[0])
    assert units.num_bytes == rows[0].num_bytes + rows[1].num_bytes
    units.close("u0")
    assert case.parts == []
    units.add("u0", rows[2])
    assert case.parts == ["u0: b.0 a.0 c.0 | 0"]
    assert units.num_bytes == 0
    assert case.stored() == {("a", 0), ("b", 0), ("c", 0)}
    assert case.done == [("u0", 1)]


def test_an_open_unit_waits_even_with_nothing_in_flight(case: Case) -> None:
    units = case.units
    units.open("u0")
    units.add("u0", case.run("u0", "a"))
    assert case.parts == []
    units.add("u0", case.run("u0", "b"))
    units.close("u0")
    assert case.parts == ["u0: a.0 b.0 | 0"]


def test_failures_end_a_rollout_too(case: Case) -> None:
    units = case.units
    units.open("u0")
    row = case.run("u0", "a")
    units.start("u0")
    units.close("u0")
    units.add("u0", row)
    assert case.parts == []
    units.fail("u0", rejection("b", 0))
    assert case.parts == ["u0: a.0 | 1"]


def test_rejected_prompts_are_committed_with_their_unit(case: Case) -> None:
    units = case.units
    units.open("u0")
    units.reject("u0", rejection("a"))
    units.reject("u0", rejection("b"))
    units.close("u0")
    assert case.parts == ["u0:  | 2"]
    assert len(read_dataset(case.storage).rejected) == 2


def test_an_empty_unit_is_no_part(case: Case) -> None:
    case.units.open("u0")
    case.units.close("u0")
    assert case.parts == []
    assert case.done == [("u0", 0)]


def test_units_do_not_wait_for_each_other(case: Case) -> None:
    units = case.units
    for unit in ("u0", "u1"):
        units.open(unit)
    first, second = case.run("u0", "a"), case.run("u1", "d")
    for unit in ("u0", "u1"):
        units.close(unit)
    units.add("u1", second)
    assert case.parts == ["u1: d.0 | 0"]
    units.add("u0", first)
    assert case.parts == ["u1: d.0 | 0", "u0: a.0 | 0"]


def test_a_unit_may_be_opened_again(case: Case) -> None:
    units = case.units
    for prompt in "ab":
        units.open("u0")
        row = case.run("u0", prompt)
        units.close("u0")
        units.add("u0", row)
    assert case.parts == ["u0: a.0 | 0", "u0: b.0 | 0"]


def test_a_buffer_of_the_size_of_a_shard_is_committed_early(tmp_path: Path) -> None:
    case = Case(tmp_path, shard_bytes=2**20)
    units = case.units
    units.open("u0")
    wide = [case.run("u0", p, lengths=[70_000]) for p in "ab"]  # 560 kB each
    small = case.run("u0", "c")
    units.add("u0", wide[0])
    assert case.parts == []
    units.add("u0", wide[1])
    assert case.parts == ["u0: a.0 b.0 | 0"]
    assert units.num_bytes == 0
    units.add("u0", small)
    units.close("u0")
    assert case.parts == ["u0: a.0 b.0 | 0", "u0: c.0 | 0"]


def test_at_the_end_buffers_are_cut_into_smaller_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.units._LEAST_LAST_BYTES", 2**20)
    case = Case(tmp_path)
    units = case.units
    units.open("u0")
    rows = [case.run("u0", "a", index, lengths=[70_000]) for index in range(7)]  # 560 kB each
    rejection = make_rejection("b", 0)
    units.start("u0")
    units.fail("u0", rejection)
    for row in rows[:4]:
        units.add("u0", row)
    assert case.parts == []
    units.hurry(16)
    assert case.parts == ["u0: a.0 a.1 | 0", "u0: a.2 a.3 | 1"]
    units.add("u0", rows[4])
    units.add("u0", rows[5])
    assert case.parts[2:] == ["u0: a.4 a.5 | 0"]
    units.add("u0", rows[6])
    units.flush()
    assert case.parts[3:] == ["u0: a.6 | 0"]
    assert case.stored() == {("a", index) for index in range(7)}
    assert units.num_bytes == 0


def test_the_last_parts_are_about_as_many_as_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.units._LEAST_LAST_BYTES", 2**20)
    case = Case(tmp_path)
    case.units.open("u0")
    rows = [case.run("u0", "a", index, lengths=[70_000]) for index in range(12)]  # 6.7 MB
    for row in rows[:4]:
        case.units.add("u0", row)
    case.units.hurry(3)  # a third is four rollouts
    assert case.parts == ["u0: a.0 a.1 a.2 a.3 | 0"]
    for row in rows[4:]:
        case.units.add("u0", row)
    case.units.flush()
    assert case.parts[1:] == ["u0: a.4 a.5 a.6 a.7 | 0", "u0: a.8 a.9 a.10 a.11 | 0"]


def test_the_last_parts_get_smaller_as_less_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.units._LEAST_LAST_BYTES", 2**20)  # of two rollouts
    case = Case(tmp_path)
    case.units.open("u0")
    rows = [case.run("u0", "a", index, lengths=[70_000]) for index in range(24)]
    for row in rows:
        case.units.add("u0", row)
        case.units.hurry(3)
    sizes = [part.count("a.") for part in case.parts]
    # a third of 24, of the 16 that are left then, of 10, of 6
    assert sizes == [8, 6, 4, 2, 2, 2]
    assert case.stored() == {("a", index) for index in range(24)}


def test_parts_are_not_small_for_good_by_what_was_known_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.units._LEAST_LAST_BYTES", 2**20)  # of two rollouts
    case = Case(tmp_path)
    case.units.open("u0")
    rows = [case.run("u0", "a", 0, lengths=[10])]
    rows += [case.run("u0", "a", index, lengths=[70_000]) for index in range(1, 13)]
    case.units.hurry(3)  # nothing has ended, and nothing is known
    for row in rows[:4]:
        case.units.add("u0", row)
        case.units.hurry(3)  # after the first one all others seem as small
    assert case.parts == ["u0: a.0 a.1 a.2 a.3 | 0"]


def test_the_last_parts_have_a_most_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.units._MOST_LAST_BYTES", 2**20)
    monkeypatch.setattr("rollout.units._LEAST_LAST_BYTES", 2**10)
    case = Case(tmp_path)
    case.units.open("u0")
    for row in [case.run("u0", "a", index, lengths=[70_000]) for index in range(4)]:
        case.units.add("u0", row)
    case.units.hurry(1)
    assert case.parts == ["u0: a.0 a.1 | 0", "u0: a.2 a.3 | 0"]


def test_what_could_not_be_handed_over_at_the_end_is_tried_again_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.units._LEAST_LAST_BYTES", 2**20)
    case = Case(tmp_path)
    case.units.open("u0")
    for index in range(4):
        case.units.add("u0", case.run("u0", "a", index, lengths=[70_000]))
    taken = case._commit

    def first_only(unit: str, rows: list[RolloutRow], rejected: list[Rejection]) -> None:
        taken(unit, rows, rejected)
        case.fails = True

    case.units._take_part = first_only
    with pytest.raises(OutputError, match="disk is full"):
        case.units.hurry(16)
    assert case.units.num_bytes == 2 * case.run("u0", "a", lengths=[70_000]).memory_bytes
    case.fails = False
    case.units._take_part = taken
    case.units.flush()
    assert case.parts == ["u0: a.0 a.1 | 0", "u0: a.2 a.3 | 0"]


def test_the_last_parts_are_not_larger_than_those_before(tmp_path: Path) -> None:
    case = Case(tmp_path, shard_bytes=2**20)
    case.units.open("u0")
    case.units.hurry(1)
    for index in range(2):
        case.units.add("u0", case.run("u0", "a", index, lengths=[70_000]))
    assert case.parts == ["u0: a.0 a.1 | 0"]


def test_a_large_rollout_behind_small_ones_leaves_no_part_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.units._LEAST_LAST_BYTES", 2**20)
    case = Case(tmp_path)
    case.units.open("u0")
    for index, lengths in enumerate(([10], [10], [150_000, 150_000])):
        case.units.add("u0", case.run("u0", "a", index, lengths=lengths))
    case.units.hurry(16)
    assert case.parts == ["u0: a.0 a.1 | 0", "u0: a.2 | 0"]


def test_entries_that_are_in_the_spool_take_no_memory(case: Case, tmp_path: Path) -> None:
    row = case.run("u0", "a", lengths=[1000])
    counts = np.array([1000], np.int32)
    stored = SpooledEntries(
        segments=HeldSegments(tmp_path), addresses=np.zeros(1, np.int64), counts=counts
    )
    case.units.open("u0")
    case.units.add("u0", dataclasses.replace(row, support_entries=None, stored_entries=stored))
    assert case.units.num_bytes == row.num_bytes - 8000


def test_the_last_rollout_of_a_unit_may_fill_a_shard(tmp_path: Path) -> None:
    case = Case(tmp_path, shard_bytes=2**20)
    case.units.open("u0")
    row = case.run("u0", "a", lengths=[140_000])
    case.units.close("u0")
    case.units.add("u0", row)
    assert case.parts == ["u0: a.0 | 0"]


def test_finished_rollouts_wait_no_longer_than_said(case: Case) -> None:
    units, clock = case.units, case.clock
    units.open("u0")
    units.open("u1")
    rows = [case.run("u0", "a"), case.run("u0", "b"), case.run("u1", "d")]
    units.add("u0", rows[0])
    clock.now += 30
    units.add("u1", rows[2])
    clock.now += 29.9
    units.tick()
    assert case.parts == []
    units.add("u0", rows[1])
    clock.now += 0.2  # 60.1 s after the first of u0, 30.1 s after u1's
    units.tick()
    assert case.parts == ["u0: a.0 b.0 | 0"]
    clock.now += 30
    units.tick()
    assert case.parts == ["u0: a.0 b.0 | 0", "u1: d.0 | 0"]
    clock.now += 1000
    units.tick()
    assert len(case.parts) == 2


def test_rejections_do_not_wait_longer_either(case: Case) -> None:
    case.units.open("u0")
    case.units.reject("u0", rejection("a"))
    case.clock.now += 60
    case.units.tick()
    assert case.parts == ["u0:  | 1"]


def test_a_group_in_several_parts_is_whole_in_the_end(case: Case) -> None:
    units = case.units
    units.open("u0")
    rows = [case.run("u0", "a", i) for i in range(4)]
    for i in (3, 1):
        units.add("u0", rows[i])
    case.clock.now += 60
    units.tick()
    units.add("u0", rows[0])
    units.flush()
    units.close("u0")
    units.add("u0", rows[2])
    assert case.parts == ["u0: a.3 a.1 | 0", "u0: a.0 | 0", "u0: a.2 | 0"]
    assert case.stored() == {("a", i) for i in range(4)}


def test_flush_commits_all_that_is_finished(case: Case) -> None:
    units = case.units
    units.open("u0")
    units.open("u1")
    rows = [case.run("u0", "a"), case.run("u1", "d"), case.run("u1", "e")]
    units.add("u0", rows[0])
    units.add("u1", rows[1])
    units.flush()
    assert sorted(case.parts) == ["u0: a.0 | 0", "u1: d.0 | 0"]
    units.flush()
    assert len(case.parts) == 2


def test_what_could_not_be_written_is_still_there(case: Case) -> None:
    units = case.units
    units.open("u0")
    row = case.run("u0", "a")
    units.close("u0")
    case.fails = True
    with pytest.raises(OutputError, match="the disk is full"):
        units.add("u0", row)
    assert units.num_bytes == row.num_bytes
    case.fails = False
    units.flush()
    assert case.parts == ["u0: a.0 | 0"]
    assert case.stored() == {("a", 0)}


def test_ending_what_never_started_is_a_mistake(case: Case) -> None:
    with pytest.raises(AssertionError, match="nothing of unit u0 is in flight"):
        case.units.add("u0", make_row("a"))
