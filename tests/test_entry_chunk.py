"""Pages of support entries that we encode, read by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import make_row, realistic_rows

from rollout import compact_thrift, entry_chunk
from rollout.compact_thrift import BINARY, BYTE, DOUBLE, FALSE, I32, I64, LIST, STRUCT, TRUE
from rollout.entry_chunk import PAGE_ENTRIES, encode_chunk
from rollout.errors import DatasetError
from rollout.rows import RolloutRow
from rollout.schema.columns import SCHEMA
from rollout.schema.entries import pack_entries
from rollout.shard import verify_shard, write_shard

PAGE = 16
# entries of each row's list, or null: every way in which a list meets the end of a page
PATTERNS: dict[str, list[int | None]] = {
    "nothing but nulls": [None, None, None],
    "nothing but empty lists": [0, 0],
    "a null last": [3, None],
    "a null first": [None, 3],
    "an empty one between": [3, 0, 5],
    "all kinds": [0, None, 1, None, None, 0, 0, 2, None],
    "a page exactly": [PAGE],
    "pages exactly": [PAGE, PAGE, 3 * PAGE],
    "one beyond a page": [PAGE + 1, 1],
    "one before the end of a page": [PAGE - 1, 1, 1],
    "a page begins with a null": [PAGE, None, 2],
    "a page ends with an empty list": [PAGE - 1, 0, 1, 0, 1],
    "a list over several pages": [5, 4 * PAGE + 3, 2],
}


def rows_of(lists: list[int | None], seed: int = 0) -> list[RolloutRow]:
    """Rows of one token each, whose support has so many ids."""
    rng = np.random.default_rng(seed)
    rows = []
    for index, count in enumerate(lists):
        if count is None:
            rows.append(make_row(f"p{index}", lengths=[1], kind="none"))
            continue
        entries = np.sort(pack_entries(rng.integers(0, 2**31, count), -rng.exponential(4, count)))
        rows.append(
            make_row(
                f"p{index}",
                lengths=[1],
                kind="top",
                support_offsets=np.array([0, count]),
                support_entries=entries,
            )
        )
    return rows


def random_lists(seed: int) -> list[int | None]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(-2, 3 * PAGE, 200)
    return [None if n == -2 else max(int(n), 0) for n in counts]


@pytest.mark.parametrize("lists", [*PATTERNS.values(), random_lists(0), random_lists(1)])
def test_every_reader_finds_the_same_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists: list[int | None]
) -> None:
    monkeypatch.setattr(entry_chunk, "PAGE_ENTRIES", PAGE)
    rows = rows_of(lists)
    path = tmp_path / "x.parquet"
    info = write_shard(path, rows, "f")
    expected = [None if r.support_entries is None else r.support_entries.tolist() for r in rows]
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read()
    table.validate(full=True)
    assert table["support_entries"].to_pylist() == expected
    assert pl.read_parquet(path)["support_entries"].to_list() == expected
    found = duckdb.execute(f"select support_entries from '{path}'").fetchall()
    assert [entries for (entries,) in found] == expected
    verify_shard(path, info)


def test_pages_are_of_the_size_said_and_the_footer_counts_them(tmp_path: Path) -> None:
    lists: list[int | None] = [2 * PAGE_ENTRIES + 5, None, 0, 7]
    path = tmp_path / "x.parquet"
    write_shard(path, rows_of(lists), "f", row_group_bytes=2**30)
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    assert group.total_byte_size == sum(column.total_uncompressed_size for column in columns)
    own = columns[SCHEMA.names.index("support_entries")]
    assert own.num_values == 2 * PAGE_ENTRIES + 5 + 1 + 1 + 7
    raw = 8 * (2 * PAGE_ENTRIES + 5 + 7)
    assert raw < own.total_uncompressed_size < raw + 3 * 100
    # pages of another reader's size are as large, so that either decodes them in its memory
    chunk = path.read_bytes()[own.data_page_offset :][: own.total_compressed_size]
    header, _ = compact_thrift.read_struct(chunk)
    assert header[5][1][1] == (I32, PAGE_ENTRIES)


def footer_of(path: Path) -> compact_thrift.Struct:
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    return compact_thrift.read_struct(data[-8 - length : -8])[0]


def test_the_footer_says_of_every_column_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers go by it to split files, and to see how much memory a column takes."""
    monkeypatch.setattr(entry_chunk, "PAGE_ENTRIES", PAGE)
    path = tmp_path / "x.parquet"
    write_shard(path, rows_of(random_lists(0)), "f", row_group_bytes=20_000)
    data = path.read_bytes()
    place = 4
    groups = footer_of(path)[4][1][1]
    assert len(groups) > 1
    for group in groups:
        start = place
        raw = 0
        for column in group[1][1][1]:
            metadata = column[3][1]
            assert metadata[9][1] == place
            end = place + metadata[7][1]
            pages = values = size = 0
            while place < end:
                header, body = compact_thrift.read_struct(data, place)
                pages, values = pages + 1, values + header[5][1][1][1]
                size += body - place + header[2][1]
                place = body + header[3][1]
            assert (place, values, size) == (end, metadata[5][1], metadata[6][1])
            assert [stats[3][1] for stats in metadata[13][1][1]] == [pages]
            raw += size
        assert (group[5][1], group[6][1], group[2][1]) == (start, place - start, raw)


