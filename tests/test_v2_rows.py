"""What the V2 runner's adapter makes of batches, against each row's own arithmetic."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from v2_fakes import Runner, Scheduled, decode

from rollout.capture import v2
from rollout.capture.batch import BatchRows
from rollout.capture.request import GREEDY, KEPT, NONE, SKIP, TOP, extra_args
from rollout.capture.v2 import V2Adapter


class Case:
    """A runner whose rows are checked in each step."""

    def __init__(self) -> None:
        self.runner = Runner()
        self.adapter = V2Adapter(self.runner)
        self.got: list[BatchRows] = []
        self.resume()

    def resume(self) -> None:
        """Record from now on."""
        self.adapter.on_step = lambda _logits, _sampled, rows: self.got.append(rows)

    def step(self, *rows: Scheduled) -> BatchRows:
        """Run a step and check its rows."""
        self.runner.step(list(rows))
        got = self.got[-1]
        assert got.request_ids == [row.name for row in rows]
        for i, row in enumerate(rows):
            prompt, kind, seed = self.runner.wanted[row.name]
            end = row.computed + row.tokens
            assert got.positions[i] == end - prompt
            assert got.kinds[i] == (kind if end >= row.prefill else SKIP)
            assert got.seeds[i] == seed
        assert got.positions.dtype == np.int32
        assert got.kinds.dtype == np.int8
        return got


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(v2, "find_noise", lambda _sampler: None)
    return Case()


def test_requests_come_go_and_share_slots(case: Case) -> None:
    runner = case.runner
    runner.add("a", 3, 5, KEPT)
    runner.add("b", 1, 7, TOP)
    case.step(
        Scheduled(name="a", slot=3, computed=0, tokens=5, prefill=5),
        Scheduled(name="b", slot=1, computed=0, tokens=4, prefill=7),  # the rest comes later
    )
    case.step(decode("a", 3, 5), Scheduled(name="b", slot=1, computed=4, tokens=3, prefill=7))
    for done in range(4):
        case.step(decode("a", 3, 6 + done), decode("b", 1, 7 + done))
    # another request in the slot of one that has ended
    runner.add("c", 3, 2, GREEDY)
    case.step(
        Scheduled(name="c", slot=3, computed=0, tokens=2, prefill=2),
        decode("b", 1, 11),
    )
    for done in range(3):
        case.step(decode("c", 3, 2 + done), decode("b", 1, 12 + done))
    case.step(decode("b", 1, 15), decode("c", 3, 5))  # in another order
    case.step(decode("b", 1, 16))


def test_a_prefill_of_a_token_at_a_time_samples_at_its_end(case: Case) -> None:
    case.runner.add("a", 0, 3, NONE)
    for computed in range(3):
        got = case.step(Scheduled(name="a", slot=0, computed=computed, tokens=1, prefill=3))
        assert (got.kinds[0] == SKIP) == (computed < 2)
    case.step(decode("a", 0, 3))


def test_a_request_taken_back_prefills_what_it_had_sampled(case: Case) -> None:
    runner = case.runner
    runner.add("a", 0, 3, KEPT)
    runner.add("b", 1, 3, KEPT)
    case.step(
        *(
            Scheduled(name=n, slot=s, computed=0, tokens=3, prefill=3)
            for s, n in ((0, "a"), (1, "b"))
        )
    )
    case.step(decode("a", 0, 3), decode("b", 1, 3))
    # all at once, so that no step shows another batch; in another slot, with five tokens to prefill
    runner.req_states.prompt_len.np[2] = 3
    runner.sampler.add_request(
        2, 5, SimpleNamespace(extra_args=extra_args(KEPT, runner.wanted["a"][2]))
    )
    case.step(
        Scheduled(name="a", slot=2, computed=0, tokens=4, prefill=5),
        Scheduled(name="b", slot=1, computed=0, tokens=5, prefill=5),
    )
    case.step(Scheduled(name="a", slot=2, computed=4, tokens=1, prefill=5), decode("b", 1, 5))
    case.step(decode("a", 2, 5), decode("b", 1, 6))


def test_steps_that_are_not_recorded_may_change_anything(case: Case) -> None:
    runner = case.runner
    runner.add("a", 0, 2, KEPT)
    case.step(Scheduled(name="a", slot=0, computed=0, tokens=2, prefill=2))
    case.step(decode("a", 0, 2))
    case.adapter.on_step = None
    runner.step([Scheduled(name="a", slot=0, computed=0, tokens=1, prefill=4)])
    case.resume()
    got = case.step(Scheduled(name="a", slot=0, computed=1, tokens=1, prefill=4))
    assert got.kinds[0] == SKIP


def test_rows_that_stay_the_same_are_the_same_array(case: Case) -> None:
    # the ring writes them once
    case.runner.add("a", 0, 2, KEPT)
    case.step(Scheduled(name="a", slot=0, computed=0, tokens=2, prefill=2))
    first, second = case.step(decode("a", 0, 2)), case.step(decode("a", 0, 3))
    assert first.kinds is second.kinds
