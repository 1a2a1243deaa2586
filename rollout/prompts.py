"""Prompts as people write them: rows of JSON lines or Parquet, each kept or set aside.

Nothing that stands in a row stops the job: what can't be read is yielded as a rejection with its
line. Keys are ours (a digest of what the engine will see), the user's `id` is carried along.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from rollout.config import PromptsConfig, SamplingConfig
from rollout.errors import ConfigError, InputError
from rollout.jobfile import check_section
from rollout.rows import Rejection

_KNOWN = ("id", "prompt", "messages", "prompt_token_ids", "sampling", "chat_template_kwargs")
_CONTENT = ("prompt", "messages", "prompt_token_ids")
_FORMATS = (".jsonl", ".jsonl.gz", ".parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One readable row."""

    key: str
    """Digest of content, id, overrides and occurrence: the same wherever the row stands."""
    prompt_id: str
    line: int
    """Line of the file, or row of a Parquet file, from 1."""
    prompt: str | None
    messages: list[dict[str, Any]] | None
    prompt_token_ids: list[int] | None
    sampling: SamplingConfig
    """The job's values with the row's own on top."""
    chat_template_kwargs: dict[str, Any]
    row: dict[str, Any]
    """The whole row as written, for the reward function."""
    metadata: str | None
    """JSON of the columns that are the user's own, `sampling` included."""


class _Content(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    id: str | int | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    sampling: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def read_prompts(config: PromptsConfig, sampling: SamplingConfig) -> Iterator[Prompt | Rejection]:
    """Read the rows in order.

    Args:
        config: where they are.
        sampling: the job's values, which a row may override.

    Yields:
        a prompt, or why a row is none.

    Raises:
        InputError: the file can't be opened or is of another format; two rows have the same id
            where that is refused.
    """
    seen_keys: Counter[str] = Counter()
    lines_of_ids: dict[str, int] = {}
    for line, data in _rows(config):
        if isinstance(data, str):
            yield _rejection(config, line, "unreadable_row", data)
            continue
        try:
            content = _check_content(data)
            effective = _effective_sampling(content, sampling)
        except ValueError as error:
            yield _rejection(config, line, "bad_row", str(error), data)
            continue
        digest = _digest(content, effective, sampling)
        seen_keys[digest] += 1
        key = digest if seen_keys[digest] == 1 else _sha256(f"{digest} {seen_keys[digest]}")
        prompt_id = key[:16] if content.id is None else str(content.id)
        first = lines_of_ids.setdefault(prompt_id, line)
        if first != line and config.duplicate_ids == "fail":
            raise InputError(
                f"prompts {config.path}: id {prompt_id!r} stands on line {first} and line {line}; "
                "make ids unique, or set prompts.duplicate_ids: allow"
            )
        own = {k: v for k, v in data.items() if k not in _KNOWN or (k == "sampling" and v)}
        yield Prompt(
            key=key,
            prompt_id=prompt_id,
            line=line,
            prompt=content.prompt,
            messages=content.messages,
            prompt_token_ids=content.prompt_token_ids,
            sampling=effective,
            chat_template_kwargs=config.chat_template_kwargs | (content.chat_template_kwargs or {}),
            row=data,
            metadata=json.dumps(own, ensure_ascii=False, default=str) if own else None,
        )


def check_prompts_file(config: PromptsConfig) -> None:
    """Open the file and read its first row, so that a wrong path is found before anything loads.

    Raises:
        InputError: it can't be opened, is of another format, or is empty.
    """
    if next(_rows(config), None) is None:
        raise InputError(f"prompts {config.path}: no rows")


def _check_content(data: dict[str, Any]) -> _Content:
    try:
        content = _Content.model_validate(data)
    except ValidationError as error:
        item = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, item['loc']))}: {item['msg'].lower()}") from None
    given = [name for name in _CONTENT if getattr(content, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else f"columns {', '.join(map(str, data)) or 'none'}"
        raise ValueError(f"got {found}, expected exactly one of {', '.join(_CONTENT)}")
    return content


def _effective_sampling(content: _Content, sampling: SamplingConfig) -> SamplingConfig:
    if not content.sampling:
        return sampling
    if "seed" in content.sampling:
        raise ValueError("sampling.seed: belongs to the job, not to a row")
    try:
        return check_section(
            SamplingConfig, sampling.model_dump() | content.sampling, prefix="sampling"
        )
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _digest(content: _Content, effective: SamplingConfig, sampling: SamplingConfig) -> str:
    # what the job itself says is in the run's fingerprint; n may grow without making another prompt
    base = sampling.model_dump(mode="json")
    own = {k: v for k, v in effective.model_dump(mode="json").items() if k != "n" and v != base[k]}
    fields = content.model_dump(exclude={"sampling"}, exclude_none=True)
    return _sha256(json.dumps(fields | {"sampling": own}, sort_keys=True, ensure_ascii=False))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _rejection(
    config: PromptsConfig, line: int, reason: str, detail: str, data: dict[str, Any] | None = None
) -> Rejection:
    prompt_id = None if data is None or data.get("id") is None else str(data["id"])
    return Rejection(
        # a row that is no prompt has no content digest; its place in the file names it
        prompt_key=_sha256(f"{config.path} line {line}: {reason} {detail}"),
        prompt_id=prompt_id,
        sample_index=None,
        file=config.path,
        line=line,
        stage="read",
        reason=reason,
        detail=detail,
        num_prompt_tokens=None,
    )


def _rows(config: PromptsConfig) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield line numbers with the row's object, or with the reason why it is none."""
    if not config.path.endswith(_FORMATS):
        raise InputError(f"prompts {config.path}: expected a file named {', '.join(_FORMATS)}")
    try:
        if config.path.endswith(".parquet"):
            yield from _parquet_rows(config)
        else:
            yield from _json_rows(config)
    except (OSError, EOFError, ImportError, pa.ArrowInvalid) as error:
        # storage options may hold secrets: name the cause, never the arguments
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InputError(f"prompts {config.path} can't be read: {cause}") from error


def _parquet_rows(config: PromptsConfig) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with fsspec.open(config.path, "rb", **config.storage_options) as file:
        line = 0
        for batch in pq.ParquetFile(file).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                line += 1
                yield line, row


def _json_rows(config: PromptsConfig) -> Iterator[tuple[int, dict[str, Any] | str]]:
    compression = "gzip" if config.path.endswith(".gz") else None
    with fsspec.open(config.path, "rb", compression=compression, **config.storage_options) as file:
        for line, raw in enumerate(file, start=1):
            # each of several concatenated files may bring its own byte order mark
            text = raw.removeprefix(b"\xef\xbb\xbf").strip()
            if not text:
                continue
            try:
                data = json.loads(text.decode(), object_pairs_hook=_no_repeated_keys)
            except (ValueError, RecursionError) as error:
                yield line, str(error) or type(error).__name__
                continue
            yield (
                line,
                data
                if isinstance(data, dict)
                else f"got {type(data).__name__}, expected an object",
            )


def _no_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        repeated = next(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"key {repeated!r} stands twice in one object")
    return data
