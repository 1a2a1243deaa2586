"""The capture's core: from one sampling step's tensors to one block of the spool.

It knows neither runners nor vLLM: an adapter hands it the masked logits, the sampled ids and what
the host knows of the rows. On the CPU the step is written at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rollout.capture.batch import BatchRows
from rollout.capture.request import SKIP
from rollout.kernels.support_capture import StepOutput, capture_step
from rollout.spool import FLAG_OVERFLOW, SpoolWriter, StepBlock


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSettings:
    """What the job asks for; the fields are those of the job's `capture` section."""

    support_capacity: int
    top: int
    draws: int


class CaptureCore:
    """Records sampling steps of one worker."""

    def __init__(
        self, settings: CaptureSettings, *, device: torch.device, max_rows: int, vocab_size: int
    ) -> None:
        """Allocate the buffers of a step.

        Args:
            settings: what to record.
            device: where the logits are.
            max_rows: most rows of a step.
            vocab_size: widest row of logits.
        """
        self._settings = settings
        self._out = StepOutput.allocate(
            max_rows=max_rows,
            vocab_size=vocab_size,
            top=settings.top,
            capacity=settings.support_capacity,
            draws=settings.draws,
            device=device,
        )
        self._writer: SpoolWriter | None = None
        self._step = 0

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device, to be taken from the KV cache's budget."""
        return self._out.num_bytes

    def start(self, folder: str) -> None:
        """Record from now on, into a spool folder."""
        self.stop()
        self._writer = SpoolWriter(folder)
        self._step = 0

    def stop(self) -> None:
        """Stop recording."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def flush(self) -> None:
        """Return once everything that was captured is in the spool."""

    def on_step(self, logits: torch.Tensor, sampled: torch.Tensor, rows: BatchRows) -> None:
        """Record one step.

        Args:
            logits: [N, V] masked with -inf, what the tokens were drawn from.
            sampled: [N] integer ids.
            rows: the N rows.
        """
        if self._writer is None or not np.any(rows.kinds != SKIP):
            return
        out = self._out
        n = len(rows.kinds)
        capture_step(
            logits,
            sampled.reshape(-1).to(torch.int64),
            torch.from_numpy(rows.kinds),
            out,
            top=self._settings.top,
            draws=self._settings.draws,
            seeds=torch.from_numpy(rows.seeds),
            positions=torch.from_numpy(rows.positions.astype(np.int64)),
        )
        flags = out.flags[:n].numpy().copy()
        counts = out.counts[:n].numpy().copy()
        stored = int(counts[(flags & FLAG_OVERFLOW) == 0].sum())
        self._writer.append(
            StepBlock(
                step=self._step,
                need=int(out.offsets[n]),
                request_ids=rows.request_ids,
                positions=rows.positions,
                sampled=sampled.reshape(-1).numpy().astype(np.int32),
                kinds=rows.kinds,
                flags=flags,
                counts=counts,
                sampled_logprobs=out.sampled_logprobs[:n].numpy(),
                tail_mass=out.tail_mass[:n].numpy(),
                draws=out.draws[:n].numpy().view(np.uint64),
                entries=out.entries[:stored].numpy().view(np.uint64),
            )
        )
        self._step += 1
