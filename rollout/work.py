"""What a job still has to generate: its prompts in order, less what is already committed."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollout.config import JobConfig
from rollout.dataset import DatasetWriter
from rollout.prompts import Prompt, read_prompts
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


WorkItem = UnitOpened | UnitClosed | Missing | SetAside


def missing_work(
    config: JobConfig,
    writer: DatasetWriter,
    stats: WorkStats,
    *,
    lot_prompts: int = LOT_PROMPTS,
) -> Iterator[WorkItem]:
    """Yield what to do, in the order of the rows; new prompts are planned before they are yielded.

    Args:
        config: the job.
        writer: the dataset, with its plan and what is committed.
        stats: counted up as rows are read.
        lot_prompts: rows that are read ahead and planned together.

    Raises:
        InputError: the prompts can't be read.
        OutputError: the plan can't be written.
    """
    rows = read_prompts(config.prompts, config.sampling)
    numbers = _UnitNumbers(writer.plan)
    size = config.output.unit_prompts
    last_unit = unit_name(max(numbers.next() - 1, 0))
    while lot := list(itertools.islice(rows, lot_prompts)):
        new = [row for row in lot if isinstance(row, Prompt) and row.key not in writer.plan]
        first, units = numbers.next(), -(-len(new) // size)
        writer.append_plan(
            PlanEntry(
                prompt_key=prompt.key,
                prompt_id=prompt.prompt_id,
                # spread over the lot's units, so that they are committed side by side
                unit=unit_name(first + i % units),
                digest=prompt.key,
            )
            for i, prompt in enumerate(new)
        )
        planned = [writer.plan[row.key] for row in lot if isinstance(row, Prompt)]
        yield from _lot_work(lot, writer, stats, planned[0] if planned else last_unit)
        last_unit = planned[-1] if planned else last_unit


class _UnitNumbers:
    """Numbers of new units: above every one in the plan, also those that other processes made."""

    def __init__(self, plan: Mapping[str, str]) -> None:
        self._plan = plan
        self._seen = 0
        self._highest = -1

    def next(self) -> int:
        """Return the lowest number above all units that are planned by now."""
        for unit in itertools.islice(self._plan.values(), self._seen, None):
            match = _UNIT.fullmatch(unit)
            if match:
                self._highest = max(self._highest, int(match[1]))
        self._seen = len(self._plan)
        return self._highest + 1


def _lot_work(
    lot: list[Prompt | Rejection], writer: DatasetWriter, stats: WorkStats, unit: str
) -> Iterator[WorkItem]:
    """Follow a lot in order; rejected rows go with the prompt before them."""
    units = []
    for row in lot:
        if isinstance(row, Prompt):
            unit = writer.plan[row.key]
        units.append(unit)
    last_row = {unit: i for i, unit in enumerate(units)}
    for unit in last_row:
        yield UnitOpened(unit=unit)
    for i, (row, unit) in enumerate(zip(lot, units, strict=True)):
        if isinstance(row, Rejection):
            stats.rejected += 1
            yield SetAside(unit=unit, rejection=row)
        else:
            indices = range(row.sampling.n)
            missing = tuple(k for k in indices if (row.key, k) not in writer.covered)
            stats.prompts += 1
            stats.asked += len(indices)
            stats.already_committed += len(indices) - len(missing)
            if missing:
                yield Missing(unit=unit, prompt=row, sample_indices=missing)
        if i == last_row[unit]:
            yield UnitClosed(unit=unit)


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
