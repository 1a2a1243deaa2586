"""From steps to rollouts: rows may come twice, late or not at all."""

from pathlib import Path

import numpy as np
import pytest
from assemble_cases import HALF, PAIR, block, feed, needed, open_spool, pack, row, stored, take

from rollout import assemble, spool
from rollout.assemble import Assembler, Failure, suggested_capacity
from rollout.capture.request import GREEDY, KEPT, NONE, SKIP, TOP
from rollout.errors import EngineError
from rollout.rows import RolloutRow, check_row


@pytest.fixture(autouse=True)
def spool_of_the_test(tmp_path: Path) -> None:
    """Give every test a spool."""
    open_spool(tmp_path)


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


@pytest.mark.parametrize(
    ("largest", "capacity"), [(0, 2), (1, 2), (2, 4), (100, 256), (700, 2048), (2**20, 2**21)]
)
def test_suggested_capacity(largest: int, capacity: int) -> None:
    assert suggested_capacity(largest) == capacity
    assert capacity >= 1.5 * largest
