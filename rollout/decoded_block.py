"""A decoded row group whose rollouts are views of its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from rollout.rows import RolloutRow


class DecodedBlock:
    """Rows of one row group; their arrays are read-only views, made when a row is asked for.

    Args:
        table: columns of the dataset's schema; those that are not there stay unset.
        prompt_keys: one for each row.
        scalars: columns of the same rows that a step is planned from.
    """

    def __init__(
        self, table: pa.Table, prompt_keys: Sequence[str], scalars: pa.Table | None = None
    ) -> None:
        self.scalars = scalars
        self.num_rows: int = table.num_rows
        self.num_bytes: int = table.nbytes
        """Bytes of the decoded columns."""
        self._prompt_keys = prompt_keys
        self._scalars: dict[str, list[Any]] = {}
        self._lists: dict[str, list[_Lists]] = {}
        for name, column in zip(table.schema.names, table.columns, strict=True):
            if pa.types.is_list(column.type):
                self._lists[name] = [_Lists(chunk) for chunk in column.chunks]
            else:
                self._scalars[name] = column.to_pylist()

    def row(self, index: int) -> RolloutRow:
        """Return one rollout."""
        fields = {name: values[index] for name, values in self._scalars.items()}
        for name, chunks in self._lists.items():
            place = index
            for chunk in chunks:
                if place < chunk.num_rows:
                    fields[name] = chunk.row(place)
                    break
                place -= chunk.num_rows
        return RolloutRow(prompt_key=self._prompt_keys[index], **fields)


class _Lists:
    """One chunk of a list column."""

    def __init__(self, chunk: pa.ListArray) -> None:
        self.num_rows = len(chunk)
        self._values = chunk.values.to_numpy(zero_copy_only=True)
        self._bounds = chunk.offsets.to_numpy(zero_copy_only=True).tolist()
        self._valid = chunk.is_valid().to_pylist() if chunk.null_count else None

    def row(self, index: int) -> NDArray[Any] | None:
        """Return one list, None where it is null."""
        if self._valid is not None and not self._valid[index]:
            return None
        values: NDArray[Any] = self._values[self._bounds[index] : self._bounds[index + 1]]
        return values
