"""JSON records and names, there and back."""

import dataclasses
import gzip
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
    rows=3,
    tokens=3,
    entries=2**40,
    max_token_id=2**31 - 1,
    prompt_keys=("schl\u00fcssel", "p"),
    prompt_rows=(2, 1),
    sample_indices=(0, 3, 1),
    row_groups=(RowGroup(offset=4, size=6, blake3="bb", rows=3),),
    footer_blake3="cc",
    rejected_file=None,
    rejected_rows=0,
    rejected_keys=(("q", None), ("p", 3)),
    engine={"vllm": "0.32.0"},
    created_at="2026-01-01T00:00:00+00:00",
)


COLUMNS = {
    "prompt_keys": ["schl\u00fcssel", "p"],
    "prompt_rows": [2, 1],
    "sample_indices": [0, 3, 1],
}


def packed(raw: dict[str, Any]) -> bytes:
    return gzip.compress(json.dumps(raw).encode())


def unpacked(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(data))
    return found


def test_commit_record_round_trip() -> None:
    data = COMMIT.to_bytes()
    assert CommitRecord.from_bytes(data) == COMMIT
    assert COMMIT.to_bytes() == data


def test_commit_record_is_one_line_of_json_in_a_gzip_file() -> None:
    text = gzip.decompress(COMMIT.to_bytes())
    assert text.count(b"\n") == 1
    assert json.loads(text).items() >= COLUMNS.items()


def test_rows_are_found_by_the_columns_of_a_record() -> None:
    assert COMMIT.row_prompts == ("schl\u00fcssel", "schl\u00fcssel", "p")
    assert COMMIT.keys == (("schl\u00fcssel", 0), ("schl\u00fcssel", 3), ("p", 1))
    assert COMMIT.groups == (
        GroupRange(prompt_key="schl\u00fcssel", first_row=0, num_rows=2),
        GroupRange(prompt_key="p", first_row=2, num_rows=1),
    )


def test_a_key_of_a_record_takes_few_bytes() -> None:
    """With 8 samples a prompt 2.6 bytes a rollout: its key has 16 that no codec shortens."""
    keys = tuple(hashlib.sha256(b"%d" % i).hexdigest()[:32] for i in range(512))
    record = dataclasses.replace(
        COMMIT, prompt_keys=keys, prompt_rows=(8,) * 512, sample_indices=tuple(range(8)) * 512
    )
    data = record.to_bytes()
    assert len(data) - len(COMMIT.to_bytes()) < 512 * 21
    assert CommitRecord.from_bytes(data) == record


def test_every_flipped_byte_and_every_cut_of_a_record_is_noticed() -> None:
    data = COMMIT.to_bytes()
    for length in range(len(data)):
        with pytest.raises(RecordError, match="not a whole gzip file"):
            CommitRecord.from_bytes(data[:length])
    with pytest.raises(RecordError, match="more behind its end"):
        CommitRecord.from_bytes(data + b"\0")
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 0x40
        try:
            found = CommitRecord.from_bytes(bytes(damaged))
        except RecordError:
            continue
        # time and system of the gzip header, and the bits that fill up the last byte of data
        assert 4 <= place < 10 or place == len(data) - 9
        assert found == COMMIT


def test_dataset_record_round_trip() -> None:
    record = make_record(dtype="bfloat16")
    assert DatasetRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize(("version", "what"), [(1, "generate it again"), (99, "install a newer")])
def test_another_format_is_refused_in_one_sentence(version: int, what: str) -> None:
    message = f"^format version {version}, expected 2: {what}"
    with pytest.raises(RecordError, match=message):
        CommitRecord.from_bytes(packed(unpacked(COMMIT.to_bytes()) | {"format_version": version}))
    raw = json.loads(make_record().to_json()) | {"format_version": version}
    with pytest.raises(RecordError, match=message):
        DatasetRecord.from_json(json.dumps(raw).encode())


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b'{"format_version": "1"}'])
def test_damaged_record_is_refused(data: bytes) -> None:
    for found in (data, gzip.compress(data)):
        with pytest.raises(RecordError):
            CommitRecord.from_bytes(found)
    with pytest.raises(RecordError):
        DatasetRecord.from_json(data)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CommitRecord)])
def test_commit_record_without_a_field_is_refused(name: str) -> None:
    raw = unpacked(COMMIT.to_bytes())
    del raw[name]
    with pytest.raises(RecordError, match=name):
        CommitRecord.from_bytes(packed(raw))


def test_unknown_keys_of_the_same_version_are_ignored() -> None:
    assert CommitRecord.from_bytes(packed(unpacked(COMMIT.to_bytes()) | {"later": "x"})) == COMMIT


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
