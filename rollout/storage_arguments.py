"""Storage options as they are written on a command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollout.errors import ConfigError


def parse_storage_options(given: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` arguments; a value is JSON where it reads as JSON, else text.

    `a.b=value` sets key `b` of the option `a`, such as `client_kwargs.endpoint_url=...`.

    Raises:
        ConfigError: an argument has no `=`, or contradicts another; values are never shown.
    """
    options: dict[str, Any] = {}
    for text in given:
        key, equals, raw = text.partition("=")
        if not equals or not key:
            raise ConfigError("--storage-option: expected key=value, got one without a key or `=`")
        try:
            value = json.loads(raw)
        except ValueError:
            value = raw
        *parents, last = key.split(".")
        target = options
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--storage-option {key}: `{parent}` has a value of its own")
        target[last] = value
    return options
