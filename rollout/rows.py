"""One rollout and one rejection, as they travel from the engine to the dataset's writer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.schema.columns import SUPPORT_KINDS
from rollout.schema.entries import AT_ONCE, invalid_entries, unpack_entries

# how far the recorded support's mass may be from 1, in nats: float32 rounding stays below 2e-6
_MASS_TOLERANCE: Final = 1e-5
# one Arrow list array holds fewer elements than this
_MAX_ELEMENTS: Final = 2**31 - 1


class BadRowError(ValueError):
    """Raised when a rollout's fields contradict each other or hold what may not reach a file.

    Args:
        reason: a snake_case code, the same for every row of its kind.
        detail: one sentence for people.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class StoredEntries(Protocol):
    """Support entries that are not in memory yet."""

    @property
    def size(self) -> int:
        """Number of entries, E."""

    @property
    def nbytes(self) -> int:
        """Bytes of the entries."""

    def load(self) -> NDArray[np.uint64]:
        """Read them: [E] packed."""

    def release(self) -> None:
        """Give them up; once."""


@dataclass(kw_only=True, slots=True, eq=False)
class RolloutRow:
    """One sample of one prompt; T sampled tokens, E support entries, K draws a token."""

    prompt_key: str
    """Our key of the prompt; in the commit record, not a column."""
    rollout_id: str
    group_id: str
    prompt_id: str
    """The user's own id."""
    sample_index: int
    group_size: int
    """Samples asked for."""
    prompt_token_ids: NDArray[np.int32]
    """[P] int32."""
    token_ids: NDArray[np.int32]
    """[T] int32, terminal token included."""
    text: str | None = None
    sampled_logprobs: NDArray[np.float32]
    """[T] float32, log q of each sampled token in nats."""
    temperature: float
    policy_step: int | None = None
    support_kind: str
    """kept, top or none."""
    support_offsets: NDArray[np.int64] | None = None
    """[T + 1] int64 from 0; None for none."""
    support_entries: NDArray[np.uint64] | None = None
    """[E] uint64 packed, any order within a token; None for none, or while they are stored."""
    stored_entries: StoredEntries | None = None
    """The entries while they are not in memory; not a column."""
    tail_mass: NDArray[np.float32] | None = None
    """[T] float32; required for top, None or zeros for kept, None for none."""
    draw_entries: NDArray[np.uint64] | None = None
    """[T * K] uint64 packed, in the order drawn."""
    finish_reason: str | None = None
    stop_reason: str | None = None
    reward: float | None = None
    advantage: float | None = None
    metadata: str | None = None
    """JSON."""

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the rollout in a dataset: prompt_key and sample_index."""
        return self.prompt_key, self.sample_index

    @property
    def num_bytes(self) -> int:
        """Raw bytes of the arrays, stored entries included."""
        arrays = (
            self.prompt_token_ids,
            self.token_ids,
            self.sampled_logprobs,
            self.support_offsets,
            self.support_entries,
            self.stored_entries,
            self.tail_mass,
            self.draw_entries,
        )
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the arrays that are in memory."""
        return self.num_bytes - (0 if self.stored_entries is None else self.stored_entries.nbytes)

    @property
    def num_entries(self) -> int:
        """Support entries, E; 0 without a support."""
        entries = self.support_entries if self.stored_entries is None else self.stored_entries
        return 0 if entries is None else entries.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """A prompt or a rollout set aside, and why."""

    prompt_key: str
    prompt_id: str | None = None
    sample_index: int | None = None
    """None for the whole prompt."""
    file: str
    line: int | None = None
    stage: str
    """read, render, sample, capture or reward."""
    reason: str
    """A snake_case code."""
    detail: str
    num_prompt_tokens: int | None = None

    @property
    def key(self) -> tuple[str, int | None]:
        """The prompt_key, and the sample_index or None for the whole prompt."""
        return self.prompt_key, self.sample_index


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanEntry:
    """Which unit a prompt is committed with."""

    prompt_key: str
    prompt_id: str
    unit: str


