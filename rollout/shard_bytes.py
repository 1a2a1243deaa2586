"""Fetch ranges of bytes of the pinned shards, each as what its record vouches for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from blake3 import blake3

from rollout.epoch_plan import Block
from rollout.errors import DatasetError
from rollout.recycled import RecycledArrays
from rollout.row_group_cache import RowGroupCache
from rollout.schema.records import CommitRecord
from rollout.storage import Storage

Verify = Literal["digests", "pages"]
Data = bytes | memoryview

# the system reads less than 2 GiB at once
_MOST_AT_ONCE: Final = 2**30


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

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's file system."""
        return self.storage.local_root is not None


class ShardBytes:
    """Bytes of shards; safe to use from several threads.

    Args:
        shards: the pinned shards.
        verify: `digests` compares each row group's digest when it is first read from storage;
            `pages` leaves it at the size of the shard.
        cache: for row groups of shards that are not local.
        memory: for ranges of shards that are.
    """

    def __init__(
        self,
        shards: Sequence[PinnedShard],
        *,
        verify: Verify,
        cache: RowGroupCache | None,
        memory: RecycledArrays,
    ) -> None:
        self._shards = shards
        self._verify = verify
        self._cache = cache
        self._verified: set[Block] = set()
        self._memory = memory

    def row_group(self, block: Block) -> Data:
        """Return a row group's bytes.

        Raises:
            DatasetError: the shard is missing, ends too early, or has another digest there.
        """
        pinned = self._shards[block[0]]
        group = pinned.record.row_groups[block[1]]
        cache = None if pinned.is_local else self._cache
        if cache is not None and (cached := cache.get(group.blake3)) is not None:
            return cached
        data = self.range(block[0], group.offset, group.size)
        if cache is not None or (self._verify == "digests" and block not in self._verified):
            digest = blake3(data).hexdigest()
            if digest != group.blake3:
                raise DatasetError(
                    f"{pinned.where}: row group {block[1]} has digest {digest}, expected "
                    f"{group.blake3}: it changed after it was committed"
                )
            self._verified.add(block)
        if cache is not None:
            cache.put(group.blake3, data)
        return data

    def range(self, shard: int, start: int, size: int) -> Data:
        """Return bytes of a shard, all of them.

        Raises:
            DatasetError: the shard is missing or ends too early.
        """
        pinned = self._shards[shard]
        root = pinned.storage.local_root
        try:
            if root is None:
                data: Data = pinned.storage.read_range(pinned.file, start, size)
            else:
                data = self._local_range(root / pinned.file, start, size, pinned)
        except FileNotFoundError as error:
            raise DatasetError(f"{pinned.where} is missing") from error
        if len(data) != size:
            raise DatasetError(
                f"{pinned.where} ends at byte {start + len(data)}, expected "
                f"{pinned.record.size} bytes: it changed after it was committed"
            )
        return data

    def _local_range(self, path: Path, start: int, size: int, pinned: PinnedShard) -> memoryview:
        """Read bytes of a local file that still has its size."""
        try:
            with path.open("rb", buffering=0) as file:
                found = os.fstat(file.fileno()).st_size
                if found != pinned.record.size:
                    raise DatasetError(
                        f"{pinned.where} has {found} bytes, expected {pinned.record.size}: "
                        "it changed after it was committed"
                    )
                file.seek(start)
                data, filled = memoryview(self._memory.empty(size, np.uint8).data), 0
                while read := file.readinto(data[filled : filled + _MOST_AT_ONCE]):
                    filled += read
                return data[:filled]
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise DatasetError(f"{pinned.where}: can't read it: {error}") from error
