"""Turn a shard's table back into the rollouts that it was built from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from rollout.rows import RolloutRow
from rollout.schema.columns import SCHEMA

# all but the counts, which follow from the rest
ROW_COLUMNS: Final = tuple(name for name in SCHEMA.names if not name.startswith("num_"))


def table_rows(table: pa.Table, prompt_keys: Sequence[str]) -> list[RolloutRow]:
    """Build the rollouts of a table that holds `ROW_COLUMNS`; arrays are views where they can be.

    Args:
        table: rows of a shard.
        prompt_keys: the prompt of each row, from the commit record.
    """
    columns: dict[str, list[Any]] = {}
    for name in ROW_COLUMNS:
        column = table[name]
        columns[name] = (
            [None if item.values is None else item.values.to_numpy() for item in column]
            if pa.types.is_list(column.type)
            else column.to_pylist()
        )
    return [
        RolloutRow(prompt_key=key, **{name: values[i] for name, values in columns.items()})
        for i, key in enumerate(prompt_keys)
    ]
