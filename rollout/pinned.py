"""The datasets that a loader reads, as their records stood when it was made."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.dataset_view import DatasetView, read_dataset
from rollout.epoch_plan import PlannedGroup, plan_groups
from rollout.errors import ConfigError, DatasetError
from rollout.schema.layout import DATA_FOLDER
from rollout.schema.records import CommitRecord
from rollout.shard_bytes import PinnedShard
from rollout.storage import Storage

_log = logging.getLogger(__name__)

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, kw_only=True)
class PinnedDataset:
    """One dataset: its record, and the shards that count."""

    storage: Storage
    fingerprint: str
    records: tuple[CommitRecord, ...]
    """Commit records that name a shard, by unit and part."""

    def state(self) -> dict[str, Any]:
        """Return what a state says of it: fingerprint, shards and their digests."""
        return {
            "fingerprint": self.fingerprint,
            "shards": [[record.file, record.sha256] for record in self.records],
        }

    def restricted(self, state: Mapping[str, Any]) -> PinnedDataset:
        """Return the dataset with the shards of a state alone.

        Raises:
            DatasetError: it is another dataset, or a shard is gone or another one.
        """
        url = self.storage.url
        if state["fingerprint"] != self.fingerprint:
            raise DatasetError(
                f"loader state is of a dataset with fingerprint {state['fingerprint']}, "
                f"expected {self.fingerprint} of {url}"
            )
        known = {record.file: record for record in self.records}
        records = []
        for file, sha256 in state["shards"]:
            if file not in known or known[file].sha256 != sha256:
                raise DatasetError(f"dataset {url}: {file} of the loader state is gone or changed")
            records.append(known[file])
        return PinnedDataset(
            storage=self.storage, fingerprint=self.fingerprint, records=tuple(records)
        )


def pin_datasets(
    paths: Paths,
    *,
    storage_options: dict[str, Any] | None,
    fingerprint: str | Sequence[str] | None,
    vocab_size: int,
    head_dtype: str | None,
) -> list[PinnedDataset]:
    """Read the records of datasets, and refuse what can't be trained on.

    Args:
        paths: one dataset or several.
        storage_options: keyword arguments of the fsspec filesystem.
        fingerprint: the expected one, or one for each dataset; None takes any.
        vocab_size: rows of the trainer's output weight.
        head_dtype: dtype of the trainer's output weight, to warn where the sampler's differed.

    Raises:
        DatasetError: one is not a dataset, is empty, has another fingerprint, lacks a shard, or
            holds ids outside the vocabulary.
        ConfigError: no path, or as many fingerprints as there are not paths.
    """
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    expected: list[str | None] = [fingerprint] if isinstance(fingerprint, str) else [None]
    if fingerprint is None:
        expected = [None] * len(listed)
    elif not isinstance(fingerprint, str):
        expected = list(fingerprint)
    if not listed or len(expected) != len(listed):
        raise ConfigError(f"got {len(listed)} datasets and {len(expected)} fingerprints")
    pinned = []
    for path, wanted in zip(listed, expected, strict=True):
        view = read_dataset(Storage.open(path, storage_options))
        url, found = view.storage.url, view.record.fingerprint
        if wanted is not None and found != wanted:
            raise DatasetError(f"dataset {url} has fingerprint {found}, expected {wanted}")
        if not any(record.rows for record in view.shards):
            raise DatasetError(f"dataset {url} holds no rollouts: nothing was committed yet")
        _check_shards(view)
        _check_vocabulary(url, view.shards, vocab_size)
        if head_dtype is not None:
            _compare_head(url, view.shards, head_dtype)
        pinned.append(PinnedDataset(storage=view.storage, fingerprint=found, records=view.shards))
    return pinned


def pinned_groups(
    datasets: Sequence[PinnedDataset],
) -> tuple[list[PinnedShard], list[PlannedGroup]]:
    """List the shards of all datasets, and their groups."""
    shards: list[PinnedShard] = []
    groups: list[PlannedGroup] = []
    for number, dataset in enumerate(datasets):
        groups += plan_groups(dataset.records, dataset=number, first_shard=len(shards))
        shards += [
            PinnedShard(storage=dataset.storage, record=record, fingerprint=dataset.fingerprint)
            for record in dataset.records
        ]
    return shards, groups


def _check_shards(view: DatasetView) -> None:
    """Raise DatasetError where a shard that a record names is missing or has another size."""
    there = view.storage.sizes(DATA_FOLDER)
    for record in view.shards:
        assert record.file is not None
        size = there.get(record.file.rpartition("/")[2])
        if size == record.size:
            continue
        found = "is missing although its commit record exists"
        if size is not None:
            found = f"has {size} bytes, expected {record.size}"
        raise DatasetError(
            f"dataset {view.storage.url}: {record.file} {found}: copy the dataset again"
        )


def _check_vocabulary(url: str, shards: Sequence[CommitRecord], vocab_size: int) -> None:
    """Raise DatasetError where the dataset holds ids that the trainer's weight has no row for."""
    largest = max(record.max_token_id for record in shards)
    if largest >= vocab_size:
        raise DatasetError(
            f"dataset {url} holds token id {largest}, expected below the trainer's vocab_size "
            f"{vocab_size}: the sampler's vocabulary is wider than the trainer's; load the output "
            "weight with the padding rows that the sampler had"
        )


def _compare_head(url: str, shards: Sequence[CommitRecord], head_dtype: str) -> None:
    """Warn where the sampler's output weight had another dtype than the trainer's."""
    found = {record.engine.get("head_dtype") for record in shards}
    others = {str(dtype) for dtype in found - {None, head_dtype}}
    if others:
        _log.warning(
            "dataset %s: the sampler's output weight was %s, the trainer's is %s: "
            "log-probabilities of unchanged weights differ by their rounding",
            url,
            ", ".join(sorted(others)),
            head_dtype,
        )
