"""The ring's bookkeeping, with stand-ins for CUDA's streams and events: the copies are real."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from spool_blocks import entries_of

from rollout.capture import ring
from rollout.capture.batch import BatchRows
from rollout.capture.request import GREEDY, KEPT, NONE, SKIP, TOP, CaptureSettings
from rollout.spool import FLAG_LOST, FLAG_OVERFLOW, SpoolReader, SpoolWriter, StepBlock, StoredStep

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


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zeros", "empty_like"):
        stock = getattr(torch, name)

        def unpinned(*args: Any, _stock: Any = stock, pin_memory: bool = False, **kw: Any) -> Any:
            return _stock(*args, **kw)

        monkeypatch.setattr(torch, name, unpinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)


@pytest.fixture
def recorder() -> Iterator[ring.RingRecorder]:
    made = make_recorder()
    yield made
    made.stop()


def make_recorder(capacity: int = 400, slots: int = 3) -> ring.RingRecorder:
    settings = CaptureSettings(support_capacity=capacity, top=4, draws=2)
    return ring.RingRecorder(
        settings, device=torch.device("cpu"), max_rows=8, vocab_size=VOCAB, slots=slots
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


def check_block(block: StoredStep, seed: int) -> None:
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
    assert block.draws.shape == (5, 2)


@pytest.mark.parametrize("first_copy", [2, 1 << 16])
def test_steps_come_out_whole_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_copy: int
) -> None:
    monkeypatch.setattr(ring, "_FIRST_COPY", first_copy)  # 2: the rest takes a second copy
    recorder = make_recorder()
    recorder.start(str(tmp_path))
    for seed in range(20):  # many times the slots
        recorder.record(seed, *step_of(seed))
    recorder.flush()
    blocks = list(SpoolReader(tmp_path).poll())
    assert len(blocks) == 20
    for seed, block in enumerate(blocks):
        check_block(block, seed)
    assert recorder.error is None
    recorder.stop()


def test_a_row_past_the_capacity_is_flagged_and_the_rest_is_whole(tmp_path: Path) -> None:
    recorder = make_recorder(capacity=12)
    recorder.start(str(tmp_path))
    recorder.record(0, *step_of(0))
    recorder.stop()
    (block,) = SpoolReader(tmp_path).poll()
    assert (block.flags & FLAG_OVERFLOW).tolist() == [0, 0, FLAG_OVERFLOW, 0, 0]
    assert (block.need, block.num_entries) == (15, 11)


def test_no_free_slot_in_time_loses_the_step_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "SLOT_SECONDS", 0.05)
    go_on = threading.Event()
    stock = SpoolWriter.append

    def stuck(self: SpoolWriter, block: StepBlock) -> int:
        assert go_on.wait(30)
        return stock(self, block)

    monkeypatch.setattr(SpoolWriter, "append", stuck)
    recorder = make_recorder(slots=1)
    # the drain thread gives the slot back before it writes: hold it from the outside too
    held = recorder._free.get_nowait()
    recorder.start(str(tmp_path))
    recorder.record(0, *step_of(0))
    recorder._free.put(held)
    recorder.record(1, *step_of(1))
    go_on.set()
    recorder.stop()
    lost, kept = SpoolReader(tmp_path).poll()
    assert lost.flags.tolist() == [FLAG_LOST] * 4 + [0]  # a row that does not count is not lost
    assert lost.waited >= 0.05
    assert lost.num_entries == 0
    check_block(kept, 1)


def test_a_full_disk_is_told_and_sampling_goes_on(
    recorder: ring.RingRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = SpoolWriter.append

    def full(self: SpoolWriter, block: StepBlock) -> int:
        if block.step == 3:
            raise OSError(28, "No space left on device")
        return stock(self, block)

    monkeypatch.setattr(SpoolWriter, "append", full)
    recorder.start(str(tmp_path / "a"))
    for seed in range(12):
        recorder.record(seed, *step_of(seed))
    recorder.flush()
    assert recorder.error is not None
    assert "No space left on device" in recorder.error
    recorder.stop()
    assert len(list(SpoolReader(tmp_path / "a").poll())) == 3
    # every slot is there once: a slot handed out twice would mix two steps
    slots = [recorder._free.get_nowait() for _ in range(3)]
    assert len({id(slot) for slot in slots}) == 3
    with pytest.raises(queue.Empty):
        recorder._free.get_nowait()
    for slot in slots:
        recorder._free.put(slot)
    monkeypatch.setattr(SpoolWriter, "append", stock)
    recorder.start(str(tmp_path / "b"))
    recorder.record(0, *step_of(0))
    recorder.flush()
    (block,) = SpoolReader(tmp_path / "b").poll()
    check_block(block, 0)
