"""One rollout as a batch takes it up: its tokens, and the entries that its rows bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollout.entry_pages import Entries, SplitEntries
from rollout.rows import RolloutRow
from rollout.schema.entries import unpack_entries

Untruncated = Literal["head", "draws"]

_NONE = SplitEntries(np.empty(0, np.int32), np.empty(0, np.float32))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Support:
    """What a rollout of T tokens brings as its rows of E entries."""

    entries: Entries
    offsets: NDArray[np.int64]
    """[T + 1] where each token's entries begin, from 0."""
    tail_mass: NDArray[np.float32]
    """[T]."""
    valid: bool
    is_samples: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchRow:
    """One rollout of T tokens; its arrays are read and not kept."""

    rollout_id: str
    prompt_token_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    sampled_logprobs: NDArray[np.float32]
    temperature: float
    support: Support
    columns: dict[str, Any]
    """What the batch carries along, by name."""


def batch_row(row: RolloutRow, untruncated: Untruncated, columns: Sequence[str]) -> BatchRow:
    """Take up a rollout as a dataset's writer knows it.

    Args:
        row: the rollout.
        untruncated: see `choose_support`.
        columns: fields to carry along.
    """
    entries, draws = row.support_entries, row.draw_entries
    return BatchRow(
        rollout_id=row.rollout_id,
        prompt_token_ids=row.prompt_token_ids,
        token_ids=row.token_ids,
        sampled_logprobs=row.sampled_logprobs,
        temperature=row.temperature,
        support=choose_support(
            kind=row.support_kind,
            num_tokens=row.token_ids.size,
            offsets=row.support_offsets,
            entries=None if entries is None else SplitEntries(*unpack_entries(entries)),
            tail_mass=row.tail_mass,
            draws=None if draws is None else SplitEntries(*unpack_entries(draws)),
            untruncated=untruncated,
        ),
        columns={name: getattr(row, name) for name in columns},
    )


def choose_support(
    *,
    kind: str,
    num_tokens: int,
    offsets: NDArray[np.int64] | None,
    entries: Entries | None,
    tail_mass: NDArray[np.float32] | None,
    draws: SplitEntries | None,
    untruncated: Untruncated,
) -> Support:
    """Choose which recorded entries a rollout brings.

    Args:
        kind: its `support_kind`.
        num_tokens: T.
        offsets: [T + 1] of its listed entries.
        entries: those that are listed.
        tail_mass: [T] probability outside of them.
        draws: equally many of each token.
        untruncated: which entries an untruncated row brings: the recorded head, or its draws. A row
            of kind `none` brings its draws, if it has any.
    """
    wants_draws = kind == "none" or (kind == "top" and untruncated == "draws")
    if wants_draws and draws is not None:
        per_token = draws.size // max(num_tokens, 1)
        return Support(
            entries=draws,
            offsets=np.arange(num_tokens + 1, dtype=np.int64) * per_token,
            tail_mass=np.zeros(num_tokens, np.float32),
            valid=True,
            is_samples=True,
        )
    if offsets is None or entries is None or wants_draws:
        return Support(
            entries=_NONE,
            offsets=np.zeros(num_tokens + 1, np.int64),
            tail_mass=np.zeros(num_tokens, np.float32),
            valid=False,
            is_samples=False,
        )
    return Support(
        entries=entries,
        offsets=offsets,
        tail_mass=np.zeros(num_tokens, np.float32) if tail_mass is None else tail_mass,
        valid=True,
        is_samples=False,
    )
