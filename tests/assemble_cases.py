"""Steps made by hand, sent through a spool to an assembler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout import spool
from rollout.assemble import Assembler, CapturedTokens, Failure
from rollout.capture.request import KEPT
from rollout.schema.entries import pack_entries
from rollout.spool import SpoolReader, SpoolWriter, StepBlock, StoredStep
from rollout.spool_entries import HeldSegments

HALF = float(np.float32(np.log(0.5)))
PAIR = [(5, HALF), (9, HALF)]
Row = dict[str, Any]


def row(request: str, position: int, sampled: int, **fields: Any) -> Row:
    """A row that keeps `entries` [(id, logprob)]; its sampled token alone by default."""
    values: Row = {
        "request": request,
        "position": position,
        "sampled": sampled,
        "kind": KEPT,
        "flags": 0,
        "entries": [(sampled, 0.0)],
        "logprob": 0.0,
        "tail": 0.0,
        "draws": (),
        "need": None,
    }
    return values | fields


def pack(pairs: Sequence[tuple[int, float]]) -> np.ndarray[Any, Any]:
    ids, logprobs = zip(*pairs, strict=True) if pairs else ((), ())
    return pack_entries(np.array(ids, np.int64), np.array(logprobs, np.float32))


def block(*rows: Row, step: int = 0, need: int | None = None) -> StepBlock:
    stored = [r for r in rows if not r["flags"] & spool.FLAG_OVERFLOW]
    counts = [len(r["entries"]) if r["need"] is None else r["need"] for r in rows]
    draws = [pack(r["draws"]) for r in rows]
    return StepBlock(
        step=step,
        need=sum(counts) if need is None else need,
        request_ids=[r["request"] for r in rows],
        positions=np.array([r["position"] for r in rows], np.int32),
        sampled=np.array([r["sampled"] for r in rows], np.int32),
        kinds=np.array([r["kind"] for r in rows], np.int8),
        flags=np.array([r["flags"] for r in rows], np.int32),
        counts=np.array(counts, np.int32),
        sampled_logprobs=np.array([r["logprob"] for r in rows], np.float32),
        tail_mass=np.array([r["tail"] for r in rows], np.float32),
        draws=np.stack(draws) if draws else np.zeros((0, 0), np.uint64),
        entries=np.concatenate([pack(r["entries"]) for r in stored] or [np.zeros(0, np.uint64)]),
    )


@dataclass(frozen=True)
class Taken:
    """A capture with its entries in memory."""

    support_kind: str
    sampled_logprobs: NDArray[np.float32]
    support_offsets: NDArray[np.int64] | None
    support_entries: NDArray[np.uint64] | None
    tail_mass: NDArray[np.float32] | None
    draw_entries: NDArray[np.uint64] | None


_spool: list[Any] = []


def open_spool(folder: Path) -> None:
    """Let the steps of a test go through a spool, each in a segment of its own."""
    _spool[:] = [SpoolWriter(folder, segment_bytes=1), SpoolReader(folder)]


def stored(*blocks: StepBlock) -> Iterator[StoredStep]:
    """Send steps through the spool."""
    writer, reader = _spool
    for one in blocks:
        writer.append(one)
        yield from reader.poll()


def feed(assembler: Assembler, *blocks: StepBlock) -> list[Failure]:
    return list(assembler.feed(stored(*blocks)))


def take(assembler: Assembler, request: str, *token_ids: int) -> Taken:
    result = assembler.take(request, np.array(token_ids, np.int32))
    assert isinstance(result, CapturedTokens), result
    entries = None
    if result.entries is not None:
        entries = result.entries.load()
        result.entries.release()
    return Taken(
        support_kind=result.support_kind,
        sampled_logprobs=result.sampled_logprobs,
        support_offsets=result.support_offsets,
        support_entries=entries,
        tail_mass=result.tail_mass,
        draw_entries=result.draw_entries,
    )


def spooled() -> HeldSegments:
    """The spool's segments."""
    segments: HeldSegments = _spool[1].segments
    return segments


def needed() -> int:
    """Bytes of the spool that somebody needs."""
    return sum(spooled()._needed.values())
