"""Head and tail of an untruncated row: the most probable ids and the mass of the others.

The tail is summed on its own, never as one minus the head: in float32 that difference loses a tail
of 1e-6 altogether, and the trainer divides by it.
"""

from __future__ import annotations

import torch


def top_reference(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the head of one row and sum its tail, in plain torch.

    tail = exp(logsumexp(tail logits) - logsumexp(all logits)); exactly 0 when no kept id is left
    out.

    Args:
        logits: [V] any float dtype, without NaN and +inf, not all -inf.
        top: ids in the head.

    Returns:
        ids [min(top, kept)] int64, the most probable ids (of equal ones the lowest), ascending;
        tail mass [], float32.
    """
    values = logits.float()
    num_head = min(top, int((values > -torch.inf).sum()))
    head = torch.argsort(values, descending=True, stable=True)[:num_head].sort().values
    rest = values.double()
    total = torch.logsumexp(rest, dim=0)
    rest = rest.clone()
    rest[head] = -torch.inf
    return head, torch.exp(torch.logsumexp(rest, dim=0) - total).float()
