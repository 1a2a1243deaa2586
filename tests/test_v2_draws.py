"""Which steps the V2 runner's adapter lets the capture draw, and who draws the others."""

from __future__ import annotations

import gc
import importlib
import weakref
from types import SimpleNamespace

import pytest
import torch
import v2_fakes
from v2_fakes import Drawing, Sampler, Scheduled, decode

from rollout.capture import v2_hooks
from rollout.capture.batch import BatchRows
from rollout.capture.request import GREEDY, KEPT, NONE, SKIP, TOP


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
    assert set(seen[:32]) == {KEPT, TOP, GREEDY, NONE}
    assert seen[32:] == 32 * [KEPT]  # their launches are others
    assert ("vLLM draws the tokens" in caplog.text) == (kind is not None)


def test_noise_that_is_not_known_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler()
    assert v2_hooks.find_noise(sampler) is None  # on a CPU, where no kernel runs
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = SimpleNamespace(add_noise="noise")
    monkeypatch.setattr(importlib, "import_module", lambda _name: module)
    assert v2_hooks.find_noise(sampler) == "noise"
    sampler.use_fp64_gumbel = True
    assert v2_hooks.find_noise(sampler) is None


def test_an_engine_that_is_gone_leaves_vllm_its_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Drawing(monkeypatch)
    gone = weakref.ref(case.runner)
    del case
    gc.collect()
    assert gone() is None
    assert v2_fakes.gumbel_sample(torch.zeros(2, 4)).tolist() == [7, 7]


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
