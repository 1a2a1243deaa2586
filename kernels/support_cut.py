"""Top-k and top-p, decided by the capture: which ids of a row the token may be drawn from.

The ids of a row are in order of their logits, of equal ones the lowest id first. top_k keeps the
first k of them; top_p then keeps the shortest prefix whose probability, among what top_k kept,
reaches p. What is kept is therefore a prefix, and a row's cut is its last id.

Most rows keep few ids, and one read of the logits leaves a list of candidates (`cut_head`); wide
rows take two more (`cut_wide`). Among the candidates the cut is searched for (`cut_search`). Sums
decide to about 1e-6 of the mass; nothing goes by the order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.kernels.cut_head import launch_cut_head
from rollout.kernels.cut_search import launch_cut_search
from rollout.kernels.cut_wide import launch_cut_wide
from rollout.kernels.launch import CaptureScratch

# N rows of logits, M >= N rows of the step, V vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class SupportCut:
    """How the rows of a step are truncated; M rows."""

    top_k: torch.Tensor
    """[M] int32, ids kept at most; 0 or at least V keeps all."""
    top_p: torch.Tensor
    """[M] float32 in (0, 1], the probability to reach; 1 keeps all."""


def cut_reference(logits: torch.Tensor, cut: SupportCut) -> torch.Tensor:
    """Mask what is cut off, in plain torch and float64.

    Args:
        logits: [N, V] any float dtype, no NaN or +inf; some may be -inf.
        cut: of at least N rows.

    Returns:
        [N, V] float32, -inf where an id is not kept.
    """
    values = logits.float()
    order = torch.sort(values, dim=1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    top_k = cut.top_k[: values.shape[0], None].long()
    top_p = cut.top_p[: values.shape[0], None].double()
    kept = (rank < top_k) | (top_k <= 0)
    weights = torch.where(kept, (order.values - order.values[:, :1]).double().exp(), 0.0)
    before = weights.cumsum(dim=1) - weights  # of the ids ahead of each
    kept &= (before < top_p * weights.sum(dim=1, keepdim=True)) | (top_p >= 1.0)
    sorted_values = torch.where(kept, order.values, -torch.inf)
    return torch.full_like(values, -torch.inf).scatter(1, order.indices, sorted_values)


def launch_support_cut(
    logits: torch.Tensor,  # [N, V]
    kinds: torch.Tensor,  # [M]
    cut: SupportCut,
    scratch: CaptureScratch,
    distance: torch.Tensor | None,  # [1]
) -> None:
    """Find the cut of each KEPT row and leave it in the scratch; other rows are not cut.

    Of rows whose kept ids are all listed, that is the bound of the list and their statistics;
    otherwise the logit and the id to which the pass over the logits keeps ids.

    Args:
        logits: [N, V] float32, bfloat16 or float16, not truncated.
        kinds: [M] int8.
        cut: how the rows are truncated.
        scratch: the step's working memory.
        distance: [1] int64 or None, see `capture_step`.
    """
    launch_cut_head(logits, kinds, cut.top_k, cut.top_p, scratch, distance)
    launch_cut_wide(logits, kinds, cut.top_k, cut.top_p, scratch, distance)
    launch_cut_search(logits, kinds, cut.top_k, cut.top_p, scratch, distance)
