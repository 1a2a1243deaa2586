"""The losses on the real output heads: what reaches the hidden states and the output weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor

from rollout.kernels.dense_head import dense_logprobs
from rollout.kernels.support_head import support_logprobs
from rollout.losses import LossConfig, LossInputs, compute_loss

N, H, V = 9, 5, 30
TEMPERATURE = 0.7


def case(
    seed: int, widths: list[int], *, full: bool = False
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return hidden states, output weight, and the sampler's side for these support widths."""
    rng = np.random.default_rng(seed)
    hidden, weight = rng.normal(size=(N, H)), rng.normal(size=(V, H))
    ids: list[int] = []
    logprobs: list[float] = []
    targets: list[int] = []
    sampled: list[float] = []
    for i, width in enumerate(widths):
        own = np.arange(V) if full else rng.permutation(V)[:width]
        q = oracle.softmax(
            hidden[i] @ weight[own].T / TEMPERATURE + 0.5 * rng.normal(size=len(own))
        )
        pick = int(rng.integers(len(own)))
        ids += own.tolist()
        logprobs += np.log(q).tolist()
        targets.append(int(own[pick]))
        sampled.append(float(np.log(q[pick])))
    values = {
        "sampler_logprobs": torch.tensor(sampled, dtype=torch.float64),
        "advantages": torch.tensor(rng.normal(size=N)),
        "loss_mask": torch.ones(N, dtype=torch.bool),
        "temperature": torch.full((N,), TEMPERATURE, dtype=torch.float64),
        "support_offsets": torch.tensor(np.cumsum([0, *widths])),
        "sampler_support_logprobs": torch.tensor(logprobs, dtype=torch.float64),
        "support_valid": torch.ones(N, dtype=torch.bool),
        "support_is_samples": torch.zeros(N, dtype=torch.bool),
        "sampler_tail_mass": torch.zeros(N, dtype=torch.float64),
        "global_denominator": 1.0,
        "target_ids": torch.tensor(targets),
        "support_ids": torch.tensor(ids, dtype=torch.int32),
    }
    return torch.tensor(hidden), torch.tensor(weight), values


def head_arguments(values: dict[str, Any]) -> tuple[Tensor, ...]:
    inverse = torch.full((N,), 1 / TEMPERATURE, dtype=torch.float64)
    return values["support_ids"], values["support_offsets"], values["target_ids"], inverse


