"""Prompts as people write them: the rows of a file, each kept or set aside.

Nothing that stands in a row stops the job: what can't be used is yielded as a rejection with its
line. Keys are ours (a digest of what the engine will see), the user's `id` is carried along.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rollout.config import PromptsConfig, SamplingConfig, check_template_kwargs
from rollout.errors import ConfigError, InputError
from rollout.jobfile import check_section
from rollout.key_table import Column, IdSet, KeyTable
from rollout.metadata import encode_metadata
from rollout.prompt_files import RawRow, read_rows
from rollout.rows import Rejection

_KNOWN = ("id", "prompt", "messages", "prompt_token_ids", "sampling", "chat_template_kwargs")
_CONTENT = ("prompt", "messages", "prompt_token_ids")
_DETAIL_CHARACTERS = 500
_LOT_ROWS = 256


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
    """The columns that are the user's own, `sampling` included, as `rollout.metadata` writes them;
    null where there are none."""


class _Content(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    id: str | int | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    sampling: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def read_prompts(config: PromptsConfig, sampling: SamplingConfig) -> Iterator[Prompt | Rejection]:
    """Read the rows in order; see `read_lots`.

    Args:
        config: where they are.
        sampling: the job's values, which a row may override.

    Yields:
        a prompt, or why a row is none.

    Raises:
        InputError: see `read_lots`.
    """
    for lot in read_lots(config, sampling, _LOT_ROWS):
        yield from lot


def read_lots(
    config: PromptsConfig, sampling: SamplingConfig, size: int, keys: KeyTable | None = None
) -> Iterator[list[Prompt | Rejection]]:
    """Read the rows in order, some at a time: no more of them is held than a few bytes each.

    Args:
        config: where they are.
        sampling: the job's values, which a row may override.
        size: rows of a lot.
        keys: where their keys are numbered; default: in a table of their own.

    Yields:
        up to `size` rows: each a prompt, or why it is none.

    Raises:
        InputError: the file can't be opened or is of another format; two rows have the same id
            where that is refused.
    """
    occurrences = _Occurrences(KeyTable() if keys is None else keys)
    ids = IdSet()
    rows = _parsed(config, sampling)
    while lot := list(itertools.islice(rows, size)):
        if config.duplicate_ids == "fail":
            prompts = [row for row in lot if isinstance(row, Prompt)]
            # an id made from the content is as often there as its row
            named = [prompt for prompt in prompts if prompt.prompt_id != prompt.key[:16]]
            for index in ids.add([prompt.prompt_id for prompt in named]):
                _refuse_second(config, sampling, named[index])
        yield occurrences.told_apart(lot)


class _Occurrences:
    """Tells equal rows apart by how many of them came before."""

    def __init__(self, keys: KeyTable) -> None:
        self._keys = keys
        self._times = Column()

    def told_apart(self, rows: Sequence[Prompt | Rejection]) -> list[Prompt | Rejection]:
        """Give rows the keys that they keep."""
        digests = [_key_of(row) for row in rows]
        numbers: list[int] = self._keys.add(digests).tolist()
        result: list[Prompt | Rejection] = []
        for row, digest, number in zip(rows, digests, numbers, strict=True):
            self._times[number] = times = self._times[number] + 1
            if times == 1:
                result.append(row)
                continue
            key = _key(f"{digest} {times}")
            if isinstance(row, Rejection):
                result.append(replace(row, prompt_key=key))
            else:
                own = row.prompt_id != digest[:16]
                result.append(replace(row, key=key, prompt_id=row.prompt_id if own else key[:16]))
        return result


def _key_of(row: Prompt | Rejection) -> str:
    return row.key if isinstance(row, Prompt) else row.prompt_key


def _refuse_second(config: PromptsConfig, sampling: SamplingConfig, prompt: Prompt) -> None:
    """Raise InputError if a row before this one has its id: read again, since none was kept."""
    for row in _parsed(config, sampling):
        if isinstance(row, Rejection):
            continue
        if row.line >= prompt.line:
            return
        if row.prompt_id == prompt.prompt_id:
            raise InputError(
                f"prompts {config.name}: id {row.prompt_id[:200]!r} stands on line {row.line} and "
                f"line {prompt.line}; make ids unique, or set prompts.duplicate_ids: allow"
            )


def _parsed(config: PromptsConfig, sampling: SamplingConfig) -> Iterator[Prompt | Rejection]:
    """Read the rows with the digests of what stands in them as their keys."""
    for raw in read_rows(config):
        row = _prompt(raw, config, sampling)
        if isinstance(row, Rejection) and config.bad_rows == "fail":
            raise InputError(
                f"prompts {config.name} line {row.line}: {row.detail}; correct it, or set "
                "prompts.bad_rows: reject"
            )
        yield row


def check_prompts_file(config: PromptsConfig) -> None:
    """Open the file and read its first row, so that a wrong path is found before anything loads.

    Raises:
        InputError: it can't be opened, is of another format, or is empty.
    """
    if next(read_rows(config), None) is None:
        raise InputError(f"prompts {config.name}: no rows, expected at least one")


def _prompt(raw: RawRow, config: PromptsConfig, sampling: SamplingConfig) -> Prompt | Rejection:
    data = raw.data
    if data is None:
        return _rejection(config, raw, "unreadable_row", raw.problem or "")
    try:
        content = _check_content(data)
        effective = _effective_sampling(content, sampling)
        digest = _digest(content, effective, sampling)
        own = {k: v for k, v in data.items() if k not in _KNOWN or (k == "sampling" and v)}
        metadata = encode_metadata(own) if own else None
    except UnicodeEncodeError as error:
        lone = f"\\u{ord(error.object[error.start]):04x}"
        return _rejection(config, raw, "bad_row", f"{lone} alone is no character")
    except RecursionError:
        return _rejection(config, raw, "bad_row", "nested too deeply")
    except (ValueError, TypeError) as error:
        return _rejection(config, raw, "bad_row", str(error))
    return Prompt(
        key=digest,
        prompt_id=digest[:16] if content.id is None else str(content.id),
        line=raw.line,
        prompt=content.prompt,
        messages=content.messages,
        prompt_token_ids=content.prompt_token_ids,
        sampling=effective,
        chat_template_kwargs=config.chat_template_kwargs | (content.chat_template_kwargs or {}),
        row=data,
        metadata=metadata,
    )


def _check_content(data: dict[str, Any]) -> _Content:
    try:
        content = _Content.model_validate(data)
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        if item["loc"][0] == "id":
            raise ValueError(
                f"id: got a {type(data['id']).__name__}, expected a string or an integer"
            ) from None
        raise ValueError(f"{'.'.join(map(str, item['loc']))}: {item['msg'].lower()}") from None
    given = [name for name in _CONTENT if getattr(content, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else f"columns {', '.join(map(str, data)) or 'none'}"
        raise ValueError(f"got {found}, expected exactly one of {', '.join(_CONTENT)}")
    if content.chat_template_kwargs:
        check_template_kwargs(content.chat_template_kwargs)
    if content.messages is not None:
        content.messages = _checked_messages(content.messages)
    return content


def _checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give all spellings of a message one form: a null field is an absent one, but `content`.

    Templates guess where a role or a content is missing, and print the word None or drop the
    message; only an assistant that calls tools may have no content.
    """
    if not messages:
        raise ValueError("messages: got none, expected at least one")
    checked = []
    for i, message in enumerate(messages):
        kept = {key: message[key] for key in sorted(message) if message[key] is not None}
        if not isinstance(kept.get("role"), str):
            raise ValueError(f"messages.{i}: no role")
        if "content" not in kept:
            if kept["role"] != "assistant" or len(kept) == 1:
                raise ValueError(f"messages.{i}: no content")
            kept["content"] = None
        checked.append(kept)
    return checked


