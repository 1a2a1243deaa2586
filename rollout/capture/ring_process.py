"""The process that takes captured steps: from the shared ring to the spool.

It runs beside each sampling process, so that nothing of this work waits for that one's interpreter
or holds it up. It ends when told to, or when the sampling process is gone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np

from rollout.capture.shared_ring import RingLayout, RingStep, SharedRing
from rollout.spool import (
    FLAG_OVERFLOW,
    SpoolReader,
    SpoolWriter,
    StepBlock,
    StepRows,
    StoredStep,
)

LOST_FOLDER: Final = "lost"
"""Beside the spool's segments: a spool of the steps that found no slot."""
_POLL_SECONDS: Final = 0.001  # a step takes some milliseconds
_LOOK_SECONDS: Final = 0.05  # between looks at what hardly ever changes


def main() -> None:
    """Take steps: `python -m rollout.capture.ring_process FILE FOLDER LAYOUT`."""
    # the job decides what a signal to the whole group means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    layout = RingLayout(**json.loads(sys.argv[3]))
    take_steps(SharedRing(int(sys.argv[1]), layout), Path(sys.argv[2]), parent=0)


def take_steps(ring: SharedRing, folder: Path, parent: int) -> None:
    """Write every step to a spool folder until the ring is closed.

    After an error steps are taken and dropped, so that sampling goes on.

    Args:
        ring: the shared memory.
        folder: the spool's.
        parent: descriptor that ends when the sampling process does.
    """
    writer: SpoolWriter | None = None
    lost = SpoolReader(folder / LOST_FOLDER)
    number = ring.consumed
    looked = 0.0
    ring.taking = 1
    while True:
        slot = number % ring.layout.slots
        if ring.ready[slot] == number + 1:
            if ring.error is None:
                try:
                    writer = writer or SpoolWriter(folder)
                    writer.append(block_of(ring.step(slot)))
                except Exception as error:  # the driver reads it from `error`
                    ring.error = f"{type(error).__name__}: {error}"
            number += 1
            ring.consumed = number
            continue
        closed = ring.closing and number == ring.queued
        if not closed and time.monotonic() - looked < _LOOK_SECONDS:
            time.sleep(_POLL_SECONDS)
            continue
        looked = time.monotonic()
        # asked before the last look at the lost steps, or one could come in between
        last = closed or _ended(parent)
        for step in lost.poll():
            writer = writer or SpoolWriter(folder)
            writer.append(_without_entries(step))
        if last:
            break  # what the device has not finished goes with the process that asked for it
    if writer is not None:
        writer.close()


def block_of(step: RingStep) -> StepBlock:
    """Return a slot's content as the spool has it; views of the slot."""
    n = len(step.request_ids)
    header = {name: field[:n] for name, field in step.header.items()}
    fits = (header["flags"] & FLAG_OVERFLOW) == 0
    stored = int(header["counts"][fits].sum(dtype=np.int64))
    return StepBlock(
        step=step.step,
        need=int(step.header["offsets"][n]),
        waited=step.waited,
        request_ids=step.request_ids,
        positions=step.positions,
        sampled=header["sampled_ids"].astype(np.int32),
        kinds=step.kinds,
        flags=header["flags"],
        counts=header["counts"],
        sampled_logprobs=header["sampled_logprobs"],
        tail_mass=header["tail_mass"],
        draws=header["draws"].view(np.uint64),
        entries=step.entries[:stored],
    )


def _without_entries(step: StoredStep) -> StepBlock:
    names = (field.name for field in dataclasses.fields(StepRows))
    return StepBlock(
        **{name: getattr(step, name) for name in names}, entries=np.zeros(0, np.uint64)
    )


def _ended(file: int) -> bool:
    readable, _, _ = select.select([file], [], [], 0)
    return bool(readable) and os.read(file, 1) == b""


if __name__ == "__main__":
    main()
