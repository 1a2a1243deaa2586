"""The agreement report of a dataset: where it stands, and how it is read."""

from __future__ import annotations

import json
from typing import Any, Final

from rollout.errors import DatasetError
from rollout.storage import Storage

AGREEMENT_FILE: Final = "_agreement.json"
"""Beside the data: what `rollout agree` measured, one JSON object."""


def read_agreement(storage: Storage) -> dict[str, Any] | None:
    """Read the agreement report, NaN and infinities as null; None where there is none.

    Raises:
        DatasetError: it is no JSON object.
    """
    try:
        data = storage.read_bytes(AGREEMENT_FILE)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(data, parse_constant=lambda _: None)
    except ValueError as error:
        raise DatasetError(f"{storage.url}/{AGREEMENT_FILE}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DatasetError(f"{storage.url}/{AGREEMENT_FILE}: expected a JSON object")
    return found
