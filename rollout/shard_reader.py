"""Read row groups of a dataset's shards, each from one range of bytes that its record vouches for.

A commit record names the byte range and the sha256 of every row group, so a reader needs no shard
whole: one request for the footer, which is kept, and one for each row group. The digest is
compared when a row group is first read; page checksums are verified on every read.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.decoded_block import DecodedBlock
from rollout.epoch_plan import Block
from rollout.errors import DatasetError
from rollout.local_files import link_bytes
from rollout.schema.columns import FINGERPRINT_KEY, FORMAT_VERSION, VERSION_KEY
from rollout.schema.records import CommitRecord
from rollout.sparse_file import SparseFile, joined_ranges
from rollout.storage import Storage

Verify = Literal["digests", "pages"]

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

_FOOTERS: Final = 256
# a request costs more than the bytes of such a gap
_GAP_BYTES: Final = 2**19
_SCALAR_READERS: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedShard:
    """A shard of a dataset at the moment when the loader was made."""

    storage: Storage
    record: CommitRecord
    fingerprint: str

    @property
    def file(self) -> str:
        """The shard's name within its dataset."""
        assert self.record.file is not None
        return self.record.file

    @property
    def where(self) -> str:
        """The shard's name for messages."""
        return f"dataset {self.storage.url}: {self.file}"


class ShardReader:
    """Reads and decodes single row groups; safe to use from several threads.

    Args:
        shards: the pinned shards.
        columns: those to decode.
        verify: `digests` compares each row group's sha256 when it is first read by this reader;
            `pages` leaves it at the size of the shard and the checksum of every page.
        cache_folder: a local folder where fetched row groups are kept by their digest, for storage
            that is not local; nothing is ever removed from it.
    """

    def __init__(
        self,
        shards: Sequence[PinnedShard],
        *,
        columns: Sequence[str],
        verify: Verify,
        cache_folder: Path | None,
    ) -> None:
        self._shards = shards
        self._columns = list(columns)
        self._verify = verify
        self._cache_folder = cache_folder
        self._verified: set[Block] = set()
        self._footers: OrderedDict[int, pq.FileMetaData] = OrderedDict()
        self._lock = threading.Lock()
        self._asking: dict[int, threading.Lock] = {}

    def is_local(self, shard: int) -> bool:
        """Whether a shard is on this machine's file system."""
        return self._shards[shard].storage.local_root is not None

    def read(self, block: Block) -> DecodedBlock:
        """Read and decode a row group.

        Raises:
            DatasetError: the shard is missing, damaged, or not the one of its record.
        """
        shard, index = block
        pinned = self._shards[shard]
        footer = self._footer(shard)
        _check_elements(pinned, footer, index)
        group = pinned.record.row_groups[index]
        data = self._bytes(block)
        parts = {group.offset: data}
        table = _decode(pinned, footer, index, self._columns, parts)
        scalars = None
        if not self.is_local(shard):
            # from the bytes that are here, for a planner that would ask the storage again
            scalars = _decode(pinned, footer, index, list(PLAN_COLUMNS), parts)
        first = sum(earlier.rows for earlier in pinned.record.row_groups[:index])
        keys = pinned.record.keys[first : first + table.num_rows]
        return DecodedBlock(table, [prompt_key for prompt_key, _ in keys], scalars)

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
        pinned, footer = self._shards[shard], self._footer(shard)
        wanted = set(columns)
        chunks = [
            (column.data_page_offset, column.total_compressed_size)
            for index in row_groups
            for number in range(footer.num_columns)
            if (column := footer.row_group(index).column(number)).path_in_schema in wanted
        ]
        ranges = joined_ranges(chunks, 0 if self.is_local(shard) else _GAP_BYTES)
        parts = {start: self._range(pinned, start, size) for start, size in ranges}
        tables = [_decode(pinned, footer, index, list(columns), parts) for index in row_groups]
        return pa.concat_tables(tables)

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
        group = self._footer(block[0]).row_group(block[1])
        for number in range(group.num_columns):
            column = group.column(number)
            if column.path_in_schema.startswith("draw_entries."):
                # a null list counts as one value
                values: int = column.num_values
                return values // num_tokens if num_tokens and values >= num_tokens else 0
        return 0

    def _footer(self, shard: int) -> pq.FileMetaData:
        """Return a shard's footer, by one request the first time."""
        with self._lock:
            if shard in self._footers:
                self._footers.move_to_end(shard)
                return self._footers[shard]
            asking = self._asking.setdefault(shard, threading.Lock())
        with asking:
            with self._lock:
                if shard in self._footers:
                    return self._footers[shard]
            footer = self._fetch_footer(shard)
            with self._lock:
                self._footers[shard] = footer
                if len(self._footers) > _FOOTERS:
                    self._footers.popitem(last=False)
        return footer

    def _fetch_footer(self, shard: int) -> pq.FileMetaData:
        pinned = self._shards[shard]
        start = max(group.offset + group.size for group in pinned.record.row_groups)
        tail = self._range(pinned, start, pinned.record.size - start)
        try:
            footer = pq.read_metadata(pa.BufferReader(tail))
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(f"{pinned.where}: its footer is damaged: {error}") from error
        _check_footer(pinned, footer)
        return footer

    def _bytes(self, block: Block) -> bytes:
        """Return a row group's bytes, compared with their digest as often as was asked for."""
        pinned = self._shards[block[0]]
        group = pinned.record.row_groups[block[1]]
        cached = None
        if self._cache_folder is not None and not self.is_local(block[0]):
            cached = self._cache_folder / group.sha256
            data = _cached(cached, group.sha256)
            if data is not None:
                return data
        data = self._range(pinned, group.offset, group.size)
        if cached is not None or (self._verify == "digests" and block not in self._verified):
            sha256 = hashlib.sha256(data).hexdigest()
            if sha256 != group.sha256:
                raise DatasetError(
                    f"{pinned.where}: row group {block[1]} has sha256 {sha256}, expected "
                    f"{group.sha256}: it changed after it was committed"
                )
            self._verified.add(block)
        if cached is not None:
            link_bytes(data, cached, cached.parent)
        return data

    def _range(self, pinned: PinnedShard, start: int, size: int) -> bytes:
        """Return bytes of a shard, all of them."""
        root = pinned.storage.local_root
        try:
            if root is None:
                data = pinned.storage.read_range(pinned.file, start, size)
            else:
                data = _local_range(root / pinned.file, start, size, pinned)
        except FileNotFoundError as error:
            raise DatasetError(f"{pinned.where} is missing") from error
        if len(data) != size:
            raise DatasetError(
                f"{pinned.where} ends at byte {start + len(data)}, expected "
                f"{pinned.record.size} bytes: it changed after it was committed"
            )
        return data


