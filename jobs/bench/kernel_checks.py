"""What a step of the capture wrote, compared with float64 on the device, some rows at a time."""

from __future__ import annotations

import torch
from kernel_cases import CaseStep
from noise_scores import best_ids, noisy_logits

from rollout.kernels.draws import draw_bits
from rollout.kernels.step_output import RowKind

CHECKED_ROWS = 64  # at a time: a float64 of each id of more would fill small devices
MASS_TOLERANCE = 2e-6
"""Of a top-p, relative to the mass of what top_k keeps: the kernels' sums decide to about 1e-6."""

# N rows of the step, B <= CHECKED_ROWS of them, V vocabulary, E entries


def check(step: CaseStep, index: int) -> tuple[float, float]:
    """Compare the output of one step.

    Args:
        step: a case, after the step.
        index: the step's number.

    Returns:
        worst_logprob: the largest error of a logprob over 5e-7 + 2**-23 * |logprob|.
        worst_tail: the largest relative error of a tail mass.
    """
    out = step.out
    rows = step.kinds.shape[0]
    same("flags", out.flags, torch.zeros_like(out.flags))
    same("offsets", out.offsets[1:], out.counts.long().cumsum(dim=0))
    errors = [
        _check_rows(step, index, slice(first, min(first + CHECKED_ROWS, rows)))
        for first in range(0, rows, CHECKED_ROWS)
    ]
    return max(logprob for logprob, _ in errors), max(tail for _, tail in errors)


def _check_rows(step: CaseStep, index: int, rows: slice) -> tuple[float, float]:
    """Return the errors of some rows."""
    case, out = step.case, step.out
    values = step.sets[index % len(step.sets)][rows].float()
    vocab_size = values.shape[1]
    sampled = step.tokens(index)[rows]
    counts = out.counts[rows].long()
    kept = values > -torch.inf
    if case.cut is not None:
        kept = stored_prefix(case.name, values, counts, *case.cut)
    expected = kept
    if case.kind == RowKind.TOP:
        expected = head_mask(values, case.top)
    elif case.kind == RowKind.NONE:
        expected = torch.zeros_like(kept)
    same("counts", counts, expected.sum(dim=1))
    start, end = int(out.offsets[rows.start]), int(out.offsets[rows.stop])
    row = torch.repeat_interleave(torch.arange(len(counts), device=values.device), counts)
    ids, logprobs = unpack(out.entries[start:end])
    same("ids", (row * vocab_size + ids).sort().values, expected.flatten().nonzero().flatten())
    if step.draw is not None:
        draw = step.draw
        positions = step.positions[rows] + draw.lead[rows]
        scores = noisy_logits(values, draw.add_noise, draw.seeds[rows], positions)
        same("tokens", sampled, best_ids(scores, kept))
    exact = torch.log_softmax(values.double().masked_fill(~kept, -torch.inf), dim=-1)
    worst = [error_ratio(out.sampled_logprobs[rows], exact.gather(1, sampled[:, None])[:, 0])]
    if end > start:
        worst.append(error_ratio(logprobs, exact[row, ids]))
    worst_tail = 0.0
    if case.kind == RowKind.TOP:
        tail = torch.logsumexp(exact.masked_fill(expected, -torch.inf), dim=-1).exp()
        ratio = (out.tail_mass[rows].double() - tail).abs() / tail
        worst_tail = float(ratio.nan_to_num(nan=torch.inf).max())
    else:
        same("tail mass", out.tail_mass[rows], torch.zeros_like(out.tail_mass[rows]))
    if case.draws:
        worst.append(_check_draws(step, exact, rows))
    return max(worst), worst_tail


