"""Read whole rollouts back, every column, to write them again elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from rollout.dataset_view import DatasetView
from rollout.errors import DatasetError
from rollout.rows import RolloutRow
from rollout.schema.columns import SCHEMA
from rollout.schema.records import CommitRecord

_COUNTED: Final = ("num_prompt_tokens", "num_tokens", "num_support_entries")
_COLUMNS: Final = tuple(field.name for field in SCHEMA if field.name not in _COUNTED)


def read_full_rows(view: DatasetView, record: CommitRecord) -> Iterator[RolloutRow]:
    """Yield a part's rollouts in order, one row group in memory at a time.

    Raises:
        DatasetError: the shard is missing or damaged, or is not the one of its record.
    """
    keys = iter(record.row_prompts)
    for table in read_tables(view, record, _COLUMNS):
        for index in range(table.num_rows):
            values = {name: _value(table[name][index]) for name in _COLUMNS}
            yield RolloutRow(prompt_key=next(keys), **values)


def read_tables(
    view: DatasetView, record: CommitRecord, columns: tuple[str, ...]
) -> Iterator[pa.Table]:
    """Yield some columns of a part's row groups.

    Raises:
        DatasetError: the shard is missing or damaged, or is not the one of its record.
    """
    rows = 0
    with view.open_shard(record) as file:
        for group in range(file.num_row_groups):
            try:
                table = file.read_row_group(group, columns=list(columns))
            except (pa.ArrowException, OSError) as error:
                raise DatasetError(
                    f"{record.file}: damaged, copy the dataset again: {error}"
                ) from error
            rows += table.num_rows
            if rows > record.rows:
                break
            yield table
    if rows != record.rows:
        raise DatasetError(
            f"{record.file}: holds {rows} rollouts, its commit record names {record.rows}: "
            "copy the dataset again"
        )


def _value(scalar: Any) -> Any:
    if pa.types.is_list(scalar.type):
        return scalar.values.to_numpy(zero_copy_only=True) if scalar.is_valid else None
    return scalar.as_py()
