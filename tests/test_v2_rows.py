"""What the V2 runner's adapter makes of batches, against each row's own arithmetic."""

from __future__ import annotations

import gc
import importlib
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout.capture import v2
from rollout.capture.batch import BatchRows
from rollout.capture.request import GREEDY, KEPT, NONE, SKIP, TOP, extra_args
from rollout.capture.v2 import V2Adapter

SLOTS = 8


@dataclass(kw_only=True, slots=True)
class Scheduled:
    """A request in one step."""

    name: str
    slot: int
    computed: int
    tokens: int
    prefill: int


def gumbel_sample(logits: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
    """Stands in for vLLM's own draws; the hook looks for it beside the sampler's class."""
    return torch.full((len(logits),), 7)


class Sampler:
    """Stands in for vLLM's sampler: masks nothing."""

    def __init__(self) -> None:
        seeds = SimpleNamespace(
            np=np.arange(100, 100 + SLOTS, dtype=np.int64), gpu=torch.zeros(SLOTS)
        )
        self.sampling_states = SimpleNamespace(seeds=seeds, vocab_size=40)
        self.use_fp64_gumbel = False

    def add_request(self, *_: object) -> None: ...

    def sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gumbel_sample(logits, apply_temperature=False), logits


class Runner:
    """Stands in for vLLM's runner."""

    def __init__(self) -> None:
        self.max_num_reqs = SLOTS
        self.rejection_sampler = None
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.zeros(SLOTS, np.int32)))
        self.sampler = Sampler()
        self.wanted: dict[str, tuple[int, int, int]] = {}

    def sample(self, hidden_states: torch.Tensor, batch: Any) -> Any:
        return self.sampler.sample(logits=hidden_states)

    def add(self, name: str, slot: int, prompt: int, kind: int) -> None:
        """Tell the sampler of a request."""
        seed = 1000 + len(self.wanted)
        self.wanted[name] = (prompt, kind, seed)
        self.req_states.prompt_len.np[slot] = prompt
        self.sampler.add_request(slot, prompt, SimpleNamespace(extra_args=extra_args(kind, seed)))

    def step(self, rows: list[Scheduled]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step; return what the sampler does."""
        batch = SimpleNamespace(
            req_ids=[row.name for row in rows],
            num_tokens=sum(row.tokens for row in rows),
            idx_mapping_np=np.array([row.slot for row in rows], np.intp),
            num_computed_tokens_np=np.array([row.computed for row in rows], np.int32),
            num_scheduled_tokens=np.array([row.tokens for row in rows], np.int32),
            prefill_len_np=np.array([row.prefill for row in rows], np.int32),
        )
        result: tuple[torch.Tensor, torch.Tensor] = self.sample(torch.zeros(len(rows), 4), batch)
        return result


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
    monkeypatch.setattr(v2, "_find_noise", lambda _sampler: None)
    return Case()


def decode(name: str, slot: int, computed: int) -> Scheduled:
    return Scheduled(name=name, slot=slot, computed=computed, tokens=1, prefill=1)


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


class Drawing:
    """What an adapter whose capture draws was called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, drawn: int | None = 3) -> None:
        monkeypatch.setattr(v2, "_find_noise", lambda _sampler: object())
        monkeypatch.setitem(globals(), "gumbel_sample", gumbel_sample)  # put back in the end
        self.runner = Runner()
        self.adapter = V2Adapter(self.runner)
        self.recorded: list[BatchRows] = []
        self.drawn: list[BatchRows] = []
        self.adapter.on_step = lambda _logits, _sampled, rows: self.recorded.append(rows)

        def on_draw(logits: torch.Tensor, rows: BatchRows) -> torch.Tensor | None:
            self.drawn.append(rows)
            return None if drawn is None else torch.full((len(logits),), drawn)

        self.adapter.on_draw = on_draw

    def tokens(self, *rows: Scheduled) -> list[int]:
        """Run a step; return the tokens that vLLM gets."""
        return self.runner.step(list(rows))[0].tolist()


