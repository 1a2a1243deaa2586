"""Tokens that the ring draws, of rows that it may truncate: the kernels run interpreted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from pathlib import Path

import pytest
import torch
from ring_cases import (
    VOCAB,
    check_block,
    copy_by_another_stream,
    do_without_cuda,
    make_recorder,
    noise_for,
    step_of,
    step_to_draw,
)

from rollout.capture import ring
from rollout.capture.batch import BatchRows
from rollout.capture.launch_graphs import LaunchGraphs
from rollout.kernels.support_capture import capture_step
from rollout.spool import SpoolReader


@pytest.fixture(params=["at once", "by a stream of their own"], autouse=True)
def on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    do_without_cuda(monkeypatch)
    monkeypatch.setattr(ring, "capture_step", functools.partial(capture_step, impl="triton"))
    if request.param != "at once":
        copy_by_another_stream(monkeypatch)


@pytest.mark.parametrize("draws", [0, 2])
def test_tokens_drawn_here_are_returned_and_stored(tmp_path: Path, draws: int) -> None:
    recorder = make_recorder(draws_tokens=True, draws=draws)
    recorder.start(str(tmp_path))
    # each third step is truncated here; not where draws are recorded, which are of masked logits
    steps = {
        seed: step_to_draw(seed, cut=not draws and seed % 3 == 2) for seed in range(9) if seed % 3
    }
    returned = {}
    for seed in range(9):
        if seed % 3:
            returned[seed] = recorder.record(seed, steps[seed].logits, None, steps[seed].rows)
        else:
            assert recorder.record(seed, *step_of(seed)) is None
        recorder.flush()
    blocks = list(SpoolReader(tmp_path).poll())
    assert len(blocks) == 9
    for seed, block in enumerate(blocks):
        if not seed % 3:
            check_block(block, seed, draws)
            continue
        steps[seed].check(block)
        # no view: other steps have passed since
        assert returned[seed].tolist() == steps[seed].tokens  # type: ignore[union-attr]
    for seed in (30, 31):
        step = step_to_draw(seed, cut=not draws)
        assert recorder.try_draw(step.logits, step.rows).tolist() == step.tokens
    recorder.stop()


def test_cuts_that_come_again_are_those_of_the_step(tmp_path: Path) -> None:
    # the same objects in other steps and slots; what a slot had before may not stay
    plain, first, second = noise_for(1, cut=False), noise_for(1, cut=True), noise_for(3, cut=True)
    order = [first, first, second, plain, first, first, plain, second, first, plain, plain, second]
    recorder = make_recorder(draws_tokens=True, draws=0)
    recorder.start(str(tmp_path))
    steps = [step_to_draw(number, noise=noise) for number, noise in enumerate(order)]
    assert len({str(step.tokens) for step in steps}) > 6
    for number, step in enumerate(steps):
        recorder.record(number, step.logits, None, step.rows)
        recorder.flush()
    for block, step in zip(SpoolReader(tmp_path).poll(), steps, strict=True):
        step.check(block)
    recorder.stop()


def test_what_differs_between_launches_is_in_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = make_recorder(draws_tokens=True, slots=1, draws=0)
    launches: dict[Hashable, Callable[[], None]] = {}

    def run(_self: LaunchGraphs, key: Hashable, launch: Callable[[], None]) -> None:
        launches.setdefault(key, launch)()  # what a graph would do: the first one again

    monkeypatch.setattr(LaunchGraphs, "run", run)
    # a graph finds the logits by an address that travels in memory, the reference in the launch
    place = torch.empty(5, VOCAB)
    recorder.start(str(tmp_path))
    # with and without a cut, of KEPT rows alone and of all kinds
    steps = {seed: step_to_draw(seed, cut=seed % 3 == 2) for seed in range(1, 13) if seed % 3}
    for seed in range(1, 13):
        if seed % 3:
            place[:4] = steps[seed].logits
            recorder.record(seed, place[:4], None, steps[seed].rows)
        else:
            logits, sampled, rows = step_of(seed)
            place[:] = logits
            recorder.record(seed, place, sampled, rows)
        recorder.flush()
    for block in SpoolReader(tmp_path).poll():
        if block.step % 3:
            steps[block.step].check(block)
        else:
            check_block(block, block.step, 0)
    recorder.stop()


@pytest.mark.parametrize(
    ("draws_tokens", "draws", "ways"), [(False, 0, 1), (True, 2, 3), (True, 0, 5)]
)
def test_every_launch_of_a_step_is_prepared(
    monkeypatch: pytest.MonkeyPatch, draws_tokens: bool, draws: int, ways: int
) -> None:
    recorder = make_recorder(draws_tokens=draws_tokens, draws=draws)
    monkeypatch.setattr(ring, "capture_step", lambda *_args, **_kwargs: None)
    prepared: dict[Hashable, int] = {}

    def run(_self: LaunchGraphs, key: Hashable, _launch: Callable[[], None]) -> None:
        prepared[key] = prepared.get(key, 0) + 1

    monkeypatch.setattr(LaunchGraphs, "run", run)
    recorder.warm_up((torch.float32, torch.bfloat16))
    assert min(prepared.values()) >= 2  # the second time makes the graph
    assert len(prepared) <= recorder._graphs.most
    before = set(prepared)
    batches: list[tuple[torch.Tensor, torch.Tensor | None, BatchRows]] = [step_of(0)]
    for seed in (1, 2) if draws_tokens else ():
        for cut in (False, True) if not draws else (False,):
            step = step_to_draw(seed, cut=cut)
            batches.append((step.logits, None, step.rows))
    assert len(batches) == ways
    for logits, sampled, rows in batches:
        for dtype in (torch.float32, torch.bfloat16):
            recorder._launch(0, logits.to(dtype), sampled, rows, 1, 0)
    assert set(prepared) == before
