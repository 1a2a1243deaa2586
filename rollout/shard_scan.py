"""Read a few columns of many shards, within a budget of bytes where there are too many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from rollout.dataset import DatasetView
from rollout.errors import DatasetError
from rollout.schema import layout
from rollout.schema.records import CommitRecord

MAX_SHARDS: Final = 32
MAX_BYTES: Final = 16_000_000
# where the records take much the sample takes less, so that 50 MB are enough for longer
_RUN_BYTES: Final = 48_000_000
_LEAST_BYTES: Final = 2_000_000
_READERS: Final = 8
# what a reader of a footer asks for at once
_FOOTER_BYTES: Final = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class BadShard:
    """A committed shard whose rollouts can't be read."""

    file: str
    rows: int
    problem: str
    """`missing`, or what is wrong with it."""


class ShardScan:
    """Some columns of a dataset's shards, every shard or an even sample of them.

    Args:
        view: the dataset.
        columns: columns of the schema.
        full: read every shard; else at most `MAX_SHARDS` of them and about `MAX_BYTES`, evenly
            spread over the run.
        max_shards: another limit than `MAX_SHARDS`.
        max_bytes: another limit than `MAX_BYTES`.
    """

    def __init__(
        self,
        view: DatasetView,
        columns: Sequence[str],
        *,
        full: bool,
        max_shards: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._max_shards = MAX_SHARDS if max_shards is None else max_shards
        self._max_bytes = MAX_BYTES if max_bytes is None else max_bytes
        self._view = view
        self._columns = list(columns)
        self._open: dict[str, pq.ParquetFile] = {}
        present = set(view.storage.list(layout.DATA_FOLDER))
        named = {Path(_file(record)).name for record in view.shards}
        self.orphans = len(present - named)
        """Files in data/ that no commit record names."""
        self.bad: list[BadShard] = []
        """Shards that are missing or turned out to be damaged; grows while frames are read."""
        readable = []
        for record in view.shards:
            if Path(_file(record)).name in present:
                readable.append(record)
            else:
                self.bad.append(_bad(record, "missing"))
        self.chosen = tuple(readable if full else self._affordable(readable))
        """The shards that are read, by unit and part."""

    def frames(self) -> Iterator[tuple[CommitRecord, pl.DataFrame]]:
        """Yield the row groups of the chosen shards in order, `prompt_key` added."""
        with ThreadPoolExecutor(_READERS) as pool:
            # a window, so that a slow consumer does not fill the memory
            for start in range(0, len(self.chosen), _READERS):
                window = self.chosen[start : start + _READERS]
                for record, frames in zip(window, pool.map(self._read, window), strict=True):
                    if isinstance(frames, str):
                        self.bad.append(_bad(record, frames))
                        continue
                    for frame in frames:
                        yield record, frame

    def _affordable(self, shards: Sequence[CommitRecord]) -> list[CommitRecord]:
        total = sum(record.size for record in shards)
        if len(shards) <= self._max_shards and total <= self._max_bytes:
            return list(shards)
        candidates = [shards[index] for index in spread_indices(len(shards), self._max_shards)]
        with ThreadPoolExecutor(_READERS) as pool:
            costs = list(pool.map(self._cost, candidates))
        taken: list[int] = []
        left = self._max_bytes
        # coarse to fine, so that a sample which ends early is spread over the run as well
        for index in bisection_order(len(candidates)):
            if taken and costs[index] > left:
                break
            taken.append(index)
            left -= costs[index]
        for index in set(range(len(candidates))) - set(taken):
            file = self._open.pop(_file(candidates[index]), None)
            if file is not None:
                file.close()
        return [candidates[index] for index in sorted(taken)]

    def _cost(self, record: CommitRecord) -> int:
        """Bytes that reading the columns of a shard takes; 0 for one that can't be read."""
        try:
            file = self._view.open_shard(record)
        except DatasetError:
            return 0
        # stays open, since its footer need not be fetched twice
        self._open[_file(record)] = file
        metadata = file.metadata
        total = max(int(metadata.serialized_size), _FOOTER_BYTES)
        for group in range(metadata.num_row_groups):
            for index in range(metadata.num_columns):
                column = metadata.row_group(group).column(index)
                if column.path_in_schema.partition(".")[0] in self._columns:
                    total += int(column.total_compressed_size)
        return total

    def _read(self, record: CommitRecord) -> list[pl.DataFrame] | str:
        """Read the columns of a shard, or say why that is not possible."""
        keys = record.row_prompts
        frames = []
        first = 0
        try:
            with self._open.pop(_file(record), None) or self._view.open_shard(record) as file:
                for group in range(file.num_row_groups):
                    frame = pl.DataFrame(file.read_row_group(group, columns=self._columns))
                    own = keys[first : first + len(frame)]
                    first += len(frame)
                    frames.append(frame.with_columns(pl.Series("prompt_key", own, pl.String)))
        except (pa.ArrowException, OSError, DatasetError) as error:
            problem = " ".join(str(error).splitlines()) or type(error).__name__
            return problem.removeprefix(f"{record.file}: ")
        return frames


def sample_bytes(read: int) -> int:
    """Say how many bytes of the shards may be read, given what the records and the plan took."""
    return min(MAX_BYTES, max(_LEAST_BYTES, _RUN_BYTES - read))


def spread_indices(count: int, most: int) -> list[int]:
    """Choose at most `most` of `count` indices, evenly spread, both ends among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def bisection_order(count: int) -> list[int]:
    """Order the indices so that every beginning of the list is spread over all of them."""
    order = dict.fromkeys((0, count - 1)) if count else {}
    step = 1
    while step < count:
        step *= 2
    while step >= 1:
        order |= dict.fromkeys(range(0, count, step))
        step //= 2
    return list(order)


def _file(record: CommitRecord) -> str:
    assert record.file is not None
    return record.file


def _bad(record: CommitRecord, problem: str) -> BadShard:
    return BadShard(file=_file(record), rows=record.rows, problem=problem)
