"""Shards damaged on purpose: none is taken for the recorded one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import realistic_rows

from rollout.errors import DatasetError
from rollout.schema.columns import SCHEMA, VERSION_KEY
from rollout.shard import ShardInfo, open_shard, verify_shard, write_shard


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, ShardInfo, tuple[int, int]]:
    """A shard's bytes, its info, and where the pages of its support entries are."""
    path = tmp_path_factory.mktemp("shard") / "x.parquet"
    info = write_shard(path, realistic_rows(3, tokens=60), "f")
    group = pq.read_metadata(path).row_group(0)
    column = next(
        group.column(i)
        for i in range(group.num_columns)
        if group.column(i).path_in_schema.startswith("support_entries")
    )
    return (
        path.read_bytes(),
        info,
        (column.data_page_offset, column.total_compressed_size),
    )


def flip(data: bytes, position: int, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[position] ^= 1 << bit
    return bytes(damaged)


@pytest.mark.parametrize("tenth", range(1, 10))
def test_page_checksums_catch_one_flipped_bit(
    tmp_path: Path, intact: tuple[bytes, ShardInfo, tuple[int, int]], tenth: int
) -> None:
    data, info, (start, size) = intact
    path = tmp_path / "x.parquet"
    path.write_bytes(flip(data, start + size * tenth // 10, tenth % 8))
    with pytest.raises(DatasetError, match=r"row group 0 is damaged: .*CRC"):
        verify_shard(path, info)
    with open_shard(path) as shard, pytest.raises(OSError, match="CRC"):
        shard.read_row_group(0)


def test_without_checksums_a_flipped_bit_gives_wrong_entries_and_no_error(
    tmp_path: Path, intact: tuple[bytes, ShardInfo, tuple[int, int]]
) -> None:
    # why verification is not optional: some flip decodes without complaint into other values
    data, _, (start, size) = intact
    path = tmp_path / "x.parquet"
    path.write_bytes(data)
    right = pq.read_table(path, columns=["support_entries"])
    silent = 0
    for position in range(start + size // 2, start + size - 8, 97):
        path.write_bytes(flip(data, position, 3))
        try:
            silent += not pq.read_table(path, columns=["support_entries"]).equals(right)
        except OSError:
            continue
    assert silent > 0


def test_any_flipped_bit_is_caught_by_the_digest(
    tmp_path: Path, intact: tuple[bytes, ShardInfo, tuple[int, int]]
) -> None:
    data, info, _ = intact
    path = tmp_path / "x.parquet"
    for position in np.linspace(0, len(data) - 1, 60).astype(int).tolist():
        path.write_bytes(flip(data, position, position % 8))
        with pytest.raises(DatasetError):
            verify_shard(path, info)


@pytest.mark.parametrize("keep", [0, 3, 4, 1000, -1])
def test_short_files_are_refused(
    tmp_path: Path, intact: tuple[bytes, ShardInfo, tuple[int, int]], keep: int
) -> None:
    data, info, _ = intact
    path = tmp_path / "x.parquet"
    path.write_bytes(data[:keep])
    with pytest.raises(DatasetError, match="not a readable parquet file"):
        verify_shard(path, info)


def test_another_intact_shard_is_not_the_recorded_one(
    tmp_path: Path, intact: tuple[bytes, ShardInfo, tuple[int, int]]
) -> None:
    path = tmp_path / "x.parquet"
    write_shard(path, realistic_rows(3, tokens=60, seed=1), "f")
    with pytest.raises(DatasetError, match="shard: "):
        verify_shard(path, intact[1])


def test_foreign_and_newer_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(DatasetError, match="not written by rollout"):
        open_shard(path)
    with pq.ParquetWriter(path, SCHEMA) as writer:
        writer.add_key_value_metadata({VERSION_KEY: "3"})
    with pytest.raises(DatasetError, match=r"format version 3, expected 2: install"):
        open_shard(path)
