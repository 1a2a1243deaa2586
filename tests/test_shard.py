"""Shards, read back by pyarrow and polars."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from blake3 import blake3
from numpy.typing import NDArray
from synthetic import make_row

from rollout.rows import RolloutRow
from rollout.schema.columns import (
    FINGERPRINT_KEY,
    LIST_COLUMNS,
    SCALAR_COLUMNS,
    SCHEMA,
    VERSION_KEY,
)
from rollout.schema.entries import pack_entries
from rollout.shard import verify_shard, write_shard


def mixed_rows() -> list[RolloutRow]:
    """Every kind of support, with and without draws and optional fields."""
    return [
        make_row("p0", 0, lengths=[1, 1, 1]),
        make_row("p0", 1, kind="top", draws=2, lengths=[8, 1, 300], reward=0.5, policy_step=2**40),
        make_row("p1", 0, kind="none", text="h\u00e9", metadata='{"a": [1, "\u00e9"]}'),
        make_row("p1", 1, kind="none", draws=3),
        make_row("p1", 2, kind="kept", finish_reason=None, advantage=-1.5, stop_reason="</s>"),
        # nothing was listed for any token: an empty support, which is not a null one
        make_row(
            "p1",
            3,
            kind="top",
            support_offsets=np.zeros(5, np.int64),
            support_entries=np.empty(0, np.uint64),
            tail_mass=np.ones(4, np.float32),
        ),
    ]


def expected_entries(row: RolloutRow) -> list[int] | None:
    if row.support_entries is None or row.support_offsets is None:
        return None
    entries, offsets = row.support_entries.tolist(), row.support_offsets.tolist()
    return [e for a, b in itertools.pairwise(offsets) for e in sorted(entries[a:b])]


def expected_column(rows: list[RolloutRow], name: str) -> list[Any]:
    """What a column must hold, in plain Python, from the rows alone."""
    if name == "support_entries":
        return [expected_entries(row) for row in rows]
    if name == "num_tokens":
        return [len(row.token_ids) for row in rows]
    if name == "num_prompt_tokens":
        return [len(row.prompt_token_ids) for row in rows]
    if name == "num_support_entries":
        return [0 if row.support_entries is None else len(row.support_entries) for row in rows]
    if name == "tail_mass":
        return [
            [0.0] * len(row.token_ids)
            if row.support_kind == "kept"
            else None
            if row.tail_mass is None
            else row.tail_mass.tolist()
            for row in rows
        ]
    values = [getattr(row, name) for row in rows]
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


def test_pyarrow_reads_every_value_back(tmp_path: Path) -> None:
    rows = mixed_rows()
    path = tmp_path / "x.parquet"
    write_shard(path, rows, "f")
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read()
    table.validate(full=True)
    for name in SCHEMA.names:
        assert table[name].to_pylist() == expected_column(rows, name), name


def test_polars_reads_every_value_back(tmp_path: Path) -> None:
    rows = mixed_rows()
    path = tmp_path / "x.parquet"
    write_shard(path, rows, "f")
    frame = pl.read_parquet(path)
    for name in SCHEMA.names:
        assert frame[name].to_list() == expected_column(rows, name), name


def test_polars_unpacks_entries_bit_by_bit(tmp_path: Path) -> None:
    ids = np.array([0, 2**31 - 1, 151_643, 5, 7], np.int64)
    logprobs = np.array([0.0, -0.0, -1e-45, -3.4e38, -0.1], np.float32)
    row = make_row(lengths=[1] * 5, support_entries=pack_entries(ids, logprobs))
    path = tmp_path / "x.parquet"
    write_shard(path, [row], "f")
    entry = pl.col("support_entries")
    frame = (
        pl.scan_parquet(path)
        .select(entry.explode())
        .select(
            id=(entry & 0xFFFFFFFF).cast(pl.UInt32),
            bits=(entry // 2**32).cast(pl.UInt32),
            logprob=(entry // 2**32).cast(pl.UInt32).reinterpret(dtype=pl.Float32),
        )
        .collect()
    )
    assert frame["id"].to_list() == ids.tolist()
    assert frame["bits"].to_list() == (logprobs + np.float32(0)).view(np.uint32).tolist()
    assert frame["logprob"].to_numpy().view(np.uint32).tolist() == frame["bits"].to_list()
    assert frame["bits"][:2].to_list() == [0, 0]


def test_null_and_empty_supports_differ(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_shard(path, mixed_rows(), "f")
    for column in (
        pq.read_table(path)["support_entries"].to_pylist(),
        pl.read_parquet(path)["support_entries"].to_list(),
    ):
        assert [value is None for value in column] == [False, False, True, True, False, False]
        assert column[5] == []
    assert pl.read_parquet(path)["support_offsets"].to_list()[5] == [0, 0, 0, 0, 0]


def test_negative_zero_of_a_sampled_logprob_becomes_positive(tmp_path: Path) -> None:
    row = make_row(lengths=[1, 1], sampled_logprobs=np.array([-0.0, 0.0], np.float32))
    path = tmp_path / "x.parquet"
    write_shard(path, [row], "f")
    (values,) = pl.read_parquet(path)["sampled_logprobs"].to_list()
    assert [str(value) for value in values] == ["0.0", "0.0"]


def test_draws_stay_in_the_order_drawn(tmp_path: Path) -> None:
    draws = pack_entries([9, 3, 9, 1], [-4.0, -0.5, -4.0, 0.0])
    path = tmp_path / "x.parquet"
    write_shard(path, [make_row(lengths=[2, 2], draw_entries=draws)], "f")
    assert pl.read_parquet(path)["draw_entries"].to_list() == [draws.tolist()]


def test_layout_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_shard(path, mixed_rows(), "the fingerprint")
    metadata = pq.read_metadata(path)
    assert metadata.metadata[VERSION_KEY.encode()] == b"2"
    assert metadata.metadata[FINGERPRINT_KEY.encode()] == b"the fingerprint"
    group = metadata.row_group(0)
    for index in range(group.num_columns):
        column = group.column(index)
        name = column.path_in_schema.split(".")[0]
        assert column.compression == "ZSTD"
        assert not column.has_dictionary_page
        assert (column.statistics is not None) == (name in SCALAR_COLUMNS), name
        if name == "support_offsets":
            assert "DELTA_BINARY_PACKED" in column.encodings
        elif name in LIST_COLUMNS:
            assert "BYTE_STREAM_SPLIT" in column.encodings
    planned = group.column(SCHEMA.names.index("num_tokens")).statistics
    assert (planned.min, planned.max) == (3, 4)


def footer_schema(path: Path) -> bytes:
    return bytes(pq.read_metadata(path).metadata[b"ARROW:schema"])


def test_empty_shards_have_the_same_schema_byte_by_byte(tmp_path: Path) -> None:
    full, empty, nulls = (tmp_path / name for name in ("full", "empty", "nulls"))
    write_shard(full, mixed_rows(), "a")
    info = write_shard(empty, [], "b")
    write_shard(nulls, [make_row(kind="none", finish_reason=None)], "c")
    assert info.rows == info.tokens == info.entries == 0
    assert info.max_token_id == -1
    assert info.row_groups == ()
    assert footer_schema(full) == footer_schema(empty) == footer_schema(nulls)
    for path in (full, empty, nulls):
        assert pq.read_schema(path).remove_metadata().equals(SCHEMA, check_metadata=True)
    assert pl.read_parquet(empty).schema == pl.read_parquet(full).schema
    assert pl.read_parquet(empty).height == 0
    verify_shard(empty, info)


def test_info_counts_what_was_written(tmp_path: Path) -> None:
    rows = mixed_rows()
    path = tmp_path / "x.parquet"
    info = write_shard(path, rows, "f")
    data = path.read_bytes()
    assert info.rows == 6
    assert info.tokens == 3 + 3 + 4 * 4
    assert info.entries == 3 + 309 + 47
    largest = max(
        max(row.prompt_token_ids.max(), row.token_ids.max(), ids(row.support_entries))
        for row in rows
    )
    assert info.max_token_id == max(largest, *(ids(row.draw_entries) for row in rows))
    assert info.size == len(data)
    assert info.sha256 == hashlib.sha256(data).hexdigest()


def ids(entries: NDArray[np.uint64] | None) -> int:
    return -1 if entries is None or not len(entries) else max(e % 2**32 for e in entries.tolist())


def test_row_groups_close_by_bytes_and_their_ranges_cover_the_file(tmp_path: Path) -> None:
    rows = [make_row(f"p{i}", lengths=[50] * (1 + 7 * i % 11)) for i in range(40)]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write_shard(whole, rows, "f")
    info = write_shard(cut, rows, "f", row_group_bytes=12_000)
    assert len(info.row_groups) > 10
    data = cut.read_bytes()
    position, first = 4, 0
    for group in info.row_groups:
        own = rows[first : first + group.rows]
        assert sum(row.num_bytes for row in own) <= 12_000
        following = rows[first + group.rows : first + group.rows + 1]
        assert sum(row.num_bytes for row in own + following) > 12_000 or not following
        assert group.offset == position
        assert group.blake3 == blake3(data[position : position + group.size]).hexdigest()
        position += group.size
        first += group.rows
    assert first == 40
    # what follows is the footer: its length stands in the last 8 bytes
    footer = int.from_bytes(data[-8:-4], "little")
    assert position == len(data) - 8 - footer
    assert pq.read_table(cut).equals(pq.read_table(whole))


def test_no_row_group_holds_a_part_of_a_prompt_group_beside_another(tmp_path: Path) -> None:
    sizes = [2, 3, 9, 1, 4, 4, 5, 20, 1]
    rows = [
        make_row(f"p{group}", index, lengths=[50] * 10)
        for group, size in enumerate(sizes)
        for index in range(size)
    ]
    limit = 6 * rows[0].num_bytes
    info = write_shard(tmp_path / "x", rows, "f", row_group_bytes=limit)
    # whole groups as far as they fit; 9 and 20 in as many pieces as it takes, about as large
    expected = [5, 5, 4, 5, 4, 5, 5, 5, 5, 5, 1]
    assert [group.rows for group in info.row_groups] == expected


def test_a_row_larger_than_a_row_group_gets_its_own(tmp_path: Path) -> None:
    rows = [make_row(f"p{i}", lengths=[length]) for i, length in enumerate([5, 5000, 5])]
    info = write_shard(tmp_path / "x", rows, "f", row_group_bytes=1000)
    assert [group.rows for group in info.row_groups] == [1, 1, 1]


@pytest.mark.parametrize("name", ["support_entries", "draw_entries", "token_ids"])
def test_u18_row_groups_stay_below_the_element_limit(tmp_path: Path, name: str) -> None:
    shapes: dict[str, dict[str, Any]] = {
        "support_entries": {"lengths": [30, 10]},
        "draw_entries": {"lengths": [1, 1], "draws": 20},
        "token_ids": {"lengths": [1] * 40, "kind": "none"},
    }
    rows = [make_row(f"p{i}", **shapes[name]) for i in range(10)]
    path = tmp_path / "x.parquet"
    info = write_shard(path, rows, "f", max_elements=130)
    verify_shard(path, info)
    assert [group.rows for group in info.row_groups] == [3, 3, 3, 1]
    file = pq.ParquetFile(path)
    for index in range(file.num_row_groups):
        lists = file.read_row_group(index)[name]
        assert sum(len(value) for value in lists.to_pylist()) <= 130
    file.close()
    assert pl.read_parquet(path)[name].list.len().sum() == 400


def test_u18_a_row_over_the_element_limit_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout p0\.0: 131 values in support_entries, expected"):
        write_shard(tmp_path / "x", [make_row(lengths=[131])], "f", max_elements=130)


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "nan logprob": {"sampled_logprobs": np.array([np.nan], np.float32)},
    "positive logprob": {"sampled_logprobs": np.array([0.5], np.float32)},
    "nan entry": {"support_entries": np.array([0x7FC00000 << 32], np.uint64)},
    "negative zero entry": {"support_entries": np.array([0x80000000 << 32], np.uint64)},
    "id past int32": {"support_entries": np.array([2**31], np.uint64)},
    "nan draw": {"draw_entries": np.array([0x7FC00000 << 32], np.uint64)},
    "negative id": {"token_ids": np.array([-1], np.int32)},
    "int64 ids": {"token_ids": np.array([1])},
    "offsets past the end": {"support_offsets": np.array([0, 2])},
    "offsets of another length": {"support_offsets": np.array([0, 1, 1])},
    "null support": {"support_entries": None},
    "two logprobs": {"sampled_logprobs": np.zeros(2, np.float32)},
}


@pytest.mark.parametrize("fields", BAD_FIELDS.values(), ids=BAD_FIELDS.keys())
def test_bad_values_never_reach_a_file(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        write_shard(tmp_path / "x", [make_row(lengths=[1], **fields)], "f")


def test_order_of_the_rows_is_kept_across_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    rows = (make_row(f"p{index}", lengths=[100]) for index in (3, 1, 2, 0, 9, 8, 7))
    info = write_shard(path, rows, "f", row_group_bytes=3000)
    assert len(info.row_groups) > 1
    assert pl.read_parquet(path)["prompt_id"].to_list() == [
        f"user p{index}" for index in (3, 1, 2, 0, 9, 8, 7)
    ]
