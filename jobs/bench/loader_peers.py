"""Pipelines of other libraries that end where the loader does, for `jobs/bench/loader.py`.

Written as for a trainer by someone who knows the libraries: rows as numpy arrays without Python
objects in between, everything else vectorised, support entries split straight into the batch's
arrays. `made` gives the loader's product: whole prompt groups, shuffled within as many groups
as the loader's window holds, advantages from each group's rewards, batches packed by token budget
with every tensor that a loss needs. `packed` leaves out the shuffle, the groups and all tensors but
five; `unpacked` stops at the rows.

It runs where mosaicml-streaming and datasets are installed, and imports nothing of this project.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

TOKEN_BUDGET = 16_384
GROUPS_PER_STEP = 8
# eight row groups of 24 MiB hold two prompt groups of the benchmark each
WINDOW_GROUPS = 16
LISTS = {
    "prompt_token_ids": "int32",
    "token_ids": "int32",
    "sampled_logprobs": "float32",
    "support_offsets": "int64",
    "support_entries": "uint64",
}
SCALARS = {"group_id": "str", "reward": "float32", "temperature": "float32"}
Counts = Iterator[tuple[int, int]]
"""Support entries and tokens of each piece that was read; before the clock starts, 0 and 0."""
Row = dict[str, Any]


def mosaic_rows(source: str, cached: bool) -> Iterator[Row]:
    """Rows of an MDS copy: streamed from its remote, or all of it local and unpacked."""
    from streaming import StreamingDataset

    # goes with its object
    folder = tempfile.TemporaryDirectory()
    where = {"local": source} if cached else {"local": folder.name, "remote": source}
    dataset = StreamingDataset(**where, shuffle=False, batch_size=1)

    def rows() -> Iterator[Row]:
        with folder:
            yield from dataset

    return rows()


def datasets_rows(
    source: str,
    options: dict[str, Any],
    kind: str | None,
    *,
    shuffled: bool = False,
    checked: bool = False,
) -> Iterator[Row]:
    """Rows of the same Parquet files, in a format of the library; None is Python objects.

    Args:
        source: the dataset.
        options: of its filesystem.
        kind: the format.
        shuffled: by the library's own buffer, of as many rollouts as the loader's window holds.
        checked: verify page checksums, which the library leaves out.
    """
    import datasets
    import pyarrow.dataset

    scan = pyarrow.dataset.ParquetFragmentScanOptions(page_checksum_verification=checked)
    rows = datasets.load_dataset(
        "parquet", data_files=f"{source}/data/*.parquet", split="train", streaming=True,
        storage_options=options or None, columns=[*LISTS, *SCALARS], fragment_scan_options=scan,
    )  # fmt: skip
    if shuffled:
        rows = rows.shuffle(seed=0, buffer_size=8 * WINDOW_GROUPS)
    return (
        {
            name: np.asarray(row[name], LISTS[name]) if name in LISTS else row[name]
            for name in (*LISTS, *SCALARS)
        }
        for row in (rows if kind is None else rows.with_format(kind))
    )


def unpacked(rows: Iterable[Row]) -> Counts:
    """Stop at the rows."""
    yield 0, 0
    for row in rows:
        yield row["support_entries"].size, row["token_ids"].size


def packed(rows: Iterable[Row]) -> Counts:
    """Pack rows in the order in which they come."""
    import torch  # noqa: F401 -- its time is nobody's

    yield 0, 0
    for batch in cut(rows):
        yield pack(batch)


def made(rows: Iterable[Row]) -> Counts:
    """Make the loader's batches: shuffled groups, advantages, every tensor."""
    import torch  # noqa: F401 -- its time is nobody's

    yield 0, 0
    groups = (list(own) for _, own in itertools.groupby(rows, lambda row: str(row["group_id"])))
    rng = random.Random(0)
    while window := list(itertools.islice(groups, WINDOW_GROUPS)):
        rng.shuffle(window)
        for first in range(0, len(window), GROUPS_PER_STEP):
            yield from made_step(window[first : first + GROUPS_PER_STEP])


def made_step(groups: list[list[Row]]) -> Counts:
    """Make the batches of one step."""
    rows = []
    for group in groups:
        rewards = np.array([row["reward"] for row in group], np.float64)
        for row, advantage in zip(group, rewards - rewards.mean(), strict=True):
            rows.append({**row, "advantage": advantage})
    denominator = sum(row["token_ids"].size for row in rows)
    for batch in cut(rows):
        yield pack_all(batch, denominator)


