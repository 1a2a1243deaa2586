"""Look at a dataset: read its records and the few columns that the numbers need."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from rollout.dataset import DatasetView, read_dataset
from rollout.errors import DatasetError
from rollout.report import InspectReport, SupportReport, format_report
from rollout.schema import layout
from rollout.schema.records import CommitRecord
from rollout.storage import Storage
from rollout.tally import Tally

__all__ = ["InspectReport", "format_report", "inspect_dataset"]

_COLUMNS = [
    "support_kind",
    "support_offsets",
    "tail_mass",
    "finish_reason",
    "num_prompt_tokens",
    "num_tokens",
    "num_support_entries",
    "group_size",
    "reward",
]
# what polars opens by itself; anything else goes through fsspec
_POLARS_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl", "hf")
_GLOB_CHARACTERS = frozenset("*?[]{}")


def inspect_dataset(
    path: str | Path, storage_options: Mapping[str, Any] | None = None
) -> InspectReport:
    """Count what a dataset holds and what it lacks; also while a job is writing it.

    A planned prompt asks for the `group_size` of its rollouts, or, before it has one, for the n of
    the job that made the dataset (1 where no job is recorded).

    Args:
        path: The dataset's folder, a local path or an fsspec URL.
        storage_options: Options of the fsspec filesystem.

    Returns:
        The numbers, exact.

    Raises:
        DatasetError: Not a dataset, of a newer format, or a file is missing or damaged.
        OutputError: The storage can't be opened.
    """
    storage = Storage.open(path, dict(storage_options or {}))
    view = read_dataset(storage)
    tallies = _Tallies()
    for frame in _frames(view):
        tallies.add(frame)
    rollouts = pl.concat(tallies.rollouts) if tallies.rollouts else None
    rewards = tallies.rewards.spread()
    named = {Path(record.file).name for record in view.shards if record.file is not None}
    inputs, provenance = view.record.fingerprint_inputs, view.record.provenance
    return InspectReport(
        url=storage.url,
        format_version=view.record.format_version,
        fingerprint=view.record.fingerprint,
        model=_text(provenance, "model", "name") or _text(provenance, "job", "model", "path"),
        model_digest=_text(inputs, "model", "weights_digest"),
        dtype=_text(inputs, "model", "dtype"),
        engines=_engines(view),
        parts=len(view.shards),
        data_bytes=sum(record.size for record in view.shards),
        orphans=sum(name not in named for name in storage.list(layout.DATA_FOLDER)),
        **_completeness(view, rollouts),
        rejections=_rejections(view),
        finish_reasons=tuple(sorted(tallies.finish.items(), key=lambda item: -item[1])),
        prompt_tokens=tallies.prompt_tokens.spread(),
        tokens=tallies.tokens.spread(),
        total_tokens=sum(record.tokens for record in view.shards),
        total_entries=sum(record.entries for record in view.shards),
        supports=tuple(tallies.kinds[kind].report(kind) for kind in sorted(tallies.kinds)),
        rewards=rewards,
        rollouts_without_reward=sum(r.rows for r in view.shards)
        - (rewards.count if rewards else 0),
        **_reward_groups(rollouts),
        polars_line=_polars_line(storage, path) if named else None,
    )


@dataclass(kw_only=True, slots=True)
class _KindTally:
    """Sums over the rows of one kind of support."""

    rollouts: int = 0
    tokens: int = 0
    sizes: Tally = field(default_factory=Tally)
    tails: int = 0
    tail_sum: float = 0.0
    tail_maximum: float = 0.0
    tails_above: int = 0

    def add(self, rows: pl.DataFrame) -> None:
        self.rollouts += len(rows)
        self.tokens += int(rows["num_tokens"].sum())
        listed = rows["support_offsets"].drop_nulls()
        self.sizes.add(listed.list.diff(null_behavior="drop").list.explode().drop_nulls())

    def add_tail(self, rows: pl.DataFrame) -> None:
        tail = rows["tail_mass"].drop_nulls().list.explode().drop_nulls().cast(pl.Float64)
        if len(tail) == 0:
            return
        self.tails += len(tail)
        self.tail_sum += float(tail.sum())
        self.tail_maximum = max(self.tail_maximum, float(tail.to_numpy().max()))
        self.tails_above += int((tail > 0.01).sum())

    def report(self, kind: str) -> SupportReport:
        has_tail = kind == "top" and self.tails > 0
        return SupportReport(
            kind=kind,
            rollouts=self.rollouts,
            tokens=self.tokens,
            sizes=self.sizes.spread(),
            singleton_share=self.sizes.share_of(1),
            tail_mean=self.tail_sum / self.tails if has_tail else None,
            tail_maximum=self.tail_maximum if has_tail else None,
            tail_above_1_percent=self.tails_above / self.tails if has_tail else None,
        )


@dataclass(kw_only=True, slots=True)
class _Tallies:
    """Sums over all row groups."""

    finish: Counter[str | None] = field(default_factory=Counter)
    prompt_tokens: Tally = field(default_factory=Tally)
    tokens: Tally = field(default_factory=Tally)
    rewards: Tally = field(default_factory=Tally)
    kinds: dict[str, _KindTally] = field(default_factory=dict)
    rollouts: list[pl.DataFrame] = field(default_factory=list)
    """prompt_key, group_size and reward of every rollout."""

    def add(self, frame: pl.DataFrame) -> None:
        self.finish.update(frame["finish_reason"].to_list())
        self.prompt_tokens.add(frame["num_prompt_tokens"])
        self.tokens.add(frame["num_tokens"])
        self.rewards.add(
            frame["reward"].drop_nulls().filter(frame["reward"].drop_nulls().is_finite())
        )
        for (kind,), rows in frame.group_by("support_kind"):
            tally = self.kinds.setdefault(str(kind), _KindTally())
            tally.add(rows)
            if kind == "top":
                tally.add_tail(rows)
        self.rollouts.append(frame.select("prompt_key", "group_size", "reward"))


def _frames(view: DatasetView) -> Iterator[pl.DataFrame]:
    """One frame a row group, with the prompt_key that the commit record knows."""
    for record in view.shards:
        first = 0
        with view.open_shard(record) as file:
            for group in range(file.num_row_groups):
                try:
                    table = file.read_row_group(group, columns=_COLUMNS)
                except OSError as error:
                    raise DatasetError(f"{record.file}: damaged: {error}") from error
                frame = pl.DataFrame(table)
                keys = [key for key, _ in record.keys[first : first + len(frame)]]
                first += len(frame)
                if len(keys) == len(frame):
                    yield frame.with_columns(pl.Series("prompt_key", keys, pl.String))
        _check_rows(record, first)


def _check_rows(record: CommitRecord, rows: int) -> None:
    if rows != len(record.keys):
        raise DatasetError(
            f"{record.file}: holds {rows} rollouts, its commit record names {len(record.keys)}: "
            "copy the dataset again"
        )


def _completeness(view: DatasetView, rollouts: pl.DataFrame | None) -> dict[str, int]:
    whole = {item.prompt_key for item in view.rejected if item.sample_index is None}
    single = Counter(
        item.prompt_key
        for item in view.rejected
        if item.sample_index is not None and item.prompt_key not in whole
    )
    committed = Counter(key for key, _ in view.covered)
    sizes: dict[str, int] = {}
    if rollouts is not None:
        largest = rollouts.group_by("prompt_key").agg(pl.col("group_size").max())
        sizes = dict(largest.iter_rows())
    default = _find(view.record.provenance, "job", "sampling", "n")
    default = default if isinstance(default, int) else 1
    planned = {entry.prompt_key for entry in view.plan} | committed.keys()
    wanted = {
        # fewer than there are is never asked for: n may have been lowered between two runs
        key: max(sizes.get(key, default), committed[key] + single[key])
        for key in planned - whole
    }
    complete = sum(committed[key] == number for key, number in wanted.items())
    return {
        "prompts_planned": len(planned),
        "prompts_complete": complete,
        "prompts_started": len(committed) - complete,
        "prompts_rejected": len(whole),
        "rollouts_planned": sum(wanted.values()),
        "rollouts_committed": committed.total(),
        "rollouts_rejected": single.total(),
        "rollouts_missing": sum(wanted.values()) - committed.total() - single.total(),
    }


def _rejections(view: DatasetView) -> tuple[tuple[str, str, int], ...]:
    counts = Counter((item.stage, item.reason) for item in view.rejected)
    return tuple(
        (stage, reason, count)
        for (stage, reason), count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def _reward_groups(rollouts: pl.DataFrame | None) -> dict[str, int]:
    if rollouts is None:
        return {"groups_with_rewards": 0, "groups_even": 0}
    reward = pl.col("reward")
    groups = (
        rollouts.filter(reward.is_not_null() & reward.is_finite())
        .group_by("prompt_key")
        .agg(pl.len().alias("rewards"), (reward.max() == reward.min()).alias("even"))
        .filter(pl.col("rewards") >= 2)
    )
    return {"groups_with_rewards": len(groups), "groups_even": int(groups["even"].sum())}


def _engines(view: DatasetView) -> tuple[str, ...]:
    found = {
        f"{_text(record.engine, 'engine') or 'engine'} {version}"
        for record in view.shards
        if (version := _text(record.engine, "engine_version")) is not None
    }
    return tuple(sorted(found))


def _find(value: Any, *keys: str) -> Any:
    """Follow keys into a record that any version of the package may have written."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _text(value: Any, *keys: str) -> str | None:
    found = _find(value, *keys)
    return found if isinstance(found, str) else None


def _polars_line(storage: Storage, path: str | Path) -> str:
    if storage.local_root is not None:
        folder = str(path) if "://" not in str(path) else str(storage.local_root)
        folder = f"{folder.rstrip('/')}/{layout.DATA_FOLDER}/"
        if _GLOB_CHARACTERS & set(folder):
            return f"pl.scan_parquet({_quoted(folder)}, glob=False)"
        return f"pl.scan_parquet({_quoted(folder + '*.parquet')})"
    pattern = _quoted(f"{storage.url.rstrip('/')}/{layout.DATA_FOLDER}/*.parquet")
    if storage.url.split("://")[0] in _POLARS_PROTOCOLS:
        return f"pl.scan_parquet({pattern})"
    return f"pl.concat(pl.read_parquet(f.open()) for f in fsspec.open_files({pattern}))"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
