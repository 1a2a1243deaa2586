"""One pass over an epoch, or over the rest of it, by one rank or one of its workers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

from rollout.batch import RolloutBatch, pack_rows
from rollout.batch_rows import BatchRow
from rollout.blank_batch import blank_batch
from rollout.entry_pages import write_entries
from rollout.epoch_plan import Block, EpochPlan, PlannedGroup
from rollout.errors import DatasetError
from rollout.loader_config import LoaderConfig, LoaderReport
from rollout.loader_state import Cursor
from rollout.page_locked import page_locked_array
from rollout.prefetch import BlockCache
from rollout.recycled import RecycledArrays
from rollout.scalars import ScalarIndex
from rollout.shard_bytes import PinnedShard
from rollout.shard_reader import ShardReader
from rollout.step_plan import Pick, Selected, StepPlan, plan_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What part of the micro-batches a process takes, and where it begins."""

    world_size: int
    rank: int
    workers: int = 1
    """Worker processes that take turns on the rank's micro-batches."""
    lag: int = 0
    """How many of the rank's next micro-batches are other workers' turns."""


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """A batch whose entries may still be being written."""

    batch: RolloutBatch
    written: list[Future[None]]
    done: Cursor
    """The position after it."""
    lag: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its entries."""
        return 8 * self.batch.support_ids.shape[0]


class EpochRun:
    """Yields a rank's micro-batches, each with the position after it.

    Args:
        plan: the epoch's.
        groups: what the plan's numbers mean.
        shards: the pinned shards.
        reader: of these shards.
        index: their scalars.
        selected: which rows are trained on.
        config: what decides the batches.
        share: what part of them is taken.
        report: counts what is left out or bent.
        prefetch_bytes: row groups held and in flight, and batches made ahead.
        decode_threads: threads that read and decode ahead, each for a batch of its own.
        device: where batches go.
        memory: for the large arrays of batches that stay on the host.
    """

    def __init__(
        self,
        plan: EpochPlan,
        *,
        groups: Sequence[PlannedGroup],
        shards: Sequence[PinnedShard],
        reader: ShardReader,
        index: ScalarIndex,
        selected: Selected,
        config: LoaderConfig,
        share: Share,
        report: LoaderReport,
        prefetch_bytes: int,
        decode_threads: int,
        device: torch.device,
        memory: RecycledArrays,
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._shards = shards
        self._reader = reader
        self._index = index
        self._selected = selected
        self._config = config
        self._share = share
        self._report = report
        self._prefetch_bytes = prefetch_bytes
        self._threads = decode_threads
        self._device = device
        # written in place, so that nothing is copied to pin it
        self._empty = page_locked_array if device.type == "cuda" else memory.empty

    def batches(self, start: Cursor) -> Iterator[tuple[RolloutBatch, Cursor, int]]:
        """Yield batches from a position on, each with the position and the lag after it.

        Raises:
            DatasetError: a shard is missing or damaged, or nothing can be trained on.
        """
        own = self._own_splits(start)
        cache = self._open_cache(start.step, own)
        ahead: deque[_Made] = deque()
        try:
            for made in self._make(start, cache, own):
                ahead.append(made)
                # others are decoded while this one is used
                while ahead and (
                    len(ahead) > self._threads
                    or cache.num_bytes + sum(one.num_bytes for one in ahead) > self._prefetch_bytes
                ):
                    yield self._finished(ahead.popleft())
            while ahead:
                yield self._finished(ahead.popleft())
        finally:
            cache.close()

    def _make(self, start: Cursor, cache: BlockCache, own: set[int]) -> Iterator[_Made]:
        """Yield the batches from a position on while their entries are decoded."""
        world, rank, lag = self._share.world_size, self._share.rank, self._share.lag
        first, trains = start.done, start.step > 0 or start.done > 0
        for step in range(start.step, self._plan.num_steps):
            planned = self._plan_step(step, cache, own)
            if not trains and planned.num_scored == 0:
                self._refuse_if_nothing_trains(step)
            trains = True
            for index in range(rank, planned.num_batches, world):
                turn = index >= first and lag == 0
                if turn:
                    batch, written = self._pack(cache, planned, index, start.epoch, step)
                    lag = self._share.workers - 1
                    done = Cursor(start.epoch, step, index - rank + world)
                    if done.done == planned.num_batches:
                        done = Cursor(start.epoch, step + 1)
                    self._take(cache, planned, index, own)
                    yield _Made(batch, written, done, lag)
                else:
                    lag -= index >= first
                    self._take(cache, planned, index, own)
            first = 0

    def _finished(self, made: _Made) -> tuple[RolloutBatch, Cursor, int]:
        """Wait for a batch's entries, and send it where batches go."""
        for written in made.written:
            written.result()
        batch = made.batch
        if self._device.type == "cuda":
            batch = batch.pin_memory().to(self._device, non_blocking=True)
        elif self._device.type != "cpu":
            batch = batch.to(self._device)
        return batch, made.done, made.lag

    def _own_splits(self, start: Cursor) -> set[int]:
        """Return the splits that this process will take micro-batches of."""
        world, workers = self._share.world_size, self._share.workers
        per_rank = self._config.splits // world
        begin = start.done // world + self._share.lag
        turns = {(begin + turn * workers) % per_rank for turn in range(per_rank)}
        return {self._share.rank + turn * world for turn in turns}

    def _open_cache(self, first_step: int, own: set[int]) -> BlockCache:
        """Start reading ahead what the steps from here on take rows from."""
        rows: Counter[Block] = Counter()
        upcoming: dict[Block, None] = {}
        for step in range(first_step, self._plan.num_steps):
            for split in sorted(own):
                for number in self._plan.groups(step, split):
                    for piece in self._groups[number].pieces:
                        for block, start, stop in self._index.spans(piece):
                            rows[block] += stop - start
                            upcoming[block] = None
        return BlockCache(
            self._reader.read,
            self._estimate,
            upcoming=upcoming,
            rows=rows,
            budget_bytes=self._prefetch_bytes,
            threads=self._threads,
        )

    def _estimate(self, block: Block) -> int:
        """Return about how many bytes a row group takes, its columns but the entries decoded."""
        record = self._shards[block[0]].record
        group = record.row_groups[block[1]]
        return 28 * record.tokens * group.rows // record.rows + group.size

    def _plan_step(self, step: int, cache: BlockCache, own: set[int]) -> StepPlan:
        """Plan a step, and let go of the rows that it leaves out."""
        own_blocks = {
            block
            for split in own
            for number in self._plan.groups(step, split)
            for piece in self._groups[number].pieces
            for block, _, _ in self._index.spans(piece)
        }

        def load(block: Block) -> pa.Table | None:
            # storage that is not local is asked once for a row group that is needed whole
            if block not in own_blocks or self._shards[block[0]].is_local:
                return None
            return cache.get(block).table

        planned = plan_step(
            self._groups_of(step),
            config=self._config,
            index=self._index,
            selected=self._selected,
            load=load,
            report=self._report,
        )
        for split in own:
            for block in planned.left_out[split]:
                cache.take(block, 1)
        return planned

    def _groups_of(self, step: int) -> list[list[PlannedGroup]]:
        return [
            [self._groups[number] for number in self._plan.groups(step, split)]
            for split in range(self._config.splits)
        ]

    def _refuse_if_nothing_trains(self, step: int) -> None:
        """Raise DatasetError where no step has a rollout to train on."""
        report = LoaderReport(excluded=self._report.excluded.copy())
        for later in range(step + 1, self._plan.num_steps):
            planned = plan_step(
                self._groups_of(later),
                config=self._config,
                index=self._index,
                selected=self._selected,
                load=lambda block: None,
                report=report,
            )
            if planned.num_scored:
                return
        url = self._shards[0].storage.url
        count = sum(group.num_rows for group in self._groups)
        raise DatasetError(
            f"dataset {url}: none of {count} rollouts can be trained on with advantage "
            f"{self._config.advantage!r}: left out {dict(report.excluded)}"
        )

    def _pack(
        self, cache: BlockCache, planned: StepPlan, index: int, epoch: int, step: int
    ) -> tuple[RolloutBatch, list[Future[None]]]:
        """Make a batch; its entries are written when the futures are done."""
        world = self._share.world_size
        fields: dict[str, Any] = {
            "global_denominator": float(max(planned.num_scored, 1)),
            "epoch": epoch,
            "step": step,
            "micro_batch": index // world,
            "num_micro_batches": planned.num_batches // world,
        }
        picks = planned.picks(index)
        if not picks:
            return blank_batch(**fields), []
        written: list[Future[None]] = []
        batch = pack_rows(
            self._rows(cache, picks),
            [pick.advantage for pick in picks],
            columns=self._config.batch_columns,
            empty=self._empty,
            write=lambda parts, into: written.append(cache.submit(write_entries, parts, into)),
            **fields,
        )
        return batch, written

    def _rows(self, cache: BlockCache, picks: Sequence[Pick]) -> list[BatchRow]:
        """Return the rollouts of a micro-batch, asking for each row group once."""
        places: dict[Block, list[int]] = {}
        for place, pick in enumerate(picks):
            places.setdefault(pick.block, []).append(place)
        rows: dict[int, BatchRow] = {}
        untruncated, columns = self._config.untruncated, self._config.batch_columns
        for block, own in places.items():
            decoded = cache.get(block)
            for place in own:
                rows[place] = decoded.row(picks[place].row, untruncated, columns)
        return [rows[place] for place in range(len(picks))]

    def _take(self, cache: BlockCache, planned: StepPlan, index: int, own: set[int]) -> None:
        """Let go of the rows of a micro-batch: they were taken, or are another worker's."""
        if index % self._config.splits in own:
            for pick in planned.picks(index):
                cache.take(pick.block, 1)
