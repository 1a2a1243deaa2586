"""The ring's bookkeeping, with stand-ins for CUDA's streams and events: the copies are real."""

from __future__ import annotations

import dataclasses
import functools
import os
import resource
import signal
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from noise import add_noise, noise_of
from spool_blocks import entries_of

from rollout.capture import copy_ahead, ring
from rollout.capture.batch import BatchRows, RowNoise
from rollout.capture.launch_graphs import LaunchGraphs
from rollout.capture.request import GREEDY, KEPT, NONE, SKIP, TOP, CaptureSettings
from rollout.capture.ring_process import take_steps
from rollout.capture.shared_ring import SharedRing
from rollout.kernels.support_capture import capture_step
from rollout.kernels.token_draw import tokens_reference
from rollout.spool import FLAG_LOST, FLAG_OVERFLOW, SpoolReader, StoredStep

VOCAB = 50


class Event:
    """Stands in for a CUDA event whose work is done at once."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """Stands in for a CUDA stream."""

    def __init__(self, *_: Any) -> None: ...

    def wait_event(self, _event: Event) -> None: ...


@pytest.fixture(params=["at once", "by a stream of their own"], autouse=True)
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "at once":
        monkeypatch.setattr(ring, "_AT_ONCE_BYTES", 0)
        monkeypatch.setattr(copy_ahead, "LEAST", 6)  # of 15: the rest goes the other way


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = torch.zeros

    def unpinned(*args: Any, pin_memory: bool = False, **kw: Any) -> Any:
        return stock(*args, **kw)

    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(ring, "_pin", lambda _memory: None)
    monkeypatch.setattr(ring, "_unpin", lambda _memory: None)
    monkeypatch.setattr(LaunchGraphs, "run", lambda _self, _key, launch: launch())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(ring.RingRecorder, "_launch_stream", lambda _self: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _stream: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)


@pytest.fixture
def recorder() -> Iterator[ring.RingRecorder]:
    made = make_recorder()
    yield made
    made.stop()


def make_recorder(
    capacity: int = 400, slots: int = 3, draws_tokens: bool = False, draws: int = 2
) -> ring.RingRecorder:
    settings = CaptureSettings(support_capacity=capacity, top=4, draws=draws)
    return ring.RingRecorder(
        settings,
        device=torch.device("cpu"),
        max_rows=8,
        vocab_size=VOCAB,
        slots=slots,
        add_noise=add_noise if draws_tokens else None,
    )


def step_of(seed: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor, BatchRows]:
    """A step with each kind of row; a KEPT row keeps ids below 10 + its number."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, VOCAB, generator=generator)
    kinds = np.array([KEPT, GREEDY, TOP, NONE, SKIP][:rows], np.int8)
    logits[kinds == KEPT, 10:] = -torch.inf
    sampled = torch.randint(0, 10, (rows,), generator=generator)
    return (
        logits,
        sampled,
        BatchRows(
            request_ids=[f"r{i}" for i in range(rows)],
            positions=np.full(rows, seed, np.int32),
            kinds=kinds,
            seeds=np.arange(rows, dtype=np.int64),
        ),
    )


def check_block(block: StoredStep, seed: int, draws: int = 2) -> None:
    """Compare a written step with the logits that it was made of."""
    logits, sampled, rows = step_of(seed)
    log_q = logits.double().log_softmax(-1).numpy()
    assert block.step == seed
    assert block.request_ids == rows.request_ids
    assert block.positions.tolist() == rows.positions.tolist()
    assert block.sampled.tolist() == sampled.tolist()
    assert block.counts.tolist() == [10, 1, 4, 0, 0]
    entries = entries_of(block)
    assert block.need == entries.size == 15
    ids = (entries & np.uint64(0xFFFFFFFF)).astype(int)
    logprobs = (entries >> np.uint64(32)).astype(np.uint32).view(np.float32)
    assert sorted(ids[:10]) == list(range(10))
    np.testing.assert_allclose(logprobs[:10], log_q[0, ids[:10]], atol=1e-6)
    assert (ids[10], logprobs[10]) == (int(sampled[1]), 0.0)
    assert sorted(ids[11:]) == sorted(np.argsort(-log_q[2])[:4].tolist())
    np.testing.assert_allclose(block.sampled_logprobs[3], log_q[3, sampled[3]], atol=1e-6)
    assert block.draws.shape == (5, draws)


