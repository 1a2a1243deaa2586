"""The memory of the shared ring: where what is, and that nothing lies over something else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from waiting import wait_for

from rollout.capture.ring_process import LOST_FOLDER, block_of, take_steps
from rollout.capture.shared_ring import RingLayout, SharedRing
from rollout.spool import FLAG_LOST, FLAG_OVERFLOW, SpoolReader, SpoolWriter, StepBlock

ROWS, DRAWS = 4, 2
_FIELDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "offsets": ("int64", (ROWS + 1,)),
    "counts": ("int32", (ROWS,)),
    "draws": ("int64", (ROWS, DRAWS)),
    "flags": ("int32", (ROWS,)),
    "sampled_ids": ("int64", (ROWS,)),
    "sampled_logprobs": ("float32", (ROWS,)),
    "tail_mass": ("float32", (ROWS,)),
}


def make_layout(**sizes: Any) -> RingLayout:
    header: dict[str, tuple[int, str, tuple[int, ...]]] = {}
    end = 0
    for name, (dtype, shape) in _FIELDS.items():
        header[name] = (end, dtype, shape)
        end += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 8) * 8
    layout = RingLayout(slots=3, max_rows=ROWS, capacity=40, header_bytes=end, header=header)
    return replace(layout, **sizes)


@pytest.mark.parametrize(
    "sizes", [{}, {"capacity": 1000}, {"capacity": 513}, {"max_rows": 100}, {"slots": 240}]
)
def test_no_part_of_the_ring_lies_over_another(sizes: dict[str, int]) -> None:
    ring = SharedRing.create(make_layout(**sizes))
    parts: list[npt.NDArray[Any]] = [np.asarray(ring.words), ring.ready]
    for slot in range(ring.layout.slots):
        rows = ring._rows[slot]
        parts += [ring.header(slot), ring.entries(slot)]
        parts += [np.asarray(rows.head), rows.positions, rows.kinds, rows.ids]
    for number, part in enumerate(parts):
        part.reshape(-1).view(np.uint8)[:] = number % 251 + 1
    ring.error = text = "é" * 3000  # longer than there is room for
    for number, part in enumerate(parts):
        assert (part.reshape(-1).view(np.uint8) == number % 251 + 1).all()
    found = ring.error
    assert found is not None
    assert text.startswith(found)
    assert len(found) >= 1000
    ring.error = None
    assert ring.error is None
    assert ring.entries(0).size == ring.layout.capacity
    assert ring._rows[0].ids.size >= 256 * ring.layout.max_rows


@pytest.mark.parametrize("slots", [0, 241])
def test_more_slots_than_there_is_room_for_are_refused(slots: int) -> None:
    with pytest.raises(ValueError, match=f"slots: got {slots}, expected 1 to 240"):
        SharedRing.create(make_layout(slots=slots))


def fill(ring: SharedRing, number: int, counts: list[int], **fields: Any) -> None:
    """Hand over a step as the device would: its entries count up from its number."""
    slot, n = number % ring.layout.slots, len(counts)
    ring.put_rows(
        slot,
        step=number,
        waited=0.25 * number,
        request_ids=[f"{number}-{row}" for row in range(n)],
        positions=np.arange(n, dtype=np.int32) + number,
        kinds=np.ones(n, np.int8),
    )
    values: dict[str, Any] = {
        "counts": counts,
        "offsets": np.cumsum([0, *counts]),
        "flags": [0] * n,
        "sampled_ids": np.arange(n) + 5,
        "sampled_logprobs": -np.arange(n),
        "tail_mass": np.arange(n) / 8,
        "draws": np.arange(n * DRAWS).reshape(n, DRAWS),
    } | fields
    for name, (start, dtype, shape) in ring.layout.header.items():
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        field = ring.header(slot)[start : start + size].view(dtype).reshape(shape)
        # the device writes to every row: what is beyond those of the step is of no step
        field[...] = 99
        field[: len(values[name])] = values[name]
    entries = ring.entries(slot)
    entries[:] = -1
    entries[: sum(counts)] = np.arange(min(sum(counts), entries.size)) + 1000 * number
    ring.ready[slot] = number + 1
    ring.queued = number + 1


def test_a_step_is_what_the_device_and_the_host_put_there() -> None:
    ring = SharedRing.create(make_layout())
    fill(ring, 1, [3, 0, 2], offsets=[0, 3, 3, 9])
    block = block_of(ring.step(1))
    assert (block.step, block.need, block.waited) == (1, 9, 0.25)
    assert block.request_ids == ["1-0", "1-1", "1-2"]
    assert block.positions.tolist() == [1, 2, 3]
    assert block.kinds.tolist() == [1, 1, 1]
    assert block.counts.tolist() == [3, 0, 2]
    assert block.sampled.tolist() == [5, 6, 7]
    assert block.sampled_logprobs.tolist() == [0, -1, -2]
    assert block.tail_mass.tolist() == [0, 0.125, 0.25]
    assert block.draws.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert block.entries.tolist() == [1000, 1001, 1002, 1003, 1004]
    assert ring.step_need(1).tolist() == [99]  # of all rows that there may be


@pytest.mark.parametrize(
    ("flags", "stored"), [([0, FLAG_OVERFLOW, 0], 5), ([0, 1 << 30, 0], 12), ([0, 0, 0], 12)]
)
def test_only_a_row_that_overflowed_has_no_entries(flags: list[int], stored: int) -> None:
    ring = SharedRing.create(make_layout())
    fill(ring, 1, [3, 7, 2], flags=flags)
    assert block_of(ring.step(1)).entries.tolist() == list(range(1000, 1000 + stored))


def test_steps_without_rows() -> None:
    ring = SharedRing.create(make_layout())
    for number in range(2):
        fill(ring, number, [])
        block = block_of(ring.step(number))
        assert (block.step, block.need, block.request_ids, block.entries.size) == (number, 0, [], 0)


def closed_pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def test_it_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    """The ring outlives the process that takes steps: the next one starts at the step after."""
    ring = SharedRing.create(make_layout())
    parent = closed_pipe()
    for number in range(2):
        fill(ring, number, [1])
    take_steps(ring, tmp_path / "a", parent)
    for number in range(2, 5):
        fill(ring, number, [number])
    take_steps(ring, tmp_path / "b", parent)
    os.close(parent)
    assert ring.consumed == 5
    for folder, steps in (("a", [0, 1]), ("b", [2, 3, 4])):
        assert [step.step for step in SpoolReader(tmp_path / folder).poll()] == steps


def test_steps_are_dropped_after_an_error_and_the_first_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = SharedRing.create(make_layout())
    errors = [OSError(28, "No space left on device"), ValueError("another")]

    def append(*_: object) -> int:
        raise errors.pop(0)

    monkeypatch.setattr(SpoolWriter, "append", append)
    for number in range(3):
        fill(ring, number, [1])
    parent = closed_pipe()
    take_steps(ring, tmp_path, parent)
    os.close(parent)
    assert ring.error == "OSError: [Errno 28] No space left on device"
    assert (ring.consumed, len(errors)) == (3, 1)


def test_the_process_ends_by_the_ring_alone_with_every_step(tmp_path: Path) -> None:
    ring = SharedRing.create(make_layout())
    command = [sys.executable, "-m", "rollout.capture.ring_process", str(ring.file)]
    layout = json.dumps(ring.layout.record())
    with subprocess.Popen(
        [*command, str(tmp_path), layout], stdin=subprocess.PIPE, pass_fds=[ring.file]
    ) as process:
        wait_for(lambda: bool(ring.taking))
        for number in (signal.SIGINT, signal.SIGTERM):  # to the whole group
            process.send_signal(number)
        fill(ring, 0, [2, 1])
        wait_for(lambda: ring.consumed == 1)
        lost = SpoolWriter(tmp_path / LOST_FOLDER)
        lost.append(lost_step(1))
        # one is queued and not there yet: closing waits for it
        ring.queued, ring.closing = 2, 1
        time.sleep(0.1)
        assert process.poll() is None
        fill(ring, 1, [4])
        assert process.wait(30) == 0
    lost.close()
    found = {(step.step, step.num_entries) for step in SpoolReader(tmp_path).poll()}
    assert found == {(0, 3), (1, 0), (1, 4)}


def lost_step(number: int) -> StepBlock:
    return StepBlock(
        step=number,
        need=0,
        request_ids=["a"],
        positions=np.zeros(1, np.int32),
        sampled=np.zeros(1, np.int32),
        kinds=np.ones(1, np.int8),
        flags=np.full(1, FLAG_LOST, np.int32),
        counts=np.zeros(1, np.int32),
        sampled_logprobs=np.zeros(1, np.float32),
        tail_mass=np.zeros(1, np.float32),
        draws=np.zeros((1, 0), np.uint64),
        entries=np.zeros(0, np.uint64),
    )
