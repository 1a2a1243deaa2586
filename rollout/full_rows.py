"""Read rollouts back by row groups: a part's in order, or single ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.dataset_view import DatasetView
from rollout.errors import DatasetError
from rollout.rows import RolloutRow
from rollout.schema.columns import SCHEMA
from rollout.schema.records import CommitRecord

_COUNTED: Final = ("num_prompt_tokens", "num_tokens", "num_support_entries")
_COLUMNS: Final = tuple(field.name for field in SCHEMA if field.name not in _COUNTED)


def read_full_rows(
    view: DatasetView, record: CommitRecord, columns: Sequence[str] = _COLUMNS
) -> Iterator[RolloutRow]:
    """Yield a part's rollouts in order, one row group in memory at a time; lists are views.

    Args:
        view: the dataset.
        record: the part's.
        columns: fields of the row, at least those without a default; default: all.

    Raises:
        DatasetError: the shard is missing or damaged, or is not the one of its record.
    """
    keys = iter(record.row_prompts)
    for table in read_tables(view, record, columns):
        for index in range(table.num_rows):
            values = {name: _value(table[name][index]) for name in columns}
            yield RolloutRow(prompt_key=next(keys), **values)


def read_rows(
    view: DatasetView, record: CommitRecord, indices: Sequence[int], columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield some columns of single rows, lists as arrays, from the row groups that hold them.

    Args:
        view: the dataset.
        record: the part's.
        indices: rows of its shard, ascending.
        columns: columns of the schema.

    Raises:
        DatasetError: the shard is missing or damaged, or is not the one of its record.
    """
    with view.open_shard(record) as file:
        first = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            own = [index - first for index in indices if first <= index < first + rows]
            first += rows
            if not own:
                continue
            table = _row_group(file, group, record, columns)
            for index in own:
                yield {name: _value(table[name][index]) for name in columns}


def read_tables(
    view: DatasetView, record: CommitRecord, columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield some columns of a part's row groups.

    Raises:
        DatasetError: the shard is missing or damaged, or is not the one of its record.
    """
    with view.open_shard(record) as file:
        for group in range(file.num_row_groups):
            yield _row_group(file, group, record, columns)


def _row_group(
    file: pq.ParquetFile, group: int, record: CommitRecord, columns: Sequence[str]
) -> pa.Table:
    try:
        return file.read_row_group(group, columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{record.file}: damaged, copy the dataset again: {error}") from error


def _value(scalar: Any) -> Any:
    if pa.types.is_list(scalar.type):
        return scalar.values.to_numpy(zero_copy_only=False) if scalar.is_valid else None
    return scalar.as_py()
