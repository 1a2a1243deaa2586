"""What a job still has to generate: its prompts in order, less what is already committed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from rollout.claims import Claims
from rollout.config import JobConfig
from rollout.dataset import DatasetWriter
from rollout.ledger import Ledger
from rollout.prompts import Prompt, read_lots
from rollout.rows import PlanEntry, Rejection
from rollout.schema.layout import unit_name

LOT_PROMPTS = 4096  # rows read ahead; each lot adds one plan file where it brings new prompts
_UNIT = re.compile(r"u(\d+)")  # as `unit_name` writes it


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitOpened:
    """Prompts of this unit follow."""

    unit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitClosed:
    """No further prompt of this unit follows."""

    unit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A prompt with the samples that are not committed yet."""

    unit: str
    prompt: Prompt
    sample_indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SetAside:
    """A row that is no prompt."""

    unit: str
    rejection: Rejection


@dataclass(kw_only=True, slots=True)
class WorkStats:
    """Counts over the rows that were read."""

    prompts: int = 0
    rejected: int = 0
    asked: int = 0
    """Rollouts asked for by the readable prompts."""
    already_committed: int = 0
    elsewhere: int = 0
    """Committed by other processes since this one started."""
    failed_elsewhere: int = 0
    orphaned: int = 0
    """Prompts that were planned before and are not in the file, known once all of it is read."""
    rejected_elsewhere: int = 0
    """Prompts that other processes set aside meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Nothing to start for now: other processes hold what is left."""


WorkItem = UnitOpened | UnitClosed | Missing | SetAside | Waiting


def missing_work(
    config: JobConfig,
    writer: DatasetWriter,
    stats: WorkStats,
    *,
    claims: Claims | None = None,
    lot_prompts: int = LOT_PROMPTS,
) -> Iterator[WorkItem]:
    """Yield what to do, in the order of the rows; new prompts are planned before they are yielded.

    Where processes share the output, each takes some of a lot's free units at a time and comes
    back for those that others held, to find them done or their holder gone.

    Args:
        config: the job.
        writer: the dataset, with its plan and what is committed.
        stats: counted up as rows are read.
        claims: decides which units are this process's; unset, all are.
        lot_prompts: rows that are read ahead and planned together.

    Raises:
        InputError: the prompts can't be read.
        OutputError: the plan can't be written.
    """
    claims = claims or Claims()
    held = yield from _pass(config, writer, stats, claims, lot_prompts, None)
    while held:
        while not claims.any_free(unit for _, unit in held):
            yield Waiting()
        held = yield from _pass(config, writer, stats, claims, lot_prompts, held)


