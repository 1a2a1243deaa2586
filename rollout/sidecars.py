"""The tables beside the data as Parquet bytes: the plan, and what was set aside."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.errors import DatasetError
from rollout.rows import PlanEntry, Rejection
from rollout.schema.columns import FINGERPRINT_KEY, FORMAT_VERSION, VERSION_KEY
from rollout.schema.sidecars import PLAN_SCHEMA, REJECTED_SCHEMA


def plan_bytes(entries: Sequence[PlanEntry], fingerprint: str) -> bytes:
    """Serialise a piece of the plan."""
    return _write(entries, PLAN_SCHEMA, fingerprint)


def rejected_bytes(rejections: Sequence[Rejection], fingerprint: str) -> bytes:
    """Serialise what a part set aside."""
    return _write(rejections, REJECTED_SCHEMA, fingerprint)


def read_plan(data: bytes, name: str) -> list[PlanEntry]:
    """Parse what `plan_bytes` made.

    Raises:
        DatasetError: damaged.
    """
    return [PlanEntry(**row) for row in _read(data, PLAN_SCHEMA, name)]


def read_plan_units(data: bytes, name: str) -> tuple[list[str], list[str]]:
    """Parse the keys and units alone of what `plan_bytes` made.

    Raises:
        DatasetError: damaged.
    """
    table = read_plan_columns(data, name, ["prompt_key", "unit"])
    return table["prompt_key"].to_pylist(), table["unit"].to_pylist()


def read_plan_columns(data: bytes, name: str, columns: Sequence[str]) -> pa.Table:
    """Parse some columns of what `plan_bytes` made.

    Raises:
        DatasetError: damaged.
    """
    return _read_table(data, list(columns), name)


def read_rejected(data: bytes, name: str) -> list[Rejection]:
    """Parse what `rejected_bytes` made.

    Raises:
        DatasetError: damaged.
    """
    return [Rejection(**row) for row in _read(data, REJECTED_SCHEMA, name)]


def _write(items: Sequence[Any], schema: pa.Schema, fingerprint: str) -> bytes:
    table = pa.Table.from_pylist([dataclasses.asdict(item) for item in items], schema=schema)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, schema, compression="zstd", compression_level=1, write_page_checksum=True
    ) as writer:
        writer.add_key_value_metadata(
            {VERSION_KEY: str(FORMAT_VERSION), FINGERPRINT_KEY: fingerprint}
        )
        writer.write_table(table)
    return bytes(sink.getvalue())


def _read(data: bytes, schema: pa.Schema, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _read_table(data, schema.names, name).to_pylist()
    return rows


def _read_table(data: bytes, columns: list[str], name: str) -> pa.Table:
    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            return file.read(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{name}: damaged, copy the dataset again: {error}") from error
