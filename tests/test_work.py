"""What a job still has to do, whatever was done before."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_record, make_rejection, make_row

from rollout.claims import Claims
from rollout.config import JobConfig
from rollout.dataset import DatasetWriter, read_dataset
from rollout.rows import PlanEntry
from rollout.storage import Storage
from rollout.work import (
    Missing,
    SetAside,
    UnitClosed,
    UnitOpened,
    WorkItem,
    WorkStats,
    group_id,
    missing_work,
    rollout_seed,
)


class Project:
    """A prompts file and a dataset in a folder."""

    def __init__(self, folder: Path) -> None:
        self.prompts = folder / "prompts.jsonl"
        self.output = folder / "out"

    def write(self, *names: str) -> None:
        """Write one prompt a name; `!...` is a line that is none."""
        lines = [name if name.startswith("!") else json.dumps({"prompt": name}) for name in names]
        self.prompts.write_text("".join(line + "\n" for line in lines))

    def config(self, n: int = 2, unit_prompts: int = 2) -> JobConfig:
        """The job that works on them."""
        return JobConfig.model_validate(
            {
                "model": {"path": "m"},
                "prompts": {"path": str(self.prompts)},
                "sampling": {"max_tokens": 4, "n": n},
                "output": {"path": str(self.output), "unit_prompts": unit_prompts},
            }
        )

    def writer(self) -> DatasetWriter:
        """A process of its own."""
        return DatasetWriter.open(Storage.open(str(self.output), {}), make_record())

    def work(
        self, *, writer: DatasetWriter | None = None, lot: int = 100, **config: Any
    ) -> tuple[list[WorkItem], WorkStats]:
        """All that is left to do."""
        stats = WorkStats()
        items = missing_work(self.config(**config), writer or self.writer(), stats, lot_prompts=lot)
        return list(items), stats


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def described(items: list[WorkItem]) -> list[str]:
    """Units as `u0: a[01] !`, sorted, checked to be open around all that is in them."""
    lines: list[str] = []
    words: dict[str, list[str]] = {}
    for item in items:
        if isinstance(item, UnitOpened):
            assert item.unit not in words
            words[item.unit] = []
        elif isinstance(item, UnitClosed):
            name = item.unit.replace("u00000", "u")
            lines.append(f"{name}: {' '.join(words.pop(item.unit))}".strip())
        elif isinstance(item, SetAside):
            words[item.unit].append("!")
        else:
            assert isinstance(item, Missing)
            indices = "".join(map(str, item.sample_indices))
            words[item.unit].append(f"{item.prompt.prompt}[{indices}]")
    assert words == {}
    return sorted(lines, key=lambda line: int(line[1 : line.index(":")]))


def commit(project: Project, *samples: str) -> None:
    """Commit samples such as `a0` with the units that the plan gives their prompts."""
    writer = project.writer()
    items, _ = project.work(writer=writer, n=10)
    prompts = {i.prompt.prompt: i for i in items if isinstance(i, Missing)}
    for sample in samples:
        item = prompts[sample[0]]
        row = make_row(item.prompt.key, int(sample[1]))
        assert writer.commit_part(item.unit, [row]) is not None


def test_units_and_samples_in_order(project: Project) -> None:
    project.write(*"abcde")
    items, stats = project.work(n=3)
    assert described(items) == ["u0: a[012] d[012]", "u1: b[012] e[012]", "u2: c[012]"]
    assert (stats.prompts, stats.rejected, stats.asked, stats.already_committed) == (5, 0, 15, 0)


def test_rows_come_in_the_order_of_the_file(project: Project) -> None:
    project.write(*"edcba", "!", *"fgh")
    items, _ = project.work(n=1, unit_prompts=3)
    order = [
        str(i.prompt.prompt) if isinstance(i, Missing) else "!"
        for i in items
        if isinstance(i, (Missing, SetAside))
    ]
    assert "".join(order) == "edcba!fgh"
    # all units are in work from the start, and each ends with its own last row
    kinds = [type(item).__name__ for item in items]
    assert kinds[:3] == ["UnitOpened"] * 3
    assert kinds[-6:] == ["Missing", "UnitClosed"] * 3


def test_what_is_committed_is_not_done_again(project: Project) -> None:
    project.write(*"abc")
    commit(project, "a0", "a1", "b1", "c0")
    items, stats = project.work(n=2)
    assert described(items) == ["u0: c[1]", "u1: b[0]"]
    assert (stats.asked, stats.already_committed) == (6, 4)
    commit(project, "b0", "c1")
    items, stats = project.work(n=2)
    assert described(items) == ["u0:", "u1:"]
    assert (stats.asked, stats.already_committed) == (6, 6)


def test_n_may_grow_and_shrink(project: Project) -> None:
    project.write(*"ab")
    commit(project, "a0", "a1", "b0", "b1")
    items, stats = project.work(n=4)
    assert described(items) == ["u0: a[23] b[23]"]
    assert (stats.asked, stats.already_committed) == (8, 4)
    items, stats = project.work(n=1)
    assert described(items) == ["u0:"]
    assert (stats.asked, stats.already_committed) == (2, 2)


def test_appended_prompts_make_new_units(project: Project) -> None:
    project.write(*"abc")
    project.work()
    project.write(*"abcde")
    items, _ = project.work()
    # u1 was short, and stays so
    assert described(items) == ["u0: a[01] c[01]", "u1: b[01]", "u2: d[01] e[01]"]
    project.write(*"abcdef")
    assert described(project.work()[0])[-1] == "u3: f[01]"


def test_moved_prompts_keep_their_units(project: Project) -> None:
    project.write(*"abcd")
    project.work()
    project.write(*"dxbca")
    items, _ = project.work()
    assert described(items) == ["u0: c[01] a[01]", "u1: d[01] b[01]", "u2: x[01]"]


def test_removed_prompts_are_not_asked_for(project: Project) -> None:
    project.write(*"abcd")
    assert project.work()[1].orphaned == 0
    project.write(*"bd")
    items, stats = project.work()
    assert described(items) == ["u1: b[01] d[01]"]
    assert stats.asked == 4
    assert stats.orphaned == 2


@pytest.mark.parametrize("lot", [1, 2, 3, 4, 100])
def test_lots_change_no_unit_of_a_second_run(project: Project, lot: int) -> None:
    names = "abcdefghij"
    project.write(*names)
    first, _ = project.work(lot=3, unit_prompts=2)
    assert described(first) == [
        "u0: a[01] c[01]",
        "u1: b[01]",
        "u2: d[01] f[01]",
        "u3: e[01]",
        "u4: g[01] i[01]",
        "u5: h[01]",
        "u6: j[01]",
    ]
    units = {i.prompt.prompt: i.unit for i in first if isinstance(i, Missing)}
    again, stats = project.work(lot=lot, unit_prompts=2)
    assert {i.prompt.prompt: i.unit for i in again if isinstance(i, Missing)} == units
    assert stats.asked == 20


def test_new_units_never_take_a_planned_name(project: Project) -> None:
    # another process has planned unit 7; numbers below it are free, but counting gives 1
    writer = project.writer()
    for key, unit in (("x", "u000007"), ("y", "u000003"), ("z", "mine")):
        writer.append_plan([PlanEntry(prompt_key=key, prompt_id=key, unit=unit)])
    project.write(*"abc")
    items, _ = project.work()
    assert described(items) == ["u8: a[01] c[01]", "u9: b[01]"]


def test_two_processes_that_plan_at_once_agree(project: Project) -> None:
    project.write(*"abc")
    first, second = project.writer(), project.writer()
    project.work(writer=first)
    project.write(*"xabcy")
    stats = WorkStats()
    items = missing_work(project.config(), second, stats, lot_prompts=2)
    found = described(list(items))
    # x takes a number that the first had taken meanwhile: a larger unit, but one plan for both
    assert found == ["u0: x[01] a[01]", "u0: c[01]", "u1: b[01]", "u2: y[01]"]
    stored = read_dataset(Storage.open(str(project.output), {})).plan
    units = {entry.prompt_key: entry.unit for entry in stored}
    assert second.ledger.units_of(list(units)) == list(units.values())
    assert len(units) == second.ledger.num_planned == 5
    known = first.ledger.units_of(list(units))
    assert first.ledger.num_planned == 3
    assert all(mine in (None, unit) for mine, unit in zip(known, units.values(), strict=True))


def test_rejected_rows_go_with_the_prompt_before_them(project: Project) -> None:
    project.write("!", "a", "b", "!", "c", "!", "!")
    items, stats = project.work()
    assert described(items) == ["u0: ! a[01] c[01] ! !", "u1: b[01] !"]
    assert (stats.prompts, stats.rejected) == (3, 4)


def test_rejected_rows_in_lots_of_their_own(project: Project) -> None:
    project.write("!1", "!2", "a", "b", "c", "!3", "!4")
    items, _ = project.work(lot=2)
    assert described(items) == ["u0: ! !", "u0: a[01] b[01]", "u1: c[01] !", "u1: !"]


def test_rejected_rows_in_a_lots_beginning_go_with_the_prompt_after_them(project: Project) -> None:
    project.write("a", "b", "!", "c")
    items, _ = project.work(lot=2)
    assert described(items) == ["u0: a[01] b[01]", "u1: ! c[01]"]


class TakenMeanwhile(Claims):
    """Claims that come when another process has just left the unit."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work

    def take(self, units: Sequence[str]) -> tuple[list[str], list[str]]:
        self._work()
        return super().take(units)


