"""Stream a dataset into the trainer's batches, by its commit records and with no engine.

    loader = RolloutLoader("out/run", vocab_size=151936, groups_per_step=64, token_budget=16384)
    for batch in loader:                    # one epoch
        ...                                 # loss over the batch, backward
        if batch.micro_batch == batch.num_micro_batches - 1:
            ...                             # optimiser step

A step is a global batch: whole prompt groups. It is cut into micro-batches by token budget, and
every one of them carries the step's denominator, so the cut changes nothing in the gradient.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from rollout.advantages import AdvantageRule, group_advantages
from rollout.batch import RolloutBatch, Untruncated, num_entries, pack_rollouts
from rollout.dataset_view import read_dataset
from rollout.epoch_plan import PlannedGroup, epoch_order, plan_groups
from rollout.errors import ConfigError, DatasetError
from rollout.rows import RolloutRow
from rollout.schema.records import CommitRecord
from rollout.shard_reader import ShardReader
from rollout.storage import Storage

_log = logging.getLogger(__name__)

STATE_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """What decides the batches; part of the loader's state.

    Raises:
        ConfigError: a value is out of range.
    """

    groups_per_step: int
    """Prompt groups of one global batch."""
    token_budget: int
    """Most tokens (prompt and completion) of a micro-batch; a longer rollout goes alone."""
    entry_budget: int = 2**26
    """Most support entries of a micro-batch; likewise."""
    advantage: AdvantageRule = "group_mean"
    """Reward minus the group's mean; the same over its deviation; or the `advantage` column."""
    untruncated: Untruncated = "head"
    """Whether untruncated rows bring their recorded head or their draws."""
    shuffle: bool = True
    """Whether groups come in a seeded order, another one in each epoch."""
    seed: int = 0
    window_blocks: int = 8
    """Row groups within which prompt groups are mixed."""
    drop_remainder: bool = False
    """Whether a last step of fewer groups is left out."""

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "token_budget", "entry_budget", "window_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name, allowed in (
            ("advantage", ("group_mean", "group_normalised", "column")),
            ("untruncated", ("head", "draws")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}"
                )


@dataclass(slots=True, kw_only=True)
class LoaderReport:
    """What an epoch left out or bent, so that nothing goes unseen."""

    excluded: Counter[str] = field(default_factory=Counter)
    """Rollouts left out, by reason: `no_reward`, `no_advantage`, `remainder`."""
    over_budget: int = 0
    """Rollouts that alone exceed a budget and were given their own micro-batch."""
    incomplete_groups: int = 0
    """Groups with fewer rollouts than were asked for; advantages use the real count."""


