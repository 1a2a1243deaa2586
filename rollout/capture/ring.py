"""The capture on CUDA: a ring of buffers that the device fills and another process empties.

The launch thread waits for nothing and is helped by no other thread, which would take its turns at
the interpreter. It takes a free slot, queues the kernels that fill the slot's buffers on the
device, and their copy to memory shared with the process that writes the spool
(`rollout.capture.ring_process`); copies that take long go by a stream of their own. Steps that find
no free slot in time are written without data and flagged, so that their rollouts fail by name.
Device memory: `slots` times the buffers of a step; as much on the host.
"""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.capture.batch import BatchRows
from rollout.capture.copy_ahead import CopyAhead
from rollout.capture.launch_graphs import LaunchGraphs
from rollout.capture.request import SKIP, CaptureSettings
from rollout.capture.ring_process import LOST_FOLDER
from rollout.capture.shared_ring import RingLayout, SharedRing
from rollout.capture.step_slot import Drawn, StepSlot
from rollout.capture.warm_steps import warm_steps
from rollout.kernels.copy_out import copy_out
from rollout.kernels.fetch_step import fetch_step
from rollout.kernels.launch import (
    CaptureScratch,
    can_cut,
    distance,
    row_unit,
    stream_handle,
)
from rollout.kernels.support_capture import StepOutput, capture_step
from rollout.spool import FLAG_LOST, SpoolWriter, StepBlock

_log = logging.getLogger(__name__)
SLOT_SECONDS = 30.0  # longest wait for a free slot; vLLM gives a step up to 300 s
_WAIT_SECONDS = 0.0002
_DTYPES = {torch.int64: "int64", torch.int32: "int32", torch.float32: "float32"}
# what the sampling stream copies itself, .05 ms a MiB: another launch costs the host as much
_AT_ONCE_BYTES = 2**20
_PORTABLE_AND_MAPPED = 3  # cudaHostRegister: for every context, with an address on the device