def test_what_others_do_before_a_unit_is_taken_is_counted_once(project: Project) -> None:
    project.write(*"abcd")
    keys = {i.prompt.prompt: i.prompt.key for i in project.work()[0] if isinstance(i, Missing)}

    def meanwhile() -> None:
        # a is sampled, a sample of b failed and one is there, c is set aside whole
        rows = [make_row(keys["a"], 0), make_row(keys["a"], 1), make_row(keys["b"], 0)]
        rejected = [make_rejection(keys["b"], 1), make_rejection(keys["c"])]
        writer = project.writer()
        for unit in ("u000000", "u000001"):
            own = [row for row in rows if writer.ledger.units_of([row.prompt_key]) == [unit]]
            refused = [r for r in rejected if writer.ledger.units_of([r.prompt_key]) == [unit]]
            writer.commit_part(unit, own, refused)

    stats = WorkStats()
    claims = TakenMeanwhile(meanwhile)
    items = list(missing_work(project.config(), project.writer(), stats, claims=claims))
    assert described(items) == ["u0:", "u1: d[01]"]
    # of 8 that were asked for, 2 fell with c, 3 are there, 1 failed, 2 are left
    assert (stats.prompts, stats.asked, stats.already_committed) == (4, 6, 0)
    assert (stats.elsewhere, stats.failed_elsewhere, stats.rejected_elsewhere) == (3, 1, 1)


