"""Loss inputs for tests: many samples of one prefix, as a trainer would hand them to the loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.losses import LossConfig, LossInputs, LossOutputs, compute_loss


def make_inputs(
    logits: Tensor,  # [V]
    q: Any,  # [V]
    tokens: list[int],
    *,
    advantages: Any = 1.0,
    weights: Any = None,
    support: list[int] | None = None,
    head: list[int] | None = None,
    draws: list[list[int]] | None = None,
    normalise: bool = True,
    **changes: Any,
) -> LossInputs:
    """Build one row per token: all ids, a truncated support, a head with a tail, or draws.

    Trainer values are computed from the logits by plain torch, over the support if there is one.
    """
    num_rows = len(tokens)
    dtype = logits.dtype
    q = torch.as_tensor(np.asarray(q), dtype=torch.float64)
    kept = torch.tensor(support if support is not None else range(len(q)))
    log_z = torch.logsumexp(logits[kept], 0) if normalise else torch.zeros((), dtype=dtype)
    log_p = logits - log_z
    entries = [support if support is not None else list(range(len(q)))] * num_rows
    if head is not None:
        entries = [head] * num_rows
    if draws is not None:
        entries = draws
    ids = torch.tensor([i for row in entries for i in row], dtype=torch.int64)
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in entries])])
    tail_ids = torch.tensor([i for i in range(len(q)) if head is not None and i not in head])
    tail_ids = tail_ids.long()
    target = torch.tensor(tokens, dtype=torch.int64)
    values: dict[str, Any] = {
        "trainer_logprobs": log_p[target],
        "sampler_logprobs": q.log().to(dtype)[target],
        "advantages": torch.as_tensor(np.broadcast_to(advantages, num_rows).copy()).to(dtype),
        "loss_mask": torch.ones(num_rows, dtype=torch.bool),
        "temperature": torch.ones(num_rows, dtype=dtype),
        "support_offsets": offsets,
        "trainer_support_logprobs": log_p[ids],
        "sampler_support_logprobs": q.log().to(dtype)[ids],
        "support_valid": torch.ones(num_rows, dtype=torch.bool),
        "support_is_samples": torch.full((num_rows,), draws is not None),
        "sampler_tail_mass": q[tail_ids].sum().to(dtype).expand(num_rows),
        "trainer_tail_mass": log_p[tail_ids].exp().sum().expand(num_rows),
        "global_denominator": 1.0,
        "loss_weights": None if weights is None else torch.as_tensor(np.asarray(weights)).to(dtype),
        "target_ids": target,
        "support_ids": ids,
    }
    if not normalise:
        values["trainer_is_normalised"] = torch.zeros(num_rows, dtype=torch.bool)
    return LossInputs(**{**values, **changes})


def update(
    z: Any, q: Any, tokens: list[int], config: LossConfig, **case: Any
) -> NDArray[np.float64]:
    """Return minus the gradient of the loss by the logits: the direction a step would take."""
    logits = torch.tensor(np.asarray(z), dtype=torch.float64, requires_grad=True)
    outputs = compute_loss(make_inputs(logits, q, tokens, **case), config)
    (grad,) = torch.autograd.grad(outputs.loss, logits)
    return -grad.numpy()


def evaluate(z: Any, q: Any, tokens: list[int], config: LossConfig, **case: Any) -> LossOutputs:
    """Return the outputs of the loss for float64 logits without a gradient."""
    logits = torch.tensor(np.asarray(z), dtype=torch.float64)
    return compute_loss(make_inputs(logits, q, tokens, **case), config)
