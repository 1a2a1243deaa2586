"""From the spool's steps to whole rollouts.

Rows are keyed (internal request id, output position) and the last write wins, since a preempted
request computes positions again. A rollout is whole once the engine has returned it and every one
of its positions is there with the token that was returned; a hole or a mismatch fails it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rollout import spool
from rollout.capture import request as kinds
from rollout.errors import EngineError
from rollout.spool import StepBlock

_REASONS = {
    spool.FLAG_NONFINITE: ("bad_numerics", "NaN or +inf among the logits"),
    spool.FLAG_EMPTY: ("empty_support", "every id was masked"),
    spool.FLAG_LOST: ("capture_lost", "no capture buffer came free in time"),
    spool.FLAG_SAMPLED_MISSING: ("sampled_not_kept", "the sampled id is not in the kept set"),
}
# ids whose late rows are still recognised; a late row comes within a few steps
_CLOSED_IDS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a request's rollout can't be recorded."""

    request_id: str
    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedTokens:
    """The capture of one whole rollout of T tokens."""

    support_kind: str
    """`kept`, `top` or `none`."""
    sampled_logprobs: npt.NDArray[np.float32]
    """[T] nats."""
    support_offsets: npt.NDArray[np.int64] | None
    """[T + 1]."""
    support_entries: npt.NDArray[np.uint64] | None
    """[E] packed, rows in the order of the kernel."""
    tail_mass: npt.NDArray[np.float32] | None
    """[T]."""
    draw_entries: npt.NDArray[np.uint64] | None
    """[T * K] packed."""


@dataclass(kw_only=True, slots=True)
class _Row:
    sampled: int
    kind: int
    logprob: float
    tail_mass: float
    entries: npt.NDArray[np.uint64]
    draws: npt.NDArray[np.uint64]


@dataclass(kw_only=True, slots=True)
class CaptureStats:
    """Counts over the steps that were read."""

    steps: int = 0
    rows: int = 0
    entries: int = 0
    largest_step: int = 0
    """Most entries that one step needed, whether or not they fitted."""
    waited: float = 0.0
    """Seconds that sampling waited for a capture buffer."""
    replaced_rows: int = 0
    """Rows written again after a preemption."""
    late_rows: int = 0
    """Rows of requests that had already ended."""


