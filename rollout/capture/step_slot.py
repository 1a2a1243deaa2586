"""The buffers of one step in flight: what the host hands over, and what the device makes of it."""

from __future__ import annotations

import numpy as np
import torch

from rollout.capture.request import CaptureSettings
from rollout.kernels.launch import CaptureScratch
from rollout.kernels.support_capture import StepOutput


class StepSlot:
    """The buffers of one step in flight."""

    def __init__(
        self,
        settings: CaptureSettings,
        rows: int,
        vocab: int,
        device: torch.device,
        scratch: CaptureScratch | None,
    ) -> None:
        """Allocate them, here and on the device.

        Args:
            settings: what to record.
            rows: most rows of a step.
            vocab: widest row of logits.
            device: a CUDA device.
            scratch: another slot's working memory, to share it.
        """
        self.out = StepOutput.allocate(
            max_rows=rows,
            vocab_size=vocab,
            capacity=settings.support_capacity,
            top=settings.top,
            draws=settings.draws,
            device=device,
            scratch=scratch,
        )
        # what the host knows of the step: its number, where the sampled ids are and how many, where
        # the logits are, then of each row the seed, the position and the kind
        seeds, positions, kinds, end = (32 + rows * width for width in (0, 8, 16, 17))
        words = (end + 7) // 8
        self.host_words = torch.zeros(words, dtype=torch.int64, pin_memory=True)
        self.words = torch.zeros(words, dtype=torch.int64, device=device)
        host, there = self.host_words.numpy().view(np.uint8), self.words.view(torch.uint8)
        self.host_head = host[:seeds].view(np.int64)
        self.host_seeds = host[seeds:positions].view(np.int64)
        self.host_positions = host[positions:kinds].view(np.int64)
        self.host_kinds = host[kinds:end].view(np.int8)
        self.number = self.words[:1]
        self.distance = self.words[3:4]
        self.seeds = there[seeds:positions].view(torch.int64)
        self.positions = there[positions:kinds].view(torch.int64)
        self.kinds = there[kinds:end].view(torch.int8)
        # part of the launches, also where they are graphs
        self.filled = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
