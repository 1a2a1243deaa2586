"""Cut one step into micro-batches, from scalars alone, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollout.advantages import group_advantages
from rollout.epoch_plan import Block, PlannedGroup
from rollout.loader_config import LoaderConfig, LoaderReport
from rollout.scalars import ScalarIndex, Scalars

Selected = Sequence[NDArray[np.bool_]] | None
"""For each shard, whether each row is selected; None for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pick:
    """One rollout of a step: where it is, what it weighs, and its advantage."""

    block: Block
    row: int
    """Row in the row group."""
    num_tokens: int
    """Prompt and completion."""
    num_scored: int
    num_entries: int
    advantage: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The micro-batches of one step.

    Micro-batch m of split s has the index m * S + s, so that rank r of any world size W that
    divides the S splits takes the indices r, r + W, r + 2 W ...: whole splits, and after each
    round the ranks together have taken a prefix.
    """

    splits: tuple[list[list[Pick]], ...]
    """The micro-batches of each split."""
    left_out: tuple[list[Block], ...]
    """For each split, the row group of every row that is planned but not trained on."""
    rounds: int
    """Micro-batches of each split, those of weight zero included; at least 1."""
    num_scored: int
    """Tokens of the whole step that the loss reads."""

    @property
    def num_batches(self) -> int:
        """Micro-batches of all splits together."""
        return self.rounds * len(self.splits)

    def picks(self, index: int) -> list[Pick]:
        """Return the rollouts of a micro-batch; none for one of weight zero."""
        number, split = divmod(index, len(self.splits))
        batches = self.splits[split]
        return batches[number] if number < len(batches) else []


def plan_step(
    splits: Sequence[Sequence[PlannedGroup]],
    *,
    config: LoaderConfig,
    index: ScalarIndex,
    selected: Selected,
    load: Callable[[Block], pa.Table | None],
    report: LoaderReport,
) -> StepPlan:
    """Plan the micro-batches of one step.

    Args:
        splits: the groups of each split.
        config: budgets and the rule of the advantages.
        index: the scalars of the dataset.
        selected: which rows are trained on; advantages come from whole groups all the same.
        load: see `ScalarIndex.get`.
        report: counts what is left out or bent.

    Returns:
        The plan.
    """
    batches, left_out = [], []
    for groups in splits:
        picks: list[Pick] = []
        skipped: list[Block] = []
        for group in groups:
            for pick, block in _picks(group, config, index, selected, load, report):
                if pick is None:
                    skipped.append(block)
                else:
                    picks.append(pick)
        batches.append(_cut(picks, config, report))
        left_out.append(skipped)
    rounds = max(1, *(len(own) for own in batches))
    report.blank_batches += sum(rounds - len(own) for own in batches)
    return StepPlan(
        splits=tuple(batches),
        left_out=tuple(left_out),
        rounds=rounds,
        num_scored=sum(pick.num_scored for own in batches for batch in own for pick in batch),
    )


def _picks(
    group: PlannedGroup,
    config: LoaderConfig,
    index: ScalarIndex,
    selected: Selected,
    load: Callable[[Block], pa.Table | None],
    report: LoaderReport,
) -> Iterator[tuple[Pick | None, Block]]:
    """Yield a group's rollouts by sample_index; None for one that is not trained on."""
    parts, chosen = [], []
    places: list[tuple[Block, int]] = []
    for piece in group.pieces:
        for block, start, stop in index.spans(piece):
            parts.append(index.get(block, load).slice(start, stop))
            places += [(block, row) for row in range(start, stop)]
        if selected is not None:
            chosen.append(selected[piece.shard][piece.first_row : piece.first_row + piece.num_rows])
    rows = Scalars.joined(parts)
    report.incomplete_groups += len(places) < int(rows.group_size.max())
    name = "advantage" if config.advantage == "column" else "reward"
    values = rows.advantage if name == "advantage" else rows.reward
    known = ~np.isnan(values)
    advantages = values.copy()
    if name == "reward" and known.any():
        advantages[known] = group_advantages(
            values[known],
            np.zeros(int(known.sum()), np.int64),
            normalised=config.advantage == "group_normalised",
        )
    wanted = np.concatenate(chosen) if chosen else np.ones(len(places), np.bool_)
    missing = int((wanted & ~known).sum())
    if missing:
        report.excluded[f"no_{name}"] += missing
    entries = _num_entries(rows, config).tolist()
    lengths = (rows.num_prompt_tokens + rows.num_tokens).tolist()
    for place in np.argsort(rows.sample_index, kind="stable").tolist():
        block, row = places[place]
        if not (wanted[place] and known[place]):
            yield None, block
            continue
        yield (
            Pick(
                block=block,
                row=row,
                num_tokens=lengths[place],
                num_scored=int(rows.num_tokens[place]),
                num_entries=entries[place],
                advantage=float(advantages[place]),
            ),
            block,
        )


def _num_entries(rows: Scalars, config: LoaderConfig) -> NDArray[np.int64]:
    """Return how many support entries each rollout brings into a batch."""
    columns = config.read_columns
    draws = rows.num_draws * ("draw_entries" in columns)
    listed = rows.num_entries * ("support_entries" in columns)
    wants_draws = rows.kind == "none"
    if config.untruncated == "draws":
        wants_draws = wants_draws | (rows.kind == "top")
    result: NDArray[np.int64] = np.where(wants_draws, draws, listed)
    return result


def _cut(picks: Sequence[Pick], config: LoaderConfig, report: LoaderReport) -> list[list[Pick]]:
    """Cut a split's rollouts, in order, where the next one would exceed a budget."""
    batches: list[list[Pick]] = []
    tokens = entries = 0
    for pick in picks:
        report.over_budget += (
            pick.num_tokens > config.token_budget or pick.num_entries > config.entry_budget
        )
        fits = (
            tokens + pick.num_tokens <= config.token_budget
            and entries + pick.num_entries <= config.entry_budget
        )
        if not batches or not fits:
            batches.append([])
            tokens = entries = 0
        batches[-1].append(pick)
        tokens, entries = tokens + pick.num_tokens, entries + pick.num_entries
    return batches
