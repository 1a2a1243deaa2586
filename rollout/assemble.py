"""From the spool's steps to whole rollouts.

Rows are keyed (internal request id, output position) and the last write wins, since a preempted
request computes positions again. A rollout is whole once the engine has returned it and every one
of its positions is there with the token that was returned; a hole or a mismatch fails it. Entries
are not touched: of each token it is noted where in the spool they are.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rollout import spool
from rollout.capture import request as kinds
from rollout.captured_rows import HOLE, CapturedRows
from rollout.errors import EngineError
from rollout.spool import StoredStep
from rollout.spool_entries import SEGMENT_BITS, HeldSegments, SpooledEntries

_REASONS = {
    spool.FLAG_NONFINITE: ("bad_numerics", "NaN or +inf among the logits"),
    spool.FLAG_EMPTY: ("empty_support", "every id was masked"),
    spool.FLAG_LOST: ("capture_lost", "no capture buffer came free in time"),
    spool.FLAG_SAMPLED_MISSING: ("sampled_not_kept", "the sampled id is not in the kept set"),
}
# ids whose late rows are still recognised; a late row comes within a few steps
_CLOSED_IDS = 16_384
_SPARSE = 0.5  # a segment of which less is needed is worth the copy


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
    entries: SpooledEntries | None
    """Where the E packed entries are, rows in the order of the kernel; null for `none`."""
    tail_mass: npt.NDArray[np.float32] | None
    """[T]."""
    draw_entries: npt.NDArray[np.uint64] | None
    """[T * K] packed."""


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
    _rows: dict[str, CapturedRows] = field(default_factory=dict)
    _closed: set[str] = field(default_factory=set)
    _closed_order: deque[str] = field(default_factory=deque)

    def widest(self) -> str | None:
        """Return the request in work that holds the most entries."""
        rows = self._rows
        return max(rows, key=lambda request_id: rows[request_id].num_entries, default=None)

    def compact(self, segments: HeldSegments) -> None:
        """Let segments go that only a few requests in work still need.

        Args:
            segments: of the spool that is read.

        Raises:
            OSError: the disk takes no more.
        """
        sparse = np.array(segments.sparse(_SPARSE), np.int64)
        found: list[tuple[CapturedRows, npt.NDArray[np.int64]]] = []
        for rows in self._rows.values():
            if rows.segments is segments:
                addresses = np.array(rows.addresses, np.int64)
                at = np.flatnonzero(
                    np.isin(addresses >> SEGMENT_BITS, sparse) & (np.array(rows.counts) > 0)
                )
                if at.size:
                    found.append((rows, at))
        if not found:
            return
        addresses = np.concatenate([np.array(rows.addresses, np.int64)[at] for rows, at in found])
        counts = np.concatenate([np.array(rows.counts, np.int32)[at] for rows, at in found])
        moved = iter(segments.move(addresses, counts).tolist())
        for rows, at in found:
            for position in at.tolist():
                rows.addresses[position] = next(moved)

    def feed(self, blocks: Iterable[StoredStep]) -> Iterator[Failure]:
        """Take in steps.

        Args:
            blocks: steps in order.

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
        rows = self._rows.get(request_id)
        num_tokens = len(token_ids)
        if rows is None:
            if num_tokens:
                return None
            rows = CapturedRows(HeldSegments(""))
        if len(rows.kinds) < num_tokens or HOLE in rows.kinds[:num_tokens]:
            return None
        result = _assemble(request_id, rows, token_ids)
        if isinstance(result, CapturedTokens) and result.entries is not None:
            rows.release(num_tokens)  # sampled before the engine saw the end
            self._rows.pop(request_id, None)  # the entries are the caller's now
        self.close(request_id)
        return result

    def missing(self, request_id: str, num_tokens: int) -> Failure:
        """Close a request whose rows never came, and say which."""
        rows = self._rows.get(request_id)
        holes = list(range(num_tokens)) if rows is None else rows.holes(num_tokens)
        self.close(request_id)
        return Failure(
            request_id=request_id,
            reason="rows_missing",
            detail=f"{len(holes)} of {num_tokens} positions were not captured, "
            f"the first is {holes[0] if holes else None}",
        )

    def close(self, request_id: str) -> None:
        """Forget a request; rows that still come for it are counted and dropped."""
        rows = self._rows.pop(request_id, None)
        if rows is not None:
            rows.release(0)
        if request_id not in self._closed:
            self._closed.add(request_id)
            self._closed_order.append(request_id)
            if len(self._closed_order) > _CLOSED_IDS:
                self._closed.discard(self._closed_order.popleft())

    def _feed_block(self, block: StoredStep) -> Iterator[Failure]:
        stats = self.stats
        stats.steps += 1
        stats.waited += block.waited
        stats.largest_step = max(stats.largest_step, block.need)
        counts = np.where(block.flags & spool.FLAG_OVERFLOW, 0, block.counts)
        ends = np.cumsum(counts, dtype=np.int64)
        total = int(ends[-1]) if ends.size else 0
        if total != block.num_entries:
            raise EngineError(
                f"step {block.step} holds {block.num_entries} entries, its rows say {total}"
            )
        addresses = block.address + 8 * (ends - counts)
        # all of it until it is known which rows nobody wants
        block.segments.hold(block.segment, 8 * total)
        dropped: list[int] = []
        columns = zip(
            block.request_ids,
            block.positions.tolist(),
            block.sampled.tolist(),
            block.kinds.tolist(),
            block.flags.tolist(),
            block.sampled_logprobs.tolist(),
            block.tail_mass.tolist(),
            addresses.tolist(),
            counts.tolist(),
            block.draws if block.draws.size else itertools.repeat(None, len(block.request_ids)),
            strict=True,
        )
        for i, row in enumerate(columns):
            request_id, position, sampled, kind, flags, logprob, tail, address, count, draws = row
            if kind == kinds.SKIP:
                dropped.append(i)
                continue
            if request_id in self._closed:
                stats.late_rows += 1
                dropped.append(i)
                continue
            if flags:
                dropped.append(i)
                yield self._failure(block, i, request_id, position, flags)
                continue
            rows = self._rows.get(request_id)
            if rows is None:
                rows = self._rows[request_id] = CapturedRows(block.segments)
            stats.replaced_rows += rows.put(
                position, sampled, kind, logprob, tail, address, count, draws
            )
            stats.rows += 1
            stats.entries += count
        if dropped:
            block.segments.release(addresses[dropped], counts[dropped])

    def _failure(
        self, block: StoredStep, row: int, request_id: str, position: int, flags: int
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
    request_id: str, rows: CapturedRows, token_ids: npt.NDArray[np.int32]
) -> CapturedTokens | Failure:
    count = len(token_ids)
    sampled = np.array(rows.sampled[:count], np.int32)
    wrong = np.flatnonzero(sampled != token_ids)
    if wrong.size:
        first = int(wrong[0])
        return Failure(
            request_id=request_id,
            reason="token_mismatch",
            detail=f"token {first}: captured id {sampled[first]}, returned id {token_ids[first]}",
        )
    row_kinds = set(rows.kinds[:count])
    kept = row_kinds <= {kinds.KEPT, kinds.GREEDY}
    if not kept and len(row_kinds) > 1:
        detail = f"kinds {sorted(row_kinds)} in one rollout"
        return Failure(request_id=request_id, reason="mixed_kinds", detail=detail)
    drawn = [draws for draws in rows.draws[:count] if draws is not None]
    draw_entries = np.concatenate(drawn) if drawn else None
    logprobs = np.array(rows.logprobs[:count], np.float32)
    if row_kinds == {kinds.NONE}:
        return CapturedTokens(
            support_kind="none",
            sampled_logprobs=logprobs,
            support_offsets=None,
            entries=None,
            tail_mass=None,
            draw_entries=draw_entries,
        )
    counts = np.array(rows.counts[:count], np.int32)
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return CapturedTokens(
        support_kind="kept" if kept else "top",
        sampled_logprobs=logprobs,
        support_offsets=offsets,
        entries=SpooledEntries(
            segments=rows.segments,
            addresses=np.array(rows.addresses[:count], np.int64),
            counts=counts,
        ),
        tail_mass=np.array(rows.tails[:count], np.float32),
        draw_entries=draw_entries,
    )
