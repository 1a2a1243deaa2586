"""Read row groups of a dataset's shards, each from one range of bytes that its record vouches for.

A commit record names the byte range and the digest of every row group, so a reader needs no shard
whole: one request for the footer (`ShardFooters`) and one for each row group. The digest is
compared when a row group is first read; page checksums are verified on every read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.decoded_block import DecodedBlock
from rollout.entry_pages import EntryPages
from rollout.epoch_plan import Block
from rollout.errors import DatasetError
from rollout.shard_bytes import Data, PinnedShard, ShardBytes
from rollout.shard_footers import ShardFooters
from rollout.sparse_file import SparseFile, joined_ranges

BASE_COLUMNS: Final = (
    "rollout_id",
    "prompt_token_ids",
    "token_ids",
    "sampled_logprobs",
    "temperature",
    "support_kind",
)
"""What every batch needs."""
OPTIONAL_COLUMNS: Final = ("support_offsets", "support_entries", "tail_mass", "draw_entries")
"""What training reads unless it is told to leave some out."""
PLAN_COLUMNS: Final = (
    "sample_index",
    "group_size",
    "support_kind",
    "num_prompt_tokens",
    "num_tokens",
    "num_support_entries",
    "reward",
    "advantage",
)
"""What a step is planned from."""
MAX_ELEMENTS: Final = 2**31 - 1

# a request costs more than the bytes of such a gap
_REMOTE_GAP: Final = 2**19
_LOCAL_GAP: Final = 2**16
_SCALAR_READERS: Final = 8


class ShardReader:
    """Reads and decodes single row groups; safe to use from several threads.

    Args:
        shards: the pinned shards.
        source: their bytes.
        footers: their footers.
        columns: those to read.
    """

    def __init__(
        self,
        shards: Sequence[PinnedShard],
        source: ShardBytes,
        footers: ShardFooters,
        *,
        columns: Sequence[str],
    ) -> None:
        self._shards = shards
        self._bytes = source
        self._footers = footers
        self._columns = [name for name in columns if name != "support_entries"]
        self._with_entries = "support_entries" in columns

    def read(self, block: Block) -> DecodedBlock:
        """Read a row group and decode it, but for its support entries.

        Raises:
            DatasetError: the shard is missing, damaged, or not the one of its record.
        """
        shard, index = block
        pinned = self._shards[shard]
        footer = self._footers.get(shard)
        _check_elements(pinned, footer, index)
        data = self._bytes.row_group(block)
        parts = {pinned.record.row_groups[index].offset: data}
        # for a planner that would have to ask the storage again
        planned = () if pinned.is_local else PLAN_COLUMNS
        what = f"row group {index}"
        with _opened(pinned, footer, parts, what) as file:
            table = file.read_row_group(
                index, columns=list(dict.fromkeys((*self._columns, *planned))), use_threads=False
            )
            _check_rows(table.num_rows, footer.row_group(index).num_rows)
            if not self._with_entries:
                return DecodedBlock(table)
            chunk = self._entry_chunk(footer, block, data)
            where = f"{pinned.where}: {what}"
            return DecodedBlock(table, lambda counts: EntryPages(chunk, counts, where))

    def scalars(self, shard: int, row_groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
        """Read scalar columns of row groups, and few bytes beside them.

        Args:
            shard: index of the shard.
            row_groups: their indices, ascending.
            columns: scalar columns of the schema.

        Returns:
            The columns of these row groups, one after the other.

        Raises:
            DatasetError: as `read`.
        """
        pinned, footer = self._shards[shard], self._footers.get(shard)
        wanted = set(columns)
        chunks = [
            (column.data_page_offset, column.total_compressed_size)
            for index in row_groups
            for column in _chunks(footer.row_group(index))
            if column.path_in_schema in wanted
        ]
        ranges = joined_ranges(chunks, _LOCAL_GAP if pinned.is_local else _REMOTE_GAP)
        parts = {start: self._bytes.range(shard, start, size) for start, size in ranges}
        with _opened(pinned, footer, parts, f"row groups {list(row_groups)[:3]}") as file:
            table = file.read_row_groups(row_groups, columns=list(columns), use_threads=False)
            _check_rows(table.num_rows, sum(footer.row_group(i).num_rows for i in row_groups))
        return table

    def all_scalars(self, columns: Sequence[str]) -> list[pa.Table]:
        """Read scalar columns of all shards, several at a time.

        Raises:
            DatasetError: as `read`.
        """
        with ThreadPoolExecutor(_SCALAR_READERS) as pool:
            return list(
                pool.map(
                    lambda shard: self.scalars(
                        shard, range(len(self._shards[shard].record.row_groups)), columns
                    ),
                    range(len(self._shards)),
                )
            )

    def plan_scalars(self, block: Block) -> dict[Block, pa.Table]:
        """Read what steps are planned from: of a row group, or of all in a local shard.

        Raises:
            DatasetError: as `read`.
        """
        shard, index = block
        groups = self._shards[shard].record.row_groups
        if not self._shards[shard].is_local:
            return {block: self.scalars(shard, [index], PLAN_COLUMNS)}
        table, first, found = self.scalars(shard, range(len(groups)), PLAN_COLUMNS), 0, {}
        for number, group in enumerate(groups):
            found[shard, number] = table.slice(first, group.rows)
            first += group.rows
        return found

    def draws_per_token(self, block: Block, num_tokens: int) -> int:
        """Return how many draws a row group holds for each of its sampled tokens."""
        for column in _chunks(self._footers.get(block[0]).row_group(block[1])):
            if column.path_in_schema.startswith("draw_entries."):
                # a null list counts as one value
                values: int = column.num_values
                return values // num_tokens if num_tokens and values >= num_tokens else 0
        return 0

    def _entry_chunk(self, footer: pq.FileMetaData, block: Block, data: Data) -> memoryview:
        """Return the column chunk of the support entries, given a row group's bytes."""
        (chunk,) = (
            column
            for column in _chunks(footer.row_group(block[1]))
            if column.path_in_schema.startswith("support_entries.")
        )
        start = chunk.data_page_offset - self._shards[block[0]].record.row_groups[block[1]].offset
        return memoryview(data)[start : start + chunk.total_compressed_size]


@contextmanager
def _opened(
    pinned: PinnedShard, footer: pq.FileMetaData, parts: Mapping[int, Data], what: str
) -> Iterator[pq.ParquetFile]:
    """Open bytes of a shard that were fetched before; damage becomes a DatasetError."""
    try:
        yield pq.ParquetFile(
            pa.PythonFile(SparseFile(parts, pinned.record.size), mode="r"),
            metadata=footer,
            page_checksum_verification=True,
            pre_buffer=False,
        )
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{pinned.where}: {what} is damaged: {error}") from error


def _chunks(group: pq.RowGroupMetaData) -> Iterator[Any]:
    """Yield the column chunks of a row group."""
    return (group.column(number) for number in range(group.num_columns))


def _check_rows(found: int, expected: int) -> None:
    """Raise where a damaged page header, which no checksum covers, ended a column early."""
    if found != expected:
        raise OSError(f"{expected - found} rows are missing")


def _check_elements(pinned: PinnedShard, footer: pq.FileMetaData, index: int) -> None:
    """Raise DatasetError for a row group whose lists Arrow's 32-bit offsets can't address."""
    for column in _chunks(footer.row_group(index)):
        if column.num_values > MAX_ELEMENTS:
            raise DatasetError(
                f"{pinned.where}: row group {index} holds {column.num_values} values in "
                f"{column.path_in_schema}, expected at most {MAX_ELEMENTS}: write it again"
            )
