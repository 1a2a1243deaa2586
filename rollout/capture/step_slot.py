"""The buffers of one step in flight: what the host hands over, and what the device makes of it."""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rollout.capture.batch import BatchRows, RowNoise
from rollout.capture.request import SKIP, CaptureSettings
from rollout.kernels.launch import CaptureScratch
from rollout.kernels.support_capture import StepOutput
from rollout.kernels.support_cut import SupportCut
from rollout.kernels.token_draw import TokenDraw

_HEAD: Final = struct.Struct("<4q")


class Drawn(NamedTuple):
    """What a launch that draws the tokens of a step takes for granted."""

    untruncated: bool
    """See `TokenDraw`."""
    cut: bool
    """Whether it truncates."""


class StepSlot:
    """The buffers of one step in flight."""

    def __init__(
        self,
        settings: CaptureSettings,
        rows: int,
        vocab: int,
        device: torch.device,
        scratch: CaptureScratch,
    ) -> None:
        """Allocate them, here and on the device.

        Args:
            settings: what to record.
            rows: most rows of a step.
            vocab: widest row of logits.
            device: a CUDA device.
            scratch: the working memory of all slots.
        """
        self._draws = settings.draws
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
        # the logits are, then of each row the seed of its draws, its position, seed and lead of
        # its token's noise, top-k and top-p of its cut, and the kind
        seeds, positions, noise_seeds, noise_lead, top_k, top_p, kinds, end = (
            32 + rows * width for width in (0, 8, 16, 24, 32, 36, 40, 41)
        )
        words = (end + 7) // 8
        self.host_words = torch.zeros(words, dtype=torch.int64, pin_memory=True)
        self.words = torch.zeros(words, dtype=torch.int64, device=device)
        host, there = self.host_words.numpy().view(np.uint8), self.words.view(torch.uint8)
        self._head = memoryview(host[:seeds])  # type: ignore[arg-type]
        self._host_seeds = host[seeds:positions].view(np.int64)
        self._host_positions = host[positions:noise_seeds].view(np.int64)
        self._host_noise_seeds = host[noise_seeds:noise_lead].view(np.int64)
        self._host_noise_lead = host[noise_lead:top_k].view(np.int64)
        self._host_top_k = host[top_k:top_p].view(np.int32)
        self._host_top_p = host[top_p:kinds].view(np.float32)
        self._host_kinds = host[kinds:end].view(np.int8)
        self._last_kinds: npt.NDArray[np.int8] | None = None  # the array that is there
        self._last_noise: RowNoise | None = None
        self.number = self.words[:1]
        self.distance = self.words[3:4]
        self.seeds = there[seeds:positions].view(torch.int64)
        self.positions = there[positions:noise_seeds].view(torch.int64)
        self._noise_seeds = there[noise_seeds:noise_lead].view(torch.int64)
        self._noise_lead = there[noise_lead:top_k].view(torch.int64)
        self._cut = SupportCut(
            top_k=there[top_k:top_p].view(torch.int32), top_p=there[top_p:kinds].view(torch.float32)
        )
        self.kinds = there[kinds:end].view(torch.int8)
        # part of the launches, also where they are graphs
        self.filled = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]

    def put(self, ready: int, sampled: torch.Tensor | None, behind: int, rows: BatchRows) -> None:
        """Write what the host knows of a step.

        Args:
            ready: the step's number + 1.
            sampled: [N] int64 ids on the device, or null if the device draws them.
            behind: from where the logits are (`rollout.kernels.launch.distance`).
            rows: the N rows.
        """
        n, kinds = len(rows.request_ids), rows.kinds
        if sampled is None:
            assert rows.noise is not None
            _HEAD.pack_into(self._head, 0, ready, 0, 0, behind)
            if rows.noise is not self._last_noise:
                self._host_noise_seeds[:n] = rows.noise.seeds
                self._host_noise_lead[:n] = rows.noise.lead
                # rows past N keep what they had, of no meaning in SKIP rows
                if rows.noise.cut is not None:
                    self._host_top_k[:n] = rows.noise.cut.top_k
                    self._host_top_p[:n] = rows.noise.cut.top_p
                self._last_noise = rows.noise
        else:
            _HEAD.pack_into(self._head, 0, ready, sampled.data_ptr(), n, behind)
        if kinds is not self._last_kinds:
            self._host_kinds[:n] = kinds
            # always as many rows as there may be, so that one graph serves every step
            self._host_kinds[n:] = SKIP
            self._last_kinds = kinds
        if self._draws or sampled is None:
            self._host_positions[:n] = rows.positions
        if self._draws:
            self._host_seeds[:n] = rows.seeds

    def token_draw(self, add_noise: Any, drawn: Drawn) -> TokenDraw:
        """Return how the device draws the tokens of the step that is there.

        Args:
            add_noise: see `TokenDraw`.
            drawn: of the step's rows.
        """
        return TokenDraw(
            add_noise=add_noise,
            seeds=self._noise_seeds,
            lead=self._noise_lead,
            untruncated=drawn.untruncated,
            cut=self._cut if drawn.cut else None,
        )
