"""The capture on CUDA: a ring of device buffers, a copy stream and a drain thread.

The launch thread never waits for the device. It takes a free slot, queues the kernels that fill it,
records an event and hands the slot to the drain thread, which waits for the event, copies the row
headers and exactly the entries that the step stored, frees the slot, and writes the step to the
spool. Steps that find no free slot in time are written without data and flagged, so that their
rollouts fail by name. Device memory: `slots` times the buffers of a step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass

import numpy as np
import torch

from rollout.capture.batch import BatchRows
from rollout.capture.request import SKIP, CaptureSettings
from rollout.kernels.launch import CaptureScratch
from rollout.kernels.support_capture import StepOutput, capture_step
from rollout.spool import FLAG_LOST, FLAG_OVERFLOW, SpoolWriter, StepBlock

_log = logging.getLogger(__name__)
SLOT_SECONDS = 30.0  # longest wait for a free slot; vLLM gives a step up to 300 s
_FIRST_COPY = 1 << 16  # entries copied with the first step's header; later steps go by the last


class _Slot:
    """The buffers of one step in flight."""

    def __init__(
        self,
        settings: CaptureSettings,
        rows: int,
        vocab: int,
        device: torch.device,
        scratch: CaptureScratch | None,
    ) -> None:
        self.out = StepOutput.allocate(
            max_rows=rows,
            vocab_size=vocab,
            capacity=settings.support_capacity,
            top=settings.top,
            draws=settings.draws,
            device=device,
            scratch=scratch,
        )
        # what the host knows of the rows goes over in one copy: seeds, positions, kinds
        self.host_rows = torch.zeros(17 * rows, dtype=torch.uint8, pin_memory=True)
        self.rows = torch.zeros(17 * rows, dtype=torch.uint8, device=device)
        self.host_header = torch.zeros(self.out.header.numel(), dtype=torch.uint8, pin_memory=True)
        fields = StepOutput.header_fields(self.host_header, rows, settings.draws)
        self.host = {name: field.numpy() for name, field in fields.items()}
        self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A step on its way to the drain thread; no slot: it was lost."""

    number: int
    rows: BatchRows
    slot: _Slot | None
    waited: float


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
    ) -> None:
        """Allocate the ring; the pinned memory too, since that may synchronise.

        Args:
            settings: what to record.
            device: a CUDA device.
            max_rows: most rows of a step.
            vocab_size: widest row of logits.
            slots: steps in flight; more than the engine runs ahead.
        """
        self._settings = settings
        self._device = device
        self._vocab_size = vocab_size
        self._slots: list[_Slot] = []
        for _ in range(slots):
            # steps run one after the other on the launch stream: one working memory serves all
            scratch = self._slots[0].out.scratch if self._slots else None
            self._slots.append(_Slot(settings, max_rows, vocab_size, device, scratch))
        self._staging = torch.zeros(settings.support_capacity, dtype=torch.int64, pin_memory=True)
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._writer: SpoolWriter | None = None
        self._thread: threading.Thread | None = None
        self._progress = threading.Condition()
        self._last_stored = _FIRST_COPY
        self._queued = 0
        self._written = 0
        self.error: str | None = None
        bytes_of_slots = self.device_bytes / 2**20
        _log.info("capture: %d slots, %.0f MiB on %s", slots, bytes_of_slots, device)

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device."""
        slots = sum(slot.out.num_bytes + slot.rows.numel() for slot in self._slots)
        scratch = self._slots[0].out.scratch
        return slots + (scratch.num_bytes if scratch is not None else 0)

    def warm_up(self, dtypes: tuple[torch.dtype, ...]) -> None:
        """Compile every kernel, so that no real step does.

        Args:
            dtypes: types that logits may have.
        """
        slot = self._slots[0]
        rows = min(8, slot.out.counts.numel())
        vocab = self._vocab_size
        for dtype in dtypes:
            for n in (1, rows):
                logits = torch.zeros(n, vocab, dtype=dtype, device=self._device)
                sampled = torch.zeros(n, dtype=torch.int64, device=self._device)
                batch = BatchRows(
                    request_ids=[""] * n,
                    positions=np.zeros(n, np.int32),
                    kinds=(np.arange(n) % 5).astype(np.int8),
                    seeds=np.zeros(n, np.int64),
                )
                self._launch(slot, logits, sampled, batch)
        torch.cuda.synchronize(self._device)

    def start(self, folder: str) -> None:
        """Record from now on, into a spool folder."""
        self.stop()
        self._writer = SpoolWriter(folder)
        self.error = None
        self._queued = self._written = 0
        self._thread = threading.Thread(target=self._drain, name="rollout-drain", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write what was recorded and end the drain thread."""
        if self._thread is not None:
            self._steps.put(None)
            self._thread.join()
            self._thread = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def flush(self) -> None:
        """Return once every step so far is in the spool, or the drain thread has failed."""
        with self._progress:
            self._progress.wait_for(lambda: self._written == self._queued or self.error is not None)

    def record(
        self, number: int, logits: torch.Tensor, sampled: torch.Tensor, rows: BatchRows
    ) -> None:
        """Queue one step; waits for nothing but a free slot, and for that at most 30 s.

        Args:
            number: the step's number.
            logits: [N, V] masked.
            sampled: [N] ids.
            rows: the N rows.
        """
        start = time.monotonic()
        waited = 0.0
        slot: _Slot | None
        try:
            slot = self._free.get_nowait()
        except queue.Empty:
            try:
                slot = self._free.get(timeout=SLOT_SECONDS) if self.error is None else None
            except queue.Empty:
                slot = None
            waited = time.monotonic() - start
        if slot is not None:
            self._launch(slot, logits, sampled, rows)
        self._queued += 1
        self._steps.put(_Step(number=number, rows=rows, slot=slot, waited=waited))

    def _launch(
        self, slot: _Slot, logits: torch.Tensor, sampled: torch.Tensor, rows: BatchRows
    ) -> None:
        n = len(rows.kinds)
        host = slot.host_rows.numpy()
        host[: 8 * n].view(np.int64)[:] = rows.seeds
        host[8 * n : 16 * n].view(np.int64)[:] = rows.positions
        host[16 * n : 17 * n].view(np.int8)[:] = rows.kinds
        slot.rows[: 17 * n].copy_(slot.host_rows[: 17 * n], non_blocking=True)
        # copied, since vLLM goes on with the memory of its own
        slot.out.sampled_ids[:n].copy_(sampled.reshape(-1))
        capture_step(
            logits,
            slot.out.sampled_ids[:n],
            slot.rows[16 * n : 17 * n].view(torch.int8),
            slot.out,
            top=self._settings.top,
            draws=self._settings.draws,
            seeds=slot.rows[: 8 * n].view(torch.int64),
            positions=slot.rows[8 * n : 16 * n].view(torch.int64),
        )
        slot.ready.record()

    def _drain(self) -> None:
        torch.cuda.set_device(self._device)
        while (step := self._steps.get()) is not None:
            try:
                if self.error is None:
                    self._write(step)
                elif step.slot is not None:
                    self._free.put(step.slot)
            except Exception as error:  # the driver reads it from `error`; sampling must go on
                _log.exception("capture: the drain thread failed")
                self.error = f"{type(error).__name__}: {error}"
            finally:
                with self._progress:
                    self._written += 1
                    self._progress.notify_all()

    def _write(self, step: _Step) -> None:
        assert self._writer is not None
        if step.slot is None:
            self._writer.append(_lost(step))
            return
        try:
            block = self._copy_out(step, step.slot)
        finally:
            self._free.put(step.slot)
        self._writer.append(block)

    def _copy_out(self, step: _Step, slot: _Slot) -> StepBlock:
        """Copy a step to the host; its entries stay in the staging memory until the next."""
        n, out = len(step.rows.kinds), slot.out
        # with the header as many entries as the last step had and some more: mostly all there are
        copied = min(self._last_stored + self._last_stored // 8, out.entries.numel())
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(slot.ready)
            slot.host_header.copy_(out.header, non_blocking=True)
            self._staging[:copied].copy_(out.entries[:copied], non_blocking=True)
            self._copied.record(self._copy_stream)
        self._copied.synchronize()
        header = {name: field[:n] for name, field in slot.host.items()}
        fits = (header["flags"] & FLAG_OVERFLOW) == 0
        stored = int(header["counts"][fits].sum(dtype=np.int64))
        self._last_stored = max(stored, _FIRST_COPY)
        if stored > copied:
            with torch.cuda.stream(self._copy_stream):
                rest = slice(copied, stored)
                self._staging[rest].copy_(out.entries[rest], non_blocking=True)
                self._copied.record(self._copy_stream)
            self._copied.synchronize()
        return StepBlock(
            step=step.number,
            need=int(slot.host["offsets"][n]),
            waited=step.waited,
            request_ids=step.rows.request_ids,
            positions=step.rows.positions,
            sampled=header["sampled_ids"].astype(np.int32),
            kinds=step.rows.kinds,
            flags=header["flags"],
            counts=header["counts"],
            sampled_logprobs=header["sampled_logprobs"],
            tail_mass=header["tail_mass"],
            draws=header["draws"].view(np.uint64),
            entries=self._staging[:stored].numpy().view(np.uint64),
        )


def _lost(step: _Step) -> StepBlock:
    n = len(step.rows.kinds)
    flags = np.where(step.rows.kinds == SKIP, 0, FLAG_LOST).astype(np.int32)
    return StepBlock(
        step=step.number,
        need=0,
        waited=step.waited,
        request_ids=step.rows.request_ids,
        positions=step.rows.positions,
        sampled=np.zeros(n, np.int32),
        kinds=step.rows.kinds,
        flags=flags,
        counts=np.zeros(n, np.int32),
        sampled_logprobs=np.zeros(n, np.float32),
        tail_mass=np.zeros(n, np.float32),
        draws=np.zeros((n, 0), np.uint64),
        entries=np.zeros(0, np.uint64),
    )