def _local_range(path: Path, start: int, size: int, pinned: PinnedShard) -> bytes:
    """Read bytes of a local file that still has its size."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise DatasetError(f"{pinned.where}: can't read it: {error}") from error
    try:
        found = os.fstat(descriptor).st_size
        if found != pinned.record.size:
            raise DatasetError(
                f"{pinned.where} has {found} bytes, expected {pinned.record.size}: "
                "it changed after it was committed"
            )
        return os.pread(descriptor, size, start)
    except OSError as error:
        raise DatasetError(f"{pinned.where}: can't read it: {error}") from error
    finally:
        os.close(descriptor)


def _cached(path: Path, sha256: str) -> bytes | None:
    """Return a cached row group that still has its digest; a damaged one is removed."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if hashlib.sha256(data).hexdigest() == sha256:
        return data
    path.unlink(missing_ok=True)
    return None


def _decode(
    pinned: PinnedShard,
    footer: pq.FileMetaData,
    index: int,
    columns: list[str],
    parts: dict[int, bytes],
) -> pa.Table:
    """Decode columns of a row group from bytes that were fetched before."""
    source = SparseFile(parts, pinned.record.size)
    try:
        file = pq.ParquetFile(
            pa.PythonFile(source, mode="r"),
            metadata=footer,
            page_checksum_verification=True,
            pre_buffer=False,
        )
        return file.read_row_group(index, columns=columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{pinned.where}: row group {index} is damaged: {error}") from error


def _check_footer(pinned: PinnedShard, footer: pq.FileMetaData) -> None:
    """Raise DatasetError where a footer is not the one of the shard's record."""
    metadata: dict[bytes, bytes] = footer.metadata or {}
    version = metadata.get(VERSION_KEY.encode())
    if version is None or int(version) > FORMAT_VERSION:
        raise DatasetError(
            f"{pinned.where}: format version {version!r}, expected at most {FORMAT_VERSION}"
        )
    fingerprint = metadata.get(FINGERPRINT_KEY.encode(), b"").decode()
    rows = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
    expected = [group.rows for group in pinned.record.row_groups]
    if fingerprint != pinned.fingerprint or rows != expected:
        raise DatasetError(
            f"{pinned.where}: its footer has fingerprint {fingerprint} and row groups {rows[:3]}, "
            f"expected {pinned.fingerprint} and {expected[:3]}: it changed after it was committed"
        )


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