def check_row(row: RolloutRow) -> None:
    """Check that a rollout may be written.

    Lengths agree; logprobs are finite and not positive; the sampled token of every `kept` row is
    in its own support exactly once, with the bits of its sampled logprob; the logsumexp of a
    `kept` row is 0 within 1e-5; a `top` row lists its sampled token at most once.

    Args:
        row: the rollout, arrays in their final types.

    Raises:
        BadRowError: the first rule that does not hold.
    """
    _check_tokens(row)
    if row.support_kind not in SUPPORT_KINDS:
        raise BadRowError(
            "bad_support_kind", f"got {row.support_kind!r}, expected one of {SUPPORT_KINDS}"
        )
    if row.support_kind == "none":
        if row.support_offsets is not None or row.support_entries is not None:
            raise BadRowError("unexpected_support", "support_kind none with a support")
        if row.tail_mass is not None:
            raise BadRowError("unexpected_tail_mass", "support_kind none with a tail mass")
    else:
        _check_support(row)
        _check_tail(row)
    if row.draw_entries is not None:
        _check_draws(row)
    for name, value in (("reward", row.reward), ("advantage", row.advantage)):
        if value is not None and not np.isfinite(np.float32(value)):
            raise BadRowError(f"nonfinite_{name}", f"got {value}, expected a finite float32")


def _check_array(name: str, array: NDArray[np.generic], dtype: type, length: int | None) -> None:
    if array.dtype != dtype or array.ndim != 1:
        raise BadRowError(
            "bad_dtype",
            f"{name} is {array.dtype} with {array.ndim} dimensions, expected 1 of {dtype.__name__}",
        )
    if length is not None and array.size != length:
        raise BadRowError("length_mismatch", f"{name} has {array.size} values, expected {length}")


def _check_ids(name: str, ids: NDArray[np.int32]) -> None:
    if ids.size and int(ids.min()) < 0:
        raise BadRowError("bad_token_id", f"{name} holds {int(ids.min())}, expected at least 0")


def _check_tokens(row: RolloutRow) -> None:
    _check_array("prompt_token_ids", row.prompt_token_ids, np.int32, None)
    _check_array("token_ids", row.token_ids, np.int32, None)
    tokens = row.token_ids.size
    if tokens == 0:
        raise BadRowError("no_tokens", "the rollout has no sampled token")
    _check_array("sampled_logprobs", row.sampled_logprobs, np.float32, tokens)
    _check_ids("prompt_token_ids", row.prompt_token_ids)
    _check_ids("token_ids", row.token_ids)
    good = np.isfinite(row.sampled_logprobs) & (row.sampled_logprobs <= 0)
    if not good.all():
        where = int(np.argmin(good))
        raise BadRowError(
            "bad_numerics",
            f"sampled_logprobs[{where}] is {row.sampled_logprobs[where]}, "
            "expected finite and not positive",
        )
    if not row.temperature >= 0 or not np.isfinite(row.temperature):
        raise BadRowError("bad_temperature", f"got {row.temperature}, expected 0 or more")


def _check_support(row: RolloutRow) -> None:
    offsets, entries = row.support_offsets, row.support_entries
    if offsets is None or entries is None:
        raise BadRowError("missing_support", f"support_kind {row.support_kind} without a support")
    tokens = row.token_ids.size
    _check_array("support_offsets", offsets, np.int64, tokens + 1)
    _check_array("support_entries", entries, np.uint64, None)
    if entries.size > _MAX_ELEMENTS:
        raise BadRowError(
            "support_too_large", f"{entries.size} entries, a rollout holds at most {_MAX_ELEMENTS}"
        )
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != entries.size or (lengths < 0).any():
        raise BadRowError(
            "bad_offsets",
            f"support_offsets must rise from 0 to {entries.size}, "
            f"got {int(offsets[0])}..{int(offsets[-1])}, smallest step {int(lengths.min())}",
        )
    kept = row.support_kind == "kept"
    _check_listed(row, offsets, entries, kept=kept)


