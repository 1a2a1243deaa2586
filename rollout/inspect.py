"""Look at a dataset: read its records and the few columns that the numbers need."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from rollout.agreement_file import read_agreement
from rollout.completeness import count_completeness
from rollout.dataset import DatasetView, read_dataset
from rollout.inspect_text import format_report
from rollout.report import InspectReport
from rollout.schema import layout
from rollout.shard_scan import ShardScan, sample_bytes
from rollout.storage import Storage
from rollout.tallies import COLUMNS, Tallies

__all__ = ["InspectReport", "format_report", "inspect_dataset", "inspect_view"]

# what polars opens by itself; anything else goes through fsspec
_POLARS_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl", "hf")
_GLOB_CHARACTERS = frozenset("*?[]{}")


def inspect_dataset(
    path: str | Path, storage_options: Mapping[str, Any] | None = None, *, full: bool = False
) -> InspectReport:
    """Count what a dataset holds and what it lacks; also while a job is writing it.

    Completeness comes from the records alone: see `count_completeness`. A shard that is missing or
    damaged is named, and everything else is counted.

    Args:
        path: The dataset's folder, a local path or an fsspec URL.
        storage_options: Options of the fsspec filesystem.
        full: Read every shard; else an even sample of a large dataset (see `ShardScan`) gives the
            lengths, supports and rewards.

    Returns:
        The numbers; exact, but for what `rollouts_read` says of a sample.

    Raises:
        DatasetError: Not a dataset, of a newer format, or a record is missing or damaged.
        OutputError: The storage can't be opened.
    """
    storage = Storage.open(path, dict(storage_options or {}))
    with _collector_paused():
        return inspect_view(read_dataset(storage), path, full=full)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Let the garbage collector rest: a fifth of the time went into its looking at the records."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def inspect_view(view: DatasetView, path: str | Path, *, full: bool) -> InspectReport:
    """Count what an opened dataset holds: see `inspect_dataset`."""
    storage = view.storage
    tallies = Tallies()
    scan = ShardScan(
        view, COLUMNS, full=full, max_bytes=sample_bytes(view.record_bytes + view.plan_bytes)
    )
    for _, frame in scan.frames():
        tallies.add(frame)
    rollouts = tallies.rollouts()
    inputs, provenance = view.record.fingerprint_inputs, view.record.provenance
    times = sorted(record.created_at for record in view.commits)
    return InspectReport(
        url=storage.url,
        format_version=view.record.format_version,
        fingerprint=view.record.fingerprint,
        model=_text(provenance, "model", "name") or _text(provenance, "job", "model", "path"),
        model_revision=_text(provenance, "model", "revision"),
        model_digest=_text(inputs, "model", "weights_digest"),
        tokenizer_digest=_text(inputs, "tokenizer", "tokenizer_digest"),
        template_digest=_text(inputs, "tokenizer", "template_digest"),
        dtype=_text(inputs, "model", "dtype"),
        engines=_engines(view),
        sampling=_section(view, "sampling"),
        capture=_section(view, "capture"),
        rollout_version=_text(provenance, "rollout_version") or _text(provenance, "version"),
        prompts_file=_text(provenance, "job", "prompts", "path"),
        reward_function=_text(provenance, "reward", "name"),
        first_commit=times[0] if times else None,
        last_commit=times[-1] if times else None,
        parts=len(view.shards),
        data_bytes=sum(record.size for record in view.shards),
        orphans=scan.orphans,
        bad_shards=tuple(sorted(scan.bad, key=lambda bad: bad.file)),
        **count_completeness(view, rollouts),
        rejections=_rejections(view),
        rejected=view.rejected,
        rollouts_read=tallies.rows,
        shards_read=len(scan.chosen),
        finish_reasons=tuple(
            sorted(tallies.finish.items(), key=lambda item: (-item[1], item[0] or ""))
        ),
        prompt_tokens=tallies.prompt_tokens.spread(),
        tokens=tallies.tokens.spread(),
        total_tokens=sum(record.tokens for record in view.shards),
        total_entries=sum(record.entries for record in view.shards),
        supports=tuple(tallies.kinds[kind].report(kind) for kind in sorted(tallies.kinds)),
        rewards=tallies.rewards.spread(),
        rollouts_without_reward=tallies.nulls,
        nonfinite_rewards=tallies.nonfinite_rewards,
        **_reward_groups(rollouts),
        first_prompt=view.plan_ids["prompt_id"][0].as_py() if len(view.plan_ids) else None,
        agreement=read_agreement(storage),
        polars_line=_polars_line(storage, path) if view.shards else None,
    )


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


def _section(view: DatasetView, name: str) -> dict[str, Any]:
    """What the job asked for under one heading, n included; nothing where it is not recorded."""
    values: dict[str, Any] = {}
    for source in (view.record.provenance.get("job"), view.record.fingerprint_inputs):
        found = _find(source, name)
        if isinstance(found, Mapping):
            values |= found
    return values


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