def _pass(
    config: JobConfig,
    writer: DatasetWriter,
    stats: WorkStats,
    claims: Claims,
    lot_prompts: int,
    only: set[tuple[int, str]] | None,
) -> Generator[WorkItem, None, set[tuple[int, str]]]:
    """Go through the file once.

    Args:
        config: the job.
        writer: the dataset.
        stats: counted up.
        claims: which units are this process's.
        lot_prompts: rows of a lot.
        only: lots and units that are left; null in the first pass, which counts the rows.

    Returns:
        The lots and units that others hold.
    """
    ledger = writer.ledger
    numbers = _UnitNumbers(ledger)
    size = config.output.unit_prompts
    last_unit = unit_name(max(numbers.next() - 1, 0))
    held: set[tuple[int, str]] = set()
    lots = read_lots(config.prompts, config.sampling, lot_prompts, ledger.keys)
    for number, lot in enumerate(lots):
        prompts = [row for row in lot if isinstance(row, Prompt)]
        keys = [prompt.key for prompt in prompts]
        known = zip(prompts, ledger.units_of(keys), strict=True)
        new = [prompt for prompt, unit in known if unit is None]
        first, units = numbers.next(), -(-len(new) // size)
        writer.append_plan(
            PlanEntry(
                prompt_key=prompt.key,
                prompt_id=prompt.prompt_id,
                # spread over the lot's units, so that they are committed side by side
                unit=unit_name(first + i % units),
            )
            for i, prompt in enumerate(new)
        )
        units_of = iter(ledger.units_of(keys))
        planned = []
        for row in lot:
            # rejected rows go with the prompt before them
            if isinstance(row, Prompt):
                last_unit = next(units_of) or last_unit
            planned.append((row, last_unit))
        # ... or after them, in a lot's beginning
        if isinstance(lot[0], Rejection):
            start = next((i for i, row in enumerate(lot) if isinstance(row, Prompt)), 0)
            planned[:start] = [(row, planned[start][1]) for row in lot[:start]]
        if only is not None:
            planned = [(row, unit) for row, unit in planned if (number, unit) in only]
        lot_work = _Lot(planned, writer, stats, first_time=only is None)
        held |= {(number, unit) for unit in (yield from lot_work.work(claims))}
    if only is None:
        stats.orphaned = ledger.num_planned - stats.prompts
    return held


class _UnitNumbers:
    """Numbers of new units: above every one in the plan, also those that other processes made."""

    def __init__(self, ledger: Ledger) -> None:
        self._units = ledger.units
        self._seen = 0
        self._highest = -1

    def next(self) -> int:
        """Return the lowest number above all units that are planned by now."""
        for unit in self._units[self._seen :]:
            match = _UNIT.fullmatch(unit)
            if match:
                self._highest = max(self._highest, int(match[1]))
            self._seen += 1
        return self._highest + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlannedRow:
    """A row with its unit, and its key's number in the ledger."""

    row: Prompt | Rejection
    unit: str
    number: int


class _Lot:
    """Rows that are planned together, by unit."""

    def __init__(
        self,
        rows: list[tuple[Prompt | Rejection, str]],
        writer: DatasetWriter,
        stats: WorkStats,
        *,
        first_time: bool,
    ) -> None:
        self._writer = writer
        self._ledger = writer.ledger
        self._stats = stats
        keys = [row.key if isinstance(row, Prompt) else row.prompt_key for row, _ in rows]
        self._rows = [
            _PlannedRow(row=row, unit=unit, number=number)
            for (row, unit), number in zip(rows, self._ledger.numbers(keys), strict=True)
        ]
        self._by_unit: dict[str, list[_PlannedRow]] = {}
        for planned in self._rows:
            self._by_unit.setdefault(planned.unit, []).append(planned)
        if not first_time:
            return
        for planned in self._rows:
            if isinstance(planned.row, Rejection):
                stats.rejected += 1
            else:
                asked = planned.row.sampling.n
                stats.prompts += 1
                stats.asked += asked
                stats.already_committed += asked - len(self._missing(planned))

    def work(self, claims: Claims) -> Generator[WorkItem, None, list[str]]:
        """Yield the work of the units that can be had.

        Returns:
            The units that others hold.
        """
        units = list(self._by_unit)
        before = {unit: self._left(unit) for unit in units}
        idle = [unit for unit in units if before[unit] == 0 and not self._unrecorded(unit)]
        if len(idle) == len(units):
            # nothing to take, but the units are seen to have been looked at
            yield from self._items(units)
            return []
        yield from self._items(idle)
        looked_at = set(idle)
        todo = [unit for unit in units if unit not in looked_at]
        held: list[str] = []
        while todo:
            taken, others = claims.take(todo)
            held += others
            looked_at.update(taken, others)
            todo = [unit for unit in todo if unit not in looked_at]
            for unit in taken:
                # only now that nobody else works on it
                self._writer.catch_up(unit)
                self._count_elsewhere(unit, before[unit])
            yield from self._items(taken)
        return held

    def _items(self, units: Sequence[str]) -> Iterator[WorkItem]:
        chosen = set(units)
        rows = [planned for planned in self._rows if planned.unit in chosen]
        last_row = {planned.unit: i for i, planned in enumerate(rows)}
        for unit in last_row:
            yield UnitOpened(unit=unit)
        for i, planned in enumerate(rows):
            if isinstance(planned.row, Rejection):
                yield SetAside(unit=planned.unit, rejection=planned.row)
            elif missing := self._missing(planned):
                yield Missing(unit=planned.unit, prompt=planned.row, sample_indices=tuple(missing))
            if i == last_row[planned.unit]:
                yield UnitClosed(unit=planned.unit)

    def _missing(self, planned: _PlannedRow) -> list[int]:
        """List the samples of a prompt that nobody has committed or set aside."""
        number, ledger = planned.number, self._ledger
        if isinstance(planned.row, Rejection) or ledger.set_aside_since(number):
            return []
        missing = ledger.missing(number, planned.row.sampling.n)
        return [index for index in missing if not ledger.set_aside_since(number, index)]

    def _left(self, unit: str) -> int:
        return sum(len(self._missing(planned)) for planned in self._by_unit[unit])

    def _unrecorded(self, unit: str) -> bool:
        return any(
            isinstance(planned.row, Rejection) and not self._ledger.is_set_aside(planned.number)
            for planned in self._by_unit[unit]
        )

    def _count_elsewhere(self, unit: str, before: int) -> None:
        """Count what other processes did of a unit since its rows were first looked at."""
        ledger, stats = self._ledger, self._stats
        done = before - self._left(unit)
        for planned in self._by_unit[unit]:
            if isinstance(planned.row, Rejection):
                continue
            missing = ledger.missing(planned.number, planned.row.sampling.n)
            if ledger.set_aside_since(planned.number):
                stats.rejected_elsewhere += 1
                stats.asked -= len(missing)
                done -= len(missing)
                continue
            failed = sum(ledger.set_aside_since(planned.number, index) for index in missing)
            stats.failed_elsewhere += failed
            done -= failed
        stats.elsewhere += done


def group_id(fingerprint: str, prompt_key: str) -> str:
    """Return the id of a prompt's group, the same in every run of the same fingerprint."""
    return hashlib.sha256(f"{fingerprint} {prompt_key}".encode()).hexdigest()[:32]


def rollout_seed(base: int, prompt_key: str, sample_index: int) -> int:
    """Derive a rollout's own seed.

    Args:
        base: the job's seed, or the run's.
        prompt_key: the prompt.
        sample_index: its sample.

    Returns:
        A seed in [0, 2**63).
    """
    digest = hashlib.sha256(f"{base} {prompt_key} {sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
