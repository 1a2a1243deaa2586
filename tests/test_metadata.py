"""The user's columns come back exactly from strict JSON."""

import datetime
import decimal
import json
import uuid
from typing import Any

import numpy as np
import pytest

from rollout.metadata import decode_metadata, encode_metadata

_ZONE = datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))
VALUES: dict[str, Any] = {
    "text": 'caf\u00e9 \U0001f600 \x00 \u2028 "quoted" \\n\n',
    "int": 2**70,
    "negative": -(2**63),
    "bool": True,
    "null": None,
    "float": 0.1 + 0.2,
    "minus zero": -0.0,
    "tiny": 5e-324,
    "list": [1, [2.5, None], {"a": []}],
    "dict": {"a": {"b": 1}, "": 2},
    "bytes": bytes(range(256)),
    "decimal": decimal.Decimal("1.200"),
    "datetime": datetime.datetime(2024, 2, 29, 1, 2, 3, 456789),
    "zoned": datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=_ZONE),
    "date": datetime.date(1, 1, 1),
    "time": datetime.time(23, 59, 59, 999999),
    "delta": datetime.timedelta(days=-3, microseconds=7),
    "nanoseconds": np.datetime64("2024-02-29T01:02:03.123456789", "ns"),
    "nanodelta": np.timedelta64(-123456789, "ns"),
    "uuid": uuid.UUID(int=5),
    "looks tagged": {"$bytes": "AQI="},
    "looks wrapped": {"$object": {"$float": "nan"}},
    "two keys": {"$bytes": "AQI=", "x": 1},
    "dollar": {"$": 1},
}


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back(name: str) -> None:
    text = encode_metadata({name: VALUES[name]})
    json.loads(text, parse_constant=refuse_constant)
    found = decode_metadata(text)[name]
    assert found == VALUES[name]
    assert type(found) is type(VALUES[name])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_floats_that_json_lacks_come_back(value: float) -> None:
    text = encode_metadata({"x": [value]})
    json.loads(text, parse_constant=refuse_constant)
    assert str(decode_metadata(text)["x"][0]) == str(value)


def test_the_sign_of_zero_comes_back() -> None:
    assert str(decode_metadata(encode_metadata({"x": -0.0}))["x"]) == "-0.0"


def test_columns_whose_only_name_starts_with_a_dollar() -> None:
    assert decode_metadata(encode_metadata({"$bytes": "x"})) == {"$bytes": "x"}


def test_plain_values_are_plain_json() -> None:
    assert encode_metadata({"a": 1, "b": ["\u00e9", None]}) == '{"a": 1, "b": ["\u00e9", null]}'


@pytest.mark.parametrize("value", [object(), {1: 2}, {1, 2}])
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="expected"):
        encode_metadata({"x": value})


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        encode_metadata({"x": ["\ud800"]})


@pytest.mark.parametrize("text", ["[1]", '{"x": {"$later": 1}}', "{", '{"x": {"$bytes": "?"}}'])
def test_texts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_metadata(text)