class RolloutLoader:
    """Iterates over the micro-batches of one epoch; the next iteration is the next epoch.

    The commit records are read once, when the loader is made: a dataset that grows meanwhile
    changes nothing. An iteration that is given up half-way starts its epoch again.

    Args:
        path: the dataset, a local path or an fsspec URL.
        vocab_size: rows of the trainer's output weight; every id of the dataset must be below.
        storage_options: keyword arguments of the fsspec filesystem.
        fingerprint: refuse a dataset with another one; unset takes any.
        head_dtype: the trainer's dtype of the output weight, such as "bfloat16"; a warning tells
            where the sampler's differed.
        verify: compare each shard's digest with its record when it is first opened.
        cache_bytes: decoded row groups kept in memory.
        **settings: fields of `LoaderConfig`.

    Raises:
        DatasetError: not a dataset, empty, another fingerprint, or ids outside the vocabulary.
        ConfigError: a setting is out of range.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int,
        storage_options: dict[str, Any] | None = None,
        fingerprint: str | None = None,
        head_dtype: str | None = None,
        verify: bool = True,
        cache_bytes: int = 2**30,
        **settings: Any,
    ) -> None:
        self.config = LoaderConfig(**settings)
        self._view = read_dataset(Storage.open(path, storage_options))
        self._cache_bytes = cache_bytes
        self._verify = verify
        url, record = self._view.storage.url, self._view.record
        if fingerprint is not None and record.fingerprint != fingerprint:
            raise DatasetError(
                f"dataset {url} has fingerprint {record.fingerprint}, expected {fingerprint}"
            )
        self._pin(self._view.shards)
        if not self._groups:
            raise DatasetError(f"dataset {url} holds no rollouts: nothing was committed yet")
        _check_vocabulary(url, self._shards, vocab_size)
        if head_dtype is not None:
            _compare_head(url, self._shards, head_dtype)
        self.epoch = 0
        """The epoch that the next iteration yields."""
        self.report = LoaderReport()
        """What the last iteration left out."""
        self._cursor = (0, 0, 0)
        self._resumes = False
        self._started = False

    @property
    def num_groups(self) -> int:
        """Prompt groups in the dataset."""
        return len(self._groups)

    @property
    def num_rollouts(self) -> int:
        """Rollouts in the dataset, those without a reward included."""
        return sum(group.num_rows for group in self._groups)

    @property
    def num_steps(self) -> int:
        """Steps of an epoch, known up front."""
        share = self.num_groups / self.config.groups_per_step
        return math.floor(share) if self.config.drop_remainder else math.ceil(share)

    def __iter__(self) -> Iterator[RolloutBatch]:
        self._started = True
        step, micro_batch = 0, 0
        if self._resumes:
            self.epoch, step, micro_batch = self._cursor
        self._resumes = False
        self._cursor = (self.epoch, step, micro_batch)
        return self._iterate(self.epoch, step, micro_batch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands: after the batch that it yielded last. Plain JSON."""
        epoch, step, micro_batch = self._cursor
        return {
            "version": STATE_VERSION,
            "fingerprint": self._view.record.fingerprint,
            "shards": [[record.file, record.sha256] for record in self._shards],
            "settings": {f.name: getattr(self.config, f.name) for f in fields(self.config)},
            "epoch": epoch,
            "step": step,
            "micro_batch": micro_batch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader of the same dataset and settings stood.

        The shards of the state are pinned: what was committed since is left to a new loader.

        Raises:
            RuntimeError: an iteration has begun.
            DatasetError: another dataset, or a shard of the state is gone or another one.
            ConfigError: another version of the state, or other settings.
        """
        if self._started:
            raise RuntimeError("the loader was iterated already, expected its state before that")
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"loader state has version {state.get('version')}, expected {STATE_VERSION}"
            )
        url, own = self._view.storage.url, self._view.record.fingerprint
        if state["fingerprint"] != own:
            raise DatasetError(
                f"loader state is of a dataset with fingerprint {state['fingerprint']}, "
                f"expected {own} of {url}"
            )
        for name in (f.name for f in fields(self.config)):
            if state["settings"].get(name) != getattr(self.config, name):
                raise ConfigError(
                    f"loader state has {name} {state['settings'].get(name)!r}, expected "
                    f"{getattr(self.config, name)!r}: load it with the settings it was saved with"
                )
        known = {record.file: record for record in self._view.shards}
        shards = []
        for file, sha256 in state["shards"]:
            if file not in known or known[file].sha256 != sha256:
                raise DatasetError(f"dataset {url}: {file} of the loader state is gone or changed")
            shards.append(known[file])
        self._pin(shards)
        self.epoch = state["epoch"]
        self._cursor = (state["epoch"], state["step"], state["micro_batch"])
        self._resumes = True

    def _pin(self, shards: Sequence[CommitRecord]) -> None:
        self._shards = tuple(shards)
        self._groups = plan_groups(self._shards)

    def _iterate(self, epoch: int, first_step: int, first_micro: int) -> Iterator[RolloutBatch]:
        """Yield the rest of an epoch; the cursor moves before each batch is handed out."""
        self.report = LoaderReport()
        order = epoch_order(
            self._groups,
            seed=self.config.seed,
            epoch=epoch,
            window_blocks=self.config.window_blocks,
            shuffle=self.config.shuffle,
        )
        size = self.config.groups_per_step
        dropped = order[self.num_steps * size :]
        if dropped:
            self.report.excluded["remainder"] = sum(self._groups[g].num_rows for g in dropped)
        reader = ShardReader(
            self._view, self._shards, cache_bytes=self._cache_bytes, verify=self._verify
        )
        yielded = first_step > 0 or first_micro > 0
        try:
            for step in range(first_step, self.num_steps):
                groups = [self._groups[g] for g in order[step * size : (step + 1) * size]]
                rows, advantages = self._score([self._read(reader, group) for group in groups])
                cuts = self._cut(rows)
                total = sum(row.token_ids.size for row in rows)
                for micro in range(first_micro, len(cuts)):
                    start, stop = cuts[micro]
                    batch = pack_rollouts(
                        rows[start:stop],
                        advantages[start:stop],
                        untruncated=self.config.untruncated,
                        global_denominator=total,
                        step=step,
                        micro_batch=micro,
                        num_micro_batches=len(cuts),
                    )
                    last = micro + 1 == len(cuts)
                    self._cursor = (epoch, step + 1, 0) if last else (epoch, step, micro + 1)
                    if last and step + 1 == self.num_steps:
                        self._cursor = (epoch + 1, 0, 0)
                    yielded = True
                    yield batch
                first_micro = 0
        finally:
            reader.close()
        self._finish(epoch, yielded)

    def _finish(self, epoch: int, yielded: bool) -> None:
        """Say what the epoch left out, and move on to the next."""
        excluded, url = dict(self.report.excluded), self._view.storage.url
        if not yielded:
            raise DatasetError(
                f"dataset {url}: none of {self.num_rollouts} rollouts can be trained on with "
                f"advantage {self.config.advantage!r}: left out {excluded}"
            )
        if excluded or self.report.over_budget:
            _log.warning(
                "dataset %s, epoch %d: left out %s; %d rollouts exceed a budget alone",
                url,
                epoch,
                excluded or "nothing",
                self.report.over_budget,
            )
        self.epoch = epoch + 1
        self._cursor = (self.epoch, 0, 0)

    def _read(self, reader: ShardReader, group: PlannedGroup) -> list[RolloutRow]:
        """Return the rollouts of a group in the order of their sample_index."""
        rows = [
            row
            for piece in group.pieces
            for row in reader.read(piece.shard, piece.first_row, piece.num_rows)
        ]
        if len(rows) < max(row.group_size for row in rows):
            self.report.incomplete_groups += 1
        return sorted(rows, key=lambda row: row.sample_index)

    def _score(
        self, groups: Sequence[Sequence[RolloutRow]]
    ) -> tuple[list[RolloutRow], list[float]]:
        """Return the rollouts of a step that have an advantage, and their advantages."""
        name = "advantage" if self.config.advantage == "column" else "reward"
        rows, values, index = [], [], []
        for number, group in enumerate(groups):
            for row in group:
                value = getattr(row, name)
                if value is None:
                    self.report.excluded[f"no_{name}"] += 1
                    continue
                rows.append(row)
                values.append(value)
                index.append(number)
        if name == "advantage" or not rows:
            return rows, values
        normalised = self.config.advantage == "group_normalised"
        scored = group_advantages(np.array(values), np.array(index), normalised=normalised)
        return rows, scored.tolist()

    def _cut(self, rows: Sequence[RolloutRow]) -> list[tuple[int, int]]:
        """Cut a step's rollouts, in order, where the next one would exceed a budget."""
        cuts: list[tuple[int, int]] = []
        start = tokens = entries = 0
        for i, row in enumerate(rows):
            own_tokens = row.prompt_token_ids.size + row.token_ids.size
            own_entries = num_entries(row, self.config.untruncated)
            over = own_tokens > self.config.token_budget or own_entries > self.config.entry_budget
            self.report.over_budget += over
            fits = (
                tokens + own_tokens <= self.config.token_budget
                and entries + own_entries <= self.config.entry_budget
            )
            if i > start and not fits:
                cuts.append((start, i))
                start, tokens, entries = i, 0, 0
            tokens, entries = tokens + own_tokens, entries + own_entries
        if rows:
            cuts.append((start, len(rows)))
        return cuts


def _check_vocabulary(url: str, shards: Sequence[CommitRecord], vocab_size: int) -> None:
    """Raise DatasetError where the dataset holds ids that the trainer's weight has no row for."""
    largest = max(record.max_token_id for record in shards)
    if largest >= vocab_size:
        raise DatasetError(
            f"dataset {url} holds token id {largest}, expected below the trainer's vocab_size "
            f"{vocab_size}: the sampler's vocabulary is wider than the trainer's; load the output "
            "weight with the padding rows that the sampler had"
        )


def _compare_head(url: str, shards: Sequence[CommitRecord], head_dtype: str) -> None:
    """Warn where the sampler's output weight had another dtype than the trainer's."""
    found = {record.engine.get("head_dtype") for record in shards}
    others = {str(dtype) for dtype in found - {None, head_dtype}}
    if others:
        _log.warning(
            "dataset %s: the sampler's output weight was %s, the trainer's is %s: "
            "log-probabilities of unchanged weights differ by their rounding",
            url,
            ", ".join(sorted(others)),
            head_dtype,
        )
