"""Capture of one sampling step: the distribution that every token of the step was drawn from.

log q of an id is (z - max) - log(sum of exp(z - max)) over the row's logits z as the sampler saw
them: after temperature and with everything that it masked at -inf, or that the capture cuts off
itself. One read of the logits gives the kept ids as bits, the maximum and the sum; the second pass
goes by the bits and touches only what is kept. Both are kernels since in torch the same takes
several passes over [N, V], a V-wide temporary and a wait for the number of entries.
"""

from __future__ import annotations

import torch

from rollout.kernels.draws import draw_bits, draws_reference, launch_draws
from rollout.kernels.launch import Impl, choose_impl
from rollout.kernels.pack_support import launch_pack
from rollout.kernels.row_stats import launch_row_stats
from rollout.kernels.step_output import RowFlag, RowKind, StepOutput
from rollout.kernels.support_cut import launch_support_cut
from rollout.kernels.token_draw import TokenDraw, launch_take_tokens
from rollout.kernels.top_capture import launch_top, top_reference

__all__ = ["RowFlag", "RowKind", "StepOutput", "capture_step", "capture_step_reference"]

# N rows of logits, M >= N rows of the step, V vocabulary, K draws; R >= M rows of the buffers

_ROW_DTYPES = {
    "kinds": torch.int8,
    "draw.cut.top_k": torch.int32,
    "draw.cut.top_p": torch.float32,
}  # of the others, int64


def capture_step(
    logits: torch.Tensor,  # [N, V]
    sampled_ids: torch.Tensor,  # [M]
    kinds: torch.Tensor,  # [M]
    out: StepOutput,
    *,
    top: int,
    draws: int,
    seeds: torch.Tensor,  # [M]
    positions: torch.Tensor,  # [M]
    draw: TokenDraw | None = None,
    distance: torch.Tensor | None = None,  # [1]
    impl: Impl | None = None,
) -> None:
    """Record the sampler's distribution of every row, without waiting for the device.

    Entries go to `out.entries` in the order of the rows. A row is written if the inclusive prefix
    sum of the counts stays within the capacity; otherwise it is flagged OVERFLOW and nothing of it
    is written. See `RowKind` for what a row records and `RowFlag` for what can be wrong with it.
    There may be more rows than logits, as long as all that are too many are SKIP rows: a launch for
    the most rows of any step is the same at every step.

    Args:
        logits: [N, V] float32, bfloat16 or float16; ids next to each other, rows any distance
            apart.
        sampled_ids: [M] int64, M >= N, the ids that the sampler drew; written where `draw` says
            how they are drawn, 0 in SKIP, NONFINITE and EMPTY rows.
        kinds: [M] int8, `RowKind` of each row.
        out: the buffers to fill, of at least M rows and vocabulary V.
        top: ids recorded of a TOP row, as `out` was allocated for.
        draws: independent samples of every row, K, as `out` was allocated for.
        seeds: [M] int64, the seed of each row's rollout; used for the draws alone.
        positions: [M] int64, the output position of each row, for the draws and the token's noise.
        draw: how to draw the tokens; of GREEDY rows, the most probable id is taken.
        distance: [1] int64 on the device, `launch.distance` of the logits from
            `out.scratch.anchor`, so that one launch serves logits at any address of the same shape,
            stride, dtype and `launch.row_unit`; None names the address in the launch.
        impl: overrides the choice by device, for tests.

    Raises:
        ValueError: shapes, dtypes or devices disagree, tokens are to be drawn by the reference, or
            draws are wanted of rows that are cut here.
            Nothing that depends on values is checked.
    """
    of_rows = {"sampled_ids": sampled_ids, "seeds": seeds, "positions": positions}
    if draw is not None:
        of_rows |= {"draw.seeds": draw.seeds, "draw.lead": draw.lead}
    cut = None if draw is None else draw.cut
    if cut is not None:
        of_rows |= {"draw.cut.top_k": cut.top_k, "draw.cut.top_p": cut.top_p}
        if draws:
            raise ValueError(f"draws: got {draws}, expected 0 where the rows are cut here")
    _check(logits, kinds, out, draws, of_rows)
    out.scratch.check(vocab_size=logits.shape[1], top=top, cut=cut is not None)
    if kinds.shape[0] == 0:
        out.offsets[:1] = 0
        return
    if choose_impl(logits, impl) == "reference":
        if draw is not None:
            raise ValueError("draw: the noise is a Triton function, which the reference can't run")
        capture_step_reference(
            logits, sampled_ids, kinds, out, top=top, draws=draws, seeds=seeds, positions=positions
        )
        return
    if cut is not None:
        launch_support_cut(logits, kinds, cut, out.scratch, distance)
    launch_row_stats(logits, sampled_ids, kinds, out, top, draw, positions, distance)
    launch_pack(logits, sampled_ids, kinds, out, draw, positions, distance)
    if draw is not None:
        launch_take_tokens(logits, sampled_ids, kinds, out, distance)
    if top:
        launch_top(logits, kinds, out, top, distance)
    if draws:
        launch_draws(logits, sampled_ids, kinds, out, seeds, positions, distance)