def cut(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Cut rows into batches by tokens."""
    batch: list[Row] = []
    filled = 0
    for row in rows:
        tokens = row["prompt_token_ids"].size + row["token_ids"].size
        if batch and filled + tokens > TOKEN_BUDGET:
            yield batch
            batch, filled = [], 0
        batch.append(row)
        filled += tokens
    if batch:
        yield batch


def pack(rows: list[Row]) -> tuple[int, int]:
    """Make five tensors of a batch, and count support entries and tokens."""
    import torch

    ids, logprobs = split_entries([row["support_entries"] for row in rows])
    offsets = np.concatenate([np.diff(row["support_offsets"]) for row in rows]).cumsum()
    tokens = [part for row in rows for part in (row["prompt_token_ids"], row["token_ids"])]
    made = (
        torch.from_numpy(np.concatenate(tokens, dtype=np.int64)),
        torch.from_numpy(np.concatenate([row["sampled_logprobs"] for row in rows])),
        torch.from_numpy(offsets),
        torch.from_numpy(ids),
        torch.from_numpy(logprobs),
    )
    return made[3].shape[0], made[1].shape[0]


def split_entries(parts: list[Any]) -> tuple[Any, Any]:
    """Split the packed entries of all rows, each written once and nothing in between."""
    count = sum(part.size for part in parts)
    ids, logprobs = np.empty(count, np.int32), np.empty(count, np.float32)
    first = 0
    for part in parts:
        stop = first + part.size
        ids[first:stop] = part
        logprobs[first:stop] = part.view(np.float32)[1::2]
        first = stop
    return ids, logprobs


def pack_all(rows: list[Row], denominator: int) -> tuple[int, int]:
    """Make every tensor of a batch, and count support entries and tokens."""
    import torch

    prompts = np.array([row["prompt_token_ids"].size for row in rows])
    counts = np.array([row["token_ids"].size for row in rows])
    starts = np.concatenate([[0], np.cumsum(prompts + counts)])
    owner = np.repeat(np.arange(len(rows)), counts)
    whose = np.repeat(np.arange(len(rows)), prompts + counts)
    ends = np.concatenate([[0], np.cumsum(counts)])
    tokens = [part for row in rows for part in (row["prompt_token_ids"], row["token_ids"])]
    widths = np.concatenate([np.diff(row["support_offsets"]) for row in rows])
    ids, logprobs = split_entries([row["support_entries"] for row in rows])
    batch = {
        "input_ids": np.concatenate(tokens, dtype=np.int64),
        "position_ids": np.arange(whose.size) - starts[whose],
        "cu_seqlens": starts.astype(np.int32),
        "hidden_index": np.arange(owner.size) + (starts[:-1] + prompts - 1 - ends[:-1])[owner],
        "target_ids": np.concatenate([row["token_ids"] for row in rows], dtype=np.int64),
        "sampler_logprobs": np.concatenate([row["sampled_logprobs"] for row in rows]),
        "advantages": np.array([row["advantage"] for row in rows], np.float32)[owner],
        "temperature": np.array([row["temperature"] for row in rows], np.float32)[owner],
        "support_offsets": np.concatenate([[0], np.cumsum(widths)]),
        "support_ids": ids,
        "sampler_support_logprobs": logprobs,
        "loss_mask": np.ones(owner.size, np.bool_),
        "support_valid": np.ones(owner.size, np.bool_),
        "support_is_samples": np.zeros(owner.size, np.bool_),
        "sampler_tail_mass": np.zeros(owner.size, np.float32),
        "rollout_index": owner,
    }
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    assert denominator >= owner.size
    return tensors["support_ids"].shape[0], tensors["target_ids"].shape[0]


def write_mds(path: str) -> None:
    """Copy a dataset's columns into MDS, with and without compression."""
    import pyarrow.parquet as pq
    from streaming import MDSWriter

    columns = {**{name: f"ndarray:{kind}" for name, kind in LISTS.items()}, **SCALARS}
    for suffix, compression in (("-mds", None), ("-mds-zstd", "zstd:1")):
        with MDSWriter(out=path + suffix, columns=columns, compression=compression) as writer:
            for file in sorted(Path(path, "data").iterdir()):
                shard = pq.ParquetFile(file)
                for piece in shard.iter_batches(batch_size=1, columns=[*LISTS, *SCALARS]):
                    row: Row = {k: piece[k][0].values.to_numpy() for k in LISTS}
                    group, *numbers = (piece[k][0].as_py() for k in SCALARS)
                    row |= dict(zip(SCALARS, (group, *map(np.float32, numbers)), strict=True))
                    writer.write(row)
