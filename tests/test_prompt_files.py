"""What Parquet files and files that can't be read give."""

import datetime
import decimal
import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.config import PromptsConfig, SamplingConfig
from rollout.errors import InputError
from rollout.metadata import decode_metadata
from rollout.prompts import Prompt, check_prompts_file, read_prompts
from rollout.rows import Rejection

BOM = b"\xef\xbb\xbf"
SAMPLING = SamplingConfig(max_tokens=8, top_p=0.9, n=4)


def read(path: Path, **config: Any) -> list[Any]:
    return list(read_prompts(PromptsConfig(path=str(path), **config), SAMPLING))


def test_metadata_of_parquet_rows(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 2, 29, 1, 2, 3, 456789)
    own = {
        "when": pa.array([moment, None], pa.timestamp("us")),
        "exact": pa.array([1_234_567_890_123_456_789, None], pa.timestamp("ns")),
        "blob": pa.array([b"\xff\x00", None]),
        "price": pa.array([decimal.Decimal("1.20"), None], pa.decimal128(5, 2)),
        "score": pa.array([float("nan"), 0.5], pa.float32()),
        "big": pa.array([2**64 - 1, 0], pa.uint64()),
        "list": pa.array([[1, None], None], pa.list_(pa.int8())),
        "struct": pa.array([{"a": 1, "b": None}, None]),
        "kind": pa.array(["x", "y"]).dictionary_encode(),
    }
    pq.write_table(pa.table({"prompt": ["p", "q"]} | own), tmp_path / "x.parquet")
    rows = read(tmp_path / "x.parquet")
    first, second = (decode_metadata(row.metadata) for row in rows)
    assert np.isnan(first.pop("score"))
    assert first == {
        "when": moment,
        "exact": np.datetime64(1_234_567_890_123_456_789, "ns"),
        "blob": b"\xff\x00",
        "price": decimal.Decimal("1.20"),
        "big": 2**64 - 1,
        "list": [1, None],
        "struct": {"a": 1, "b": None},
        "kind": "x",
    }
    assert second == dict.fromkeys(own) | {"score": 0.5, "big": 0, "kind": "y"}


def test_struct_fields_of_other_rows_are_not_there(tmp_path: Path) -> None:
    table = pa.table(
        {
            "messages": [
                [{"role": "user", "content": "x", "name": None}],
                [{"role": "user", "content": "y", "name": "n"}],
            ],
            "sampling": [{"temperature": 0.5, "top_k": None}, {"temperature": None, "top_k": 3}],
            "chat_template_kwargs": [{"a": None, "b": 1}, None],
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    first, second = read(tmp_path / "x.parquet")
    assert first.messages == [{"content": "x", "role": "user"}]
    assert second.messages == [{"content": "y", "name": "n", "role": "user"}]
    assert (first.sampling.temperature, first.sampling.top_k) == (0.5, 0)
    assert (second.sampling.temperature, second.sampling.top_k) == (1.0, 3)
    assert first.chat_template_kwargs == {"b": 1}


def test_one_bad_value_spoils_one_parquet_row(tmp_path: Path) -> None:
    texts = pa.array([f"p{i}".encode() for i in range(2000)])
    spoiled = pa.concat_arrays([texts[:1500], pa.array([b"\xff"]), texts[1501:]])
    # reinterpreted without a check, as a careless writer does
    strings = pa.StringArray.from_buffers(2000, spoiled.buffers()[1], spoiled.buffers()[2])
    pq.write_table(pa.table({"prompt": strings}), tmp_path / "x.parquet")
    rows = read(tmp_path / "x.parquet")
    assert len(rows) == 2000
    bad = [row for row in rows if isinstance(row, Rejection)]
    assert [(row.line, row.reason) for row in bad] == [(1501, "unreadable_row")]
    assert rows[1499].prompt == "p1499"
    assert rows[1501].prompt == "p1501"
    assert rows[1501].line == 1502


def damaged(folder: Path) -> dict[str, tuple[Path, str]]:
    good = gzip.compress(json.dumps({"prompt": "x" * 1000}).encode() * 50)
    table = folder / "whole.parquet"
    pq.write_table(pa.table({"prompt": ["x"]}), table)
    flipped, broken = bytearray(good), bytearray(good)
    flipped[len(good) // 2] ^= 0xFF
    broken[10:14] = b"\xff" * 4
    contents = {
        "cut.jsonl.gz": (good[: len(good) // 2], "end-of-stream"),
        "flipped.jsonl.gz": (bytes(flipped), "CRC check failed"),
        # of zlib, or of isal, which fsspec takes where it is installed
        "broken.jsonl.gz": (bytes(broken), "rror: Error -"),
        "plain.jsonl.gz": (b'{"prompt": "x"}\n', "Not a gzipped file"),
        "cut.parquet": (table.read_bytes()[:-20], "Parquet magic bytes not found in footer"),
        "text.parquet": (b'{"prompt": "x"}\n', "can't be read"),
        "empty.parquet": (b"", "can't be read"),
        "utf16.jsonl": ('{"prompt": "x"}\n'.encode("utf-16"), "the file is UTF-16, save it as UT"),
        "rows.csv": (b"prompt\nx\n", "expected a file named .jsonl, .jsonl.gz, .parquet"),
        "rows.json": (b"[]", "expected a file named"),
    }
    for name, (content, _) in contents.items():
        (folder / name).write_bytes(content)
    (folder / "folder.jsonl").mkdir()
    (folder / "folder.parquet").mkdir()
    found = {name: (folder / name, message) for name, (_, message) in contents.items()}
    found["missing.jsonl"] = (folder / "missing.jsonl", "can't be read: No such file or directory")
    found["folder.jsonl"] = (folder / "folder.jsonl", "can't be read: Is a directory")
    found["folder.parquet"] = (folder / "folder.parquet", "can't be read: Is a directory")
    return found


def test_files_that_cannot_be_read_give_one_line(tmp_path: Path) -> None:
    for name, (path, message) in damaged(tmp_path).items():
        with pytest.raises(InputError) as caught:
            read(path)
        text = str(caught.value)
        assert text.startswith(f"prompts {path}"), name
        assert message in text, name
        assert "\n" not in text, name


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nosuch://x.jsonl", "Protocol not known: nosuch"),
        ("memory://nowhere/x.jsonl", "can't be read"),
    ],
)
def test_storages_that_are_not_there(path: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(read_prompts(PromptsConfig(path=path), SAMPLING))


def test_repeated_columns_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(InputError, match="column `prompt` is there twice"):
        read(tmp_path / "x.parquet")


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", BOM])
def test_empty_files_are_found_early(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match="no rows"):
        check_prompts_file(PromptsConfig(path=str(path)))


def test_an_early_check_reads_one_row_only(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 100_000)[:-1000])
    check_prompts_file(PromptsConfig(path=str(path)))


def test_other_storages_and_odd_names(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/prompts/x [1] \u00e9.jsonl", b'{"prompt": "x"}\n')
    (row,) = read_prompts(PromptsConfig(path="memory://prompts/x [1] \u00e9.jsonl"), SAMPLING)
    odd = tmp_path / "exp[7b] \u00e9 {x}.jsonl"
    odd.write_text('{"prompt": "x"}\n')
    (same,) = read(odd)
    assert isinstance(row, Prompt)
    assert row.key == same.key
