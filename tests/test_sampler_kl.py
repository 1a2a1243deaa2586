"""Sampler KL against closed forms; each test is named after the identity that it shows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from loss_cases import evaluate, make_inputs, update
from numpy.typing import NDArray

from rollout.losses import LossConfig, compute_loss

V = 6
SEEDS = pytest.mark.parametrize("seed", range(3))


def kl_only(estimator: Any, q_p: float = 0.0, p_q: float = 0.0) -> LossConfig:
    """Return a config for tests that set every advantage to 0: nothing but the KL is left."""
    return LossConfig(loss="reinforce", kl_estimator=estimator, kl_q_p=q_p, kl_p_q=p_q)


def logits_and_q(seed: int) -> tuple[NDArray[np.float64], oracle.Vector]:
    rng = np.random.default_rng(seed)
    return 1.2 * rng.normal(size=V), oracle.softmax(1.2 * rng.normal(size=V))


def values(z: object, q: object, tokens: list[int], estimator: Any, **case: Any) -> list[float]:
    """Return the reported sums of both directions."""
    metrics = evaluate(z, q, tokens, kl_only(estimator, 1.0, 1.0), advantages=0.0, **case).metrics
    return [float(metrics.kl_q_p), float(metrics.kl_p_q)]


@SEEDS
def test_o22_gradient_of_kl_q_p_by_finite_difference(seed: int) -> None:
    z, q = logits_and_q(seed)
    got = -update(z, q, [0], kl_only("exact", q_p=0.7), advantages=0.0)
    want = oracle.gradient(lambda x: 0.7 * oracle.kl(q, oracle.softmax(x)), z)
    np.testing.assert_allclose(got, want, atol=1e-9)
    np.testing.assert_allclose(got, -0.7 * q @ oracle.scores(oracle.softmax(z)), atol=1e-14)


@SEEDS
def test_o23_gradient_of_kl_p_q_by_finite_difference(seed: int) -> None:
    z, q = logits_and_q(seed)
    got = -update(z, q, [0], kl_only("exact", p_q=0.7), advantages=0.0)
    want = oracle.gradient(lambda x: 0.7 * oracle.kl(oracle.softmax(x), q), z)
    np.testing.assert_allclose(got, want, atol=1e-9)


@SEEDS
def test_o22_o23_exact_values_over_a_truncated_support(seed: int) -> None:
    z, q = logits_and_q(seed)
    support = [1, 2, 5]
    kept = np.zeros(V)
    kept[support] = q[support] / q[support].sum()
    p = oracle.softmax(z)[support] / oracle.softmax(z)[support].sum()
    got = values(z, kept, [1], "exact", support=support)
    np.testing.assert_allclose(
        got, [oracle.kl(kept[support], p), oracle.kl(p, kept[support])], atol=1e-14
    )


@SEEDS
def test_o24_mean_of_r_minus_1_minus_log_r_is_kl_q_p(seed: int) -> None:
    z, q = logits_and_q(seed)
    got = evaluate(z, q, list(range(V)), kl_only("token", q_p=1.0), advantages=0.0, weights=q).loss
    np.testing.assert_allclose(got, oracle.kl(q, oracle.softmax(z)), atol=1e-14)


@SEEDS
def test_o25_mean_of_r_log_r_minus_r_plus_1_is_kl_p_q(seed: int) -> None:
    z, q = logits_and_q(seed)
    got = evaluate(z, q, list(range(V)), kl_only("token", p_q=1.0), advantages=0.0, weights=q).loss
    np.testing.assert_allclose(got, oracle.kl(oracle.softmax(z), q), atol=1e-14)


@SEEDS
def test_o26_token_estimates_are_positive_and_their_mean_gradient_is_exact(seed: int) -> None:
    z, q = logits_and_q(seed)
    for a in range(V):
        assert min(values(z, q, [a], "token")) >= 0.0
    for direction in ({"q_p": 1.0}, {"p_q": 1.0}):
        mean = update(
            z, q, list(range(V)), kl_only("token", **direction), advantages=0.0, weights=q
        )
        exact = update(z, q, [0], kl_only("exact", **direction), advantages=0.0)
        np.testing.assert_allclose(mean, exact, atol=1e-14)


@SEEDS
@pytest.mark.parametrize("head", [[0], [1, 4], [0, 1, 2, 3, 4]], ids=len)
def test_o27_aggregated_kl_is_a_lower_bound(seed: int, head: list[int]) -> None:
    z, q = logits_and_q(seed)
    p = oracle.softmax(z)
    got = values(z, q, [0], "tail", head=head)
    want = [oracle.aggregated_kl(q, p, head), oracle.aggregated_kl(p, q, head)]
    np.testing.assert_allclose(got, want, atol=1e-14)
    assert got[0] <= oracle.kl(q, p) + 1e-14
    assert got[1] <= oracle.kl(p, q) + 1e-14


@SEEDS
@pytest.mark.parametrize("head", [[0], [1, 4], [0, 1, 2, 3, 4]], ids=len)
def test_o28_gradient_of_the_aggregated_kl(seed: int, head: list[int]) -> None:
    z, q = logits_and_q(seed)
    p = oracle.softmax(z)
    rho = oracle.tail_model(p, q, head)[1]
    q_p = -update(z, q, [0], kl_only("tail", q_p=1.0), advantages=0.0, head=head)
    want = oracle.gradient(lambda x: oracle.aggregated_kl(q, oracle.softmax(x), head), z)
    np.testing.assert_allclose(q_p, want, atol=1e-9)
    np.testing.assert_allclose(q_p, -(q - rho * p)[head] @ oracle.scores(p)[head], atol=1e-14)
    # minus the residual of the modelled tail in score centering, so one set of coefficients
    off, tail = (
        update(z, q, [0], LossConfig(loss="reinforce", centering=c), head=head)
        for c in ("off", "tail")
    )
    np.testing.assert_allclose(q_p, tail - off, atol=1e-14)
    p_q = -update(z, q, [0], kl_only("tail", p_q=1.0), advantages=0.0, head=head)
    want = oracle.gradient(lambda x: oracle.aggregated_kl(oracle.softmax(x), q, head), z)
    np.testing.assert_allclose(p_q, want, atol=1e-9)


@SEEDS
def test_means_over_draws_are_unbiased_and_may_be_negative(seed: int) -> None:
    z, q = logits_and_q(seed)
    p = oracle.softmax(z)
    pairs = [list(pair) for pair in itertools.product(range(V), repeat=2)]
    chances = np.array([q[i] * q[j] for i, j in pairs])
    single = np.array([values(z, q, [0], "sampled", draws=[pair]) for pair in pairs])
    np.testing.assert_allclose(chances @ single, [oracle.kl(q, p), oracle.kl(p, q)], atol=1e-13)
    assert single[:, 0].min() < 0.0
    assert single[:, 1].min() >= 0.0
    for direction in ({"q_p": 1.0}, {"p_q": 1.0}):
        mean = update(
            z, q, [0] * len(pairs), kl_only("sampled", **direction),
            advantages=0.0, draws=pairs, weights=chances,
        )  # fmt: skip
        exact = update(z, q, [0], kl_only("exact", **direction), advantages=0.0)
        np.testing.assert_allclose(mean, exact, atol=1e-13)


def test_unweighted_centering_is_an_advantage_signed_kl() -> None:
    z, q = logits_and_q(7)
    off, exact = (
        update(z, q, [0], LossConfig(loss="reinforce", centering=c), advantages=1.3)
        for c in ("off", "exact")
    )
    kl = -update(z, q, [0], kl_only("exact", q_p=1.3), advantages=0.0)
    np.testing.assert_allclose(exact - off, kl, atol=1e-14)


def test_capped_ratio_keeps_the_sampled_terms_finite() -> None:
    logits = torch.tensor([0.0, -5.0], dtype=torch.float32, requires_grad=True)
    inputs = make_inputs(
        logits, [1.0, 1.0], [0, 1], sampler_logprobs=torch.tensor([-200.0, -100.0]), advantages=0.0
    )
    outputs = compute_loss(inputs, kl_only("token", 1.0, 1.0))
    torch.autograd.backward(outputs.loss)
    assert torch.isfinite(outputs.loss)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
