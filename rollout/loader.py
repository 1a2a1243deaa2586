"""Stream a dataset into the trainer's batches, by its commit records and with no engine.

    loader = RolloutLoader("out/run", vocab_size=151936, groups_per_step=64, token_budget=16384)
    for batch in loader:                    # one epoch
        ...                                 # loss over the batch, backward
        if batch.micro_batch == batch.num_micro_batches - 1:
            ...                             # optimiser step

A step is a global batch: whole prompt groups. It is cut into canonical splits, each split into
micro-batches by token budget, and every rank takes whole splits. All micro-batches of a step carry
its denominator, and each rank gets as many of them, so neither the cut nor the number of ranks
changes anything in the gradient.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from rollout.batch import RolloutBatch
from rollout.epoch_plan import EpochPlan, count_steps, mixed_counts, plan_epoch
from rollout.epoch_run import EpochRun, Share
from rollout.errors import ConfigError, DatasetError
from rollout.loader_config import LoaderConfig, LoaderReport, check_ranks
from rollout.loader_state import Cursor, make_state, read_state
from rollout.pinned import Paths, PinnedDataset, pin_datasets, pinned_groups
from rollout.ranks import resolve_rank
from rollout.recycled import RecycledArrays
from rollout.row_group_cache import RowGroupCache
from rollout.scalars import ScalarIndex, Where, select_rows
from rollout.shard_bytes import ShardBytes, Verify
from rollout.shard_footers import ShardFooters
from rollout.shard_reader import ShardReader
from rollout.step_plan import Selected

_log = logging.getLogger(__name__)

__all__ = ["LoaderConfig", "LoaderReport", "RolloutLoader"]


class RolloutLoader(IterableDataset[RolloutBatch]):
    """Iterates over this rank's micro-batches of one epoch; the next iteration is the next epoch.

    The commit records are read once, when the loader is made: a dataset that grows meanwhile
    changes nothing. An iteration that is given up half-way starts its epoch again.

    It decodes ahead in threads of its own, and needs no worker processes. Inside
    `torch.utils.data.DataLoader` use `batch_size=None`, start workers by spawn or forkserver, and
    keep them (`persistent_workers=True`) or call `set_epoch` before every further epoch; make
    `splits` a multiple of ranks times workers, so that workers do not read each other's row groups.
    The state is then `state_dict(batch)` with the batch that was trained on last.

    Args:
        path: the dataset, a local path or an fsspec URL; or several, to be mixed.
        vocab_size: rows of the trainer's output weight; every id of the dataset must be below.
        storage_options: keyword arguments of the fsspec filesystem.
        fingerprint: refuse a dataset with another one (one for each dataset); unset takes any.
        head_dtype: the trainer's dtype of the output weight, such as "bfloat16"; a warning tells
            where the sampler's differed.
        where: a polars or pyarrow expression over the scalar columns; rollouts for which it is not
            true are left out and counted. Their rewards still count for their group.
        world_size: ranks that read different data; unset, from torch.distributed.
        rank: of this process among them.
        verify: `digests` compares each row group's digest when this loader first reads it; `pages`
            leaves it at the checksum of every page.
        prefetch_bytes: row groups held and in flight, and batches made ahead.
        decode_threads: threads that fetch and decode ahead.
        cache_folder: a local folder that keeps fetched row groups by digest, for remote storage;
            any number of processes may share it.
        cache_bytes: most bytes that it holds; what was not used for longest goes first.
        device: where batches go; on CUDA from pinned memory, without waiting.
        **settings: fields of `LoaderConfig`.

    Raises:
        DatasetError: not a dataset, empty, another fingerprint, a shard is missing or has another
            size or footer, ids outside the vocabulary, or `where` keeps nothing.
        ConfigError: a setting is out of range, or the splits can't be shared by the ranks.
    """

    def __init__(
        self,
        path: Paths,
        *,
        vocab_size: int,
        storage_options: dict[str, Any] | None = None,
        fingerprint: str | list[str] | None = None,
        head_dtype: str | None = None,
        where: Where | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        verify: Verify = "digests",
        prefetch_bytes: int = 2**30,
        decode_threads: int = 2,
        cache_folder: str | Path | None = None,
        cache_bytes: int = 2**36,
        device: torch.device | str = "cpu",
        **settings: Any,
    ) -> None:
        super().__init__()
        self._world, self._rank = resolve_rank(world_size, rank)
        config = LoaderConfig(**settings)
        self._own_splits = config.splits > 0
        self.config = dataclasses.replace(config, splits=config.splits or self._world)
        check_ranks(self.config, self._world)
        if verify not in ("digests", "pages"):
            raise ConfigError(f"verify is {verify!r}, expected digests or pages")
        if decode_threads < 1:
            raise ConfigError(f"decode_threads is {decode_threads}, expected at least 1")
        self._where = where
        self._verify: Verify = verify
        self._prefetch_bytes = prefetch_bytes
        self._threads = decode_threads
        self._cache_folder = None if cache_folder is None else Path(cache_folder)
        self._cache_bytes = cache_bytes
        self._device = torch.device(device)
        datasets = pin_datasets(
            path,
            storage_options=storage_options,
            fingerprint=fingerprint,
            vocab_size=vocab_size,
            head_dtype=head_dtype,
        )
        weights = self.config.weights
        if weights is not None and len(weights) != len(datasets):
            raise ConfigError(f"got {len(weights)} weights for {len(datasets)} datasets")
        self._kept_footers: dict[str, bytes] = {}
        self._pin(datasets)
        self.epoch = 0
        """The epoch that the next iteration yields."""
        self.report = LoaderReport()
        """What the last iteration left out."""
        self._cursor = Cursor()
        self._lag: int | None = None
        self._resumes = False
        self._started = False
        self._owner = os.getpid()
        self._handed_over = 0
        self._memory = RecycledArrays()

    @property
    def num_groups(self) -> int:
        """Prompt groups with a selected rollout."""
        return len(self._groups)

    @property
    def num_rollouts(self) -> int:
        """Selected rollouts, those without a reward included."""
        return sum(group.num_rows for group in self._groups) - self._unselected_inside

    @property
    def num_steps(self) -> int:
        """Steps of an epoch, known up front and the same on every rank."""
        sizes = np.bincount([group.dataset for group in self._groups]).tolist()
        total = sum(mixed_counts(sizes, self.config.weights))
        return count_steps(total, self.config.groups_per_step, self.config.remainder)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration.

        Needed only where workers are started anew for every epoch: they are copies of this loader,
        which does not hear of what they did.

        Raises:
            ConfigError: the epoch is negative.
        """
        if epoch < 0:
            raise ConfigError(f"epoch is {epoch}, expected at least 0")
        self.epoch = epoch
        self._resumes = False
        self._cursor = Cursor(epoch=epoch)
        self._handed_over = 0

    def state_dict(self, after: RolloutBatch | None = None) -> dict[str, Any]:
        """Return where the loader stands, in plain JSON, the same on every rank.

        Args:
            after: the last batch that was trained on; unset, the one that this loader yielded last.

        Raises:
            RuntimeError: worker processes iterate, so that this loader knows of no batch.
        """
        if after is not None:
            last = after.micro_batch + 1 == after.num_micro_batches
            cursor = Cursor(
                epoch=after.epoch,
                step=after.step + last,
                done=0 if last else (after.micro_batch + 1) * self._world,
            )
            if cursor.step == self.num_steps:
                cursor = Cursor(epoch=after.epoch + 1)
            return make_state(self._datasets, self.config, self._where, cursor)
        if self._handed_over and not self._started and get_worker_info() is None:
            raise RuntimeError(
                "the batches come from worker processes: give the last one, state_dict(batch)"
            )
        return make_state(self._datasets, self.config, self._where, self._cursor, self._lag)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader of the same datasets and settings stood.

        The world size, workers and everything about speed may differ. The shards of the state are
        pinned: what was committed since is left to a new loader.

        Raises:
            RuntimeError: an iteration has begun.
            DatasetError: another dataset, or a shard of the state is gone or another one.
            ConfigError: another version of the state, other settings, or a position within a step
                that this world size can't take up.
        """
        if self._started:
            raise RuntimeError("the loader was iterated already, expected its state before that")
        config = self.config
        if not self._own_splits:
            config = dataclasses.replace(config, splits=0)
        config, cursor, lag, shards = read_state(state, self._datasets, config, self._where)
        check_ranks(config, self._world)
        if cursor.done % self._world:
            raise ConfigError(
                f"loader state stands after {cursor.done} micro-batches of a step, expected a "
                f"multiple of the world size {self._world}: save it at the end of a step"
            )
        self.config = config
        if [dataset.records for dataset in shards] != [d.records for d in self._datasets]:
            self._pin(shards)
        self.epoch = cursor.epoch
        self._cursor, self._lag, self._resumes = cursor, lag, True

    def __iter__(self) -> Iterator[RolloutBatch]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if self._owner != os.getpid():
            raise RuntimeError(
                "the loader was forked into a worker, whose threads and connections would hang: "
                "start workers with multiprocessing_context='spawn'"
            )
        if worker is not None and self._handed_over > workers and not self._resumes:
            raise RuntimeError(
                f"workers were started anew for epoch {self.epoch}, which others have begun: call "
                "set_epoch before every further epoch, or keep them with persistent_workers=True"
            )
        self._handed_over = 0
        cursor = Cursor(epoch=self.epoch)
        lag = number
        if self._resumes:
            cursor = self._cursor
            lag = number if self._lag is None else self._lag
        self._started = True
        self._resumes = False
        self._cursor, self._lag = cursor, None if worker is None else lag
        return self._iterate(cursor, lag, workers, in_worker=worker is not None)

    def __getstate__(self) -> dict[str, Any]:
        """Return the loader's parts for a worker process, which reads scalars anew."""
        self._handed_over += 1
        left = ("_footers", "_reader", "_index")
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._owner = os.getpid()
        self._started = False
        self._open_reader()

    def _pin(self, datasets: list[PinnedDataset]) -> None:
        """Plan over these shards from now on."""
        self._datasets = datasets
        self._shards, groups = pinned_groups(datasets)
        self._open_reader()
        self._footers.check()
        self._selected: Selected = None
        self._unselected = self._unselected_inside = 0
        if self._where is not None:
            selected = self._selected = select_rows(self._reader, self._where)
            counts = [
                sum(
                    int(selected[p.shard][p.first_row : p.first_row + p.num_rows].sum())
                    for p in group.pieces
                )
                for group in groups
            ]
            self._unselected = sum(group.num_rows for group in groups) - sum(counts)
            groups = [group for group, count in zip(groups, counts, strict=True) if count]
            self._unselected_inside = sum(group.num_rows for group in groups) - sum(counts)
            left = {group.dataset for group in groups}
            for number, dataset in enumerate(datasets):
                if number not in left:
                    raise DatasetError(
                        f"dataset {dataset.storage.url}: where {self._where} keeps none of its "
                        "rollouts"
                    )
        self._groups = groups
        if self.num_steps == 0:
            raise ConfigError(
                f"{len(groups)} groups fill no step of groups_per_step "
                f"{self.config.groups_per_step}, and remainder 'drop' leaves them out"
            )

    def _open_reader(self) -> None:
        cache = None
        if self._cache_folder is not None:
            cache = RowGroupCache(self._cache_folder, self._cache_bytes)
        memory = RecycledArrays(self._prefetch_bytes)
        source = ShardBytes(self._shards, verify=self._verify, cache=cache, memory=memory)
        self._footers = ShardFooters(self._shards, source, self._kept_footers)
        self._kept_footers = self._footers.kept
        self._reader = ShardReader(
            self._shards, source, self._footers, columns=self.config.read_columns
        )
        self._index = ScalarIndex(
            self._reader, [[g.rows for g in shard.record.row_groups] for shard in self._shards]
        )

    def _iterate(
        self, cursor: Cursor, lag: int, workers: int, *, in_worker: bool
    ) -> Iterator[RolloutBatch]:
        """Yield the rest of an epoch; the cursor moves before each batch is handed out."""
        epoch = cursor.epoch
        plan = self._start_epoch(epoch)
        run = EpochRun(
            plan,
            groups=self._groups,
            shards=self._shards,
            reader=self._reader,
            index=self._index,
            selected=self._selected,
            config=self.config,
            share=Share(world_size=self._world, rank=self._rank, workers=workers, lag=lag),
            report=self.report,
            prefetch_bytes=self._prefetch_bytes,
            decode_threads=self._threads,
            device=torch.device("cpu") if in_worker else self._device,
            memory=self._memory,
        )
        for batch, position, left in run.batches(cursor):
            self._cursor, self._lag = position, left if in_worker else None
            if position.step == plan.num_steps and not in_worker:
                self._cursor = Cursor(epoch=epoch + 1)
            yield batch
        # a worker's end is no end of the epoch: others may still have batches
        self._cursor = Cursor(epoch, plan.num_steps) if in_worker else Cursor(epoch=epoch + 1)
        self.epoch = epoch + 1
        self._tell(epoch)

    def _start_epoch(self, epoch: int) -> EpochPlan:
        """Plan an epoch and say what it leaves out or repeats."""
        config = self.config
        plan = plan_epoch(
            self._groups,
            seed=config.seed,
            epoch=epoch,
            groups_per_step=config.groups_per_step,
            splits=config.splits,
            window_blocks=config.window_blocks,
            shuffle=config.shuffle,
            remainder=config.remainder,
            weights=config.weights,
        )
        self.report = LoaderReport()
        if self._unselected:
            self.report.excluded["not_selected"] = self._unselected
        if plan.dropped.size:
            self.report.excluded["remainder"] = self._count_rows(plan.dropped)
        self.report.repeated = self._count_rows(plan.repeated)
        short = plan.num_steps * config.groups_per_step - sum(map(len, plan.splits))
        if plan.dropped.size or plan.repeated.size or short:
            _log.info(
                "epoch %d, remainder %r: %d groups left out, %d repeated, the last step lacks %d",
                epoch,
                config.remainder,
                plan.dropped.size,
                plan.repeated.size,
                short,
            )
        return plan

    def _count_rows(self, groups: NDArray[np.int64]) -> int:
        return sum(self._groups[number].num_rows for number in groups.tolist())

    def _tell(self, epoch: int) -> None:
        """Say what the epoch left out."""
        if self.report.excluded or self.report.over_budget:
            _log.warning(
                "dataset %s, epoch %d: left out %s; %d rollouts exceed a budget alone",
                ", ".join(dataset.storage.url for dataset in self._datasets),
                epoch,
                dict(self.report.excluded) or "nothing",
                self.report.over_budget,
            )
