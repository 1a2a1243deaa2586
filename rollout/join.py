"""Add rewards or advantages to a dataset by rollout id: a new dataset, the old one untouched."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import polars as pl

from rollout.dataset import DatasetView, DatasetWriter, read_dataset
from rollout.errors import DatasetError, InputError, OutputError
from rollout.full_rows import read_full_rows
from rollout.rows import Rejection, RolloutRow
from rollout.schema.records import CommitRecord
from rollout.storage import Storage
from rollout.verify_shard import check_bytes

_VALUES: Final = ("reward", "advantage")
_NAMED: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinSummary:
    """What a join did."""

    rollouts: int
    """In the new dataset."""
    matched: int
    """Rollouts that got at least one value."""
    without_values: tuple[str, ...]
    """rollout_id of the rollouts that got none; they keep what they had."""
    unknown_ids: tuple[str, ...]
    """rollout_id of values that belong to no rollout of the dataset."""

    def text(self) -> str:
        """Say it on a few lines."""
        lines = [f"{self.matched:,} of {self.rollouts:,} rollouts got values"]
        for what, ids in (
            ("rollouts without a value, left as they were", self.without_values),
            ("ids in the file that no rollout has", self.unknown_ids),
        ):
            if ids:
                more = ", ..." if len(ids) > _NAMED else ""
                lines.append(f"{len(ids):,} {what}: {', '.join(ids[:_NAMED])}{more}")
        return "\n".join(lines)


def join_values(
    path: str | Path,
    values: Path,
    output: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    output_options: Mapping[str, Any] | None = None,
) -> JoinSummary:
    """Write a dataset again with the rewards or advantages of a table.

    The new dataset has the old one's fingerprint, plan, parts and rejections, and goes through the
    same commit protocol: a join that was cut short continues when it is run again.

    Args:
        path: the dataset.
        values: a local .parquet, .csv or .jsonl file with `rollout_id` and `reward`, `advantage` or
            both; a null leaves what is there.
        output: the new dataset's folder or URL.
        storage_options: options of the dataset's fsspec filesystem.
        output_options: the same of the new one.

    Returns:
        How many rollouts got values, and which ids did not match.

    Raises:
        InputError: the table can't be read, lacks a column, repeats an id, or holds what is
            no finite float32.
        DatasetError: the dataset can't be read, a shard is missing or not as it was committed, or
            the plan lacks a prompt.
        OutputError: the output holds something else, or can't be written.
    """
    table, digest = _read_values(values)
    view = read_dataset(Storage.open(path, dict(storage_options or {})))
    joined = {"values_sha256": digest, "columns": list(table.columns[1:])}
    record = replace(view.record, provenance=view.record.provenance | {"joined": joined})
    target = Storage.open(output, dict(output_options or {}))
    writer = DatasetWriter.open(target, record)
    if writer.record.provenance.get("joined") != joined:
        raise OutputError(f"output {target.url} holds another dataset: choose an empty folder")
    writer.append_plan(view.plan)
    given = {row[0]: row[1:] for row in table.iter_rows()}
    names = table.columns[1:]
    units = {entry.prompt_key: entry.unit for entry in view.plan}
    seen: set[str] = set()
    left: list[str] = []
    matched = 0
    for commit in view.commits:
        _check_part(view, commit, units)
        writer.engine = dict(commit.engine)
        rows = []
        for row in _rows_of(view, commit):
            seen.add(row.rollout_id)
            found = {
                name: value
                for name, value in zip(names, given.get(row.rollout_id, ()), strict=False)
                if value is not None
            }
            for name, value in found.items():
                setattr(row, name, value)
            if found:
                matched += 1
            else:
                left.append(row.rollout_id)
            rows.append(row)
        writer.commit_part(commit.unit, rows, _rejections_of(view, commit))
    return JoinSummary(
        rollouts=len(seen),
        matched=matched,
        without_values=tuple(left),
        unknown_ids=tuple(one for one in given if one not in seen),
    )


def _check_part(view: DatasetView, commit: CommitRecord, units: Mapping[str, str]) -> None:
    """Raise DatasetError where a part is not what was committed: the copy would vouch for it."""
    problem = None
    if any(units.get(key) != commit.unit for key in commit.prompt_keys):
        problem = f"the plan lacks prompts of unit {commit.unit}"
    elif commit.file is not None:
        try:
            check_bytes(view.storage, commit)
        except DatasetError as error:
            problem = f"{commit.file} {error}"
    if problem is not None:
        raise DatasetError(f"dataset {view.storage.url}: {problem}: copy the dataset again")


def _rows_of(view: DatasetView, commit: CommitRecord) -> Iterator[RolloutRow]:
    if commit.file is not None:
        yield from read_full_rows(view, commit)


def _rejections_of(view: DatasetView, commit: CommitRecord) -> list[Rejection]:
    keys = set(commit.rejected_keys)
    return [item for item in view.rejected if item.key in keys]


def _read_values(path: Path) -> tuple[pl.DataFrame, str]:
    """Read the table as rollout_id and the value columns, checked, and digest the file."""
    readers: dict[str, Callable[[bytes], pl.DataFrame]] = {
        ".parquet": pl.read_parquet,
        ".csv": pl.read_csv,
        ".jsonl": pl.read_ndjson,
    }
    if path.suffix not in readers:
        raise InputError(f"values {path}: expected a name that ends in {', '.join(readers)}")
    try:
        data = path.read_bytes()
        table = readers[path.suffix](data)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(f"values {path}: can't be read: {error}") from error
    names = [name for name in _VALUES if name in table.columns]
    if "rollout_id" not in table.columns or not names:
        raise InputError(
            f"values {path}: columns {table.columns}, expected `rollout_id` and `reward` or "
            "`advantage`"
        )
    try:
        table = table.select(
            pl.col("rollout_id").cast(pl.String),
            *(pl.col(name).cast(pl.Float64).alias(name) for name in names),
        )
    except pl.exceptions.PolarsError as error:
        raise InputError(f"values {path}: a column is no number: {error}") from error
    for problem, bad in (
        ("has no rollout_id", table.filter(pl.col("rollout_id").is_null())),
        ("is there twice", table.filter(pl.col("rollout_id").is_duplicated())),
        *(
            # as they will be stored: float32 has no 1e39
            (
                f"has no finite float32 as {name}",
                table.filter(~pl.col(name).cast(pl.Float32).is_finite()),
            )
            for name in names
        ),
    ):
        if len(bad):
            raise InputError(
                f"values {path}: {len(bad)} rows: {bad['rollout_id'][0]!r} {problem}: correct them"
            )
    return table, hashlib.sha256(data).hexdigest()
