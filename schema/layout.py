"""Names inside a dataset: its folders, and how shards, records and plans are called.

Data files live alone in `data/`, so that a plain scan of that folder is right. A unit is named by
letters, digits and underscores; a part's number counts up from 0 within its unit; an attempt is a
random word that makes the name of every upload unique.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

DATASET_FILE: Final = "_dataset.json"
PLAN_FOLDER: Final = "_plan"
DATA_FOLDER: Final = "data"
COMMIT_FOLDER: Final = "_commit"
REJECTED_FOLDER: Final = "_rejected"
LEASE_FOLDER: Final = "_lease"
SCRATCH_FOLDER: Final = "_scratch"

_UNIT: Final = re.compile(r"[A-Za-z0-9_]{1,80}")
_PART: Final = re.compile(r"([A-Za-z0-9_]{1,80})-(\d{5,})(?:-([0-9a-f]+))?\.(?:parquet|json\.gz)")
_PLAN: Final = re.compile(r"(\d{6,})\.parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartName:
    """What the name of a shard, a rejected file or a commit record says."""

    unit: str
    part: int
    attempt: str | None
    """The upload's random word; None in a commit record's name."""


def check_unit(unit: str) -> None:
    """Refuse a unit name that could not be parsed back out of a file name.

    Raises:
        ValueError: the name has other characters than letters, digits and underscores.
    """
    if _UNIT.fullmatch(unit) is None:
        raise ValueError(
            f"unit {unit!r}: expected 1 to 80 letters, digits or underscores in a unit's name"
        )


def unit_name(index: int) -> str:
    """Name the unit with this number, so that names sort as numbers do."""
    return f"u{index:06d}"


def data_name(unit: str, part: int, attempt: str) -> str:
    """Name a shard, relative to the dataset's root."""
    return f"{DATA_FOLDER}/{unit}-{part:05d}-{attempt}.parquet"


def rejected_name(unit: str, part: int, attempt: str) -> str:
    """Name the table of what a part set aside, relative to the dataset's root."""
    return f"{REJECTED_FOLDER}/{unit}-{part:05d}-{attempt}.parquet"


def commit_name(unit: str, part: int) -> str:
    """Name a commit record, relative to the dataset's root."""
    return f"{COMMIT_FOLDER}/{unit}-{part:05d}.json.gz"


def plan_name(number: int) -> str:
    """Name a plan file, relative to the dataset's root."""
    return f"{PLAN_FOLDER}/{number:06d}.parquet"


def lease_name(unit: str) -> str:
    """Name a unit's lease, relative to the dataset's root."""
    return f"{LEASE_FOLDER}/{unit}"


def parse_part(base: str) -> PartName | None:
    """Read the name of a shard, rejected file or commit record; None if it is something else.

    Args:
        base: the name without its folder.
    """
    match = _PART.fullmatch(base)
    if match is None:
        return None
    return PartName(unit=match[1], part=int(match[2]), attempt=match[3])


def parse_plan(base: str) -> int | None:
    """Read the number in a plan file's name; None if it is something else.

    Args:
        base: the name without its folder.
    """
    match = _PLAN.fullmatch(base)
    return None if match is None else int(match[1])
