"""Go from a dataset to one prompt, one of its samples, and one token of that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rollout.dataset import DatasetView
from rollout.errors import DatasetError
from rollout.full_rows import read_rows
from rollout.rows import Rejection
from rollout.schema.columns import SCHEMA
from rollout.schema.entries import unpack_entries
from rollout.schema.records import CommitRecord
from rollout.token_text import TokenText

_SAMPLE_COLUMNS: Final = (
    "rollout_id",
    "group_id",
    "sample_index",
    "group_size",
    "prompt_token_ids",
    "sampled_logprobs",
    "support_kind",
    "tail_mass",
    "finish_reason",
    "stop_reason",
    "num_tokens",
    "num_support_entries",
    "policy_step",
    "reward",
    "advantage",
    "text",
)
_FACTS: Final = (
    "prompt_id",
    "rollout_id",
    "group_id",
    "sample_index",
    "support_kind",
    "temperature",
    "policy_step",
    "finish_reason",
    "stop_reason",
    "metadata",
)
_SHOWN_ALTERNATIVES: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLine:
    """One sample of a prompt in a line."""

    sample_index: int
    status: str
    """committed, rejected, unreadable or missing."""
    why: str | None
    """Reason and detail of a rejection, or what is wrong with the shard."""
    rollout_id: str | None = None
    num_tokens: int | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    reward: float | None = None
    nonfinite_reward: bool = False
    """The reward is NaN or infinite, so that `reward` is None."""
    advantage: float | None = None
    mean_logprob: float | None = None
    """Mean log q of the sampled tokens, nats."""
    nonfinite_logprobs: int = 0
    mean_support: float | None = None
    """Recorded ids a token; None for kind none."""
    largest_tail: float | None = None
    text: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptView:
    """One prompt and its samples."""

    prompt_id: str
    prompt_key: str
    rejected: Rejection | None
    """Set where the prompt is set aside whole."""
    prompt_token_ids: tuple[int, ...] | None
    """None while there is no rollout."""
    prompt_text: str | None
    samples: tuple[SampleLine, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """One recorded id of a token's support."""

    id: int
    text: str | None
    logprob: float
    sampled: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLine:
    """One sampled token."""

    position: int
    id: int
    text: str | None
    logprob: float | None
    """log q in nats; None where it is no number."""
    support_size: int | None
    """Recorded ids; None for kind none."""
    tail_mass: float | None
    rank: int | None
    """Place of the sampled id among the recorded ones, from 1; None where it is not recorded."""
    alternatives: tuple[Alternative, ...]
    """The most probable recorded ids, the sampled one included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleView:
    """One rollout, token by token."""

    prompt_id: str
    prompt_key: str
    rollout_id: str
    group_id: str
    sample_index: int
    support_kind: str
    temperature: float
    policy_step: int | None
    finish_reason: str | None
    stop_reason: str | None
    reward: float | None
    nonfinite_reward: bool
    """The reward is NaN or infinite, so that `reward` is None."""
    advantage: float | None
    metadata: str | None
    file: str
    """The shard that holds it."""
    num_tokens: int
    prompt_token_ids: tuple[int, ...]
    prompt_text: str | None
    text: str | None
    before: str | None
    """Text before the token, where one token is shown."""
    after: str | None
    tokens: tuple[TokenLine, ...]
    """All of them, or the one asked for."""


def find_prompt(view: DatasetView, name: str) -> tuple[str, str]:
    """Find a prompt by the user's id, or by (the start of) our key.

    Args:
        view: the dataset.
        name: a prompt_id, or at least 8 characters of a prompt_key.

    Returns:
        The prompt_id and the prompt_key.

    Raises:
        DatasetError: no prompt has this name, or several do.
    """
    plan = view.plan_ids
    ids = dict(zip(plan["prompt_key"].to_pylist(), plan["prompt_id"].to_pylist(), strict=True))
    for item in view.rejected:
        ids.setdefault(item.prompt_key, item.prompt_id or item.prompt_key)
    found = [key for key, prompt_id in ids.items() if prompt_id == name]
    if not found and len(name) >= 8:
        found = [key for key in ids if key.startswith(name)]
    if not found and name in ids:
        found = [name]
    if not found:
        shown = ", ".join(repr(prompt_id) for prompt_id in list(ids.values())[:3])
        raise DatasetError(
            f"no prompt {name!r} in it, expected an id or at least 8 characters of a key; the ids "
            f"begin with {shown or 'none'}"
        )
    if len(found) > 1:
        keys = ", ".join(key[:16] for key in found[:5])
        raise DatasetError(f"{len(found)} prompts are called {name!r}: ask by key: {keys}")
    return ids[found[0]], found[0]


def show_prompt(view: DatasetView, name: str, text: TokenText) -> PromptView:
    """Look at one prompt and what became of each of its samples.

    Raises:
        DatasetError: there is no such prompt.
    """
    prompt_id, key = find_prompt(view, name)
    lines: dict[int, SampleLine] = {}
    prompt_tokens: tuple[int, ...] | None = None
    size = view.record.samples_asked or 0
    for record, indices in _parts_of(view, key):
        try:
            rows = list(read_rows(view, record, indices, _SAMPLE_COLUMNS))
        except DatasetError as error:
            for index in indices:
                sample = record.sample_indices[index]
                lines[sample] = SampleLine(sample_index=sample, status="unreadable", why=str(error))
            continue
        for row in rows:
            prompt_tokens = tuple(row["prompt_token_ids"].tolist())
            size = max(size, row["group_size"])
            lines[row["sample_index"]] = _sample_line(row)
    whole = None
    for item in view.rejected:
        if item.prompt_key != key:
            continue
        if item.sample_index is None:
            whole = item
        else:
            lines[item.sample_index] = SampleLine(
                sample_index=item.sample_index,
                status="rejected",
                why=f"{item.reason}: {item.detail}",
            )
    for index in range(0 if whole is not None else size):
        lines.setdefault(index, SampleLine(sample_index=index, status="missing", why=None))
    return PromptView(
        prompt_id=prompt_id,
        prompt_key=key,
        rejected=whole,
        prompt_token_ids=prompt_tokens,
        prompt_text=None if prompt_tokens is None else text.many(prompt_tokens),
        samples=tuple(lines[index] for index in sorted(lines)),
    )


def show_sample(
    view: DatasetView, name: str, sample: int, text: TokenText, *, token: int | None = None
) -> SampleView:
    """Look at one rollout token by token.

    Args:
        view: the dataset.
        name: the prompt: see `find_prompt`.
        sample: the sample's index.
        text: turns ids into text.
        token: show this position only, with every recorded id.

    Raises:
        DatasetError: there is no such rollout or position, or its shard can't be read.
    """
    prompt_id, key = find_prompt(view, name)
    for record, indices in _parts_of(view, key):
        wanted = [index for index in indices if record.sample_indices[index] == sample]
        if not wanted:
            continue
        columns = [field.name for field in SCHEMA if field.name != "draw_entries"]
        (row,) = read_rows(view, record, wanted, columns)
        return _sample_view(row, key, record, text, token)
    for item in view.rejected:
        if item.prompt_key == key and item.sample_index in (None, sample):
            raise DatasetError(
                f"prompt {prompt_id!r} sample {sample}: set aside at {item.stage}: "
                f"{item.reason}: {item.detail}"
            )
    raise DatasetError(
        f"prompt {prompt_id!r} sample {sample}: not sampled, --prompt alone lists those that are"
    )


def _parts_of(view: DatasetView, key: str) -> Iterator[tuple[CommitRecord, list[int]]]:
    """The parts that hold rollouts of a prompt, and at which rows."""
    for record in view.shards:
        if key not in record.prompt_keys:
            continue
        group = record.groups[record.prompt_keys.index(key)]
        yield record, list(range(group.first_row, group.first_row + group.num_rows))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _is_number(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _sample_line(row: dict[str, Any]) -> SampleLine:
    logprobs = row["sampled_logprobs"]
    good = logprobs[np.isfinite(logprobs)]
    tail = row["tail_mass"]
    listed = row["support_kind"] != "none"
    return SampleLine(
        sample_index=row["sample_index"],
        status="committed",
        why=None,
        rollout_id=row["rollout_id"],
        num_tokens=row["num_tokens"],
        finish_reason=row["finish_reason"],
        stop_reason=row["stop_reason"],
        reward=_finite(row["reward"]),
        nonfinite_reward=not _is_number(row["reward"]),
        advantage=_finite(row["advantage"]),
        mean_logprob=float(good.mean(dtype=np.float64)) if good.size else None,
        nonfinite_logprobs=int(logprobs.size - good.size),
        mean_support=row["num_support_entries"] / row["num_tokens"] if listed else None,
        largest_tail=None if tail is None else float(tail.max()),
        text=row["text"],
    )


def _sample_view(
    row: dict[str, Any], key: str, record: CommitRecord, text: TokenText, token: int | None
) -> SampleView:
    count = int(row["num_tokens"])
    if token is not None and not 0 <= token < count:
        raise DatasetError(
            f"prompt {row['prompt_id']!r} sample {row['sample_index']}: it has {count} tokens, "
            f"0 to {count - 1}, got token {token}"
        )
    ids = row["token_ids"].tolist()
    positions = range(count) if token is None else [token]
    limit = _SHOWN_ALTERNATIVES if token is None else None
    prompt = tuple(row["prompt_token_ids"].tolist())
    return SampleView(
        **{name: row[name] for name in _FACTS},
        reward=_finite(row["reward"]),
        nonfinite_reward=not _is_number(row["reward"]),
        advantage=_finite(row["advantage"]),
        prompt_key=key,
        file=str(record.file),
        num_tokens=count,
        prompt_token_ids=prompt,
        prompt_text=text.many(prompt),
        text=row["text"],
        before=None if token is None else text.many(ids[:token]),
        after=None if token is None else text.many(ids[token + 1 :]),
        tokens=tuple(_token_line(row, ids, position, text, limit) for position in positions),
    )


def _token_line(
    row: dict[str, Any], ids: list[int], position: int, text: TokenText, limit: int | None
) -> TokenLine:
    sampled = ids[position]
    size = rank = None
    alternatives: tuple[Alternative, ...] = ()
    if row["support_offsets"] is not None:
        start, end = row["support_offsets"][position : position + 2].tolist()
        size = end - start
        # the writer's order is most probable first
        own, logprobs = unpack_entries(row["support_entries"][start:end])
        at = np.flatnonzero(own == sampled)
        rank = int(at[0]) + 1 if at.size else None
        shown = list(zip(own.tolist(), logprobs.tolist(), strict=True))[:limit]
        alternatives = tuple(
            Alternative(id=one, text=text.one(one), logprob=value, sampled=one == sampled)
            for one, value in shown
        )
    tail = row["tail_mass"]
    return TokenLine(
        position=position,
        id=sampled,
        text=text.one(sampled),
        logprob=_finite(float(row["sampled_logprobs"][position])),
        support_size=size,
        tail_mass=None if tail is None else float(tail[position]),
        rank=rank,
        alternatives=alternatives,
    )