def test_steps_come_out_whole_and_in_order(recorder: ring.RingRecorder, tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        recorder.start(str(folder))
        for seed in range(20):  # many times the slots
            recorder.record(seed, *step_of(seed))
        recorder.flush()
        blocks = list(SpoolReader(folder).poll())
        assert len(blocks) == 20
        for seed, block in enumerate(blocks):
            check_block(block, seed)
        assert recorder.error is None


def test_kinds_that_come_again_are_those_of_the_step(
    recorder: ring.RingRecorder, tmp_path: Path
) -> None:
    # the same arrays in other steps and slots, of other numbers of rows
    kept = np.array([KEPT, KEPT, SKIP], np.int8)
    greedy = np.array([GREEDY, SKIP, GREEDY, GREEDY, KEPT], np.int8)
    order = [kept, kept, greedy, kept, kept, kept, kept, greedy, greedy, greedy, greedy, kept]
    recorder.start(str(tmp_path))
    for number, kinds in enumerate(order):
        logits, sampled, rows = step_of(number, len(kinds))
        logits[:, 10:] = -torch.inf
        recorder.record(number, logits, sampled, dataclasses.replace(rows, kinds=kinds))
        # rows that are not there are none for the device
        slot = recorder._slots[number % len(recorder._slots)]
        assert not slot.kinds[len(kinds) :].any()
    recorder.flush()
    counts = {SKIP: 0, GREEDY: 1, KEPT: 10}
    for block, kinds in zip(SpoolReader(tmp_path).poll(), order, strict=True):
        assert block.kinds.tolist() == kinds.tolist()
        assert block.counts.tolist() == [counts[kind] for kind in kinds.tolist()]


def test_a_row_past_the_capacity_is_flagged_and_the_rest_is_whole(tmp_path: Path) -> None:
    recorder = make_recorder(capacity=12)
    recorder.start(str(tmp_path))
    recorder.record(0, *step_of(0))
    recorder.stop()
    (block,) = SpoolReader(tmp_path).poll()
    assert (block.flags & FLAG_OVERFLOW).tolist() == [0, 0, FLAG_OVERFLOW, 0, 0]
    assert (block.need, block.num_entries) == (15, 11)


def step_to_draw(seed: int) -> tuple[torch.Tensor, BatchRows, list[int]]:
    """A step of rows that are drawn here, in odd steps of KEPT ones alone, and their tokens."""
    logits, _, rows = step_of(seed, 4)
    kinds = np.array([KEPT, KEPT, SKIP, KEPT] if seed % 2 else [KEPT, GREEDY, TOP, NONE], np.int8)
    logits[kinds == KEPT, 10:] = -torch.inf
    lead = 9 - seed
    noise = RowNoise(
        seeds=np.arange(seed, seed + 4, dtype=np.int64),
        lead=np.full(4, lead, np.int64),
        untruncated=seed % 2 == 0,
    )
    of_ids = noise_of(list(range(seed, seed + 4)), [seed + lead] * 4, VOCAB).cpu()
    of_ids[kinds == GREEDY] = 0.0
    tokens = tokens_reference(logits, of_ids)
    tokens[kinds == SKIP] = 0
    return logits, dataclasses.replace(rows, kinds=kinds, noise=noise), tokens.tolist()


@pytest.mark.parametrize("draws", [0, 2])
def test_tokens_drawn_here_are_returned_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draws: int
) -> None:
    monkeypatch.setattr(ring, "capture_step", functools.partial(capture_step, impl="triton"))
    recorder = make_recorder(draws_tokens=True, draws=draws)
    recorder.start(str(tmp_path))
    returned = {}
    for seed in range(9):
        if seed % 3:
            logits, rows, _ = step_to_draw(seed)
            returned[seed] = recorder.record(seed, logits, None, rows)
        else:
            assert recorder.record(seed, *step_of(seed)) is None
        recorder.flush()
    blocks = list(SpoolReader(tmp_path).poll())
    assert len(blocks) == 9
    for seed, block in enumerate(blocks):
        if not seed % 3:
            check_block(block, seed, draws)
            continue
        logits, rows, tokens = step_to_draw(seed)
        assert block.sampled.tolist() == tokens
        # no view: other steps have passed since
        assert returned[seed].tolist() == tokens  # type: ignore[union-attr]
        assert block.counts.tolist() == ([10, 10, 0, 10] if seed % 2 else [10, 1, 4, 0])
        log_q = logits.double().log_softmax(-1).numpy()[range(4), tokens]
        log_q[(rows.kinds == SKIP) | (rows.kinds == GREEDY)] = 0.0
        np.testing.assert_allclose(block.sampled_logprobs, log_q, atol=1e-6)
    for seed in (30, 31):
        assert recorder.try_draw(*step_to_draw(seed)[:2]).tolist() == step_to_draw(seed)[2]
    recorder.stop()


