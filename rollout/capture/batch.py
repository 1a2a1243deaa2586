"""One sampling step's rows as the runner's host memory describes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRows:
    """N rows in the order of the logits."""

    request_ids: list[str]
    """[N] the engine's internal ids."""
    positions: npt.NDArray[np.int32]
    """[N] index of the token being sampled in the request's output."""
    kinds: npt.NDArray[np.int8]
    """[N] kinds of `rollout.capture.request`; SKIP where the sample does not count. Never changed,
    so that the same array in another step says the same."""
    seeds: npt.NDArray[np.int64]
    """[N] seeds of the recorded draws."""
    noise: RowNoise | None = None
    """What the capture needs to draw the tokens itself; null where the engine draws them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowNoise:
    """By what the engine's sampler would draw the tokens of N rows.

    Never changed: the same object in another step says the same.
    """

    seeds: npt.NDArray[np.int64]
    """[N]."""
    lead: npt.NDArray[np.int64]
    """[N] what the sampler's position is ahead of the output's."""
    untruncated: bool
    """Whether there are rows of other kinds than KEPT and SKIP."""
    cut: RowCut | None = None
    """How the capture truncates KEPT rows; null if their logits come masked."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowCut:
    """How N rows are truncated; see `rollout.kernels.support_cut`."""

    top_k: npt.NDArray[np.int32]
    """[N] 0 or at least V keeps all."""
    top_p: npt.NDArray[np.float32]
    """[N] 1 keeps all."""


OnStep = Callable[[torch.Tensor, torch.Tensor, BatchRows], None]
"""Called in each sampling step with masked logits [N, V], sampled ids [N] and the N rows."""

OnDraw = Callable[[torch.Tensor, BatchRows], torch.Tensor | None]
"""Called in place of `OnStep` where rows have their noise, with logits [N, V], masked but for what
the rows' cut drops, and the N rows; returns [N] int64 sampled ids, or null if the engine is to draw
them."""

OnDrawn = Callable[[torch.Tensor], None]
"""Called with the tokens of a step, [N] int64."""
