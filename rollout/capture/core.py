"""The capture's core: one sampling step's tensors become one block of the spool.

It knows neither runners nor vLLM: an adapter hands it the masked logits, the sampled ids and what
the host knows of the rows, and a recorder for the device does the rest.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from rollout.capture.batch import BatchRows
from rollout.capture.request import CaptureSettings
from rollout.capture.ring import RingRecorder
from rollout.kernels.launch import can_cut
from rollout.kernels.support_capture import StepOutput, capture_step
from rollout.kernels.support_cut import SupportCut
from rollout.kernels.token_draw import TokenDraw
from rollout.spool import FLAG_OVERFLOW, SpoolWriter, StepBlock


class Recorder(Protocol):
    """Records steps on one kind of device."""

    @property
    def error(self) -> str | None:
        """Why recording stopped, or null."""

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device, to be taken from the KV cache's budget."""

    def warm_up(self, dtypes: tuple[torch.dtype, ...]) -> None:
        """Run every kernel once on logits of these types, so that no real step compiles."""

    def start(self, folder: str) -> None:
        """Record from now on, into a spool folder."""

    def stop(self) -> None:
        """Stop recording."""

    def flush(self) -> None:
        """Return once everything recorded so far is in the spool."""

    def record(
        self, number: int, logits: torch.Tensor, sampled: torch.Tensor | None, rows: BatchRows
    ) -> torch.Tensor | None:
        """Record one step: logits [N, V], sampled ids [N], and the N rows.

        Without sampled ids, truncate by the rows' cut if there is one, draw the ids by the rows'
        noise and return them, [N] int64; null if they could not be drawn.
        """

    def try_draw(self, logits: torch.Tensor, rows: BatchRows) -> torch.Tensor:
        """Return the ids that a step would draw, [N] int64, and record nothing."""


class CaptureCore:
    """Records the sampling steps of one worker."""

    def __init__(
        self,
        settings: CaptureSettings,
        *,
        device: torch.device,
        max_rows: int,
        vocab_size: int,
        steps_in_flight: int,
        add_noise: Any = None,
    ) -> None:
        """Allocate the buffers.

        Args:
            settings: what to record.
            device: where the logits are.
            max_rows: most rows of a step.
            vocab_size: widest row of logits.
            steps_in_flight: steps that the engine launches before it waits for the first.
            add_noise: the sampler's noise, see `rollout.kernels.token_draw.TokenDraw`; null if
                tokens are not drawn here.
        """
        self.recorder: Recorder
        if device.type == "cuda":
            self.recorder = RingRecorder(
                settings,
                device=device,
                max_rows=max_rows,
                vocab_size=vocab_size,
                slots=steps_in_flight + 2,
                add_noise=add_noise,
            )
        else:
            self.recorder = DirectRecorder(
                settings,
                device=device,
                max_rows=max_rows,
                vocab_size=vocab_size,
                add_noise=add_noise,
            )
        self.can_draw = add_noise is not None
        """Whether tokens may be drawn here."""
        self.can_truncate = self.can_draw and can_cut(vocab_size, settings.draws)
        """Whether rows may come with a cut: recorded draws are made of masked logits."""
        self._recording = False
        self._steps = 0

    def start(self, folder: str) -> None:
        """Record from now on, into a spool folder."""
        self.recorder.start(folder)
        self._recording = True
        self._steps = 0

    def stop(self) -> None:
        """Stop recording; what was recorded is in the spool."""
        self._recording = False
        self.recorder.stop()

    def on_step(self, logits: torch.Tensor, sampled: torch.Tensor, rows: BatchRows) -> None:
        """Record one step.

        Args:
            logits: [N, V] masked with -inf, what the tokens were drawn from.
            sampled: [N] integer ids.
            rows: the N rows.
        """
        # SKIP is 0; a search of bytes takes a tenth of numpy's `any`
        if not self._recording or not rows.kinds.tobytes().strip(b"\0"):
            return
        self.recorder.record(self._steps, logits, sampled, rows)
        self._steps += 1

    def on_draw(self, logits: torch.Tensor, rows: BatchRows) -> torch.Tensor | None:
        """Record one step and draw its tokens.

        Args:
            logits: [N, V] masked with -inf, except for what the rows' cut drops.
            rows: the N rows, with their noise.

        Returns:
            [N] int64 ids, or null if the engine is to draw them; the step is taken care of then.
        """
        if not self._recording or not rows.kinds.tobytes().strip(b"\0"):
            return None
        self._steps += 1
        return self.recorder.record(self._steps - 1, logits, None, rows)