def test_what_differs_between_launches_is_in_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "capture_step", functools.partial(capture_step, impl="triton"))
    recorder = make_recorder(draws_tokens=True, slots=1)
    launches: dict[Hashable, Callable[[], None]] = {}

    def run(_self: LaunchGraphs, key: Hashable, launch: Callable[[], None]) -> None:
        launches.setdefault(key, launch)()  # what a graph would do: the first one again

    monkeypatch.setattr(LaunchGraphs, "run", run)
    # a graph finds the logits by an address that travels in memory, the reference in the launch
    place = torch.empty(5, VOCAB)
    recorder.start(str(tmp_path))
    for seed in range(1, 13):
        if seed % 3:
            logits, rows, _ = step_to_draw(seed)
            place[:4] = logits
            recorder.record(seed, place[:4], None, rows)
        else:
            logits, sampled, rows = step_of(seed)
            place[:] = logits
            recorder.record(seed, place, sampled, rows)
        recorder.flush()
    for block in SpoolReader(tmp_path).poll():
        if block.step % 3:
            assert block.sampled.tolist() == step_to_draw(block.step)[2]
        else:
            check_block(block, block.step)
    recorder.stop()


def signal_process(recorder: ring.RingRecorder, number: int) -> None:
    assert recorder._process is not None
    os.kill(recorder._process.pid, number)


def test_no_free_slot_in_time_loses_the_step_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = make_recorder(slots=1)
    recorder.start(str(tmp_path))
    signal_process(recorder, signal.SIGSTOP)
    recorder.record(0, *step_of(0))
    monkeypatch.setattr(ring, "SLOT_SECONDS", 0.05)
    recorder.record(1, *step_of(1))
    # nobody has drawn its tokens
    logits, rows, _ = step_to_draw(3)
    assert recorder.record(3, logits, None, rows) is None
    monkeypatch.setattr(ring, "SLOT_SECONDS", 30.0)
    signal_process(recorder, signal.SIGCONT)
    recorder.record(2, *step_of(2))
    recorder.stop()
    steps = {step.step: step for step in SpoolReader(tmp_path).poll()}
    assert sorted(steps) == [0, 1, 2, 3]
    assert steps[3].flags.tolist() == [FLAG_LOST, FLAG_LOST, 0, FLAG_LOST]
    lost = steps[1]
    assert lost.flags.tolist() == [FLAG_LOST] * 4 + [0]  # a row that does not count is not lost
    assert lost.request_ids == step_of(1)[2].request_ids
    assert lost.waited >= 0.05
    assert lost.num_entries == 0
    for kept in (0, 2):
        check_block(steps[kept], kept)
    assert recorder.error is None