def test_a_file_of_rejected_rows(project: Project) -> None:
    project.write("!", "!")
    items, stats = project.work()
    assert described(items) == ["u0: ! !"]
    assert (stats.prompts, stats.rejected, stats.asked) == (0, 2, 0)


def test_rejected_rows_are_recorded_once(project: Project) -> None:
    project.write("a", "!", "!", "b", "!x")
    for _ in range(3):
        writer = project.writer()
        items, stats = project.work(writer=writer)
        assert stats.rejected == 3
        for unit, group in itertools.groupby(
            (i for i in items if isinstance(i, SetAside)), key=lambda item: item.unit
        ):
            writer.commit_part(unit, [], [item.rejection for item in group])
    view = read_dataset(Storage.open(str(project.output), {}))
    assert sorted(item.line or 0 for item in view.rejected) == [2, 3, 5]
    assert sum(record.rejected_rows for record in view.commits) == 3


def test_repeated_prompts_are_prompts_of_their_own(project: Project) -> None:
    project.write("a", "a", "a")
    items, stats = project.work()
    assert described(items) == ["u0: a[01] a[01]", "u1: a[01]"]
    assert len({i.prompt.key for i in items if isinstance(i, Missing)}) == 3
    assert stats.asked == 6


def test_reading_goes_no_further_than_a_lot(project: Project) -> None:
    project.write(*"abcdefgh")
    writer = project.writer()
    items = missing_work(project.config(), writer, WorkStats(), lot_prompts=4)
    next(items)
    assert writer.ledger.num_planned == 4


def test_ids_and_seeds_are_stable_and_apart() -> None:
    assert group_id("f", "p") == group_id("f", "p")
    assert len({group_id(f, p) for f in "fg" for p in "pq"}) == 4
    seeds = {rollout_seed(b, p, i) for b in range(5) for p in "pq" for i in range(20)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert rollout_seed(1, "p", 0) == 8428690807536120104