class DirectRecorder:
    """Records on the CPU: each step is written at once."""

    def __init__(
        self,
        settings: CaptureSettings,
        *,
        device: torch.device,
        max_rows: int,
        vocab_size: int,
        add_noise: Any = None,
    ) -> None:
        """Allocate the buffers of one step; see `CaptureCore`."""
        self._settings = settings
        self._add_noise = add_noise
        self._out = StepOutput.allocate(
            max_rows=max_rows,
            vocab_size=vocab_size,
            capacity=settings.support_capacity,
            top=settings.top,
            draws=settings.draws,
            device=device,
        )
        self._writer: SpoolWriter | None = None
        self.error: str | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes of the step's buffers."""
        return self._out.num_bytes

    def warm_up(self, dtypes: tuple[torch.dtype, ...]) -> None:
        """Do nothing: there is nothing to compile."""

    def start(self, folder: str) -> None:
        """Record from now on, into a spool folder."""
        self.stop()
        self._writer = SpoolWriter(folder)

    def stop(self) -> None:
        """Close the spool."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def flush(self) -> None:
        """Do nothing: a step is in the spool when `record` returns."""

    def record(
        self, number: int, logits: torch.Tensor, sampled: torch.Tensor | None, rows: BatchRows
    ) -> torch.Tensor | None:
        """Write one step; see `Recorder.record`."""
        assert self._writer is not None
        out = self._out
        n = len(rows.kinds)
        drawn = self._capture(logits, sampled, rows)
        flags, counts = out.flags[:n].numpy(), out.counts[:n].numpy()
        stored = int(counts[(flags & FLAG_OVERFLOW) == 0].sum())
        self._writer.append(
            StepBlock(
                step=number,
                need=int(out.offsets[n]),
                request_ids=rows.request_ids,
                positions=rows.positions,
                sampled=drawn.numpy().astype(np.int32),
                kinds=rows.kinds,
                flags=flags,
                counts=counts,
                sampled_logprobs=out.sampled_logprobs[:n].numpy(),
                tail_mass=out.tail_mass[:n].numpy(),
                draws=out.draws[:n].numpy().view(np.uint64),
                entries=out.entries[:stored].numpy().view(np.uint64),
            )
        )
        return drawn if sampled is None else None

    def try_draw(self, logits: torch.Tensor, rows: BatchRows) -> torch.Tensor:
        """Draw and record nothing; see `Recorder.try_draw`."""
        return self._capture(logits, None, rows)

    def _capture(
        self, logits: torch.Tensor, sampled: torch.Tensor | None, rows: BatchRows
    ) -> torch.Tensor:
        """Fill the buffers; return [N] int64, the sampled ids."""
        noise = None
        if sampled is None:
            assert rows.noise is not None
            sampled = torch.zeros(len(rows.kinds), dtype=torch.int64)
            cut = rows.noise.cut
            noise = TokenDraw(
                add_noise=self._add_noise,
                seeds=torch.from_numpy(rows.noise.seeds),
                lead=torch.from_numpy(rows.noise.lead),
                untruncated=rows.noise.untruncated,
                cut=None
                if cut is None
                else SupportCut(
                    top_k=torch.from_numpy(cut.top_k), top_p=torch.from_numpy(cut.top_p)
                ),
            )
        sampled = sampled.reshape(-1).to(torch.int64)
        capture_step(
            logits,
            sampled,
            torch.from_numpy(rows.kinds),
            self._out,
            top=self._settings.top,
            draws=self._settings.draws,
            seeds=torch.from_numpy(rows.seeds),
            positions=torch.from_numpy(rows.positions.astype(np.int64)),
            draw=noise,
        )
        return sampled
