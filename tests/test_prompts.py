"""What becomes of rows as people write them."""

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.config import PromptsConfig, SamplingConfig
from rollout.errors import InputError
from rollout.metadata import decode_metadata
from rollout.prompts import Prompt, read_prompts
from rollout.rows import Rejection
from rollout.sidecars import read_rejected, rejected_bytes

BOM = b"\xef\xbb\xbf"
ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "na\u00efve \u2028 text"},
    {"id": "b", "messages": [{"role": "user", "content": "hi"}]},
    {"id": "c", "prompt_token_ids": [1, 2, 3]},
]
SAMPLING = SamplingConfig(max_tokens=8, top_p=0.9, n=4)


def read(path: Path, *, sampling: SamplingConfig = SAMPLING, **config: Any) -> list[Any]:
    return list(read_prompts(PromptsConfig(path=str(path), **config), sampling))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(tmp_path: Path, *rows: dict[str, Any], **config: Any) -> list[Any]:
    return read(write(tmp_path / "rows.jsonl", list(rows)), **config)


def read_bytes(tmp_path: Path, content: bytes) -> list[Any]:
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(content)
    return read(path)


def only_rejection(rows: list[Any]) -> Rejection:
    assert [type(row) for row in rows] == [Rejection]
    rejection: Rejection = rows[0]
    assert rejection.stage == "read"
    assert read_rejected(rejected_bytes([rejection], "f"), "x") == [rejection]
    return rejection


def content_of(prompt: Prompt) -> tuple[Any, ...]:
    return (
        prompt.key,
        prompt.prompt_id,
        prompt.prompt,
        prompt.messages,
        prompt.prompt_token_ids,
        prompt.sampling,
        prompt.chat_template_kwargs,
        prompt.metadata,
    )


def variants(folder: Path) -> dict[str, Path]:
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
    clean = b"\n".join(lines) + b"\n"
    contents = {
        "clean.jsonl": clean,
        "bom.jsonl": BOM + clean,
        "crlf.jsonl": BOM + clean.replace(b"\n", b"\r\n"),
        "no_newline.jsonl": clean[:-1],
        "blank.jsonl": clean + b"\n  \r\n\n",
        "two.jsonl": BOM + lines[0] + b"\n" + BOM + lines[1] + b"\n" + lines[2] + b"\n",
        "escaped.jsonl": b"\n".join(json.dumps(row).encode() for row in ROWS),
        "packed.jsonl.gz": gzip.compress(BOM + clean),
        "members.jsonl.gz": gzip.compress(lines[0] + b"\n")
        + gzip.compress(BOM + clean)[:0]
        + gzip.compress(BOM + lines[1] + b"\n" + lines[2]),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    pq.write_table(pa.Table.from_pylist(_columns()), folder / "rows.parquet", row_group_size=2)
    return {path.name: path for path in folder.iterdir()}


def _columns() -> list[dict[str, Any]]:
    names = dict.fromkeys(name for row in ROWS for name in row)
    return [{name: row.get(name) for name in names} for row in ROWS]


def test_u10_all_spellings_of_a_file_give_the_same_prompts(tmp_path: Path) -> None:
    paths = variants(tmp_path)
    expected = [content_of(prompt) for prompt in read(paths["clean.jsonl"])]
    assert [row[1] for row in expected] == ["a", "b", "c"]
    assert expected[0][2] == "na\u00efve \u2028 text"
    assert expected[1][3] == [{"content": "hi", "role": "user"}]
    assert expected[2][4] == [1, 2, 3]
    assert len(paths) == 10
    for name, path in paths.items():
        assert [content_of(prompt) for prompt in read(path)] == expected, name


def test_a_mark_in_the_middle_of_a_line_is_reported_with_the_line(tmp_path: Path) -> None:
    # two files put together where the first had no final newline
    rows = read_bytes(tmp_path, b'{"prompt": "x"}\n{"prompt": "y"}' + BOM + b'{"prompt": "z"}\n')
    assert isinstance(rows[0], Prompt)
    assert (rows[1].line, rows[1].reason) == (2, "unreadable_row")
    assert rows[1].detail.startswith("Extra data")


def test_keys_stay_with_the_content(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "id": i} for i in range(6)]
    keys = {row.prompt: row.key for row in read_rows(tmp_path, *rows)}
    moved = write(tmp_path / "moved.jsonl", [{"prompt": "new"}, *reversed(rows)])
    again = {row.prompt: row.key for row in read(moved)}
    assert {name: again[name] for name in keys} == keys
    assert len(set(again.values())) == 7


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"prompt": "x "}, False),
        ({"id": "other"}, False),
        ({"chat_template_kwargs": {"think": False}}, False),
        ({"sampling": {"temperature": 0.5}}, False),
        ({"sampling": {"max_tokens": 9}}, False),
        ({"sampling": {"n": 2}}, True),
        ({"sampling": {"top_p": 0.9}}, True),  # what the job says anyway
        ({"sampling": {"top_k": -1}}, True),
        ({"sampling": {}}, True),
        ({"sampling": {"min_p": None}}, True),
        ({"sampling": None}, True),
        ({"note": "a column of the user's"}, True),
    ],
)
def test_a_key_changes_with_what_the_engine_sees(
    tmp_path: Path, changed: dict[str, Any], same: bool
) -> None:
    row = {"id": "x", "prompt": "x"}
    (before,) = read_rows(tmp_path, row)
    (after,) = read_rows(tmp_path, row | changed)
    assert (before.key == after.key) is same


