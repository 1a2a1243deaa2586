"""The footers of the pinned shards: all compared with their records at once, parsed when needed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from rollout.errors import DatasetError
from rollout.schema.columns import FINGERPRINT_KEY, FORMAT_VERSION, VERSION_KEY
from rollout.shard_bytes import Data, PinnedShard, ShardBytes

_PARSED: Final = 256
_KEPT_BYTES: Final = 32 * 2**20
# requests that wait for a remote storage side by side
_REMOTE_READERS: Final = 32
_LOCAL_READERS: Final = 4


class ShardFooters:
    """Footers by shard, each the one that its record vouches for; safe to use from several threads.

    Those of remote shards are kept as bytes, up to 32 MiB of them, and go along to a worker
    process, so that each is asked for once; the rest are read and compared again when needed.

    Args:
        shards: the pinned shards.
        source: their bytes.
        known: footers that were compared before, by the shard's name for messages.
    """

    def __init__(
        self,
        shards: Sequence[PinnedShard],
        source: ShardBytes,
        known: Mapping[str, bytes] | None = None,
    ) -> None:
        self._shards = shards
        self._bytes = source
        self.kept: dict[str, bytes] = dict(known or {})
        """Footers of remote shards, by the shard's name for messages."""
        self._room = _KEPT_BYTES - sum(map(len, self.kept.values()))
        self._parsed: OrderedDict[int, pq.FileMetaData] = OrderedDict()
        self._lock = threading.Lock()
        self._asking: dict[int, threading.Lock] = {}

    def check(self) -> None:
        """Compare the digest of every footer with its record.

        Raises:
            DatasetError: a shard is missing or ends too early, or its footer changed.
        """
        remote = any(not shard.is_local for shard in self._shards)
        threads = min(_REMOTE_READERS if remote else _LOCAL_READERS, len(self._shards))
        with ThreadPoolExecutor(threads) as pool:
            # each thread has its own stretch: a task for each footer would cost more than it
            lots = [range(first, len(self._shards), threads) for first in range(threads)]
            for future in [pool.submit(self._check, lot) for lot in lots]:
                future.result()

    def get(self, shard: int) -> pq.FileMetaData:
        """Return a shard's footer.

        Raises:
            DatasetError: as `check`, or it contradicts the record.
        """
        with self._lock:
            if shard in self._parsed:
                self._parsed.move_to_end(shard)
                return self._parsed[shard]
            asking = self._asking.setdefault(shard, threading.Lock())
        with asking:
            with self._lock:
                if shard in self._parsed:
                    return self._parsed[shard]
            footer = _parse(self._shards[shard], self._tail(shard))
            with self._lock:
                self._parsed[shard] = footer
                if len(self._parsed) > _PARSED:
                    self._parsed.popitem(last=False)
        return footer

    def _check(self, shards: Sequence[int]) -> None:
        for shard in shards:
            self._tail(shard)

    def _tail(self, shard: int) -> Data:
        """Return the bytes behind a shard's last row group."""
        pinned = self._shards[shard]
        if (kept := self.kept.get(pinned.where)) is not None:
            return kept
        start = max(group.offset + group.size for group in pinned.record.row_groups)
        tail = self._bytes.range(shard, start, pinned.record.size - start)
        if blake3(tail).hexdigest() != pinned.record.footer_blake3:
            raise DatasetError(f"{pinned.where}: its footer changed after it was committed")
        if not pinned.is_local:
            with self._lock:
                if len(tail) <= self._room:
                    self._room -= len(tail)
                    self.kept[pinned.where] = bytes(tail)
        return tail


def _parse(pinned: PinnedShard, tail: Data) -> pq.FileMetaData:
    """Parse a footer, and raise DatasetError where it is not that of the shard's record."""
    try:
        footer = pq.read_metadata(pa.BufferReader(tail))
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{pinned.where}: its footer is damaged: {error}") from error
    metadata: dict[bytes, Any] = footer.metadata or {}
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
    return footer
