"""Which steps the V2 runner's adapter lets the capture truncate, and who truncates the others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
import v2_fakes
from v2_fakes import CUT, SLOTS, UNCUT, VOCAB, Drawing, Sampler, Scheduled, decode

from rollout.capture.batch import BatchRows, RowCut
from rollout.capture.request import GREEDY, KEPT, NONE, SKIP, TOP


def masked(logits: torch.Tensor) -> bool:
    """Whether vLLM's stand-in has truncated."""
    return bool((logits[:, 0] == -torch.inf).all())


def cut_of(rows: BatchRows) -> RowCut | None:
    assert rows.noise is not None
    return rows.noise.cut


@pytest.mark.parametrize(
    ("truncates", "kind", "top_k", "top_p", "by_capture", "by_vllm"),
    [
        (True, KEPT, 5, 1.0, True, False),
        (True, KEPT, VOCAB, 0.5, True, False),
        (True, KEPT, 5, 0.5, True, False),
        (True, KEPT, VOCAB, 1.0, False, False),  # by min-p alone
        (True, TOP, VOCAB, 1.0, False, False),
        (True, NONE, VOCAB, 1.0, False, False),
        # vLLM has them without a cut; if not, it truncates
        (True, GREEDY, 5, 0.5, False, True),
        (False, KEPT, 5, 0.5, False, True),
        (False, KEPT, VOCAB, 1.0, False, False),
    ],
)
def test_who_truncates_a_step(
    monkeypatch: pytest.MonkeyPatch,
    truncates: bool,
    kind: int,
    top_k: int,
    top_p: float,
    by_capture: bool,
    by_vllm: bool,
) -> None:
    case = Drawing(monkeypatch, truncates=truncates)
    case.runner.add("a", 3, 1, kind, top_k, top_p)
    for step in range(3):
        assert case.tokens(decode("a", 3, 1 + step)) == [3]
        assert (cut_of(case.drawn[-1]) is not None) == by_capture
        assert masked(case.logits[-1]) == by_vllm
    assert len(case.drawn) == 3
    assert not case.recorded


def test_a_cut_is_that_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Drawing(monkeypatch, truncates=True)
    for name, slot, kind, top_k, top_p in (
        ("a", 6, KEPT, 5, 0.5),
        ("b", 1, TOP, VOCAB, 1.0),
        ("c", 4, KEPT, VOCAB, 0.75),
        ("d", 0, GREEDY, VOCAB, 1.0),
    ):
        case.runner.add(name, slot, 1, kind, top_k, top_p)
    slots = {"a": 6, "b": 1, "c": 4, "d": 0}
    for computed, names in enumerate(["abcd", "abcd", "cab", "b", "dc", "dc"], start=1):
        case.tokens(*(decode(name, slots[name], computed) for name in names))
        cut = cut_of(case.drawn[-1])
        if names == "b":
            assert cut is None
            continue
        assert cut is not None
        of_names = {"a": (5, 0.5), "b": (VOCAB, 1.0), "c": (VOCAB, 0.75), "d": (VOCAB, 1.0)}
        assert list(zip(cut.top_k.tolist(), cut.top_p.tolist(), strict=True)) == [
            of_names[name] for name in names
        ]
        assert [cut.top_k.dtype.name, cut.top_p.dtype.name] == ["int32", "float32"]
    # written to the device where it changes only
    assert case.drawn[1].noise is case.drawn[0].noise
    assert case.drawn[5].noise is case.drawn[4].noise
    # the next request in a slot has a cut of its own, and what a step has is never changed
    case.runner.add("e", 4, 1, KEPT, 7, 1.0)
    case.tokens(decode("e", 4, 1))
    for rows, values in ((case.drawn[-1], [7]), (case.drawn[-2], [VOCAB, VOCAB])):
        found = cut_of(rows)
        assert found is not None
        assert found.top_k.tolist() == values


def test_a_row_that_does_not_count_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Drawing(monkeypatch, truncates=True)
    case.runner.add("a", 0, 1, KEPT)
    case.runner.add("b", 1, 9, KEPT, top_k=5)
    unfinished = Scheduled(name="b", slot=1, computed=0, tokens=4, prefill=9)
    case.tokens(decode("a", 0, 1), unfinished)
    assert case.drawn[-1].kinds.tolist() == [KEPT, SKIP]
    assert cut_of(case.drawn[-1]) is None
    assert masked(case.logits[-1])
    case.tokens(decode("a", 0, 2), Scheduled(name="b", slot=1, computed=4, tokens=5, prefill=9))
    assert cut_of(case.drawn[-1]) is not None
    assert not masked(case.logits[-1])


def test_what_the_capture_could_not_draw_vllm_truncates_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Drawing(monkeypatch, drawn=None, truncates=True)
    case.runner.add("a", 0, 1, KEPT, top_k=5)
    case.runner.add("b", 1, 1, KEPT, top_p=0.5)
    # the stand-in checks that it gets the arguments that vLLM had meant for it
    assert case.tokens(decode("a", 0, 1)) == [CUT]
    assert case.tokens(decode("a", 0, 2), decode("b", 1, 1)) == [CUT, CUT]
    assert case.tokens(decode("b", 1, 2)) == [CUT]
    assert not any(map(masked, case.logits))
    assert not case.recorded  # the capture has said what became of the steps