def _effective_sampling(content: _Content, sampling: SamplingConfig) -> SamplingConfig:
    own = {k: v for k, v in (content.sampling or {}).items() if v is not None}
    if not own:
        return sampling
    if "seed" in own:
        raise ValueError("sampling.seed: belongs to the job, not to a row")
    try:
        return check_section(SamplingConfig, sampling.model_dump() | own, prefix="sampling")
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _digest(content: _Content, effective: SamplingConfig, sampling: SamplingConfig) -> str:
    # what the job itself says is in the run's fingerprint; n may grow without making another prompt
    base = sampling.model_dump(mode="json")
    own = {k: v for k, v in effective.model_dump(mode="json").items() if k != "n" and v != base[k]}
    fields = {k: v for k, v in content if k != "sampling" and v is not None}
    return _key(encode_metadata(fields | {"sampling": own}))


def _key(text: str) -> str:
    # 128 bits, as ids of groups have: every record and plan of a run holds them
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _rejection(config: PromptsConfig, raw: RawRow, reason: str, detail: str) -> Rejection:
    prompt_id = None if raw.data is None else raw.data.get("id")
    named = isinstance(prompt_id, (str, int)) and not isinstance(prompt_id, bool)
    # what stands in the row makes the key here too, so that it is counted once wherever it stands
    written = raw.raw or json.dumps(raw.data, default=repr).encode()
    return Rejection(
        prompt_key=_key(f"rejected {hashlib.sha256(written).hexdigest()}"),
        prompt_id=_printable(str(prompt_id)) if named else None,
        sample_index=None,
        file=config.name,
        line=raw.line,
        stage="read",
        reason=reason,
        detail=_printable(detail)[:_DETAIL_CHARACTERS],
        num_prompt_tokens=None,
    )


def _printable(text: str) -> str:
    """Escape what no file takes: lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()