def _check(
    logits: torch.Tensor,
    kinds: torch.Tensor,
    out: StepOutput,
    draws: int,
    of_rows: dict[str, torch.Tensor],
) -> None:
    """Refuse arguments that the kernels would read past."""
    if logits.ndim != 2 or logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"logits: got {list(logits.shape)} {logits.dtype}, "
            "expected [N, V] float32, bfloat16 or float16"
        )
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"logits: the ids of a row are {logits.stride(1)} elements apart, expected 1"
        )
    rows = kinds.numel()
    if rows < logits.shape[0]:
        raise ValueError(f"kinds: got {rows}, expected at least {logits.shape[0]} as logits has")
    for name, tensor in {"kinds": kinds, **of_rows}.items():
        dtype = _ROW_DTYPES.get(name, torch.int64)
        if tensor.shape != (rows,) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: got {list(tensor.shape)} {tensor.dtype}, "
                f"expected contiguous [{rows}] {dtype}"
            )
        if tensor.device != logits.device:
            raise ValueError(
                f"{name}: on {tensor.device}, expected {logits.device} like the logits"
            )
    if out.counts.device != logits.device:
        raise ValueError(f"out: on {out.counts.device}, expected {logits.device} like the logits")
    if rows > out.counts.shape[0]:
        raise ValueError(f"kinds: {rows} rows, expected at most {out.counts.shape[0]} as `out` has")
    if draws != out.draws.shape[1]:
        raise ValueError(f"draws: got {draws}, expected {out.draws.shape[1]} as `out` has")


def capture_step_reference(
    logits: torch.Tensor,
    sampled_ids: torch.Tensor,
    kinds: torch.Tensor,
    out: StepOutput,
    *,
    top: int,
    draws: int,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Do what `capture_step` does in plain torch, row by row.

    Args:
        logits: as in `capture_step`.
        sampled_ids: as in `capture_step`.
        kinds: as in `capture_step`.
        out: as in `capture_step`.
        top: as in `capture_step`.
        draws: as in `capture_step`.
        seeds: as in `capture_step`.
        positions: as in `capture_step`.
    """
    words = draw_bits(seeds, positions, draws)
    capacity = out.entries.shape[0]
    end = 0
    out.offsets[0] = 0
    for row, kind in enumerate(kinds.tolist()):
        entries, sampled, tail, drawn, flags = _row_reference(
            # rows beyond the logits are SKIP rows, of which nothing is read
            logits[row] if row < logits.shape[0] else logits.new_empty(0),
            int(sampled_ids[row]),
            RowKind(kind),
            top,
            words[row],
        )
        start, end = end, end + entries.shape[0]
        if end > capacity and end > start:
            flags |= RowFlag.OVERFLOW
        elif end > start:
            out.entries[start:end] = entries
        out.counts[row] = entries.shape[0]
        out.offsets[row + 1] = end
        out.sampled_logprobs[row] = sampled
        out.tail_mass[row] = tail
        out.draws[row] = drawn
        out.flags[row] = int(flags)


def _row_reference(
    logits: torch.Tensor, sampled: int, kind: RowKind, top: int, words: torch.Tensor
) -> tuple[torch.Tensor, float, float, torch.Tensor, RowFlag]:
    """Return one row's entries, sampled logprob, tail mass, draws and flags."""
    nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
    no_draws = torch.zeros(words.shape[0], dtype=torch.int64, device=logits.device)
    if kind == RowKind.SKIP:
        return nothing, 0.0, 0.0, no_draws, RowFlag(0)
    values = logits.float()
    kept = values > -torch.inf
    broken = RowFlag(0)
    if bool((values.isnan() | (values == torch.inf)).any()):
        broken = RowFlag.NONFINITE
    elif not bool(kept.any()):
        broken = RowFlag.EMPTY
    if broken:
        return nothing, torch.nan, torch.nan if kind == RowKind.TOP else 0.0, no_draws, broken
    missing = not 0 <= sampled < values.shape[0] or not bool(kept[sampled])
    flags = RowFlag.SAMPLED_MISSING if missing else RowFlag(0)
    if kind == RowKind.GREEDY:
        if missing:
            return nothing, -torch.inf, 0.0, no_draws, flags
        # the bits of logprob 0 are 0
        return nothing.new_full((1,), sampled), 0.0, 0.0, no_draws + sampled, flags
    shifted = values - values.max()
    # summed in float64: float32 would lose digits over a wide vocabulary
    logprobs = shifted - shifted.double().exp().sum().log().float()
    sampled_logprob = -torch.inf if missing else float(logprobs[sampled])
    tail = 0.0
    ids = nothing
    if kind == RowKind.KEPT:
        ids = kept.nonzero().flatten()
    elif kind == RowKind.TOP:
        ids, tail_mass = top_reference(values, top)
        tail = float(tail_mass)
    drawn = draws_reference(values, words) if words.shape[0] else no_draws
    return _pack(logprobs, ids), sampled_logprob, tail, _pack(logprobs, drawn), flags


def _pack(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Pack the logprobs [V] of some ids [E] with the ids into int64 [E]."""
    # + 0.0 turns -0.0 into +0.0
    bits = (logprobs[ids] + 0.0).view(torch.int32)
    return (bits.long() << 32) | ids
