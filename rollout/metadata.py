"""The user's own columns as one JSON text, from which every value comes back exactly.

JSON has no form for some values of a Parquet file, and none for NaN. Such a value is written as an
object with a single key that names its type, such as `{"$bytes": "AQI="}`; an object of the user's
own with a single key that starts with `$` is wrapped as `{"$object": ...}`. The text is strict
JSON. What does not come back: tuples are lists, and a time zone is its offset from UTC (for
nanoseconds UTC itself).
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$object": lambda value: value,
    "$float": float,
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$decimal": decimal.Decimal,
    "$datetime": datetime.datetime.fromisoformat,
    "$date": datetime.date.fromisoformat,
    "$time": datetime.time.fromisoformat,
    "$timedelta": lambda parts: datetime.timedelta(*parts),
    "$datetime64": lambda text: np.datetime64(text, "ns"),
    "$timedelta64": lambda count: np.timedelta64(count, "ns"),
    "$uuid": uuid.UUID,
}


def encode_metadata(values: dict[str, Any]) -> str:
    """Serialise columns by name.

    Raises:
        ValueError: text that is not Unicode (a lone surrogate).
        TypeError: a value of a type that has no form here.
    """
    text = json.dumps(_plain(values), ensure_ascii=False, allow_nan=False)
    text.encode()  # a lone surrogate passes json, but no file takes it
    return text


def decode_metadata(text: str) -> dict[str, Any]:
    """Give back what `encode_metadata` was given.

    Raises:
        ValueError: not such a text.
    """
    values = _original(json.loads(text))
    if not isinstance(values, dict):
        raise ValueError(f"metadata is a {type(values).__name__}, expected an object")
    return values


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, dict):
        plain = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a key is a {type(key).__name__}, expected text")
            plain[key] = _plain(item)
        return {"$object": plain} if _tag(plain) else plain
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return _tagged(value)


def _tagged(value: Any) -> dict[str, Any]:
    match value:
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case decimal.Decimal():
            return {"$decimal": str(value)}
        case datetime.datetime():
            return {"$datetime": value.isoformat()}
        case datetime.date():
            return {"$date": value.isoformat()}
        case datetime.time():
            return {"$time": value.isoformat()}
        case datetime.timedelta():
            return {"$timedelta": [value.days, value.seconds, value.microseconds]}
        case np.datetime64():
            return {"$datetime64": str(value.astype("datetime64[ns]"))}
        case np.timedelta64():
            return {"$timedelta64": int(value.astype("timedelta64[ns]").astype(np.int64))}
        case uuid.UUID():
            return {"$uuid": str(value)}
    raise TypeError(f"got a {type(value).__name__}, expected a value of JSON or Parquet")


def _original(value: Any) -> Any:
    if isinstance(value, list):
        return [_original(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = _tag(value)
    if tag is None:
        return {key: _original(item) for key, item in value.items()}
    if tag == "$object":
        return {key: _original(item) for key, item in value[tag].items()}
    if tag not in _DECODERS:
        raise ValueError(f"metadata holds a value of type {tag}, which this version does not know")
    return _DECODERS[tag](value[tag])


def _tag(value: dict[str, Any]) -> str | None:
    """Return the key of an object that has one key which starts with `$`."""
    if len(value) != 1:
        return None
    (key,) = value
    return key if key.startswith("$") else None
