"""Small datasets, loaders and readings of batches that the tests of the loader share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from synthetic import make_record, make_row, plan

from rollout.batch import RolloutBatch
from rollout.dataset import DatasetWriter
from rollout.loader import RolloutLoader
from rollout.rows import RolloutRow, check_row
from rollout.schema.entries import pack_entries
from rollout.storage import Storage

VOCAB = 200


def group(index: int, samples: int = 4, **fields: Any) -> list[RolloutRow]:
    """Rollouts of one prompt, of 1 to 5 tokens, rewards 0, 1, 2 .."""
    return [
        make_row(
            f"p{index}",
            i,
            lengths=[1 + (index + i + t) % 6 for t in range(1 + (index + i) % 5)],
            seed=index,
            vocab=VOCAB,
            **{"reward": float(i), "prompt_token_ids": prompt(index), **fields},
        )
        for i in range(samples)
    ]


def prompt(index: int) -> Any:
    """Return a prompt of 1 to 7 tokens."""
    return np.arange(index % 7 + 1, dtype=np.int32)


def write(url: str, parts: list[list[RolloutRow]], **options: Any) -> DatasetWriter:
    """Commit each list of rollouts as one part of one unit."""
    writer = DatasetWriter.open(Storage.open(url), make_record(), **options)
    for rows in parts:
        writer.append_plan(plan("u000000", *dict.fromkeys(row.prompt_key for row in rows)))
        for row in rows:
            check_row(row)
        writer.commit_part("u000000", rows)
    return writer


def twelve_groups(url: str) -> dict[str, RolloutRow]:
    """Twelve groups of four in three parts, in row groups of a few rollouts."""
    groups = [group(i) for i in range(12)]
    parts = [[row for rows in groups[i : i + 4] for row in rows] for i in (0, 4, 8)]
    write(url, parts, row_group_bytes=600)
    return {row.rollout_id: row for rows in groups for row in rows}


def open_loader(url: Any, **settings: Any) -> RolloutLoader:
    """Open a loader with three groups a step and small micro-batches."""
    return RolloutLoader(
        url, **{"vocab_size": VOCAB, "groups_per_step": 3, "token_budget": 40, **settings}
    )


def per_rollout(batch: RolloutBatch) -> dict[str, dict[str, list[Any]]]:
    """Return the batch's fields cut back into rollouts."""
    result = {}
    bounds = batch.cu_seqlens.tolist()
    for i, rollout_id in enumerate(batch.rollout_ids):
        rows = (batch.rollout_index == i).nonzero()[:, 0].tolist()
        start = batch.support_offsets[rows[0]]
        end = batch.support_offsets[rows[-1] + 1]
        result[rollout_id] = {
            "ids": batch.input_ids[bounds[i] : bounds[i + 1]].tolist(),
            "targets": batch.target_ids[rows].tolist(),
            "logprobs": batch.sampler_logprobs[rows].tolist(),
            "advantages": batch.advantages[rows].tolist(),
            "offsets": (batch.support_offsets[rows[0] : rows[-1] + 2] - start).tolist(),
            "supports": pack_entries(
                batch.support_ids[start:end].numpy(),
                batch.sampler_support_logprobs[start:end].numpy(),
            ).tolist(),
        }
    return result


def ids_of(batches: Iterable[RolloutBatch]) -> list[str]:
    """Return the rollouts of batches in order."""
    return [i for batch in batches for i in batch.rollout_ids]


def shard_path(url: str) -> Path:
    """Return the first shard of a local dataset."""
    return min((Path(url) / "data").iterdir())