def test_a_full_disk_is_told_and_sampling_goes_on(
    recorder: ring.RingRecorder, tmp_path: Path
) -> None:
    recorder.start(str(tmp_path / "a"))
    for seed in range(3):
        recorder.record(seed, *step_of(seed))
    recorder.flush()
    assert recorder._process is not None
    size = sum(path.stat().st_size for path in (tmp_path / "a").glob("*.spool"))
    resource.prlimit(recorder._process.pid, resource.RLIMIT_FSIZE, (size, size))
    for seed in range(3, 12):
        recorder.record(seed, *step_of(seed))
    recorder.flush()
    assert recorder.error == "OSError: [Errno 27] File too large"
    recorder.stop()
    assert len(list(SpoolReader(tmp_path / "a").poll())) == 3
    recorder.start(str(tmp_path / "b"))
    recorder.record(0, *step_of(0))
    recorder.flush()
    assert recorder.error is None
    (block,) = SpoolReader(tmp_path / "b").poll()
    check_block(block, 0)


def test_a_dead_process_is_told_and_sampling_goes_on(
    recorder: ring.RingRecorder, tmp_path: Path
) -> None:
    recorder.start(str(tmp_path / "a"))
    recorder.record(0, *step_of(0))
    recorder.flush()
    signal_process(recorder, signal.SIGKILL)
    for seed in range(1, 9):
        recorder.record(seed, *step_of(seed))
    recorder.flush()
    assert recorder.error == "the process that takes steps ended with code -9"
    recorder.start(str(tmp_path / "b"))
    assert recorder.error is None
    recorder.record(7, *step_of(7))
    recorder.flush()
    (block,) = SpoolReader(tmp_path / "b").poll()
    check_block(block, 7)


def test_what_is_there_is_written_when_the_sampling_process_is_gone(
    recorder: ring.RingRecorder, tmp_path: Path
) -> None:
    read, write = os.pipe()
    for seed in range(2):
        recorder.record(seed, *step_of(seed))
    os.close(write)
    take_steps(recorder._ring, tmp_path, parent=read)
    os.close(read)
    blocks = list(SpoolReader(tmp_path).poll())
    assert [block.step for block in blocks] == [0, 1]
    for block in blocks:
        check_block(block, block.step)


def test_request_ids_come_and_go(recorder: ring.RingRecorder) -> None:
    """They are handed over where they change only: a step may not get those of another one."""
    writer = recorder._ring
    reader = SharedRing(os.dup(writer.file), writer.layout)
    batches = [["a", "b"], ["a", "b"], ["b", "a"], ["b", "a"], ["b"], ["b", "c"], ["b", "c"], ["a"]]
    for number, ids in enumerate(batches):
        writer.put_rows(
            number % 3,
            step=number,
            waited=0.5,
            request_ids=list(ids),
            positions=np.arange(len(ids), dtype=np.int32) + number,
            kinds=np.full(len(ids), KEPT, np.int8),
        )
        found = reader.step(number % 3)
        assert (found.step, found.request_ids, found.waited) == (number, ids, 0.5)
        assert found.positions.tolist() == [number + i for i in range(len(ids))]
    os.close(reader.file)
    with pytest.raises(ValueError, match="bytes of request ids, expected 256 a row"):
        writer.put_rows(
            0,
            step=0,
            waited=0.0,
            request_ids=["x" * 5000],
            positions=np.zeros(1, np.int32),
            kinds=np.zeros(1, np.int8),
        )


def test_the_layout_is_that_of_the_device(recorder: ring.RingRecorder) -> None:
    """A field that moves on one side alone would be read as another one."""
    out = recorder._slots[1].out
    out.header.copy_(torch.randint(0, 256, out.header.shape, dtype=torch.uint8))
    recorder._headers[1].copy_(out.header)
    found = recorder._ring.step(1).header
    assert sorted(found) == sorted(
        ["counts", "draws", "flags", "offsets", "sampled_ids", "sampled_logprobs", "tail_mass"]
    )
    for name, field in found.items():
        expected = getattr(out, name).numpy()
        assert (field.dtype, field.shape) == (expected.dtype, expected.shape), name
        assert field.tobytes() == expected.tobytes(), name
