"""JSON records and names, there and back."""

import dataclasses
import hashlib
import json
from typing import Any

import pytest
from synthetic import make_record

from rollout.schema.layout import (
    check_unit,
    commit_name,
    data_name,
    lease_name,
    parse_part,
    parse_plan,
    plan_name,
    rejected_name,
    unit_name,
)
from rollout.schema.records import (
    CommitRecord,
    DatasetRecord,
    GroupRange,
    RecordError,
    RowGroup,
    canonical_json,
    fingerprint_of,
)

COMMIT = CommitRecord(
    unit="u000001",
    part=2,
    attempt="00ff",
    file="data/u000001-00002-00ff.parquet",
    size=10,
    sha256="aa",
    rows=2,
    tokens=3,
    entries=2**40,
    max_token_id=2**31 - 1,
    keys=(("schl\u00fcssel", 0), ("p", 1)),
    row_groups=(RowGroup(offset=4, size=6, blake3="bb", rows=2),),
    footer_blake3="cc",
    groups=(GroupRange(group_id="g", first_row=0, num_rows=2),),
    rejected_file=None,
    rejected_rows=0,
    rejected_keys=(("q", None), ("p", 3)),
    engine={"vllm": "0.32.0"},
    created_at="2026-01-01T00:00:00+00:00",
)


def changed(data: bytes, **values: Any) -> bytes:
    return json.dumps(json.loads(data) | values).encode()


def test_commit_record_round_trip() -> None:
    assert CommitRecord.from_json(COMMIT.to_json()) == COMMIT


def test_commit_record_is_one_line_of_plain_json() -> None:
    data = COMMIT.to_json()
    assert data.count(b"\n") == 1
    assert json.loads(data)["keys"] == [["schl\u00fcssel", 0], ["p", 1]]


def test_dataset_record_round_trip() -> None:
    record = make_record(dtype="bfloat16")
    assert DatasetRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize("record", [COMMIT, make_record()], ids=["commit", "dataset"])
def test_newer_format_is_refused_in_one_sentence(record: CommitRecord | DatasetRecord) -> None:
    with pytest.raises(RecordError, match=r"^format version 99, expected at most 1: install"):
        type(record).from_json(changed(record.to_json(), format_version=99))


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b'{"format_version": "1"}'])
def test_damaged_record_is_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        CommitRecord.from_json(data)
    with pytest.raises(RecordError):
        DatasetRecord.from_json(data)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CommitRecord)])
def test_commit_record_without_a_field_is_refused(name: str) -> None:
    raw = json.loads(COMMIT.to_json())
    del raw[name]
    with pytest.raises(RecordError, match=name):
        CommitRecord.from_json(json.dumps(raw).encode())


def test_unknown_keys_of_the_same_version_are_ignored() -> None:
    assert CommitRecord.from_json(changed(COMMIT.to_json(), later="x")) == COMMIT


def test_fingerprint_is_the_sha256_of_canonical_json() -> None:
    inputs = {"b": [1, 2.5, None], "a": {"y": "\u00e9", "x": True}}
    text = '{"a":{"x":true,"y":"\\u00e9"},"b":[1,2.5,null]}'
    assert canonical_json(inputs) == text.encode()
    assert fingerprint_of(inputs) == hashlib.sha256(text.encode()).hexdigest()
    assert fingerprint_of(dict(reversed(inputs.items()))) == fingerprint_of(inputs)


def test_canonical_json_refuses_nan() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json({"x": float("nan")})


def test_names_parse_back() -> None:
    for name in (data_name("u_1", 12, "ab12"), rejected_name("u_1", 12, "ab12")):
        parsed = parse_part(name.split("/")[1])
        assert parsed is not None
        assert (parsed.unit, parsed.part, parsed.attempt) == ("u_1", 12, "ab12")
    parsed = parse_part(commit_name("u_1", 123456).split("/")[1])
    assert parsed is not None
    assert (parsed.unit, parsed.part, parsed.attempt) == ("u_1", 123456, None)
    assert parse_plan(plan_name(7).split("/")[1]) == 7
    assert lease_name(unit_name(3)) == "_lease/u000003"


@pytest.mark.parametrize("base", ["x.parquet", ".u-00001-ab.parquet", "u-1-ab.parquet", "u.json"])
def test_foreign_names_are_not_parts(base: str) -> None:
    assert parse_part(base) is None
    assert parse_plan(base) is None


@pytest.mark.parametrize("unit", ["", "a-b", "a/b", "..", "\u00e9", "x" * 81])
def test_unit_names_are_safe_in_file_names(unit: str) -> None:
    with pytest.raises(ValueError, match="letters, digits or underscores"):
        check_unit(unit)
