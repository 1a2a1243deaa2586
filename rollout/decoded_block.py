"""A decoded row group whose rollouts are views of its arrays."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from rollout.arrow_numpy import numpy_view
from rollout.rows import RolloutRow


class DecodedBlock:
    """Rows of one row group; their arrays are read-only views, made when a row is asked for.

    Args:
        pieces: its rows, a few at a time.
        columns: those of the rollouts, which the pieces hold; the others stay unset.
        prompt_keys: one for each row.
        planned: columns to keep as a table, for a planner.
    """

    def __init__(
        self,
        pieces: Iterable[pa.RecordBatch],
        columns: Sequence[str],
        prompt_keys: Sequence[str],
        *,
        planned: Sequence[str] = (),
    ) -> None:
        self.num_rows = 0
        self.num_bytes = 0
        """Bytes of the decoded columns."""
        self._prompt_keys = prompt_keys
        self._scalars: dict[str, list[Any]] = {}
        self._lists: dict[str, _Lists] = {}
        kept = []
        for piece in pieces:
            self.num_rows += piece.num_rows
            for name in columns:
                column = piece.column(name)
                if pa.types.is_list(column.type):
                    self._lists.setdefault(name, _Lists()).add(column)
                else:
                    self._scalars.setdefault(name, []).extend(column.to_pylist())
                self.num_bytes += column.nbytes
            if planned:
                kept.append(piece.select(planned))
        self.scalars: pa.Table | None = pa.Table.from_batches(kept) if kept else None
        """The columns to plan from, where they were asked for."""

    def row(self, index: int) -> RolloutRow:
        """Return one rollout."""
        fields = {name: values[index] for name, values in self._scalars.items()}
        for name, lists in self._lists.items():
            fields[name] = lists.row(index)
        return RolloutRow(prompt_key=self._prompt_keys[index], **fields)


class _Lists:
    """A list column, in pieces."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._values: list[NDArray[Any]] = []
        self._bounds: list[list[int]] = []
        self._valid: list[list[bool] | None] = []

    def add(self, piece: pa.ListArray) -> None:
        """Append a piece."""
        self._ends.append(len(piece) + (self._ends[-1] if self._ends else 0))
        self._values.append(numpy_view(piece.values))
        self._bounds.append(numpy_view(piece.offsets).tolist())
        self._valid.append(piece.is_valid().to_pylist() if piece.null_count else None)

    def row(self, index: int) -> NDArray[Any] | None:
        """Return one list, None where it is null."""
        piece = bisect_right(self._ends, index)
        place = index - self._ends[piece - 1] if piece else index
        valid, bounds = self._valid[piece], self._bounds[piece]
        if valid is not None and not valid[place]:
            return None
        values: NDArray[Any] = self._values[piece][bounds[place] : bounds[place + 1]]
        return values
