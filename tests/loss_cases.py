"""Loss inputs for tests: many samples of one prefix, as a trainer would hand them to the loss."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.losses import LossConfig, LossInputs, LossOutputs, compute_loss

LOSSES = pytest.mark.parametrize("loss", ["ipo", "icepop", "reinforce"])


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


def random_batch(
    seed: int, num_rows: int = 24, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Any], list[list[int]]]:
    """Return fields of ragged exact rows over 40 ids, and each row's ids."""
    rng = np.random.default_rng(seed)
    rows, fields = [], {"trainer": [], "sampler": [], "p": [], "q": [], "target": []}  # type: ignore[var-annotated]
    for i in range(num_rows):
        ids = rng.permutation(40)[: 1 + i % 9].tolist()
        p, q = (oracle.softmax(rng.normal(size=len(ids))) for _ in range(2))
        rows.append(ids)
        fields["trainer"] += np.log(p).tolist()
        fields["sampler"] += np.log(q).tolist()
        fields["p"].append(math.log(p[i % len(ids)]))
        fields["q"].append(math.log(q[i % len(ids)]))
        fields["target"].append(ids[i % len(ids)])
    offsets = np.cumsum([0, *(len(ids) for ids in rows)])
    values = {
        "trainer_logprobs": torch.tensor(fields["p"], dtype=dtype),
        "sampler_logprobs": torch.tensor(fields["q"], dtype=dtype),
        "advantages": torch.tensor(rng.normal(size=num_rows), dtype=dtype),
        "loss_mask": torch.tensor(rng.random(num_rows) < 0.8),
        "temperature": torch.ones(num_rows, dtype=dtype),
        "support_offsets": torch.tensor(offsets),
        "trainer_support_logprobs": torch.tensor(fields["trainer"], dtype=dtype),
        "sampler_support_logprobs": torch.tensor(fields["sampler"], dtype=dtype),
        "support_valid": torch.ones(num_rows, dtype=torch.bool),
        "support_is_samples": torch.zeros(num_rows, dtype=torch.bool),
        "sampler_tail_mass": torch.zeros(num_rows, dtype=dtype),
        "global_denominator": float(num_rows),
        "target_ids": torch.tensor(fields["target"]),
        "support_ids": torch.tensor([i for ids in rows for i in ids], dtype=torch.int32),
    }
    return values, rows


def take(values: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Return the fields of some rows, in that order."""
    offsets = values["support_offsets"].tolist()
    entries = torch.tensor([e for i in rows for e in range(offsets[i], offsets[i + 1])]).long()
    counts = [offsets[i + 1] - offsets[i] for i in rows]
    result = dict(values)
    for name, value in values.items():
        if name == "support_offsets":
            result[name] = torch.tensor(np.cumsum([0, *counts]))
        elif name in ("trainer_support_logprobs", "sampler_support_logprobs", "support_ids"):
            result[name] = value[entries]
        elif isinstance(value, Tensor):
            result[name] = value[rows]
    return result


def run(values: dict[str, Any], settings: LossConfig) -> tuple[LossOutputs, Tensor, Tensor]:
    """Return outputs and the gradients of both trainer fields."""
    leaves = [
        values[name].clone().requires_grad_()
        for name in ("trainer_logprobs", "trainer_support_logprobs")
    ]
    inputs = LossInputs(
        **{**values, "trainer_logprobs": leaves[0], "trainer_support_logprobs": leaves[1]}
    )
    outputs = compute_loss(inputs, settings)
    torch.autograd.backward(outputs.loss)
    outputs = dataclasses.replace(outputs, loss=outputs.loss.detach())
    assert leaves[0].grad is not None
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return outputs, grads[0], grads[1]


def everything(loss: Any) -> LossConfig:
    """Every term at once."""
    return LossConfig(
        loss=loss,
        centering="exact",
        kl_q_p=0.3,
        kl_p_q=0.2,
        max_probability_gap=0.1,
        ratio_low=0.5,
        ratio_high=2.0,
    )