def gradients(
    hidden: Tensor, weight: Tensor, values: dict[str, Any], settings: LossConfig, head: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients by the hidden states and the output weight."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    trainer: dict[str, Any]
    if head == "sparse":
        targets, entries = support_logprobs(hidden, weight, *head_arguments(values))
        trainer = {}
    elif head == "dense":
        dense = dense_logprobs(hidden, weight, *head_arguments(values))
        targets, entries = dense.targets, dense.entries
        trainer = {"trainer_tail_mass": dense.tail.exp()}
    else:
        logits = hidden @ weight.T / TEMPERATURE
        rows = torch.repeat_interleave(values["support_offsets"].diff())
        targets = logits.gather(1, values["target_ids"][:, None])[:, 0]
        entries = logits[rows, values["support_ids"].long()]
        trainer = {"trainer_is_normalised": torch.zeros(N, dtype=torch.bool)}
    inputs = LossInputs(
        trainer_logprobs=targets, trainer_support_logprobs=entries, **{**values, **trainer}
    )
    loss = compute_loss(inputs, settings).loss
    grads = torch.autograd.grad(loss, [hidden, weight])
    return loss.detach(), grads[0], grads[1]


SETTINGS = {
    "icepop": LossConfig(loss="icepop", centering="exact", kl_q_p=0.2, kl_p_q=0.1, ratio_high=1.5),
    "ipo": LossConfig(loss="ipo", centering="exact", kl_q_p=0.2, max_probability_gap=0.05),
    "reinforce": LossConfig(loss="reinforce", centering="exact", kl_p_q=0.3),
}
EACH = pytest.mark.parametrize("name", list(SETTINGS))


@EACH
def test_invariance_dense_and_sparse_head(name: str) -> None:
    # over a support of the whole vocabulary both heads normalise over the same ids
    hidden, weight, values = case(1, [V] * N, full=True)
    sparse = gradients(hidden, weight, values, SETTINGS[name], "sparse")
    dense = gradients(hidden, weight, values, SETTINGS[name], "dense")
    for a, b in zip(sparse, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@EACH
def test_o32_output_rows_off_every_support_get_no_gradient(name: str) -> None:
    hidden, weight, values = case(2, [1, 2, 3, 1, 4, 2, 2, 3, 1])
    _, _, grad = gradients(hidden, weight, values, SETTINGS[name], "sparse")
    named = torch.zeros(V, dtype=torch.bool)
    named[values["support_ids"].long()] = True
    assert 0 < int(named.sum()) < V
    assert not grad[~named].any()
    assert float(grad[named].abs().max()) > 1e-3


@EACH
def test_o33_batch_of_singletons_has_no_gradient(name: str) -> None:
    hidden, weight, values = case(3, [1] * N)
    _, grad_hidden, grad_weight = gradients(hidden, weight, values, SETTINGS[name], "sparse")
    assert not grad_hidden.any()
    assert not grad_weight.any()


@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_o15_o16_raw_logits_serve_the_unweighted_loss(kind: Any) -> None:
    hidden, weight, values = case(4, [V] * N, full=True)
    if kind == "sampled":
        rng = np.random.default_rng(4)
        offsets = values["support_offsets"].tolist()
        chosen = torch.tensor([offsets[i] + j for i in range(N) for j in rng.integers(0, V, 3)])
        values = {
            **values,
            "support_ids": values["support_ids"][chosen],
            "sampler_support_logprobs": values["sampler_support_logprobs"][chosen],
            "support_offsets": torch.arange(0, 3 * N + 1, 3),
            "support_is_samples": torch.ones(N, dtype=torch.bool),
        }
    settings = LossConfig(loss="reinforce", centering=kind)
    raw = gradients(hidden, weight, values, settings, "raw")
    dense = gradients(hidden, weight, values, settings, "dense")
    for a, b in zip(raw, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "weight_of"),
    [
        (LossConfig(loss="reinforce", centering="tail"), oracle.weight_one),
        (LossConfig(loss="icepop", centering="tail", ratio_low=0.5), oracle.weight_band),
    ],
    ids=["reinforce", "icepop"],
)
def test_o09_head_and_tail_through_the_dense_head(
    settings: LossConfig, weight_of: oracle.Weight
) -> None:
    hidden, weight, values = case(5, [V] * N, full=True)
    # record the first 4 ids of every row, the rest is the tail
    offsets = values["support_offsets"].tolist()
    q = values["sampler_support_logprobs"].exp().view(N, V)
    first = torch.tensor([offsets[i] + j for i in range(N) for j in range(4)])
    values = {
        **values,
        "support_ids": values["support_ids"][first],
        "sampler_support_logprobs": values["sampler_support_logprobs"][first],
        "support_offsets": torch.arange(0, 4 * N + 1, 4),
        "sampler_tail_mass": q[:, 4:].sum(1),
    }
    _, _, grad = gradients(hidden, weight, values, settings, "dense")
    want = np.zeros((V, H))
    for i in range(N):
        p = oracle.softmax(hidden[i].numpy() @ weight.numpy().T / TEMPERATURE)
        row, a = q[i].numpy(), int(values["target_ids"][i])
        q_hat, _ = oracle.tail_model(p, row, [0, 1, 2, 3])
        score = weight_of(p[a], row[a]) * oracle.scores(p)[a] - oracle.drift(p, q_hat, weight_of)
        logit_grad = -float(values["advantages"][i]) * score / TEMPERATURE
        want += np.outer(logit_grad, hidden[i].numpy())
    np.testing.assert_allclose(grad.numpy(), want, atol=1e-12)