class RingRecorder:
    """Records steps on CUDA without a host sync in the sampling step."""

    def __init__(
        self,
        settings: CaptureSettings,
        *,
        device: torch.device,
        max_rows: int,
        vocab_size: int,
        slots: int,
        add_noise: Any = None,
    ) -> None:
        """Allocate the ring and pin its half on the host, since that may synchronise.

        Args:
            settings: what to record.
            device: a CUDA device.
            max_rows: most rows of a step.
            vocab_size: widest row of logits.
            slots: steps in flight; more than the engine runs ahead.
            add_noise: the sampler's noise, or null; see `rollout.kernels.token_draw.TokenDraw`.

        Raises:
            OSError: the host has no memory for the ring.
        """
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._settings = settings
        self._device = device
        self._vocab_size = vocab_size
        self._add_noise = add_noise
        self._truncates = add_noise is not None and can_cut(vocab_size, settings.draws)
        # steps run one after the other on the launch stream: one working memory serves all
        scratch = CaptureScratch.allocate(
            max_rows=max_rows,
            vocab_size=vocab_size,
            top=settings.top,
            draws=settings.draws,
            cut=self._truncates,
            device=device,
        )
        self._slots = [
            StepSlot(settings, max_rows, vocab_size, device, scratch) for _ in range(slots)
        ]
        self._ring = SharedRing.create(_layout(self._slots[0].out, slots, max_rows))
        memory = torch.from_numpy(self._ring.memory)
        _pin(memory)
        # at the end of the process there is no device to tell any more
        weakref.finalize(self, _unpin, memory).atexit = False
        self._headers = [torch.from_numpy(self._ring.header(i)) for i in range(slots)]
        self._entries = [torch.from_numpy(self._ring.entries(i)) for i in range(slots)]
        self._ready = torch.from_numpy(self._ring.ready)
        self._needs = [self._ring.step_need(i) for i in range(slots)]
        self._anchor = self._slots[0].out.scratch.anchor.data_ptr()
        self._ahead = CopyAhead(settings.support_capacity)
        self._graphs = LaunchGraphs(device, slots)
        self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream: torch.cuda.Stream | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._lost: SpoolWriter | None = None
        self._failed: str | None = None
        _log.info(
            "capture: %d slots, %.0f MiB on %s, %.0f MiB pinned on the host",
            slots,
            self.device_bytes / 2**20,
            device,
            memory.numel() / 2**20,
        )

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device."""
        slots = sum(slot.out.num_bytes + 8 * slot.words.numel() for slot in self._slots)
        return slots + self._slots[0].out.scratch.num_bytes

    @property
    def error(self) -> str | None:
        """Why steps are no longer recorded, or null."""
        if self._failed is None and self._process is not None and self._process.poll():
            self._failed = f"the process that takes steps ended with code {self._process.poll()}"
        return self._failed or self._ring.error

    def warm_up(self, dtypes: tuple[torch.dtype, ...]) -> None:
        """Compile every kernel and prepare its launches, so that no real step does.

        Args:
            dtypes: types that logits may have.
        """
        most = min(8, self._slots[0].out.counts.numel())
        draws_tokens = self._add_noise is not None
        for dtype, n in itertools.product(dtypes, (1, most)):
            logits = torch.zeros(n, self._vocab_size, dtype=dtype, device=self._device)
            sampled = torch.zeros(n, dtype=torch.int64, device=self._device)
            # both ways of copying, twice: the second time makes the graph
            for index, ahead, rows in itertools.product(
                range(len(self._slots)),
                2 * [0, self._settings.support_capacity],
                warm_steps(n, draws_tokens=draws_tokens, truncates=self._truncates),
            ):
                ids = sampled if rows.noise is None else None
                self._launch(index, logits, ids, rows, 0, ahead)
                torch.cuda.synchronize(self._device)  # the next one writes to the same memory

    def start(self, folder: str) -> None:
        """Record from now on, into a spool folder."""
        self.stop()
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._ring.closing = self._ring.taking = 0
        self._ring.forget_ids()
        self._ring.error = self._failed = None
        layout = json.dumps(self._ring.layout.record())
        command = [sys.executable, "-m", "rollout.capture.ring_process"]
        self._process = subprocess.Popen(
            [*command, str(self._ring.file), folder, layout],
            stdin=subprocess.PIPE,  # never written to: it ends with this process
            pass_fds=[self._ring.file],
        )
        # its start takes longer than the ring has room for
        while not self._ring.taking and self.error is None:
            time.sleep(_WAIT_SECONDS)

    def stop(self) -> None:
        """Let what was recorded be written, and end the process."""
        if self._process is None:
            return
        if self._lost is not None:
            self._lost.close()
            self._lost = None
        self._ring.closing = 1
        if self._process.wait() and self._failed is None:
            self._failed = f"the process that takes steps ended with code {self._process.wait()}"
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None
        if self._ring.consumed != self._ring.queued:  # nobody takes what a dead one has left
            torch.cuda.synchronize(self._device)
            self._ring.consumed = self._ring.queued

    def flush(self) -> None:
        """Return once every step so far is in the spool, or nothing is written any more."""
        while self._ring.consumed != self._ring.queued and self.error is None:
            time.sleep(_WAIT_SECONDS)

    def try_draw(self, logits: torch.Tensor, rows: BatchRows) -> torch.Tensor:
        """Draw on the first slot's buffers and record nothing; see `Recorder.try_draw`."""
        self._launch(0, logits, None, rows, 0, 0)
        return self._slots[0].out.sampled_ids[: len(rows.kinds)].clone()

    def record(
        self, number: int, logits: torch.Tensor, sampled: torch.Tensor | None, rows: BatchRows
    ) -> torch.Tensor | None:
        """Queue one step; waits for nothing but a free slot, and for that at most 30 s.

        Args:
            number: the step's number.
            logits: [N, V] masked, except for what the rows' cut drops.
            sampled: [N] ids, or null if they are to be drawn.
            rows: the N rows.

        Returns:
            What was drawn, [N] int64; null if nothing was.
        """
        ring, waited = self._ring, 0.0
        queued = ring.queued
        if queued - ring.consumed >= len(self._slots):
            waited = self._wait_for_slot(queued)
            if queued - ring.consumed >= len(self._slots):
                self._lose(number, rows, waited)
                return None
        index = queued % len(self._slots)
        ring.put_rows(
            index,
            step=number,
            waited=waited,
            request_ids=rows.request_ids,
            positions=rows.positions,
            kinds=rows.kinds,
        )
        # what the step before it in this slot needed says how much there will be to copy
        ahead = self._ahead.after(self._needs[index][0])
        self._launch(index, logits, sampled, rows, queued + 1, ahead)
        ring.queued = queued + 1
        if sampled is not None:
            return None
        # the slot's own are written again in some steps, and the engine may keep these
        return self._slots[index].out.sampled_ids[: len(rows.request_ids)].clone()

    def _wait_for_slot(self, queued: int) -> float:
        """Wait for the other process; return the seconds that took."""
        start = time.monotonic()
        while queued - self._ring.consumed >= len(self._slots):
            if time.monotonic() - start >= SLOT_SECONDS or self.error is not None:
                break
            time.sleep(_WAIT_SECONDS)
        return time.monotonic() - start

    def _launch(
        self,
        index: int,
        logits: torch.Tensor,
        sampled: torch.Tensor | None,
        rows: BatchRows,
        ready: int,
        ahead: int,
    ) -> None:
        slot = self._slots[index]
        drawn = None
        if sampled is None and rows.noise is not None:
            drawn = Drawn(rows.noise.untruncated, rows.noise.cut is not None)
        if sampled is not None and not (sampled.dtype == torch.int64 and sampled.is_contiguous()):
            sampled = sampled.to(torch.int64).contiguous()
        unit = row_unit(logits)
        slot.put(ready, sampled, distance(logits, unit, self._anchor), rows)
        # addresses travel in memory, so one launch serves every step
        key = (index, drawn, logits.stride(0), logits.size(1), logits.dtype, unit)
        if 8 * ahead <= _AT_ONCE_BYTES:
            self._graphs.run((*key, "copy"), lambda: self._fill_and_copy(index, logits, drawn))
            return
        self._graphs.run(key, lambda: self._fill_and_tell(slot, logits, drawn))
        launch_stream = self._launch_stream()
        # without the context manager, which costs as much as the launch
        torch.cuda.set_stream(self._copy_stream)
        try:
            self._graphs.run((index, ahead), lambda: self._wait_and_copy(index, ahead))
        finally:
            torch.cuda.set_stream(launch_stream)

    def _launch_stream(self) -> torch.cuda.Stream:
        """Return the current stream; it is asked for by its handle, at a tenth of the cost."""
        handle = stream_handle(self._device)
        if self._stream is None or self._stream.cuda_stream != handle:
            self._stream = torch.cuda.current_stream(self._device)
        return self._stream

    def _fill(self, slot: StepSlot, logits: torch.Tensor, drawn: Drawn | None) -> None:
        draw = None if drawn is None else slot.token_draw(self._add_noise, drawn)
        fetch_step(slot.host_words, slot.words, slot.out.sampled_ids)
        capture_step(
            logits,
            slot.out.sampled_ids,
            slot.kinds,
            slot.out,
            top=self._settings.top,
            draws=self._settings.draws,
            seeds=slot.seeds,
            positions=slot.positions,
            draw=draw,
            distance=slot.distance,
        )

    def _copy(self, index: int, ahead: int) -> None:
        slot = self._slots[index]
        copy_out(
            slot.out,
            slot.kinds.numel(),
            self._headers[index],
            self._entries[index],
            self._ready[index : index + 1],
            slot.number,
            ahead=ahead,
        )

    def _fill_and_copy(self, index: int, logits: torch.Tensor, drawn: Drawn | None) -> None:
        self._fill(self._slots[index], logits, drawn)
        self._copy(index, 0)

    def _fill_and_tell(self, slot: StepSlot, logits: torch.Tensor, drawn: Drawn | None) -> None:
        self._fill(slot, logits, drawn)
        slot.filled.record(torch.cuda.current_stream(self._device))

    def _wait_and_copy(self, index: int, ahead: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._slots[index].filled)
        self._copy(index, ahead)

    def _lose(self, number: int, rows: BatchRows, waited: float) -> None:
        if self.error is not None:
            return  # the driver is about to hear of worse
        if self._lost is None:
            self._lost = SpoolWriter(self._folder / LOST_FOLDER)
        self._lost.append(_lost(number, rows, waited))