def _check_draws(step: CaseStep, exact: torch.Tensor, rows: slice) -> float:
    """Compare the draws of some rows, log q [B, V] float64; return the worst logprob's error."""
    ids, logprobs = unpack(step.out.draws[rows])
    words = draw_bits(step.seeds[rows], step.positions[rows], step.case.draws)
    uniform = ((words[..., 0] >> 5) * 2.0**26 + (words[..., 1] >> 6)) * 2.0**-53
    upper = exact.exp().cumsum(dim=-1).gather(1, ids)
    lower = upper - exact.exp().gather(1, ids)
    off = float(torch.maximum(lower - uniform, uniform - upper).max())
    if off > 1e-6:
        raise SystemExit(f"{step.case.name}: a draw is {off:.1e} away from its uniform number")
    return error_ratio(logprobs, exact.gather(1, ids))


def stored_prefix(
    name: str, values: torch.Tensor, counts: torch.Tensor, top_k: int, top_p: float
) -> torch.Tensor:
    """Return what a truncated row keeps if it keeps so many ids; stop if it may not be so many.

    What is kept is a prefix of the order (logit descending, id ascending): as long as the rule
    makes it for some p within `MASS_TOLERANCE` of top_p.

    Args:
        name: of the case.
        values: [B, V] float32, no NaN or +inf.
        counts: [B] int64, ids that the kernels kept.
        top_k: 0 for none.
        top_p: 1 for none.

    Returns:
        [B, V] bool.
    """
    # + 0.0 turns -0.0 into +0.0, which are equal
    order = (values + 0.0).sort(dim=1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    within = order.values > -torch.inf
    if top_k:
        within &= rank < top_k
    shortest = longest = within.sum(dim=1)
    if top_p < 1.0:
        p = float(torch.tensor(top_p, dtype=torch.float32))
        weights = (order.values.double() - order.values[:, :1].double()).exp()
        weights.masked_fill_(~within, 0.0)
        mass = weights.cumsum(dim=1)
        before = (mass - weights) / mass[:, -1:]
        shortest = (within & (before < p - MASS_TOLERANCE)).sum(dim=1).clamp(min=1)
        longest = (within & (before <= p + MASS_TOLERANCE)).sum(dim=1)
    wrong = ((counts < shortest) | (counts > longest)).nonzero().flatten()
    if wrong.numel():
        row = int(wrong[0])
        raise SystemExit(
            f"{name}: {wrong.numel()} rows of {len(counts)} keep the wrong number of ids, "
            f"the first {int(counts[row])}, expected {int(shortest[row])} to {int(longest[row])}"
        )
    prefix = (rank < counts[:, None]).expand_as(order.indices)
    return torch.zeros_like(within).scatter(1, order.indices, prefix)


def head_mask(values: torch.Tensor, top: int) -> torch.Tensor:
    """Mark the `top` largest of each row, of equal ones the lowest ids.

    Args:
        values: [B, V].
        top: how many.

    Returns:
        [B, V] bool.
    """
    bound = values.topk(top, dim=-1).values[:, -1:]
    above = values > bound
    equal = values == bound
    spare = top - above.sum(dim=1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=1) <= spare))


def unpack(entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take packed entries apart.

    Args:
        entries: int64, any shape.

    Returns:
        ids: int64.
        logprobs: float32.
    """
    return entries & 0xFFFFFFFF, (entries >> 32).to(torch.int32).view(torch.float32)


def error_ratio(values: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest error over the error that a logprob may have.

    Args:
        values: float32.
        exact: float64 of the same shape.

    Returns:
        At most 1 if all are right; infinite where one is no number.
    """
    ratio = (values.double() - exact).abs() / (5e-7 + 2.0**-23 * exact.abs())
    return float(ratio.nan_to_num(nan=torch.inf).max())


def same(name: str, values: torch.Tensor, expected: torch.Tensor) -> None:
    """Stop unless two tensors are equal.

    Args:
        name: what they are.
        values: from the kernels.
        expected: from the formula.
    """
    if not torch.equal(values, expected):
        raise SystemExit(f"{name}: the kernels' differ from what the logits say")
