"""Write a dataset in forms that other tools expect: JSON lines, or a Hugging Face dataset."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.dataset import DatasetView, read_dataset
from rollout.errors import OutputError
from rollout.full_rows import read_tables
from rollout.schema.columns import SCHEMA
from rollout.schema.entries import unpack_entries
from rollout.storage import Storage

_SUPPORT: Final = ("support_offsets", "support_entries", "tail_mass", "draw_entries")


def export_jsonl(
    path: str | Path,
    output: Path,
    *,
    supports: bool,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Write a dataset as JSON lines, one rollout a line; compressed where the name ends in .gz.

    A line holds the columns of the schema; `metadata` is an object. With supports, `support` and
    `draws` hold for each token the recorded ids and their log q, as two lists of equal length:
    `{"ids": [...], "logprobs": [...]}`. NaN and infinities are null.

    Args:
        path: the dataset.
        output: a local file, which may not exist.
        supports: write supports, draws and tail masses too.
        storage_options: options of the dataset's fsspec filesystem.

    Returns:
        The number of rollouts.

    Raises:
        DatasetError: the dataset can't be read, or a shard is missing or damaged.
        OutputError: the file exists or can't be written.
    """
    view = read_dataset(Storage.open(path, dict(storage_options or {})))
    if output.exists():
        raise OutputError(f"export: {output} exists, choose another name")
    unfinished = output.with_name(f"{output.name}.unfinished")
    rows = 0
    try:
        with _text_file(unfinished, compressed=output.suffix == ".gz") as file:
            for table in _tables(view, supports):
                for row in _rows(table):
                    file.write(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n")
                    rows += 1
        os.replace(unfinished, output)
    except OSError as error:
        raise OutputError(f"export: can't write {output}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return rows


def export_hugging_face(
    path: str | Path,
    output: Path,
    *,
    supports: bool,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Write a dataset as a folder that `datasets.load_dataset` opens: a card and Parquet files.

    Supports stay packed in the columns of the schema.

    Args:
        path: the dataset.
        output: a local folder, which may not exist.
        supports: write supports, draws and tail masses too.
        storage_options: options of the dataset's fsspec filesystem.

    Returns:
        The number of rollouts.

    Raises:
        DatasetError: the dataset can't be read, or a shard is missing or damaged.
        OutputError: the folder exists or can't be written.
    """
    view = read_dataset(Storage.open(path, dict(storage_options or {})))
    if output.exists():
        raise OutputError(f"export: {output} exists, choose another name")
    unfinished = output.with_name(f"{output.name}.unfinished")
    columns = _columns(supports)
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    rows = 0
    try:
        (unfinished / "data").mkdir(parents=True)
        for number, record in enumerate(view.shards):
            name = f"train-{number:05d}-of-{len(view.shards):05d}.parquet"
            with pq.ParquetWriter(
                unfinished / "data" / name, schema, compression="zstd", write_page_checksum=True
            ) as writer:
                for table in read_tables(view, record, columns):
                    writer.write_table(table.cast(schema))
                    rows += table.num_rows
        (unfinished / "README.md").write_text(_card(view, rows, supports), encoding="utf-8")
        os.replace(unfinished, output)
    except OSError as error:
        raise OutputError(f"export: can't write {output}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return rows


def _text_file(path: Path, *, compressed: bool) -> IO[str]:
    if compressed:
        return gzip.open(path, "wt", encoding="utf-8")
    return path.open("w", encoding="utf-8")


def _columns(supports: bool) -> tuple[str, ...]:
    return tuple(field.name for field in SCHEMA if supports or field.name not in _SUPPORT)


def _tables(view: DatasetView, supports: bool) -> Iterator[pa.Table]:
    for record in view.shards:
        yield from read_tables(view, record, _columns(supports))


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    plain = [name for name in table.column_names if name not in _SUPPORT]
    for index in range(table.num_rows):
        row = {name: table[name][index].as_py() for name in plain}
        if row["metadata"] is not None:
            row["metadata"] = json.loads(row["metadata"])
        if "support_entries" in table.column_names:
            row["tail_mass"] = table["tail_mass"][index].as_py()
            row["support"] = _support(table, index)
            row["draws"] = _draws(table, index, row["num_tokens"])
        yield row


def _support(table: pa.Table, index: int) -> list[dict[str, Any]] | None:
    offsets = table["support_offsets"][index]
    if not offsets.is_valid:
        return None
    return _tokens(table["support_entries"][index], offsets.as_py())


def _draws(table: pa.Table, index: int, tokens: int) -> list[dict[str, Any]] | None:
    entries = table["draw_entries"][index]
    if not entries.is_valid:
        return None
    each = len(entries) // tokens
    return _tokens(entries, range(0, len(entries) + 1, each))


def _tokens(entries: Any, bounds: Any) -> list[dict[str, Any]]:
    ids, logprobs = unpack_entries(entries.values.to_numpy(zero_copy_only=True))
    return [
        {"ids": ids[start:end].tolist(), "logprobs": logprobs[start:end].tolist()}
        for start, end in itertools.pairwise(bounds)
    ]


def _plain(value: Any) -> Any:
    """Give back a value without NaN and infinities, which JSON has no form for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _card(view: DatasetView, rows: int, supports: bool) -> str:
    model = view.record.provenance.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    what = "with their supports, packed" if supports else "without their supports"
    return (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        "    path: data/train-*.parquet\n---\n\n"
        f"{rows} rollouts of {name or 'a model that is not recorded'}, {what}.\n\n"
        f"Run fingerprint `{view.record.fingerprint}`, format version "
        f"{view.record.format_version} of `rollout`. Made by:\n\n```json\n"
        f"{json.dumps(view.record.fingerprint_inputs, indent=2)}\n```\n"
    )
