"""The ring's bookkeeping, with stand-ins for CUDA's streams and events: the copies are real."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ring_cases import (
    check_block,
    copy_by_another_stream,
    do_without_cuda,
    make_recorder,
    step_of,
    step_to_draw,
)

from rollout.capture import ring
from rollout.capture.request import GREEDY, KEPT, SKIP
from rollout.capture.ring_process import take_steps
from rollout.capture.shared_ring import SharedRing
from rollout.spool import FLAG_LOST, FLAG_OVERFLOW, SpoolReader


@pytest.fixture(params=["at once", "by a stream of their own"], autouse=True)
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    do_without_cuda(monkeypatch)
    if request.param != "at once":
        copy_by_another_stream(monkeypatch)


@pytest.fixture
def recorder() -> Iterator[ring.RingRecorder]:
    made = make_recorder()
    yield made
    made.stop()


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
    step = step_to_draw(3)
    assert recorder.record(3, step.logits, None, step.rows) is None
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