@pytest.mark.parametrize("lists", [*PATTERNS.values(), random_lists(2)])
def test_levels_are_counted_as_arrow_counts_them(tmp_path: Path, lists: list[int | None]) -> None:
    path, plain = tmp_path / "x.parquet", tmp_path / "plain.parquet"
    write_shard(path, rows_of(lists), "f", row_group_bytes=2**30)
    pq.write_table(pq.read_table(path), plain)
    place = SCHEMA.names.index("support_entries")
    ours, arrows = (
        footer_of(file)[4][1][1][0][1][1][1][place][3][1][16][1] for file in (path, plain)
    )
    assert ours == arrows


def test_it_takes_no_more_room_than_arrows_pages(tmp_path: Path) -> None:
    rows = realistic_rows(4)
    path, plain = tmp_path / "x.parquet", tmp_path / "plain.parquet"
    write_shard(path, rows, "f")
    table = pq.read_table(path, columns=["support_entries"])
    pq.write_table(
        table,
        plain,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        column_encoding={"support_entries.list.element": "BYTE_STREAM_SPLIT"},
        write_statistics=False,
    )
    place = SCHEMA.names.index("support_entries")
    ours = pq.read_metadata(path).row_group(0).column(place).total_compressed_size
    arrows = pq.read_metadata(plain).row_group(0).column(0).total_compressed_size
    assert ours < 1.01 * arrows


@pytest.mark.parametrize("tenth", range(11))
def test_a_byte_that_the_disk_changes_is_seen_before_the_shard_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tenth: int
) -> None:
    stock = Path.open
    path = tmp_path / "x.parquet"

    def damaging(self: Path, mode: str = "r", *args: Any, **named: Any) -> Any:
        file = stock(self, mode, *args, **named)
        if self == path and mode == "wb":
            close = file.close

            def damage() -> None:
                close()
                data = bytearray(self.read_bytes())
                data[(len(data) - 1) * tenth // 10] ^= 4
                monkeypatch.undo()
                self.write_bytes(data)

            class Damaged:
                def __enter__(self) -> Any:
                    return file

                def __exit__(self, *_: object) -> None:
                    damage()

            return Damaged()
        return file

    monkeypatch.setattr(Path, "open", damaging)
    with pytest.raises(DatasetError, match="bytes are not what was written"):
        write_shard(path, realistic_rows(2, tokens=100), "f")


def test_a_page_that_does_not_decompress_to_what_it_was_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = pa.Codec

    class Wrong:
        def __init__(self, *args: Any) -> None:
            self.codec = stock(*args)

        def compress(self, data: pa.Buffer, **named: Any) -> pa.Buffer:
            wrong = bytearray(data.to_pybytes())
            wrong[len(wrong) // 2] ^= 1
            return self.codec.compress(bytes(wrong), **named)

        def decompress(self, *args: Any) -> pa.Buffer:
            return self.codec.decompress(*args)

    entries = np.arange(1000, dtype=np.uint64)
    assert encode_chunk(entries, [1000], 1).num_values == 1000
    monkeypatch.setattr(pa, "Codec", Wrong)
    with pytest.raises(DatasetError, match="does not decompress to what it was"):
        encode_chunk(entries, [1000], 1)


def test_structs_are_written_by_the_protocol_and_parsed_to_the_same() -> None:
    struct: compact_thrift.Struct = {
        1: (I32, 1),
        2: (I64, -3),
        3: (TRUE, True),
        4: (FALSE, False),
        20: (BINARY, b"ab"),
        21: (STRUCT, {1: (I32, 300)}),
        22: (LIST, (I32, list(range(16)))),
        23: (BYTE, 200),
        24: (LIST, (I32, [-1] * 15)),
        25: (LIST, (I32, [0] * 14)),
        26: (DOUBLE, b"8 bytes "),
        27: (I32, -(2**31)),
    }
    expected = (
        b"\x15\x02\x16\x05\x11\x12\x08\x28\x02ab"  # 20 does not follow 4 closely: written whole
        b"\x1c\x15\xd8\x04\x00" + b"\x19\xf5\x10" + bytes(range(0, 32, 2)) + b"\x13\xc8"
        b"\x19\xf5\x0f" + b"\x01" * 15 + b"\x19\xe5" + b"\x00" * 14 + b"\x178 bytes "
        b"\x15\xff\xff\xff\xff\x0f\x00"
    )
    assert compact_thrift.write_struct(struct) == expected
    assert compact_thrift.read_struct(expected) == (struct, len(expected))


def test_arrows_footers_come_out_byte_by_byte(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    table = pa.table(
        {
            "a": [1.5, None],
            "b": [True, False],
            "c": [["x"], []],
            "d": pa.array([1, 2], pa.decimal128(20, 2)),
            "e": pa.array([1, 2], pa.timestamp("us", "UTC")),
        }
    )
    order = [pq.SortingColumn(0, descending=True)]
    pq.write_table(table, path, sorting_columns=order, write_page_index=True)
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - length : -8]
    struct, end = compact_thrift.read_struct(footer)
    assert end == length
    assert compact_thrift.write_struct(struct) == footer
