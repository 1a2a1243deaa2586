"""The JSON records of a dataset, as dataclasses: what made it, and what each part covers.

A run has one record of what made it, and thousands of commit records with a key for every prompt:
those are columns, compressed by gzip, whose checksum also tells a torn one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import zlib
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from rollout.schema.columns import FORMAT_VERSION, other_version

Json = Any
_Record = TypeVar("_Record")
_GZIP: Final = 31  # wbits of zlib


class RecordError(ValueError):
    """Raised when a record can't be understood: damaged, incomplete, of another format."""


def canonical_json(value: Json) -> bytes:
    """Serialise a value so that equal values give equal bytes.

    Raises:
        ValueError: the value holds NaN, an infinity or something that JSON has no form for.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def fingerprint_of(inputs: dict[str, Json]) -> str:
    """Digest what changes a rollout's distribution: sha256 of the canonical JSON, in hex."""
    return hashlib.sha256(canonical_json(inputs)).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetRecord:
    """`_dataset.json`: the format's version and everything that made the data."""

    format_version: int = FORMAT_VERSION
    fingerprint: str
    """sha256 of the canonical JSON of `fingerprint_inputs`."""
    fingerprint_inputs: dict[str, Json]
    """What changes a rollout's distribution."""
    provenance: dict[str, Json]
    """What else a person wants to know: versions, machine, job file."""

    @property
    def samples_asked(self) -> int | None:
        """Rollouts that the job asks for of a prompt; None where no job is recorded."""
        value: Json = self.provenance
        for key in ("job", "sampling", "n"):
            value = value.get(key) if isinstance(value, dict) else None
        return value if isinstance(value, int) else None

    def to_json(self) -> bytes:
        """Serialise, for people to read too."""
        return _dump(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, data: bytes) -> DatasetRecord:
        """Parse what `to_json` wrote.

        Raises:
            RecordError: damaged, incomplete, or of another format version.
        """
        return _build(cls, _load(data))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """One row group's bytes in its shard."""

    offset: int
    """First byte."""
    size: int
    """Bytes."""
    blake3: str
    """Of these bytes, in hex: readers compare it, and it takes them a fifth of a sha256's time."""
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRange:
    """Where a prompt's rollouts stand in their shard."""

    prompt_key: str
    first_row: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord:
    """`_commit/<unit>-<part>.json.gz`: the only thing that makes a part count."""

    format_version: int = FORMAT_VERSION
    unit: str
    part: int
    """Counts up from 0 within the unit, with no holes."""
    attempt: str
    """The random word in the names of this part's files."""
    file: str | None
    """The shard, relative to the dataset's root; None when the part holds rejections only."""
    size: int
    """Bytes of the shard."""
    sha256: str
    """Of the shard, in hex; empty without one."""
    rows: int
    tokens: int
    """Sampled tokens."""
    entries: int
    """Support entries."""
    max_token_id: int
    """Largest id in prompts, samples, supports and draws; -1 without rows."""
    prompt_keys: tuple[str, ...]
    """The prompts of the rows, each once: the rows of a prompt stand together."""
    prompt_rows: tuple[int, ...]
    """How many rows each of them has."""
    sample_indices: tuple[int, ...]
    """The sample_index of every row."""
    row_groups: tuple[RowGroup, ...]
    footer_blake3: str
    """Of the bytes behind the last row group, in hex; empty without a shard."""
    rejected_file: str | None
    """The table of what was set aside, relative to the dataset's root."""
    rejected_rows: int
    rejected_keys: tuple[tuple[str, int | None], ...]
    """The (prompt_key, sample_index) of every rejected row; None for a whole prompt."""
    engine: dict[str, Json]
    """What sampled this part: version and runner of the engine, dtypes of head and logits."""
    created_at: str
    """UTC, ISO 8601."""

    @property
    def row_prompts(self) -> tuple[str, ...]:
        """The prompt_key of every row, in the shard's order."""
        return tuple(
            itertools.chain.from_iterable(map(itertools.repeat, self.prompt_keys, self.prompt_rows))
        )

    @property
    def keys(self) -> tuple[tuple[str, int], ...]:
        """The (prompt_key, sample_index) of every row, in the shard's order."""
        return tuple(zip(self.row_prompts, self.sample_indices, strict=False))

    @property
    def groups(self) -> tuple[GroupRange, ...]:
        """Where each prompt's rows stand."""
        starts = itertools.accumulate(self.prompt_rows, initial=0)
        return tuple(
            GroupRange(prompt_key=key, first_row=first, num_rows=rows)
            for key, rows, first in zip(self.prompt_keys, self.prompt_rows, starts, strict=False)
        )

    def to_bytes(self) -> bytes:
        """Serialise to one line of JSON, compressed: equal records give equal bytes."""
        packer = zlib.compressobj(wbits=_GZIP)
        return packer.compress(_dump(dataclasses.asdict(self), indent=None)) + packer.flush()

    @classmethod
    def from_bytes(cls, data: bytes) -> CommitRecord:
        """Parse what `to_bytes` made.

        Raises:
            RecordError: damaged, incomplete, or of another format version.
        """
        raw = _load(_unpacked(data))
        try:
            # a conversion of each item would take as long as all the rest
            for name in ("prompt_keys", "prompt_rows", "sample_indices"):
                raw[name] = tuple(raw[name])
            raw["rejected_keys"] = tuple(
                (str(key), None if index is None else int(index))
                for key, index in raw["rejected_keys"]
            )
            raw["row_groups"] = tuple(_build(RowGroup, item) for item in raw["row_groups"])
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"commit record: {type(error).__name__} {error}") from error
        return _build(cls, raw)


def _unpacked(data: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=_GZIP)
    try:
        unpacked = unpacker.decompress(data)
    except zlib.error as error:
        raise RecordError(f"not a whole gzip file: {error}") from error
    if not unpacker.eof or unpacker.unused_data:
        found = "more behind its end" if unpacker.eof else "cut short"
        raise RecordError(f"not a whole gzip file: {len(data)} bytes, {found}")
    return unpacked


def _dump(value: Json, *, indent: int | None) -> bytes:
    return (json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent) + "\n").encode()


def _load(data: bytes) -> dict[str, Json]:
    try:
        raw = json.loads(data)
    except ValueError as error:
        raise RecordError(f"not JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("format_version"), int):
        raise RecordError("no `format_version` in it")
    version = raw["format_version"]
    if version != FORMAT_VERSION:
        raise RecordError(other_version(version))
    return raw


def _build(cls: type[_Record], raw: dict[str, Json]) -> _Record:
    try:
        # unknown keys of the same format version are ignored: a later release may add one
        # read off the class, since `dataclasses.fields` took a quarter of reading large records
        values = {name: raw[name] for name in cls.__dataclass_fields__}  # type: ignore[attr-defined]
    except KeyError as error:
        raise RecordError(f"{cls.__name__}: no `{error.args[0]}` in it") from error
    return cls(**values)
