"""Read row groups of a dataset's shards, each from one range of bytes that its record vouches for.

A commit record names the byte range and the digest of every row group, so a reader needs no shard
whole: one request for the footer (`ShardFooters`) and one for each row group. The digest is
compared when a row group is first read; page checksums are verified on every read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.decoded_block import DecodedBlock
from rollout.epoch_plan import Block
from rollout.errors import DatasetError
from rollout.shard_bytes import Data, PinnedShard, ShardBytes
from rollout.shard_footers import ShardFooters
from rollout.sparse_file import SparseFile, joined_ranges

BASE_COLUMNS: Final = (
    "rollout_id",
    "group_id",
    "prompt_id",
    "sample_index",
    "group_size",
    "prompt_token_ids",
    "token_ids",
    "sampled_logprobs",
    "temperature",
    "support_kind",
)
"""What every batch needs."""
OPTIONAL_COLUMNS: Final = (
    "policy_step",
    "support_offsets",
    "support_entries",
    "tail_mass",
    "draw_entries",
    "reward",
    "advantage",
)
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
_GAP_BYTES: Final = 2**19
_SCALAR_READERS: Final = 8
_PIECE_BYTES: Final = 3 * 2**20


class ShardReader:
    """Reads and decodes single row groups; safe to use from several threads.

    Args:
        shards: the pinned shards.
        source: their bytes.
        footers: their footers.
        columns: those to decode.
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
        self._columns = list(columns)
        self._footers = footers

    def read(self, block: Block) -> DecodedBlock:
        """Read and decode a row group.

        Raises:
            DatasetError: the shard is missing, damaged, or not the one of its record.
        """
        shard, index = block
        pinned = self._shards[shard]
        footer = self._footers.get(shard)
        _check_elements(pinned, footer, index)
        group = pinned.record.row_groups[index]
        data = self._bytes.row_group(block)
        parts = {group.offset: data}
        first = sum(earlier.rows for earlier in pinned.record.row_groups[:index])
        keys = pinned.record.keys[first : first + group.rows]
        # for a planner that would have to ask the storage again
        planned = () if pinned.is_local else PLAN_COLUMNS
        columns = dict.fromkeys((*self._columns, *planned))
        return DecodedBlock(
            _decode(pinned, footer, index, list(columns), parts),
            self._columns,
            [prompt_key for prompt_key, _ in keys],
            planned=planned,
        )

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
            for number in range(footer.num_columns)
            if (column := footer.row_group(index).column(number)).path_in_schema in wanted
        ]
        ranges = joined_ranges(chunks, 0 if pinned.is_local else _GAP_BYTES)
        parts = {start: self._bytes.range(shard, start, size) for start, size in ranges}
        pieces = [_decode(pinned, footer, index, list(columns), parts) for index in row_groups]
        return pa.Table.from_batches(chain.from_iterable(pieces))

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

    def draws_per_token(self, block: Block, num_tokens: int) -> int:
        """Return how many draws a row group holds for each of its sampled tokens."""
        group = self._footers.get(block[0]).row_group(block[1])
        for number in range(group.num_columns):
            column = group.column(number)
            if column.path_in_schema.startswith("draw_entries."):
                # a null list counts as one value
                values: int = column.num_values
                return values // num_tokens if num_tokens and values >= num_tokens else 0
        return 0


def _decode(
    pinned: PinnedShard,
    footer: pq.FileMetaData,
    index: int,
    columns: list[str],
    parts: Mapping[int, Data],
) -> Iterator[pa.RecordBatch]:
    """Decode columns of a row group from bytes that were fetched before, some rows at a time."""
    source = SparseFile(parts, pinned.record.size)
    left = footer.row_group(index).num_rows
    try:
        file = pq.ParquetFile(
            pa.PythonFile(source, mode="r"),
            metadata=footer,
            page_checksum_verification=True,
            pre_buffer=False,
        )
        # pieces that stay in the processor's cache are decoded faster than a row group at once
        for batch in file.iter_batches(
            batch_size=_rows_of_a_piece(footer.row_group(index), set(columns)),
            row_groups=[index],
            columns=columns,
            use_threads=False,
        ):
            left -= batch.num_rows
            yield batch
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{pinned.where}: row group {index} is damaged: {error}") from error
    if left:
        # a damaged page header, which no checksum covers, ends a column early without an error
        raise DatasetError(f"{pinned.where}: row group {index} is damaged: {left} rows are missing")


def _rows_of_a_piece(group: pq.RowGroupMetaData, columns: set[str]) -> int:
    """Return how many rows have about `_PIECE_BYTES` in these columns, at least one."""
    chunks = [group.column(number) for number in range(group.num_columns)]
    raw_bytes: int = sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema.partition(".")[0] in columns
    )
    rows: int = group.num_rows
    return max(1, rows * _PIECE_BYTES // max(raw_bytes, 1))


def _check_elements(pinned: PinnedShard, footer: pq.FileMetaData, index: int) -> None:
    """Raise DatasetError for a row group whose lists Arrow's 32-bit offsets can't address."""
    group = footer.row_group(index)
    for number in range(group.num_columns):
        column = group.column(number)
        if column.num_values > MAX_ELEMENTS:
            raise DatasetError(
                f"{pinned.where}: row group {index} holds {column.num_values} values in "
                f"{column.path_in_schema}, expected at most {MAX_ELEMENTS}: write it again"
            )