@dataclass(kw_only=True, slots=True)
class Assembler:
    """Collects rows by request."""

    capacity: int
    """Entries of a step, for the message of an overflow."""
    stats: CaptureStats = field(default_factory=CaptureStats)
    _rows: dict[str, dict[int, _Row]] = field(default_factory=dict)
    _bytes: dict[str, int] = field(default_factory=dict)
    _closed: set[str] = field(default_factory=set)
    _closed_order: deque[str] = field(default_factory=deque)

    @property
    def num_bytes(self) -> int:
        """Bytes of the entries held for requests in work."""
        return sum(self._bytes.values())

    def widest(self) -> str | None:
        """Return the request in work that holds the most entries."""
        return max(self._bytes, key=self._bytes.__getitem__, default=None)

    def feed(self, blocks: Iterable[StepBlock]) -> Iterator[Failure]:
        """Take in steps.

        Args:
            blocks: steps in order; their arrays are copied where they are kept.

        Yields:
            requests that can't be recorded, for the caller to abort and `close`.

        Raises:
            EngineError: a step contradicts itself.
        """
        for block in blocks:
            yield from self._feed_block(block)

    def take(
        self, request_id: str, token_ids: npt.NDArray[np.int32]
    ) -> CapturedTokens | Failure | None:
        """Return the capture of a request that the engine has returned, and close it.

        Args:
            request_id: the engine's internal id.
            token_ids: [T] the returned tokens.

        Returns:
            null while rows are still missing: feed more, or give up with `missing`.
        """
        rows = self._rows.get(request_id, {})
        if any(position not in rows for position in range(len(token_ids))):
            return None
        self.close(request_id)
        return _assemble(request_id, [rows[i] for i in range(len(token_ids))], token_ids)

    def missing(self, request_id: str, num_tokens: int) -> Failure:
        """Close a request whose rows never came, and say which."""
        rows = self._rows.get(request_id, {})
        holes = [position for position in range(num_tokens) if position not in rows]
        self.close(request_id)
        return Failure(
            request_id=request_id,
            reason="rows_missing",
            detail=f"{len(holes)} of {num_tokens} positions were not captured, "
            f"the first is {holes[0] if holes else None}",
        )

    def close(self, request_id: str) -> None:
        """Forget a request; rows that still come for it are counted and dropped."""
        self._rows.pop(request_id, None)
        self._bytes.pop(request_id, None)
        if request_id not in self._closed:
            self._closed.add(request_id)
            self._closed_order.append(request_id)
            if len(self._closed_order) > _CLOSED_IDS:
                self._closed.discard(self._closed_order.popleft())

    def _feed_block(self, block: StepBlock) -> Iterator[Failure]:
        stats = self.stats
        stats.steps += 1
        stats.waited += block.waited
        stats.largest_step = max(stats.largest_step, block.need)
        counts = np.where(block.flags & spool.FLAG_OVERFLOW, 0, block.counts)
        bounds = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
        if bounds[-1] != block.entries.size:
            raise EngineError(
                f"step {block.step} holds {block.entries.size} entries, its rows say {bounds[-1]}"
            )
        columns = zip(
            block.request_ids,
            block.positions.tolist(),
            block.sampled.tolist(),
            block.kinds.tolist(),
            block.flags.tolist(),
            block.sampled_logprobs.tolist(),
            block.tail_mass.tolist(),
            bounds[:-1],
            bounds[1:],
            strict=True,
        )
        for i, row in enumerate(columns):
            request_id, position, sampled, kind, flags, logprob, tail, start, end = row
            if kind == kinds.SKIP:
                continue
            if request_id in self._closed:
                stats.late_rows += 1
                continue
            if flags:
                yield self._failure(block, i, request_id, position, flags)
                continue
            rows = self._rows.setdefault(request_id, {})
            replaced = rows.get(position)
            stats.replaced_rows += replaced is not None
            stats.rows += 1
            stats.entries += end - start
            grown = 8 * (end - start) - (replaced.entries.nbytes if replaced else 0)
            self._bytes[request_id] = self._bytes.get(request_id, 0) + grown
            rows[position] = _Row(
                sampled=sampled,
                kind=kind,
                logprob=logprob,
                tail_mass=tail,
                entries=block.entries[start:end].copy(),
                draws=block.draws[i].copy(),
            )

    def _failure(
        self, block: StepBlock, row: int, request_id: str, position: int, flags: int
    ) -> Failure:
        if flags & spool.FLAG_OVERFLOW:
            reason = "support_overflow"
            detail = (
                f"token {position} did not fit: the step's {len(block.request_ids)} rows need "
                f"{block.need} entries, support_capacity is {self.capacity}; raise capture."
                f"support_capacity to {_next_power(block.need)} or lower engine.max_num_seqs"
            )
        else:
            bit = next(bit for bit in _REASONS if flags & bit)
            reason, what = _REASONS[bit]
            detail = f"token {position}: {what}"
        return Failure(request_id=request_id, reason=reason, detail=detail)


def suggested_capacity(largest_step: int) -> int:
    """Suggest a `support_capacity` from the largest need that was seen.

    Args:
        largest_step: entries.

    Returns:
        The next power of two that leaves a half again as much room.
    """
    return _next_power(largest_step + largest_step // 2)


def _next_power(value: int) -> int:
    return 1 << max(value - 1, 1).bit_length()


def _assemble(
    request_id: str, rows: list[_Row], token_ids: npt.NDArray[np.int32]
) -> CapturedTokens | Failure:
    sampled = np.array([row.sampled for row in rows], np.int32)
    wrong = np.flatnonzero(sampled != token_ids)
    if wrong.size:
        first = int(wrong[0])
        return Failure(
            request_id=request_id,
            reason="token_mismatch",
            detail=f"token {first}: captured id {sampled[first]}, returned id {token_ids[first]}",
        )
    row_kinds = {row.kind for row in rows}
    kept = row_kinds <= {kinds.KEPT, kinds.GREEDY}
    if not kept and len(row_kinds) > 1:
        detail = f"kinds {sorted(row_kinds)} in one rollout"
        return Failure(request_id=request_id, reason="mixed_kinds", detail=detail)
    none = row_kinds == {kinds.NONE}
    draws = np.concatenate([row.draws for row in rows]) if rows and rows[0].draws.size else None
    logprobs = np.array([row.logprob for row in rows], np.float32)
    if none:
        return CapturedTokens(
            support_kind="none",
            sampled_logprobs=logprobs,
            support_offsets=None,
            support_entries=None,
            tail_mass=None,
            draw_entries=draws,
        )
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([row.entries.size for row in rows], out=offsets[1:])
    return CapturedTokens(
        support_kind="kept" if kept else "top",
        sampled_logprobs=logprobs,
        support_offsets=offsets,
        support_entries=np.concatenate([row.entries for row in rows])
        if rows
        else np.empty(0, np.uint64),
        tail_mass=np.array([row.tail_mass for row in rows], np.float32),
        draw_entries=draws,
    )
