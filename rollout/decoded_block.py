"""A row group whose rollouts are views of its columns, and spans of its support entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollout.arrow_numpy import numpy_view
from rollout.batch_rows import BatchRow, Untruncated, choose_support
from rollout.entry_pages import Entries, EntryPages, SplitEntries
from rollout.schema.entries import unpack_entries


class DecodedBlock:
    """Rows of one row group; their arrays are views, made when a row is asked for.

    Args:
        table: its columns, without `support_entries`; what is not among them stays unset.
        pages: given the number of support entries of each row, their pages; unset, they were not
            read.

    Raises:
        OSError: there are more entries, or fewer, than the offsets say.
    """

    def __init__(
        self, table: pa.Table, pages: Callable[[NDArray[np.int64]], EntryPages] | None = None
    ) -> None:
        self.table = table
        self.num_rows: int = table.num_rows
        self.num_bytes: int = table.nbytes
        """Bytes that it holds; support entries count as they are stored."""
        self._scalars: dict[str, list[Any]] = {}
        self._lists: dict[str, _Lists] = {}
        for name in table.column_names:
            column = table[name].combine_chunks()
            if pa.types.is_list(column.type):
                self._lists[name] = _Lists(
                    values=numpy_view(column.values),
                    bounds=numpy_view(column.offsets).tolist(),
                    valid=column.is_valid().to_pylist(),
                )
            else:
                self._scalars[name] = column.to_pylist()
        self._pages: EntryPages | None = None
        self._first_entry: list[int] = []
        if pages is not None:
            offsets = (self._list("support_offsets", index) for index in range(self.num_rows))
            counts = np.array([0 if own is None else own[-1] for own in offsets], np.int64)
            self._first_entry = [0, *np.cumsum(counts).tolist()]
            self._pages = pages(counts)
            self.num_bytes += self._pages.num_bytes

    def row(self, index: int, untruncated: Untruncated, columns: Sequence[str]) -> BatchRow:
        """Return one rollout.

        Args:
            index: of its row.
            untruncated: see `choose_support`.
            columns: scalar columns to carry along.
        """
        token_ids, draws = self._list("token_ids", index), self._list("draw_entries", index)
        entries: Entries | None = None
        if self._pages is not None:
            entries = self._pages.span(self._first_entry[index], self._first_entry[index + 1])
        return BatchRow(
            rollout_id=self._scalars["rollout_id"][index],
            prompt_token_ids=self._list("prompt_token_ids", index),
            token_ids=token_ids,
            sampled_logprobs=self._list("sampled_logprobs", index),
            temperature=self._scalars["temperature"][index],
            support=choose_support(
                kind=self._scalars["support_kind"][index],
                num_tokens=token_ids.size,
                offsets=self._list("support_offsets", index),
                entries=entries,
                tail_mass=self._list("tail_mass", index),
                draws=None if draws is None else SplitEntries(*unpack_entries(draws)),
                untruncated=untruncated,
            ),
            columns={name: self._scalars[name][index] for name in columns},
        )

    def _list(self, name: str, index: int) -> Any:
        """Return a list's values, or None where it or the column is null."""
        lists = self._lists.get(name)
        if lists is None or not lists.valid[index]:
            return None
        return lists.values[lists.bounds[index] : lists.bounds[index + 1]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Lists:
    """A list column."""

    values: NDArray[Any]
    bounds: list[int]
    valid: list[bool]