@pytest.mark.parametrize("kind", [KEPT, GREEDY, TOP, NONE])
def test_the_capture_draws_rows_of_any_kind(monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    case = Drawing(monkeypatch)
    case.runner.add("a", 5, 4, KEPT)
    case.runner.add("b", 2, 3, kind)
    prefill = [
        Scheduled(name="a", slot=5, computed=0, tokens=4, prefill=4),
        Scheduled(name="b", slot=2, computed=0, tokens=2, prefill=3),  # the rest comes later
    ]
    assert case.tokens(*prefill) == [3, 3]
    rest = Scheduled(name="b", slot=2, computed=2, tokens=1, prefill=3)
    assert case.tokens(decode("a", 5, 4), rest) == [3, 3]
    for step in range(3):
        assert case.tokens(decode("a", 5, 5 + step), decode("b", 2, 3 + step)) == [3, 3]
    kinds = [[KEPT, SKIP], *[[KEPT, kind]] * 4]
    for step, rows in enumerate(case.drawn):
        assert rows.kinds.tolist() == kinds[step]
        assert rows.noise is not None
        assert rows.noise.seeds.tolist() == [105, 102]
        # the last token that is there, as vLLM's sampler counts
        assert (rows.positions + rows.noise.lead).tolist() == [3 + step, 1 + step]
        assert rows.noise.untruncated == (step > 0 and kind != KEPT)
    assert case.drawn[-1].noise is case.drawn[-2].noise
    assert not case.recorded


def test_a_request_that_comes_back_has_its_new_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Drawing(monkeypatch)
    case.runner.add("a", 0, 1, KEPT)
    case.tokens(decode("a", 0, 1))
    case.tokens(decode("a", 0, 2))
    # taken back and scheduled again between two steps, in another slot
    case.runner.add("a", 4, 1, TOP)
    case.tokens(decode("a", 4, 3))
    seeds = [rows.noise.seeds.tolist() for rows in case.drawn if rows.noise is not None]
    assert seeds == [[100], [100], [104]]
    assert case.drawn[-1].kinds.tolist() == [TOP]


def test_vllm_draws_where_a_row_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Drawing(monkeypatch)
    case.runner.add("a", 0, 1, KEPT)
    case.runner.add("b", 1, 1, SKIP)
    assert case.tokens(decode("a", 0, 1), decode("b", 1, 1)) == [7, 7]
    assert len(case.recorded) == 1
    assert not case.drawn
    assert case.tokens(decode("a", 0, 2)) == [3]
    assert len(case.recorded) == 1
    assert case.tokens(decode("a", 0, 3), decode("b", 1, 3)) == [7, 7]
    assert len(case.recorded) == 2


@pytest.mark.parametrize("slots", [1, 2, 8, 100])
@pytest.mark.parametrize("kind", [None, KEPT, TOP, GREEDY, NONE])
def test_the_capture_draws_if_every_kind_agrees(
    slots: int,
    kind: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = Drawing(monkeypatch)
    case.adapter._slots = slots
    seen: list[int] = []

    def try_draw(logits: torch.Tensor, rows: BatchRows) -> torch.Tensor:
        assert len(logits) <= slots
        kept = (logits > -torch.inf).sum(dim=1)
        assert (kept > 1).all()  # one alone would be the token of any noise
        assert (kept[torch.from_numpy(rows.kinds != KEPT)] == 40).all()
        seen.extend(rows.kinds.tolist())
        tokens = torch.full((len(logits),), 7)
        tokens[torch.from_numpy(rows.kinds == kind)] += 1
        return tokens

    assert case.adapter.check_draw(try_draw) == (kind is None)
    assert set(seen) == {KEPT, TOP, GREEDY, NONE}
    assert len(seen) == 32
    assert ("vLLM draws the tokens" in caplog.text) == (kind is not None)


def test_noise_that_is_not_known_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler()
    assert v2._find_noise(sampler) is None  # on a CPU, where no kernel runs
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = SimpleNamespace(add_noise="noise")
    monkeypatch.setattr(importlib, "import_module", lambda _name: module)
    assert v2._find_noise(sampler) == "noise"
    sampler.use_fp64_gumbel = True
    assert v2._find_noise(sampler) is None


def test_an_engine_that_is_gone_leaves_vllm_its_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Drawing(monkeypatch)
    gone = weakref.ref(case.runner)
    del case
    gc.collect()
    assert gone() is None
    assert gumbel_sample(torch.zeros(2, 4)).tolist() == [7, 7]


def test_vllm_draws_what_the_capture_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Drawing(monkeypatch, drawn=None)
    case.runner.add("a", 0, 1, KEPT)
    assert case.tokens(decode("a", 0, 1)) == [7]
    # the capture has said what became of the step
    assert (len(case.drawn), len(case.recorded)) == (1, 0)


def test_vllm_draws_what_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Drawing(monkeypatch)
    case.runner.add("a", 0, 1, KEPT)
    case.adapter.on_step = None
    assert case.tokens(decode("a", 0, 1)) == [7]
    assert not case.drawn
    # as in vLLM's warm-up, which knows no requests
    assert case.runner.sampler.sample(torch.zeros(2, 4))[0].tolist() == [7, 7]


def test_a_new_engine_takes_the_hook_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Drawing(monkeypatch, drawn=3), Drawing(monkeypatch, drawn=4)
    second.runner.add("a", 0, 1, KEPT)
    assert second.tokens(decode("a", 0, 1)) == [4]
    second.adapter.on_draw = None
    assert second.tokens(decode("a", 0, 2)) == [7]
    assert not first.drawn
