"""From steps to rollouts: rows may come twice, late or not at all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollout import assemble, spool
from rollout.assemble import Assembler, CapturedTokens, Failure, suggested_capacity
from rollout.capture.request import GREEDY, KEPT, NONE, SKIP, TOP
from rollout.errors import EngineError
from rollout.rows import RolloutRow, check_row
from rollout.schema.entries import pack_entries
from rollout.spool import SpoolReader, SpoolWriter, StepBlock, StoredStep

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


@pytest.fixture(autouse=True)
def spool_of_the_test(tmp_path: Path) -> Iterator[None]:
    """Give every test a spool, each step in a segment of its own."""
    _spool[:] = [SpoolWriter(tmp_path, segment_bytes=1), SpoolReader(tmp_path)]
    yield
    _spool.clear()


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


def needed() -> int:
    """Bytes of the spool that somebody needs."""
    return sum(_spool[1].segments._needed.values())


HALF = float(np.float32(np.log(0.5)))
PAIR = [(5, HALF), (9, HALF)]


def test_rows_of_a_batch_find_their_requests() -> None:
    assembler = Assembler(capacity=100)
    failures = feed(
        assembler,
        block(row("a", 0, 5, entries=PAIR, logprob=HALF), row("b", 0, 7)),
        block(row("b", 1, 8), row("a", 1, 9, entries=PAIR, logprob=HALF)),
        block(row("a", 2, 3)),
    )
    assert failures == []
    a = take(assembler, "a", 5, 9, 3)
    assert a.support_kind == "kept"
    assert a.support_offsets is not None
    assert a.support_entries is not None
    assert a.tail_mass is not None
    assert a.support_offsets.tolist() == [0, 2, 4, 5]
    assert a.support_entries.tolist() == [*pack(PAIR), *pack(PAIR), 3]
    assert a.sampled_logprobs.tolist() == [HALF, HALF, 0.0]
    assert a.tail_mass.tolist() == [0, 0, 0]
    assert a.draw_entries is None
    assert a.sampled_logprobs.dtype == np.float32
    assert a.support_offsets.dtype == np.int64
    b = take(assembler, "b", 7, 8)
    assert b.support_entries is not None
    assert b.support_entries.tolist() == [7, 8]
    stats = assembler.stats
    assert (stats.steps, stats.rows, stats.entries, stats.largest_step) == (3, 5, 7, 3)
    check_row(
        RolloutRow(
            prompt_key="k",
            rollout_id="r",
            group_id="g",
            prompt_id="p",
            sample_index=0,
            group_size=1,
            prompt_token_ids=np.array([1], np.int32),
            token_ids=np.array([5, 9, 3], np.int32),
            temperature=1.0,
            sampled_logprobs=a.sampled_logprobs,
            support_kind=a.support_kind,
            support_offsets=a.support_offsets,
            support_entries=a.support_entries,
            tail_mass=a.tail_mass,
        )
    )


def test_the_last_write_of_a_position_wins() -> None:
    assembler = Assembler(capacity=100)
    feed(
        assembler,
        block(row("a", 0, 1), row("a", 1, 2)),
        block(row("a", 1, 5, entries=PAIR, logprob=HALF)),  # computed again after a preemption
        block(row("a", 2, 4)),
    )
    a = take(assembler, "a", 1, 5, 4)
    assert a.support_offsets is not None
    assert a.support_offsets.tolist() == [0, 1, 3, 4]
    assert a.sampled_logprobs.tolist() == [0, HALF, 0]
    assert assembler.stats.replaced_rows == 1


def test_positions_may_come_in_any_order_and_beyond_the_end() -> None:
    assembler = Assembler(capacity=100)
    feed(assembler, block(row("a", 2, 3)), block(row("a", 0, 1)), block(row("a", 3, 99)))
    assert assembler.take("a", np.array([1, 2, 3], np.int32)) is None
    feed(assembler, block(row("a", 1, 2)))
    a = take(assembler, "a", 1, 2, 3)  # the fourth was sampled before the engine saw the stop
    assert a.support_entries is not None
    assert a.support_entries.tolist() == [1, 2, 3]


def test_a_hole_is_named_when_one_gives_up() -> None:
    assembler = Assembler(capacity=100)
    feed(assembler, block(row("a", 0, 1)), block(row("a", 3, 4)))
    assert assembler.take("a", np.array([1, 2, 3, 4], np.int32)) is None
    assert assembler.missing("a", 4) == Failure(
        request_id="a",
        reason="rows_missing",
        detail="2 of 4 positions were not captured, the first is 1",
    )
    assert assembler.missing("never", 2).detail == (
        "2 of 2 positions were not captured, the first is 0"
    )


def test_a_mismatch_is_failed_and_named() -> None:
    assembler = Assembler(capacity=100)
    feed(assembler, block(row("a", 0, 1), row("a", 1, 2)))
    assert assembler.take("a", np.array([1, 7], np.int32)) == Failure(
        request_id="a", reason="token_mismatch", detail="token 1: captured id 2, returned id 7"
    )


def test_rows_after_the_end_are_counted_and_dropped() -> None:
    assembler = Assembler(capacity=100)
    feed(assembler, block(row("a", 0, 1)))
    take(assembler, "a", 1)
    assembler.close("a")
    bad = row("a", 2, 1, flags=spool.FLAG_NONFINITE, entries=[])
    assert feed(assembler, block(row("a", 1, 2), row("b", 0, 3), bad)) == []
    assert assembler.stats.late_rows == 2
    take(assembler, "b", 3)
    assert assembler.take("a", np.array([1], np.int32)) is None


def test_closing_while_a_step_is_fed_drops_its_later_rows() -> None:
    assembler = Assembler(capacity=100)
    bad = row("a", 0, 1, flags=spool.FLAG_EMPTY, entries=[])
    steps = [block(bad, row("b", 0, 2)), block(row("a", 1, 1), row("b", 1, 3))]
    failures = []
    for failure in assembler.feed(stored(*steps)):
        failures.append(failure)
        assembler.close(failure.request_id)
    assert [failure.request_id for failure in failures] == ["a"]
    assert assembler.stats.late_rows == 1
    take(assembler, "b", 2, 3)


def test_discarded_rows_are_nothing() -> None:
    assembler = Assembler(capacity=100)
    discarded = row("a", 0, 99, kind=SKIP, entries=[])
    feed(assembler, block(discarded, row("b", 0, 1)), block(row("a", 0, 5)))
    assert assembler.stats.replaced_rows == 0
    take(assembler, "a", 5)


@pytest.mark.parametrize(
    ("flag", "reason", "detail"),
    [
        (spool.FLAG_NONFINITE, "bad_numerics", "token 3: NaN or +inf among the logits"),
        (spool.FLAG_EMPTY, "empty_support", "token 3: every id was masked"),
        (spool.FLAG_SAMPLED_MISSING, "sampled_not_kept", "token 3: the sampled id is not in the"),
        (spool.FLAG_LOST, "capture_lost", "token 3: no capture buffer came free in time"),
        (
            spool.FLAG_OVERFLOW,
            "support_overflow",
            "token 3 did not fit: the step's 2 rows need 1000 entries, support_capacity is 100; "
            "raise capture.support_capacity to 1024 or lower engine.max_num_seqs",
        ),
    ],
)
def test_flags_fail_their_request_only(flag: int, reason: str, detail: str) -> None:
    assembler = Assembler(capacity=100)
    bad = row("a", 3, 1, flags=flag, entries=[])
    (failure,) = feed(assembler, block(bad, row("b", 0, 2), need=1000))
    assert (failure.request_id, failure.reason) == ("a", reason)
    assert failure.detail.startswith(detail)
    take(assembler, "b", 2)


def test_overflowed_rows_in_the_middle_shift_nothing() -> None:
    assembler = Assembler(capacity=100)
    wide = row("wide", 0, 1, flags=spool.FLAG_OVERFLOW, need=5000)
    third = row("third", 0, 9, entries=PAIR, logprob=HALF)
    failures = feed(
        assembler, block(row("first", 0, 5, entries=PAIR, logprob=HALF), wide, third, wide)
    )
    assert [failure.reason for failure in failures] == ["support_overflow"] * 2
    for name, token in (("first", 5), ("third", 9)):
        found = take(assembler, name, token)
        assert found.support_entries is not None
        assert found.support_entries.tolist() == pack(PAIR).tolist()
    assert assembler.stats.largest_step == 10_004
    assert assembler.stats.entries == 4


def test_a_step_that_contradicts_itself_is_refused() -> None:
    for need in (0, 2):
        with pytest.raises(EngineError, match=f"step 7 holds 1 entries, its rows say {need}"):
            feed(Assembler(capacity=100), block(row("a", 0, 1, need=need), step=7))


def test_greedy_and_truncated_rows_in_one_batch() -> None:
    assembler = Assembler(capacity=100)
    feed(
        assembler,
        block(row("greedy", 0, 3, kind=GREEDY), row("kept", 0, 5, entries=PAIR, logprob=HALF)),
    )
    greedy, kept = take(assembler, "greedy", 3), take(assembler, "kept", 5)
    assert greedy.support_kind == kept.support_kind == "kept"
    assert greedy.support_entries is not None
    assert greedy.support_entries.tolist() == [3]
    assert greedy.sampled_logprobs.tolist() == [0.0]


def test_kinds_that_may_and_may_not_stand_in_one_rollout() -> None:
    assembler = Assembler(capacity=100)
    feed(assembler, block(row("a", 0, 1, kind=GREEDY), row("a", 1, 2, kind=KEPT)))
    assert take(assembler, "a", 1, 2).support_kind == "kept"
    feed(assembler, block(row("b", 0, 1, kind=TOP), row("b", 1, 2, kind=KEPT)))
    failure = assembler.take("b", np.array([1, 2], np.int32))
    assert isinstance(failure, Failure)
    assert (failure.reason, failure.detail) == (
        "mixed_kinds",
        f"kinds {[KEPT, TOP]} in one rollout",
    )


def test_top_rows_carry_their_tail() -> None:
    assembler = Assembler(capacity=100)
    top = {"kind": TOP, "entries": [(5, -1.0), (9, -2.0)]}
    feed(
        assembler,
        block(row("a", 0, 5, logprob=-1.0, tail=0.25, **top)),
        block(row("a", 1, 77, logprob=-7.5, tail=0.5, **top)),
    )
    a = take(assembler, "a", 5, 77)
    assert a.support_kind == "top"
    assert a.support_offsets is not None
    assert a.tail_mass is not None
    assert a.support_offsets.tolist() == [0, 2, 4]
    assert a.tail_mass.tolist() == [0.25, 0.5]
    assert a.sampled_logprobs.tolist() == [-1.0, -7.5]


def test_rows_of_kind_none_have_no_support() -> None:
    assembler = Assembler(capacity=100)
    drawn = [(1, -0.5), (2, -1.5), (1, -0.5)]
    rows = [row("a", i, i, kind=NONE, entries=[], logprob=-2.0, draws=drawn) for i in range(2)]
    feed(assembler, block(*rows))
    a = take(assembler, "a", 0, 1)
    assert (a.support_kind, a.support_offsets, a.support_entries, a.tail_mass) == (
        "none",
        None,
        None,
        None,
    )
    assert a.sampled_logprobs.tolist() == [-2.0, -2.0]
    assert a.draw_entries is not None
    assert a.draw_entries.tolist() == [*pack(drawn), *pack(drawn)]


def test_draws_keep_their_order() -> None:
    assembler = Assembler(capacity=100)
    for position in (1, 0):
        drawn = [(10 * position + k, -1.0) for k in (2, 1, 2)]
        feed(assembler, block(row("a", position, 1, draws=drawn)))
    a = take(assembler, "a", 1, 1)
    assert a.draw_entries is not None
    assert (a.draw_entries & np.uint64(0xFFFFFFFF)).tolist() == [2, 1, 2, 12, 11, 12]


def test_an_empty_rollout_is_an_empty_support() -> None:
    a = take(Assembler(capacity=100), "a")
    assert a.support_offsets is not None
    assert a.support_entries is not None
    assert (a.support_kind, a.support_offsets.tolist(), a.support_entries.size) == ("kept", [0], 0)


def test_empty_steps_change_nothing() -> None:
    assembler = Assembler(capacity=100)
    assert feed(assembler, block(), block()) == []
    assert (assembler.stats.steps, assembler.stats.rows) == (2, 0)


def test_memory_is_bounded_by_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "_CLOSED_IDS", 50)
    assembler = Assembler(capacity=100)
    for i in range(500):
        feed(assembler, block(row(f"r{i}", 0, 1)))
        take(assembler, f"r{i}", 1)
    assert len(assembler._rows) == needed() == 0
    assert len(assembler._closed) == len(assembler._closed_order) == 50
    feed(assembler, block(row("r499", 1, 1), row("r450", 1, 1)))
    assert assembler.stats.late_rows == 2
    assert len(assembler._rows) == 0


def test_bytes_are_counted_and_the_widest_is_found() -> None:
    assembler = Assembler(capacity=100)
    assert (needed(), assembler.widest()) == (0, None)
    wide = [(i, -1.0) for i in range(5)]
    feed(assembler, block(row("a", 0, 1, entries=wide), row("b", 0, 2, entries=PAIR)))
    assert (needed(), assembler.widest()) == (56, "a")
    feed(assembler, block(row("a", 0, 1), row("b", 1, 2)))  # the first replaces five by one
    assert (needed(), assembler.widest()) == (32, "b")
    assembler.close("b")
    assert (needed(), assembler.widest()) == (8, "a")
    take(assembler, "a", 1)
    assert (needed(), assembler.widest()) == (0, None)


def test_a_segment_goes_when_nobody_needs_it_any_more(tmp_path: Path) -> None:
    def segments() -> int:
        return len(list(tmp_path.iterdir())) - 1  # the writer's own stays

    assembler = Assembler(capacity=100)
    bad = row("bad", 0, 1, flags=spool.FLAG_EMPTY, entries=[])
    feed(assembler, block(row("a", 0, 1), row("b", 0, 2)), block(row("b", 1, 3)), block(bad))
    feed(assembler, block(row("late", 0, 1, kind=SKIP)), block())
    assert segments() == 2  # neither the flagged nor the discarded row holds one
    result = assembler.take("b", np.array([2, 3], np.int32))
    assert isinstance(result, CapturedTokens)
    assert result.entries is not None
    assert segments() == 2  # the entries are the caller's, and still to be written
    result.entries.release()
    assert segments() == 1
    assembler.close("a")
    assert segments() == 0
    with pytest.raises(AssertionError, match="are released twice"):
        result.entries.release()


def test_few_long_requests_do_not_hold_everything_sampled_beside_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    assembler = Assembler(capacity=100)
    entries: dict[str, list[int]] = {"long": [], "other": []}
    wide = 40  # entries of the short requests, 7 and 3 of the long ones
    for step in range(30):
        rows = [row(f"short-{step}", 0, 1, entries=[(i, -1.0) for i in range(wide)])]
        for name, count in (("long", 7), ("other", 3)):
            pairs = [(int(i), -float(rng.random())) for i in rng.permutation(99)[:count]]
            entries[name] += pack(pairs).tolist()
            rows.insert(step % 2, row(name, step, 5, entries=pairs))
        feed(assembler, block(*rows))
        take(assembler, f"short-{step}", 1)
    feed(assembler, block())
    segments = _spool[1].segments
    before = segments.num_bytes
    assembler.compact(segments)
    held = 30 * 10 * 8
    assert needed() == held
    assert segments.num_bytes == held < before / 4
    assembler.compact(segments)  # nothing is sparse any more
    assert segments.num_bytes == held
    for name in ("other", "long"):
        found = take(assembler, name, *[5] * 30)
        assert found.support_entries is not None
        assert found.support_entries.tolist() == entries[name]
    assert (needed(), segments.num_bytes) == (0, 0)
    assert len(list(tmp_path.iterdir())) == 1


def test_entries_of_a_segment_that_is_cut_short_are_an_error(tmp_path: Path) -> None:
    assembler = Assembler(capacity=100)
    feed(assembler, block(row("a", 0, 1, entries=PAIR)))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(OSError, match=r"a segment ends at byte \d+, before its entries do"):
        take(assembler, "a", 1)


@pytest.mark.parametrize(
    ("largest", "capacity"), [(0, 2), (1, 2), (2, 4), (100, 256), (700, 2048), (2**20, 2**21)]
)
def test_suggested_capacity(largest: int, capacity: int) -> None:
    assert suggested_capacity(largest) == capacity
    assert capacity >= 1.5 * largest
