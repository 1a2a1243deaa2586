"""Whether the capture draws what vLLM's V2 sampler draws: both draw tokens of random logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from rollout.capture.batch import BatchRows, RowCut, RowNoise
from rollout.capture.request import GREEDY, KEPT, NONE, TOP
from rollout.kernels.support_cut import SupportCut, cut_reference

_HALF: Final = 32
TRIED_ROWS: Final = 2 * _HALF
"""Rows whose tokens are compared: half of them of all kinds, half KEPT, which has launches of its
own."""
# top-k and top-p of the rows that are cut, to one id and to nearly all; a top-k of 0 is none
_CUTS: Final = ((3, 1.0), (0, 0.9), (20, 0.5), (0, 0.05), (5000, 0.8), (0, 0.999), (1, 1.0))

TryDraw = Callable[[torch.Tensor, BatchRows], torch.Tensor]
"""Draws the tokens, [N] int64, of logits [N, V] and N rows."""


def compare_draws(
    try_draw: TryDraw,
    stock_draw: Callable[..., torch.Tensor],
    *,
    vocab_size: int,
    device: torch.device,
    rows_at_once: int,
    cut: bool,
) -> int:
    """Draw the tokens of random logits twice.

    Args:
        try_draw: draws the capture's.
        stock_draw: draws vLLM's, as its `gumbel_sample` does.
        vocab_size: V.
        device: where the logits are to be.
        rows_at_once: most rows of a step.
        cut: whether the capture is to truncate, too; vLLM's tokens are drawn of what a sort leaves.

    Returns:
        How many of `TRIED_ROWS` tokens are not the same.
    """
    # as many rows at a time as there may be, so that every kind comes
    others = 0
    for first in itertools.chain(*(range(half, half + _HALF, rows_at_once) for half in (0, _HALF))):
        end = (first // _HALF + 1) * _HALF
        number = np.arange(first, min(first + rows_at_once, end))
        logits, batch = _random_step(number, vocab_size, device, cut=cut)
        noise = batch.noise
        assert noise is not None
        theirs = stock_draw(
            logits if noise.cut is None else _masked(logits, noise.cut),
            torch.arange(len(number), device=device),
            torch.from_numpy((batch.kinds != GREEDY).astype(np.float32)).to(device),
            torch.from_numpy(noise.seeds).to(device),
            torch.from_numpy(noise.lead).to(device),
            apply_temperature=False,
            is_drafting=False,
        )
        others += int((try_draw(logits, batch) != theirs).sum())
    return others


def _random_step(
    number: npt.NDArray[np.int64], vocab_size: int, device: torch.device, *, cut: bool
) -> tuple[torch.Tensor, BatchRows]:
    """Return logits [N, V] and rows of all kinds that count, by the rows' numbers [N]."""
    rows, first = len(number), int(number[0])
    kinds = np.array([KEPT, TOP, KEPT, GREEDY, KEPT, NONE], np.int8)[number % 6]
    kinds[number >= _HALF] = KEPT
    generator = torch.Generator(device).manual_seed(first)
    logits = torch.randn(rows, vocab_size, generator=generator, device=device)
    # from some ids to all of them
    kept = torch.from_numpy((number + 2.0) / TRIED_ROWS).to(device)[:, None]
    dropped = torch.rand(rows, vocab_size, generator=generator, device=device) > kept
    dropped[:, :2] = False
    # every other row that is cut had ids masked before that, as by min-p
    masked = (kinds == KEPT) & ((number % 4 == 0) | (not cut))
    dropped &= torch.from_numpy(masked).to(device)[:, None]
    logits.masked_fill_(dropped, -torch.inf)
    seeds = np.random.default_rng(first).integers(-(2**63), 2**63, rows, np.int64)
    return logits, BatchRows(
        request_ids=[""] * rows,
        positions=np.zeros(rows, np.int32),
        kinds=kinds,
        seeds=seeds,
        noise=RowNoise(
            seeds=seeds,
            lead=number * 1001,
            untruncated=bool((kinds > KEPT).any()),
            cut=_tried_cut(number, kinds, vocab_size) if cut else None,
        ),
    )


def _tried_cut(
    number: npt.NDArray[np.int64], kinds: npt.NDArray[np.int8], vocab_size: int
) -> RowCut:
    top_k, top_p = np.array(_CUTS)[number // 2 % len(_CUTS)].T
    # vLLM has the whole vocabulary and 1 for rows without
    keeps_all = (kinds != KEPT) | (top_k == 0)
    return RowCut(
        top_k=np.where(keeps_all, vocab_size, top_k).astype(np.int32),
        top_p=np.where(kinds != KEPT, 1.0, top_p).astype(np.float32),
    )


def _masked(logits: torch.Tensor, cut: RowCut) -> torch.Tensor:
    top_k, top_p = (torch.from_numpy(array).to(logits.device) for array in (cut.top_k, cut.top_p))
    return cut_reference(logits, SupportCut(top_k=top_k, top_p=top_p))
