"""What a job still has to generate: its prompts in order, less what is already committed."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from rollout.config import JobConfig
from rollout.dataset import DatasetWriter
from rollout.prompts import Prompt, read_prompts
from rollout.rows import PlanEntry, Rejection
from rollout.schema.layout import unit_name

_PLAN_PROMPTS = 4096  # prompts read ahead; each lot adds one plan file where it brings new ones


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


def missing_work(config: JobConfig, writer: DatasetWriter, stats: WorkStats) -> Iterator[WorkItem]:
    """Yield what to do, unit by unit; new prompts are planned before they are yielded.

    Args:
        config: the job.
        writer: the dataset, with its plan and what is committed.
        stats: counted up as rows are read.

    Raises:
        InputError: the prompts can't be read.
    """
    rows = read_prompts(config.prompts, config.sampling)
    next_unit = len(set(writer.plan.values()))
    while lot := list(itertools.islice(rows, _PLAN_PROMPTS)):
        prompts = [row for row in lot if isinstance(row, Prompt)]
        new = [prompt for prompt in prompts if prompt.key not in writer.plan]
        size = config.output.unit_prompts
        entries = [
            PlanEntry(
                prompt_key=prompt.key,
                prompt_id=prompt.prompt_id,
                unit=unit_name(next_unit + i // size),
                digest=prompt.key,
            )
            for i, prompt in enumerate(new)
        ]
        if entries:
            writer.append_plan(entries)
            next_unit += -(-len(new) // size)
        yield from _lot_work(lot, writer, stats, fallback=unit_name(max(next_unit - 1, 0)))


def _lot_work(
    lot: list[Prompt | Rejection], writer: DatasetWriter, stats: WorkStats, fallback: str
) -> Iterator[WorkItem]:
    """Order a lot by unit; rejected rows go with the unit of the row before them."""
    by_unit: dict[str, list[Prompt | Rejection]] = {}
    unit = fallback
    for row in lot:
        if isinstance(row, Prompt):
            unit = writer.plan[row.key]
        by_unit.setdefault(unit, []).append(row)
    for unit, rows in by_unit.items():
        yield UnitOpened(unit=unit)
        for row in rows:
            if isinstance(row, Rejection):
                stats.rejected += 1
                yield SetAside(unit=unit, rejection=row)
                continue
            indices = range(row.sampling.n)
            missing = tuple(i for i in indices if (row.key, i) not in writer.covered)
            stats.prompts += 1
            stats.asked += len(indices)
            stats.already_committed += len(indices) - len(missing)
            if missing:
                yield Missing(unit=unit, prompt=row, sample_indices=missing)
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
