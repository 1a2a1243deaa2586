"""The agreement report of a dataset: where it stands, and how it is read."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rollout.errors import DatasetError
from rollout.storage import Storage

AGREEMENT_FILE: Final = "_agreement.json"
"""Beside the data: what `rollout agree` measured, one JSON object."""


def save_agreement(
    path: str | Path,
    report: Any,
    *,
    model: str,
    dtype: str,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Keep an agreement report beside the data, in the place of an earlier one.

    Args:
        path: the dataset.
        report: a `rollout.agreement.AgreementReport`.
        model: what was compared with the data.
        dtype: in which its logits were computed.
        storage_options: options of the dataset's fsspec filesystem.

    Raises:
        OutputError: it can't be written.
    """
    values = {
        "agreement_version": 1,
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model,
        "dtype": dtype,
        "largest_deviation": report.largest_deviation,
    }
    data = json.dumps(values | dataclasses.asdict(report), indent=2).encode()
    storage = Storage.open(path, dict(storage_options or {}))
    storage.write_bytes(AGREEMENT_FILE, data)


def summary_of(report: dict[str, Any]) -> str:
    """Say on one line what an agreement report found."""
    said = [f"of {report['model']}"] if "model" in report else []
    if isinstance(report.get("tokens"), int):
        said.append(f"{report['tokens']:,} tokens")
    replayed, unreplayed = (report.get(name) for name in ("replayed", "unreplayed"))
    if isinstance(replayed, dict):
        said.append(f"mean ratio {_number(replayed.get('mean'), '.5f')} (1: they agree)")
    deviation = _number(report.get("largest_deviation", 0.0), ".2g")
    said.append(f"largest |ratio - 1| of a token {deviation}")
    if isinstance(replayed, dict):
        said.append(f"k3 {_number(replayed.get('k3'), '.2g')} nats")
    if isinstance(unreplayed, dict):
        said.append(f"mean ratio without replay {_number(unreplayed.get('mean'), '.5f')}")
    trainer, sampler = (report.get(f"nonfinite_{side}") for side in ("trainer", "sampler"))
    said.append(f"not finite: {trainer} of the trainer's, {sampler} of the sampler's")
    return ", ".join(said)


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else "not finite"


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
        raise DatasetError(
            f"{storage.url}/{AGREEMENT_FILE}: not JSON: {error}: run `rollout agree --save` again"
        ) from error
    if not isinstance(found, dict):
        raise DatasetError(
            f"{storage.url}/{AGREEMENT_FILE}: got {type(found).__name__}, expected a JSON object: "
            "run `rollout agree --save` again"
        )
    return found