def test_a_key_does_not_depend_on_the_jobs_n(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", ROWS)
    more = read(path, sampling=SAMPLING.model_copy(update={"n": 9}))
    assert [row.key for row in more] == [row.key for row in read(path)]
    assert [row.sampling.n for row in more] == [9, 9, 9]


def test_equal_rows_have_keys_of_their_own(tmp_path: Path) -> None:
    same = {"prompt": "x"}
    first = [row.key for row in read_rows(tmp_path, same, same, {"prompt": "y"}, same)]
    again = [row.key for row in read_rows(tmp_path, {"prompt": "y"}, same, same, same, same)]
    assert len(set(first)) == 4
    assert [first[0], first[1], first[3]] == again[1:4]
    assert first[2] == again[0]


def test_u11_ids_are_carried_along(tmp_path: Path) -> None:
    ids: list[Any] = ["a", 1, "01", 2**70, -3, "x/y\nz", "k" * 10_000, "", None]
    rows = read_rows(tmp_path, *({"id": value, "prompt": "p"} for value in ids), {"prompt": "p"})
    names = [row.prompt_id for row in rows]
    assert names[:8] == [str(value) for value in ids[:8]]
    assert names[8] == rows[8].key[:16]
    assert len({row.key for row in rows}) == 10
    assert len(set(names)) == 10


@pytest.mark.parametrize("pair", [("a", "a"), (1, "1")])
def test_u11_repeated_ids_are_refused_with_both_lines(
    tmp_path: Path, pair: tuple[Any, Any]
) -> None:
    rows = [{"id": pair[0], "prompt": "x"}, {"prompt": "between"}, {"id": pair[1], "prompt": "y"}]
    with pytest.raises(InputError, match=rf"id '{pair[0]}' stands on line 1 and line 3"):
        read_rows(tmp_path, *rows)
    kept = read_rows(tmp_path, *rows, duplicate_ids="allow")
    assert [row.prompt_id for row in kept] == [str(pair[0]), kept[1].key[:16], str(pair[1])]
    assert len({row.key for row in kept}) == 3


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ({"id": True, "prompt": "x"}, "id: got a bool, expected a string or an integer"),
        ({"id": 1.0, "prompt": "x"}, "id: got a float, expected a string or an integer"),
        ({"id": ["x"], "prompt": "x"}, "id: got a list, expected a string or an integer"),
        ({"prompt": 5}, "prompt: input should be a valid string"),
        ({"text": "x"}, "got columns text, expected exactly one of prompt, messages, prompt_tok"),
        ({}, "got columns none, expected exactly one of"),
        (
            {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
            "got prompt and messages, expected exactly one of",
        ),
        ({"messages": []}, "messages: got none, expected at least one"),
        ({"messages": "hi"}, "messages: input should be a valid list"),
        ({"messages": [{"content": "x"}]}, "messages.0: no role"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages.0: no role"),
        ({"messages": [{"role": "user"}]}, "messages.0: no content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0: no content"),
        ({"messages": [{"role": "assistant"}]}, "messages.0: no content"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids.1: input should be a valid integer"),
        ({"prompt_token_ids": [1.0]}, "prompt_token_ids.0: input should be a valid integer"),
        ({"prompt_token_ids": [1, None]}, "prompt_token_ids.1: input should be a valid integer"),
        ({"prompt": "x", "sampling": {"temperture": 1}}, "sampling.temperture: unknown key; did"),
        ({"prompt": "x", "sampling": {"temperature": 3}}, "sampling.temperature: got 3, expected"),
        ({"prompt": "x", "sampling": {"temperature": 0}}, "sampling: n is 4 at temperature 0"),
        ({"prompt": "x", "sampling": {"seed": 1}}, "sampling.seed: belongs to the job"),
        ({"prompt": "x", "sampling": {"top_p": 1, "min_tokens": 2}}, "sampling: min_tokens masks"),
        ({"prompt": "x", "sampling": {"repetition_penalty": 1.1}}, "sampling: repetition_penalty"),
        ({"prompt": "x", "sampling": {"max_tokens": float("nan")}}, "sampling.max_tokens: got nan"),
        ({"prompt": "x", "sampling": 5}, "sampling: input should be a valid dictionary"),
        ({"prompt": "x", "chat_template_kwargs": {"tokenize": 1}}, "`tokenize` is decided by the"),
        ({"prompt": "a\ud800b"}, "\\ud800 alone is no character"),
        ({"prompt": "x", "id": "\ud800"}, "\\ud800 alone is no character"),
        ({"prompt": "x", "note": "a\ud800b"}, "\\ud800 alone is no character"),
        ({"prompt": "x", "\udfff": 1}, "\\udfff alone is no character"),
        (
            {"messages": [{"role": "user", "content": [{"text": "\ud83d"}]}]},
            "\\ud83d alone is no character",
        ),
    ],
)
def test_rows_that_are_no_prompt_are_set_aside(
    tmp_path: Path, row: dict[str, Any], detail: str
) -> None:
    rows = read_rows(tmp_path, {"prompt": "before"}, row, {"prompt": "after"})
    assert [getattr(item, "prompt", None) for item in rows] == ["before", None, "after"]
    rejection = only_rejection(rows[1:2])
    assert rejection.line == 2
    assert rejection.reason == "bad_row"
    assert rejection.detail.startswith(detail)


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        (b'{"prompt": "x"', "Expecting ',' delimiter"),
        (b"[1]", "got an array, expected an object"),
        (b"5", "got a number, expected an object"),
        (b"null", "got null, expected an object"),
        (b'"x"', "got a string, expected an object"),
        (b"true", "got a boolean, expected an object"),
        (b'{"id": 1, "id": 2, "prompt": "x"}', "key 'id' stands twice in one object"),
        (b'{"prompt": "x", "a": {"b": 1, "b": 1}}', "key 'b' stands twice in one object"),
        (b'{"prompt": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "x", "a": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b"\x00\x01", "Expecting value"),
    ],
)
def test_lines_that_are_no_object_are_set_aside(tmp_path: Path, line: bytes, detail: str) -> None:
    rows = read_bytes(tmp_path, b'{"prompt": "x"}\n' + line + b'\n{"prompt": "y"}\n')
    assert [getattr(row, "prompt", None) for row in rows] == ["x", None, "y"]
    rejection = only_rejection(rows[1:2])
    assert (rejection.line, rejection.reason) == (2, "unreadable_row")
    assert detail in rejection.detail


@pytest.mark.parametrize("depth", [300, 800, 980])
def test_deep_nesting_never_raises(tmp_path: Path, depth: int) -> None:
    deep = b'{"prompt": "x", "a": ' + b"[" * depth + b"]" * depth + b"}\n"
    (row,) = read_bytes(tmp_path, deep)
    if isinstance(row, Rejection):
        assert row.detail == "nested too deeply"
    else:
        assert row.metadata is not None
        assert row.metadata.count("[") == depth


def test_a_rejection_is_the_same_wherever_the_row_stands(tmp_path: Path) -> None:
    bad, good = {"id": "b", "prompt": 5}, {"prompt": "x"}
    (first,) = read_rows(tmp_path, bad)
    moved = read_rows(tmp_path, good, bad, bad, {"prompt": 6})
    assert moved[1].prompt_key == first.prompt_key
    assert len({row.prompt_key for row in moved[1:]}) == 3
    assert (first.prompt_id, first.line, moved[1].line) == ("b", 1, 2)


def test_details_are_bounded(tmp_path: Path) -> None:
    rejection = only_rejection(read_rows(tmp_path, {f"column {i} \ud800": 1 for i in range(1000)}))
    assert len(rejection.detail) == 500


def test_a_long_line(tmp_path: Path) -> None:
    text = "word " * 2_000_000
    (row,) = read_rows(tmp_path, {"prompt": text})
    assert row.prompt == text


def test_a_line_of_200_mb_is_set_aside_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "a"}\n{"prompt": "')
        for _ in range(200):
            file.write(b"x" * 2**20)
        file.write(b'"}\n{"prompt": "b"}')
    tracemalloc.start()
    try:
        first, long, last = read_prompts(PromptsConfig(path=str(path)), SAMPLING)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(first, Prompt)
    assert isinstance(last, Prompt)
    assert (first.prompt, last.prompt, last.line) == ("a", "b", 3)
    assert isinstance(long, Rejection)
    assert (long.line, long.reason) == (2, "unreadable_row")
    assert long.detail == "the line has 209715215 bytes, expected at most 67108864"
    assert peak < 160 * 2**20


def test_messages_with_tools(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"x": None}}}
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"tool_calls": [call], "content": None, "role": "assistant", "name": None},
    ]
    rows = read_rows(
        tmp_path, *({"id": "x", "messages": [t]} for t in turns), duplicate_ids="allow"
    )
    expected = [{"content": None, "role": "assistant", "tool_calls": [call]}]
    assert [row.messages for row in rows] == [expected] * 3
    again = [read_rows(tmp_path, {"id": "x", "messages": [turn]})[0].key for turn in turns]
    assert len(set(again)) == 1
    (changed,) = read_rows(
        tmp_path, {"id": "x", "messages": [turns[0] | {"tool_calls": [{"function": {}}]}]}
    )
    assert changed.key != again[0]


def test_row_overrides_stand_on_top_of_the_jobs(tmp_path: Path) -> None:
    own = {"temperature": "0.5", "n": 1, "stop": "END"}
    (row,) = read_rows(
        tmp_path,
        {"prompt": "x", "sampling": own, "chat_template_kwargs": {"a": 1}},
        chat_template_kwargs={"a": 0, "b": 2},
    )
    assert row.sampling == SAMPLING.model_copy(
        update={"temperature": 0.5, "n": 1, "stop": ("END",)}
    )
    assert row.chat_template_kwargs == {"a": 1, "b": 2}
    assert decode_metadata(row.metadata) == {"sampling": own}


def test_metadata_of_json_rows(tmp_path: Path) -> None:
    own = {"answer": 42, "score": float("nan"), "big": 2**70, "nested": {"$x": [None, "\u00e9"]}}
    plain, noted = read_rows(tmp_path, {"prompt": "x"}, {"prompt": "y", "id": 7} | own)
    assert plain.metadata is None
    found = decode_metadata(noted.metadata)
    assert np.isnan(found.pop("score"))
    assert found == {k: v for k, v in own.items() if k != "score"}
    assert noted.row["answer"] == 42
