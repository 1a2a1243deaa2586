"""Pages of support entries, decoded here and by Arrow: the same, or refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from loader_cases import group, open_loader, write
from torch import Tensor

from rollout.entry_pages import EntryPages, SplitEntries, write_entries
from rollout.errors import DatasetError
from rollout.schema.entries import unpack_entries

NAME = "support_entries"
SETTINGS: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": False,
    "column_encoding": {f"{NAME}.list.element": "BYTE_STREAM_SPLIT"},
    "write_page_checksum": True,
}


def entries_of(rng: np.random.Generator, count: int, largest_id: int) -> Any:
    ids = rng.integers(0, largest_id, count, endpoint=True).astype(np.uint64)
    logprobs = (-rng.exponential(3, count)).astype(np.float32) + np.float32(0)
    logprobs[rng.random(count) < 0.3] = 0
    return (logprobs.view(np.uint32).astype(np.uint64) << np.uint64(32)) | ids


def chunk_of(path: Path, lists: list[Any], **settings: Any) -> bytes:
    """Write lists as one column; returns the bytes of its chunk."""
    field = pa.field("element", pa.uint64(), nullable=False)
    table = pa.table({NAME: pa.array(lists, pa.list_(field))})
    pq.write_table(table, path, **{**SETTINGS, **settings})
    column = pq.read_metadata(path).row_group(0).column(0)
    start = column.data_page_offset
    return path.read_bytes()[start : start + column.total_compressed_size]


def pages_of(chunk: bytes, lists: list[Any]) -> EntryPages:
    counts = [0 if one is None else len(one) for one in lists]
    return EntryPages(memoryview(chunk), np.array(counts, np.int64), "the shard")


def nothing(count: int) -> SplitEntries:
    """Arrays that hold no entry that was written."""
    return SplitEntries(np.full(count, -1, np.int32), np.full(count, np.nan, np.float32))


def decode(chunk: bytes, lists: list[Any]) -> SplitEntries:
    pages = pages_of(chunk, lists)
    whole = nothing(sum(0 if one is None else len(one) for one in lists))
    pages.decode(0, whole.size, whole)
    return whole


@pytest.mark.parametrize("page_bytes", [200, 2**20])
@pytest.mark.parametrize("largest_id", [255, 151_935, 2**31 - 1])
def test_entries_are_those_that_arrow_reads(
    tmp_path: Path, page_bytes: int, largest_id: int
) -> None:
    rng = np.random.default_rng([page_bytes, largest_id])
    sizes = [0, 3, 1, 90_000, 0, 2000, 1]
    lists = [None, *(entries_of(rng, size, largest_id) for size in sizes), None]
    got = decode(chunk_of(tmp_path / "x", lists, data_page_size=page_bytes), lists)
    read = pq.read_table(tmp_path / "x")[NAME].combine_chunks()
    ids, logprobs = unpack_entries(read.values.to_numpy())
    assert np.array_equal(got.ids, ids)
    assert np.array_equal(got.logprobs.view(np.uint32), logprobs.view(np.uint32))
    assert np.array_equal(read.values.to_numpy(), np.concatenate(lists[1:-1]))


def test_columns_without_entries_are_empty(tmp_path: Path) -> None:
    cases: list[list[Any]] = [[], [None, None], [[], None]]
    for lists in cases:
        assert decode(chunk_of(tmp_path / "x", lists), lists).size == 0


@pytest.mark.parametrize("page_bytes", [200, 3000, 2**20])
def test_any_rows_come_in_any_order_as_arrow_reads_them(tmp_path: Path, page_bytes: int) -> None:
    rng = np.random.default_rng(page_bytes)
    # pages begin and end within rows, at their ends, and among rows without entries
    sizes = [0, 0, 700, 0, 1, 1, 0, 0, *rng.integers(0, 300, 60).tolist(), 0, 0]
    lists = [
        None if size == 0 and number % 2 else entries_of(rng, size, 2**31 - 1)
        for number, size in enumerate(sizes)
    ]
    pages = pages_of(chunk_of(tmp_path / "x", lists, data_page_size=page_bytes), lists)
    bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    read = pq.read_table(tmp_path / "x")[NAME].to_pylist()
    for _ in range(20):
        # rows that follow each other, and such that do not
        first, count = int(rng.integers(0, len(sizes))), int(rng.integers(1, 12))
        picks = [*range(first, min(first + count, len(sizes))), *rng.integers(0, len(sizes), 3)]
        want = np.array([entry for row in picks for entry in read[row] or ()], np.uint64)
        ids, logprobs = unpack_entries(want)
        got = nothing(want.size)
        write_entries([pages.span(bounds[row], bounds[row + 1]) for row in picks], got)
        assert np.array_equal(got.ids, ids)
        assert np.array_equal(got.logprobs.view(np.uint32), logprobs.view(np.uint32))


def test_pages_that_hold_other_numbers_of_entries_are_refused(tmp_path: Path) -> None:
    lists = [np.arange(size, dtype=np.uint64) for size in (300, 0, 500)]
    chunk = chunk_of(tmp_path / "x", lists, data_page_size=400)
    for counts in ([300, 0, 499], [300, 0, 501], [300, 500]):
        others = [np.arange(size, dtype=np.uint64) for size in counts]
        with pytest.raises(OSError, match=r"801 values of support_entries, expected \d+"):
            decode(chunk, others)
    # as many values, but not as many entries: an empty list counts as a value
    with pytest.raises(DatasetError, match=r"the shard is damaged: page of \d+ bytes of values"):
        decode(chunk, [np.arange(size, dtype=np.uint64) for size in (300, 1, 500)])


@pytest.mark.parametrize(
    "settings",
    [
        {"column_encoding": None},
        {"column_encoding": {f"{NAME}.list.element": "PLAIN"}},
        {"column_encoding": None, "use_dictionary": True},
        {"data_page_version": "2.0"},
        {"write_page_checksum": False},
        {"compression": "snappy"},
        {"compression": None},
    ],
    ids=["default", "plain", "dictionary", "v2", "no checksum", "snappy", "not compressed"],
)
def test_what_the_writer_does_not_write_is_refused(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    lists = [np.arange(500, dtype=np.uint64)]
    chunk = chunk_of(tmp_path / "x", lists, data_page_size=400, **settings)
    with pytest.raises((OSError, DatasetError), match=r"BYTE_STREAM_SPLIT|can't be parsed|ZSTD"):
        decode(chunk, lists)


def test_no_flipped_bit_gives_other_entries(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    lists = [entries_of(rng, size, 200) for size in (40, 3, 60)]
    chunk = chunk_of(tmp_path / "x", lists, data_page_size=300)
    want = decode(chunk, lists)
    refused = 0
    for position in range(len(chunk)):
        for bit in range(8):
            data = bytearray(chunk)
            data[position] ^= 1 << bit
            try:
                got = decode(bytes(data), lists)
            except (OSError, DatasetError):
                refused += 1
                continue
            # what no reader looks at: a field of another number
            assert np.array_equal(got.ids, want.ids)
            assert np.array_equal(got.logprobs, want.logprobs)
    assert refused > 0.9 * 8 * len(chunk)


@pytest.mark.parametrize("kept", [0, 1, 20, 0.5, -1])
def test_a_chunk_that_ends_early_is_refused(tmp_path: Path, kept: float) -> None:
    lists = [np.arange(500, dtype=np.uint64)]
    chunk = chunk_of(tmp_path / "x", lists)
    size = int(kept * len(chunk)) if kept == 0.5 else int(kept)
    with pytest.raises(OSError, match=r"of which|parsed|0 values of support_entries, expected 500"):
        decode(chunk[:size], lists)


def test_every_kind_of_row_comes_with_its_own_entries(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"kind": "top", "draws": 2},
        {"kind": "none"},
        {"kind": "none", "draws": 3},
        {},
    ]
    rows = [row for i, fields in enumerate(kinds * 2) for row in group(i, **fields)]
    settings: dict[str, Any] = {"groups_per_step": 8, "token_budget": 10_000}
    write(str(tmp_path / "whole"), [rows])
    write(str(tmp_path / "small"), [rows], row_group_bytes=600)
    (whole,) = open_loader(str(tmp_path / "whole"), shuffle=False, **settings)
    (small,) = open_loader(str(tmp_path / "small"), shuffle=False, **settings)
    assert sorted(whole.rollout_ids) == sorted(row.rollout_id for row in rows)
    for field in dataclasses.fields(whole):
        want, got = getattr(whole, field.name), getattr(small, field.name)
        same = torch.equal(got, want) if isinstance(want, Tensor) else got == want
        assert same, field.name