def nothing_is_recorded(case: Drawing) -> None:
    case.adapter.on_step = None


def nothing_is_drawn(case: Drawing) -> None:
    case.adapter.on_draw = None


def another_request(case: Drawing) -> None:
    case.runner.add("a", 0, 1, SKIP, top_k=5)


@pytest.mark.parametrize("change", [nothing_is_recorded, nothing_is_drawn, another_request])
def test_vllm_truncates_what_it_draws(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Drawing], None]
) -> None:
    case = Drawing(monkeypatch, truncates=True)
    case.runner.add("a", 0, 1, KEPT, top_k=5)
    assert case.tokens(decode("a", 0, 1)) == [3]
    change(case)
    assert case.tokens(decode("a", 0, 2)) == [CUT]
    assert len(case.drawn) == 1


@pytest.mark.parametrize("wanted", ["logprobs", "masks"])
def test_vllm_truncates_what_it_reports_of(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    case = Drawing(monkeypatch, truncates=True)
    case.runner.add("a", 3, 1, KEPT, 5, 1.0)
    sampler = case.runner.sampler
    hooked = sampler.sample
    if wanted == "masks":
        monkeypatch.setattr(sampler, "return_sampling_mask", True, raising=False)
    else:
        monkeypatch.setattr(sampler, "sample", lambda logits: hooked(logits, return_logprobs=True))
    assert case.tokens(decode("a", 3, 1)) == [CUT]
    assert not case.drawn
    assert len(case.recorded) == 1
    monkeypatch.setattr(sampler, "return_sampling_mask", False, raising=False)
    monkeypatch.setattr(sampler, "sample", hooked)
    assert case.tokens(decode("a", 3, 2)) == [3]


def test_vllm_warms_up_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Drawing(monkeypatch, truncates=True)
    case.runner.sampler.sampling_states.top_k.np[:] = 5
    case.runner.sampler.slots = np.zeros(2, np.intp)
    assert case.runner.sampler.sample(torch.zeros(2, 4))[0].tolist() == [CUT, CUT]


def test_recording_that_ends_within_a_step_leaves_vllm_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Drawing(monkeypatch, truncates=True)
    case.runner.add("a", 0, 1, KEPT, top_k=5)
    case.runner.sampler.between = lambda: nothing_is_recorded(case)
    assert case.tokens(decode("a", 0, 1)) == [CUT]
    assert not case.drawn


def fail() -> None:
    raise ArithmeticError("planted")


@pytest.mark.parametrize("where", ["before the draw", "in the draw"])
def test_a_step_that_fails_leaves_the_next_ones_nothing(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    case = Drawing(monkeypatch, truncates=True)
    case.runner.add("a", 0, 1, KEPT, top_k=5)
    case.runner.add("b", 1, 1, KEPT)
    stock_on_draw = case.adapter.on_draw
    if where == "before the draw":
        case.runner.sampler.between = fail
    else:
        case.adapter.on_draw = lambda _logits, _rows: fail()
    with pytest.raises(ArithmeticError, match="planted"):
        case.tokens(decode("a", 0, 1))
    case.runner.sampler.between = lambda: None
    case.adapter.on_draw = stock_on_draw
    # neither what the step would have been truncated by, nor its rows
    assert v2_fakes.gumbel_sample(torch.zeros(2, 4)).tolist() == [UNCUT, UNCUT]
    assert case.tokens(decode("b", 1, 1)) == [3]
    assert case.drawn[-1].request_ids == ["b"]
    case.adapter.on_step = None
    assert case.tokens(decode("b", 1, 2)) == [UNCUT]


def test_tokens_of_logits_that_nobody_masked_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # as from a fused sampler that comes in vLLM's way
    case = Drawing(monkeypatch, truncates=True)
    case.runner.add("a", 0, 1, KEPT, top_k=5)

    def sample(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v2_fakes.apply_top_k_top_p(logits, torch.tensor([5]), None, has_topp_only_rows=False)
        return torch.zeros(1), logits

    case.adapter._stock_sample = sample
    with pytest.raises(AssertionError, match="nobody had masked"):
        case.tokens(decode("a", 0, 1))


def test_logits_that_come_masked_are_not_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Drawing(monkeypatch, truncates=True)
    case.runner.add("a", 0, 1, KEPT, top_k=5)
    # as if another part of the process had taken the hook
    monkeypatch.setattr(v2_fakes, "apply_top_k_top_p", v2_fakes.apply_top_k_top_p.stock)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="not truncated once"):
        case.tokens(decode("a", 0, 1))


def test_a_new_engine_takes_the_hook_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Drawing(monkeypatch, drawn=3, truncates=True)
    second = Drawing(monkeypatch, drawn=4, truncates=True)
    for case in (first, second):
        case.runner.add("a", 0, 1, KEPT, top_k=5)
    assert second.tokens(decode("a", 0, 1)) == [4]
    assert not masked(second.logits[0])
    second.adapter.on_draw = None
    assert second.tokens(decode("a", 0, 2)) == [CUT]
    # where the first one still runs, vLLM does all of it
    assert first.tokens(decode("a", 0, 1)) == [CUT]
    assert not first.drawn
    assert len(first.recorded) == 1


def test_an_engine_that_is_gone_leaves_vllm_its_truncation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Drawing(monkeypatch, truncates=True)
    gone = weakref.ref(case.runner)
    del case
    gc.collect()
    assert gone() is None
    logits = v2_fakes.apply_top_k_top_p(torch.zeros(2, 4), torch.tensor([5]), None, False)
    assert masked(logits)


@pytest.mark.parametrize("missing", ["top_k", "top_p", "apply_top_k_top_p"])
def test_a_version_that_truncates_otherwise_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    stock, stock_init = v2_fakes.apply_top_k_top_p, Sampler.__init__

    def init(self: Sampler) -> None:
        stock_init(self)
        setattr(self.sampling_states, missing, None)

    if missing == "apply_top_k_top_p":
        monkeypatch.delattr(v2_fakes, missing)
    else:
        monkeypatch.setattr(Sampler, "__init__", init)
    case = Drawing(monkeypatch)
    assert getattr(v2_fakes, "apply_top_k_top_p", stock) is stock
    assert case.adapter.check_draw(lambda logits, _rows: torch.full((len(logits),), UNCUT))
    assert not case.adapter.check_cut(lambda _logits, _rows: torch.zeros(0))


Tried = Callable[[np.ndarray, int, float], np.ndarray]


def kept_by_rule(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The ids that a row keeps, by a loop."""
    kept, mass = [], 0.0
    first = np.argsort(-logits, kind="stable")[:top_k]
    weights = np.exp(logits[first].astype(np.float64))
    for token, share in zip(first, weights / weights.sum(), strict=True):
        if mass >= top_p < 1.0:
            break
        kept.append(token)
        mass += share
    return np.array(kept)


def one_more(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    return kept_by_rule(logits, top_k + 1, top_p)


def without_top_k(logits: np.ndarray, _top_k: int, top_p: float) -> np.ndarray:
    return kept_by_rule(logits, VOCAB, top_p)


def without_top_p(logits: np.ndarray, top_k: int, _top_p: float) -> np.ndarray:
    return kept_by_rule(logits, top_k, 1.0)


@pytest.mark.parametrize("slots", [1, 5, SLOTS, 100])
@pytest.mark.parametrize(
    ("keep", "agrees"),
    [
        (kept_by_rule, True),
        (one_more, False),
        (without_top_k, False),
        (without_top_p, False),
    ],
)
def test_the_capture_truncates_if_its_tokens_are_those_of_a_sort(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    slots: int,
    keep: Tried,
    agrees: bool,
) -> None:
    case = Drawing(monkeypatch)
    case.adapter._slots = slots
    seen: list[tuple[int, int, float, bool]] = []

    def draw(logits: np.ndarray, seed: int, position: int, greedy: bool) -> int:
        noise = np.random.default_rng([seed % 2**32, position]).gumbel(size=VOCAB)
        return int(np.argmax(logits if greedy else logits + noise))

    def stock_draw(
        logits: torch.Tensor,
        slots_of_rows: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        return torch.tensor(
            [
                draw(row, int(seeds[slot]), int(position), bool(temperature[slot] == 0))
                for row, slot, position in zip(
                    logits.numpy(), slots_of_rows.tolist(), positions, strict=True
                )
            ]
        )

    def try_draw(logits: torch.Tensor, rows: BatchRows) -> torch.Tensor:
        assert len(logits) <= slots
        cut, noise, tokens = cut_of(rows), rows.noise, []
        assert cut is not None
        assert noise is not None
        for i, row in enumerate(logits.numpy()):
            kind, k, p = int(rows.kinds[i]), int(cut.top_k[i]), float(cut.top_p[i])
            seen.append((kind, k, p, bool((row == -np.inf).any())))
            only = row
            if kind == KEPT:
                kept = keep(row, k, p)
                only = np.full(VOCAB, -np.inf, np.float32)
                only[kept] = row[kept]
            position = int(noise.lead[i] + rows.positions[i])
            tokens.append(draw(only, int(noise.seeds[i]), position, kind == GREEDY))
        return torch.tensor(tokens)

    monkeypatch.setattr(case.adapter, "_stock_draw", stock_draw)
    assert case.adapter.check_cut(try_draw) == agrees
    assert ("vLLM truncates" in caplog.text) == (not agrees)
    assert len(seen) == 64
    assert {kind for kind, *_ in seen[32:]} == {KEPT}
    assert {kind for kind, *_ in seen} == {KEPT, TOP, GREEDY, NONE}
    # vLLM has no cut for the other kinds
    assert {(k, p) for kind, k, p, _ in seen if kind != KEPT} == {(VOCAB, 1.0)}
    of_kept = {(k, p, masked) for kind, k, p, masked in seen if kind == KEPT}
    assert len({(k, p) for k, p, _ in of_kept}) >= 6
    assert {masked for *_, masked in of_kept} == {False, True}
