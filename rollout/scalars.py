"""The scalars of rollouts: what a step is planned from, and what rows are selected by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rollout.arrow_numpy import numpy_view
from rollout.epoch_plan import Block, Piece
from rollout.errors import ConfigError
from rollout.schema.columns import SCALAR_COLUMNS
from rollout.shard_reader import ShardReader

Where: TypeAlias = pl.Expr | pc.Expression

_KEPT_BLOCKS: Final = 65_536


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scalars:
    """Scalars of R consecutive rows."""

    sample_index: NDArray[np.int64]
    group_size: NDArray[np.int64]
    kind: NDArray[np.object_]
    """`kept`, `top` or `none`."""
    num_prompt_tokens: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_entries: NDArray[np.int64]
    """Support entries, draws not counted."""
    num_draws: NDArray[np.int64]
    """Draws of all tokens together."""
    reward: NDArray[np.float64]
    """NaN where there is none."""
    advantage: NDArray[np.float64]
    """NaN where there is none."""

    def slice(self, start: int, stop: int) -> Scalars:
        """Return some of the rows."""
        return Scalars(**{name: getattr(self, name)[start:stop] for name in _NAMES})

    @staticmethod
    def joined(parts: Sequence[Scalars]) -> Scalars:
        """Return the rows of all parts, one after the other."""
        return Scalars(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _NAMES}
        )


_NAMES: Final = tuple(Scalars.__dataclass_fields__)


class ScalarIndex:
    """Scalars by row group, read when they are first needed and kept.

    Args:
        reader: of the pinned shards.
        row_groups: rows of each row group, for each shard.
    """

    def __init__(self, reader: ShardReader, row_groups: Sequence[Sequence[int]]) -> None:
        self._reader = reader
        self._ends = [np.cumsum(rows) for rows in row_groups]
        self._blocks: OrderedDict[Block, Scalars] = OrderedDict()

    def spans(self, piece: Piece) -> list[tuple[Block, int, int]]:
        """Return the row groups that a piece lies in, with its first row and last row + 1 there."""
        ends, found = self._ends[piece.shard], []
        row, stop = piece.first_row, piece.first_row + piece.num_rows
        while row < stop:
            index = int(np.searchsorted(ends, row, side="right"))
            first = int(ends[index - 1]) if index else 0
            last = min(stop, int(ends[index]))
            found.append(((piece.shard, index), row - first, last - first))
            row = last
        return found

    def get(self, block: Block, load: Callable[[Block], pa.Table | None]) -> Scalars:
        """Return the scalars of a row group.

        Args:
            block: the row group.
            load: called when they are not known yet: gives the columns of a row group that is
                read whole anyway, or None.
        """
        found = self._blocks.get(block)
        if found is not None:
            return found
        table = load(block)
        tables = {block: table} if table is not None else self._reader.plan_scalars(block)
        for other, columns in tables.items():
            self._blocks[other] = self._convert(other, columns)
        while len(self._blocks) > max(_KEPT_BLOCKS, len(tables)):
            self._blocks.popitem(last=False)
        return self._blocks[block]

    def _convert(self, block: Block, table: pa.Table) -> Scalars:
        def numbers(name: str, dtype: Any) -> NDArray[Any]:
            column = table[name].combine_chunks()
            if column.null_count:
                # by polars: a null is NaN, and nothing imports pandas, which takes 0.3 s
                filled: NDArray[Any] = pl.Series(column).to_numpy().astype(dtype)
                return filled
            return numpy_view(column).astype(dtype)

        num_tokens = numbers("num_tokens", np.int64)
        draws = self._reader.draws_per_token(block, int(num_tokens.sum()))
        return Scalars(
            sample_index=numbers("sample_index", np.int64),
            group_size=numbers("group_size", np.int64),
            kind=np.array(table["support_kind"].to_pylist(), np.object_),
            num_prompt_tokens=numbers("num_prompt_tokens", np.int64),
            num_tokens=num_tokens,
            num_entries=numbers("num_support_entries", np.int64),
            num_draws=num_tokens * draws,
            reward=numbers("reward", np.float64),
            advantage=numbers("advantage", np.float64),
        )


def select_rows(reader: ShardReader, where: Where) -> list[NDArray[np.bool_]]:
    """Evaluate an expression on the scalar columns of every shard.

    Args:
        reader: of the pinned shards.
        where: a pyarrow or polars expression over `SCALAR_COLUMNS`; null means no.

    Returns:
        For each shard, whether each row is selected.

    Raises:
        ConfigError: the expression fails, or is not a condition.
        DatasetError: a shard can't be read.
    """
    names = list(SCALAR_COLUMNS)
    return [_selected(table, where) for table in reader.all_scalars(names)]


def _selected(table: pa.Table, where: Where) -> NDArray[np.bool_]:
    result = np.zeros(table.num_rows, np.bool_)
    numbered = table.append_column("__row", pa.array(np.arange(table.num_rows)))
    try:
        if isinstance(where, pl.Expr):
            frame = pl.DataFrame(pl.from_arrow(numbered))
            result[frame.filter(where)["__row"].to_numpy()] = True
        else:
            result[pl.Series(numbered.filter(where)["__row"]).to_numpy()] = True
    except (pa.ArrowException, pl.exceptions.PolarsError, TypeError) as error:
        raise ConfigError(
            f"where {where} can't be evaluated on the scalar columns: {error}"
        ) from error
    return result