def _check_listed(
    row: RolloutRow,
    offsets: NDArray[np.int64],  # [T + 1]
    entries: NDArray[np.uint64],  # [E]
    *,
    kept: bool,
) -> None:
    lengths = np.diff(offsets)
    tokens = lengths.size
    found = np.zeros(tokens, np.int64)
    differs = np.zeros(tokens, bool)
    mass = np.ones(tokens)
    invalid = 0
    # adding 0 turns -0.0 into the +0.0 that entries hold
    sampled = (row.sampled_logprobs + np.float32(0)).view(np.uint32)
    for first, last in _pieces(offsets):
        piece = entries[offsets[first] : offsets[last]]
        if bad := invalid_entries(piece):
            invalid += bad
            continue
        ids, logprobs = unpack_entries(piece)
        at = np.flatnonzero(ids == np.repeat(row.token_ids[first:last], lengths[first:last]))
        own = np.searchsorted(offsets, at + offsets[first], side="right") - 1  # the token of each
        found[first:last] = np.bincount(own - first, minlength=last - first)
        differs[own[sampled[own] != logprobs[at].view(np.uint32)]] = True
        if kept and lengths[first:last].all():
            starts = offsets[first:last] - offsets[first]
            mass[first:last] = np.add.reduceat(np.exp(logprobs), starts, dtype=np.float64)
    if invalid:
        raise _bad_entries("support_entries", invalid, entries.size)
    if kept and not lengths.all():
        where = int(np.argmin(lengths))
        raise BadRowError("empty_support", f"token {where} of a kept support has no entry")
    wrong = (found != 1) if kept else (found > 1)
    if wrong.any():
        where = int(np.argmax(wrong))
        raise BadRowError(
            "sampled_not_in_support" if found[where] == 0 else "sampled_twice_in_support",
            f"token {where} (id {int(row.token_ids[where])}) is in its support "
            f"{int(found[where])} times",
        )
    if differs.any():
        where = int(np.argmax(differs))
        ids, logprobs = unpack_entries(entries[offsets[where] : offsets[where + 1]])
        raise BadRowError(
            "sampled_logprob_mismatch",
            f"token {where}: sampled_logprobs says {row.sampled_logprobs[where]}, "
            f"its support {logprobs[ids == row.token_ids[where]][0]}",
        )
    off = np.abs(np.log(mass))
    if float(off.max()) > _MASS_TOLERANCE:
        where = int(np.argmax(off))
        raise BadRowError(
            "support_not_normalised",
            f"token {where}: its kept logprobs sum to a mass of {mass[where]:.8g}, expected 1",
        )


def _pieces(offsets: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut tokens into runs of about AT_ONCE entries: the first of each, and the one behind it."""
    marks = np.arange(AT_ONCE, max(int(offsets[-1]), 1), AT_ONCE)
    cuts = np.unique(np.concatenate([[0], np.searchsorted(offsets, marks), [offsets.size - 1]]))
    return itertools.pairwise(cuts.tolist())


def _check_entries(name: str, entries: NDArray[np.uint64]) -> None:
    if invalid := invalid_entries(entries):
        raise _bad_entries(name, invalid, entries.size)


def _bad_entries(name: str, invalid: int, size: int) -> BadRowError:
    return BadRowError(
        "bad_numerics",
        f"{invalid} of {size} {name} hold NaN, -0.0, a positive or infinite logprob, "
        "or an id outside int32",
    )


def _check_tail(row: RolloutRow) -> None:
    if row.tail_mass is None:
        if row.support_kind == "top":
            raise BadRowError("missing_tail_mass", "support_kind top without a tail mass")
        return
    _check_array("tail_mass", row.tail_mass, np.float32, row.token_ids.size)
    limit = 1 if row.support_kind == "top" else 0
    good = (row.tail_mass >= 0) & (row.tail_mass <= limit)
    if not good.all():
        where = int(np.argmin(good))
        raise BadRowError(
            "bad_tail_mass",
            f"tail_mass[{where}] is {row.tail_mass[where]}, expected 0..{limit}",
        )


def _check_draws(row: RolloutRow) -> None:
    assert row.draw_entries is not None
    _check_array("draw_entries", row.draw_entries, np.uint64, None)
    if row.draw_entries.size == 0 or row.draw_entries.size % row.token_ids.size:
        raise BadRowError(
            "length_mismatch",
            f"draw_entries has {row.draw_entries.size} values, "
            f"expected a multiple of {row.token_ids.size} tokens",
        )
    if row.draw_entries.size > _MAX_ELEMENTS:
        raise BadRowError("draws_too_large", f"{row.draw_entries.size} draws in one rollout")
    _check_entries("draw_entries", row.draw_entries)
