"""Polars views of a dataset: rollouts, tokens and support entries, all lazy.

    from rollout.frames import explode_support, explode_tokens, scan

    rollouts = scan("s3://bucket/run")              # a row a rollout
    tokens = explode_tokens(rollouts)               # a row a sampled token
    entries = explode_support(rollouts)             # a row a recorded id of a token's support

A run's entries can be billions of rows: filter the rollouts first, or aggregate in the same query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow.dataset as pads

from rollout.dataset import read_dataset
from rollout.schema.columns import SCHEMA
from rollout.storage import Storage

KEYS: Final = ("rollout_id", "group_id", "prompt_id", "sample_index")
"""The columns that say whose token or entry a row is."""


def scan(path: str | Path, storage_options: Mapping[str, Any] | None = None) -> pl.LazyFrame:
    """Scan the committed shards of a dataset; what no commit record names is left out.

    Args:
        path: the dataset's folder, a local path or an fsspec URL.
        storage_options: options of the fsspec filesystem.

    Returns:
        The columns of the schema, a row a rollout, in the order of units and parts.

    Raises:
        DatasetError: not a dataset, of a newer format, or a record is damaged or missing.
        OutputError: the storage can't be opened.
    """
    view = read_dataset(Storage.open(path, dict(storage_options or {})))
    names = [record.file for record in view.shards if record.file is not None]
    if not names:
        empty = pl.from_arrow(SCHEMA.empty_table())
        assert isinstance(empty, pl.DataFrame)
        return empty.lazy()
    root = view.storage.local_root
    if root is not None:
        return pl.scan_parquet([root / name for name in names], glob=False)
    filesystem, folder = view.storage.arrow_filesystem()
    paths = [f"{folder}/{name}" for name in names]
    # through fsspec, since polars takes other options and reaches fewer storages
    return pl.scan_pyarrow_dataset(
        pads.dataset(paths, schema=SCHEMA, format="parquet", filesystem=filesystem)
    )


def entry_id(entry: pl.Expr) -> pl.Expr:
    """Unpack the token id of packed entries.

    Args:
        entry: uint64 entries; for a list column use `.list.eval(entry_id(pl.element()))`.

    Returns:
        int32 ids.
    """
    return (entry & 0xFFFFFFFF).cast(pl.Int32)


def entry_logprob(entry: pl.Expr) -> pl.Expr:
    """Unpack the log-probability of packed entries, bit for bit.

    Args:
        entry: uint64 entries; for a list column use `.list.eval(entry_logprob(pl.element()))`.

    Returns:
        float32 log q in nats.
    """
    return (entry // 2**32).cast(pl.UInt32).reinterpret(dtype=pl.Float32)


def support_sizes(offsets: pl.Expr | None = None) -> pl.Expr:
    """Count the recorded ids of each token.

    Args:
        offsets: the support's row pointers; default: the column `support_offsets`.

    Returns:
        A list of int64, one a token; null where no support is recorded.
    """
    column = pl.col("support_offsets") if offsets is None else offsets
    # not list.diff: in polars 2.1 it loses the type of a batch that holds nulls alone
    return column.list.eval(pl.element().diff().slice(1))


def explode_tokens(rollouts: pl.LazyFrame, keep: Sequence[str] = KEYS) -> pl.LazyFrame:
    """Turn rollouts into one row a sampled token.

    Args:
        rollouts: columns of the schema.
        keep: columns of the rollout to repeat with each of its tokens.

    Returns:
        `keep`, then `position` (from 0), `token_id`, `logprob` (log q, nats), `support_size` and
        `tail_mass` (null where none is recorded).
    """
    count = pl.col("num_tokens")
    sizes = _filled(support_sizes(), pl.Int64, count)
    tail = _filled(pl.col("tail_mass"), pl.Float32, count)
    return rollouts.select(
        *keep,
        pl.int_ranges(0, count, dtype=pl.Int64).alias("position"),
        pl.col("token_ids").alias("token_id"),
        pl.col("sampled_logprobs").alias("logprob"),
        sizes.alias("support_size"),
        tail.alias("tail_mass"),
    ).explode("position", "token_id", "logprob", "support_size", "tail_mass")


def explode_support(rollouts: pl.LazyFrame, keep: Sequence[str] = KEYS) -> pl.LazyFrame:
    """Turn rollouts into one row a recorded id of a token's support, most probable first.

    Args:
        rollouts: columns of the schema; those without a support give no rows.
        keep: columns of the rollout to repeat with each of its entries.

    Returns:
        `keep`, then `position`, `id`, `logprob` (log q, nats) and `sampled` (whether this id was
        drawn).
    """
    listed = rollouts.filter(pl.col("num_support_entries") > 0)
    tokens = explode_tokens(listed, keep).filter(pl.col("support_size") > 0)
    names = [*keep, "position", "token_id"]
    owners = tokens.select(
        *(pl.col(name).repeat_by("support_size") for name in names),
    ).explode(*names)
    entry = pl.col("support_entries").explode()
    entries = listed.select(entry).select(
        entry_id(pl.col("support_entries")).alias("id"),
        entry_logprob(pl.col("support_entries")).alias("logprob"),
    )
    return pl.concat([owners, entries], how="horizontal").select(
        *keep,
        "position",
        "id",
        "logprob",
        (pl.col("id") == pl.col("token_id")).alias("sampled"),
    )


def _filled(values: pl.Expr, dtype: type[pl.DataType], count: pl.Expr) -> pl.Expr:
    """A list column with one null a token in the place of a null list."""
    nothing = pl.lit(None, dtype=dtype).repeat_by(count)
    return pl.when(values.is_null()).then(nothing).otherwise(values)