def _layout(out: StepOutput, slots: int, max_rows: int) -> RingLayout:
    draws = out.draws.shape[1]
    fields = StepOutput.header_fields(out.header, max_rows, draws)
    return RingLayout(
        slots=slots,
        max_rows=max_rows,
        capacity=out.entries.numel(),
        header_bytes=out.header.numel(),
        header={
            name: (
                int(field.storage_offset()) * field.element_size(),
                _DTYPES[field.dtype],
                tuple(field.shape),
            )
            for name, field in fields.items()
        },
    )


def _pin(memory: torch.Tensor) -> None:
    """Let the device write to memory of the host."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE_AND_MAPPED)
    torch.cuda.check_error(int(code))


def _unpin(memory: torch.Tensor) -> None:
    """Take the memory back from the device before it goes.

    Else another allocation at the same address would be taken for it, and copies would read what is
    no longer there.
    """
    torch.cuda.synchronize()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostUnregister(memory.data_ptr())))


def _lost(number: int, rows: BatchRows, waited: float) -> StepBlock:
    n = len(rows.kinds)
    flags = np.where(rows.kinds == SKIP, 0, FLAG_LOST).astype(np.int32)
    return StepBlock(
        step=number,
        need=0,
        waited=waited,
        request_ids=rows.request_ids,
        positions=rows.positions,
        sampled=np.zeros(n, np.int32),
        kinds=rows.kinds,
        flags=flags,
        counts=np.zeros(n, np.int32),
        sampled_logprobs=np.zeros(n, np.float32),
        tail_mass=np.zeros(n, np.float32),
        draws=np.zeros((n, 0), np.uint64),
        entries=np.zeros(0, np.uint64),
    )
