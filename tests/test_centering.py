"""Score centering against closed forms; each test is named after the identity that it shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from centering_cases import ALL_WEIGHTS, TAIL_WEIGHTS, WEIGHTS, V, config, logits_and_q
from loss_cases import evaluate, make_inputs, update
from numpy.typing import NDArray

from rollout.centering import centering_coefficients
from rollout.errors import ConfigError
from rollout.loss_rows import select_rows
from rollout.losses import LossConfig, compute_loss
from rollout.trust_region import tail_coefficient, tail_ratio


def coefficients(
    z: NDArray[np.float64], q: oracle.Vector, settings: LossConfig, **case: Any
) -> NDArray[np.float64]:
    """Return the product's coefficients of one row that samples id 0."""
    logits = torch.tensor(z, dtype=torch.float64)
    rows = select_rows(make_inputs(logits, q, [0], **case), settings)
    return centering_coefficients(rows, settings).numpy()


@ALL_WEIGHTS
@pytest.mark.parametrize("seed", range(3))
def test_o01_centered_weighted_score_has_mean_zero(name: str, seed: int) -> None:
    z, q = logits_and_q(seed)
    expected = update(z, q, list(range(V)), config(name, "exact"), weights=q)
    np.testing.assert_allclose(expected, 0.0, atol=1e-14)
    # and the uncentered mean is the drift of the oracle, so the zero above is earned
    drift = update(z, q, list(range(V)), config(name, "off"), weights=q)
    mu = oracle.drift(oracle.softmax(z), q, WEIGHTS[name][1])
    np.testing.assert_allclose(drift, mu, atol=1e-14)
    if name != "ratio":
        assert np.abs(mu).max() > 1e-3


@ALL_WEIGHTS
def test_o01_holds_sample_by_sample_against_the_oracle(name: str) -> None:
    z, q = logits_and_q(11)
    p, f = oracle.softmax(z), WEIGHTS[name][1]
    for a in range(V):
        got = update(z, q, [a], config(name, "exact"), advantages=-1.7)
        want = -1.7 * (f(p[a], q[a]) * oracle.scores(p)[a] - oracle.drift(p, q, f))
        np.testing.assert_allclose(got, want, atol=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_o02_expected_update_is_the_covariance(seed: int) -> None:
    z, q = logits_and_q(seed)
    advantages = np.random.default_rng(100 + seed).normal(size=V)
    got = update(z, q, list(range(V)), config("one", "exact"), weights=q, advantages=advantages)
    np.testing.assert_allclose(got, oracle.covariance(oracle.softmax(z), q, advantages), atol=1e-14)


def test_o03_gradient_of_the_correction_is_q_minus_p() -> None:
    z, q = logits_and_q(3)
    p = oracle.softmax(z)
    centered = update(z, q, [2], config("one", "exact"))
    plain = update(z, q, [2], config("one", "off"))
    # the loss carries + A sum q log p, so the update loses q - p
    np.testing.assert_allclose(plain - centered, q - p, atol=1e-15)


@ALL_WEIGHTS
def test_o04_on_policy_exact_correction_vanishes_for_every_sample(name: str) -> None:
    z, _ = logits_and_q(4)
    q = oracle.softmax(z)
    for a in range(V):
        difference = update(z, q, [a], config(name, "exact")) - update(
            z, q, [a], config(name, "off")
        )
        np.testing.assert_allclose(difference, 0.0, atol=1e-15)


@TAIL_WEIGHTS
def test_o04_on_policy_tail_coefficients_are_zero(name: str) -> None:
    z, _ = logits_and_q(4)
    q = oracle.softmax(z)
    c = coefficients(z, q, config(name, "tail"), head=[0, 1, 2])
    np.testing.assert_allclose(c, 0.0, atol=1e-15)


def test_o04_on_policy_draws_vanish_only_in_expectation() -> None:
    z, _ = logits_and_q(4)
    q = oracle.softmax(z)
    single = [
        update(z, q, [0], config("one", "sampled"), draws=[[j]])
        - update(z, q, [0], config("one", "off"))
        for j in range(V)
    ]
    assert min(np.abs(difference).max() for difference in single) > 1e-2
    np.testing.assert_allclose(q @ np.array(single), 0.0, atol=1e-14)


@ALL_WEIGHTS
def test_o05_constant_advantage_has_no_expected_update(name: str) -> None:
    z, q = logits_and_q(5)
    got = update(z, q, list(range(V)), config(name, "exact"), weights=q, advantages=3.25)
    np.testing.assert_allclose(got, 0.0, atol=1e-14)


def test_o06_two_ids_by_hand() -> None:
    z, q = np.log([0.6, 0.4]), np.array([0.5, 0.5])
    drift = update(z, q, [0, 1], LossConfig(loss="reinforce"), weights=q)
    np.testing.assert_allclose(drift, [-0.1, 0.1], atol=1e-15)


def test_o07_head_and_tail_by_hand() -> None:
    q, p = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.4, 0.4, 0.1, 0.1])
    c = coefficients(np.log(p), q, config("one", "tail"), head=[0, 1])
    np.testing.assert_allclose(c, [0.1, -0.1], atol=1e-15)
    tails = torch.tensor([0.2], dtype=torch.float64)
    assert tail_ratio(tails, tails, 1e-6).tolist() == [1.0]


@TAIL_WEIGHTS
@pytest.mark.parametrize("num_head", [1, 3, 6])
def test_o09_head_residual_is_the_brute_force_sum_over_the_vocabulary(
    name: str, num_head: int
) -> None:
    z, q = logits_and_q(9)
    p, f = oracle.softmax(z), WEIGHTS[name][1]
    head = list(np.argsort(-q)[:num_head])
    q_hat, _ = oracle.tail_model(p, q, head)
    got = update(z, q, [0], config(name, "off"), head=head) - update(
        z, q, [0], config(name, "tail"), head=head
    )
    np.testing.assert_allclose(got, oracle.drift(p, q_hat, f), atol=1e-14)


def test_o10_untruncated_importance_sampling_needs_no_correction() -> None:
    z, q = logits_and_q(10)
    c = coefficients(z, q, config("ratio", "tail"), head=[0, 1, 2])
    assert c.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("cap", [0.5, 2.0, 10.0])
def test_o11_truncated_closed_form(cap: float) -> None:
    z, q = logits_and_q(11)
    p, head = oracle.softmax(z), [1, 4, 5]
    rho = oracle.tail_model(p, q, head)[1]
    want = np.minimum(p, cap * q)[head] - min(1.0, cap * rho) * p[head]
    got = coefficients(z, q, config("truncated", "tail", ratio_cap=cap), head=head)
    np.testing.assert_allclose(got, want, atol=1e-15)


@pytest.mark.parametrize("band", [(0.5, 5.0), (0.2, 5.0), (0.9, 1.1), (0.0, 2.0)], ids=str)
def test_o12_band_closed_form(band: tuple[float, float]) -> None:
    z, q = logits_and_q(12)
    p, head = oracle.softmax(z), [0, 2, 3]
    rho = oracle.tail_model(p, q, head)[1]
    low, high = band
    ratio = p[head] / q[head]
    want = p[head] * ((ratio >= low) & (ratio <= high)) - p[head] * (low <= 1 / rho <= high)
    got = coefficients(z, q, config("band", "tail", ratio_low=low, ratio_high=high), head=head)
    np.testing.assert_allclose(got, want, atol=1e-15)


@TAIL_WEIGHTS
def test_o12_a_head_of_all_ids_equals_exact(name: str) -> None:
    z, q = logits_and_q(13)
    head = list(range(V))
    np.testing.assert_array_equal(
        coefficients(z, q, config(name, "tail"), head=head),
        coefficients(z, q, config(name, "exact")),
    )


def test_o13_error_of_the_tail_model() -> None:
    z, q = logits_and_q(13)
    p, head = oracle.softmax(z), [0, 3]
    rho = oracle.tail_model(p, q, head)[1]
    tail = [v for v in range(V) if v not in head]
    exact = update(z, q, [0], config("one", "exact"))
    modelled = update(z, q, [0], config("one", "tail"), head=head)
    error = (q - rho * p)[tail] @ oracle.scores(p)[tail]
    np.testing.assert_allclose(modelled - exact, error, atol=1e-14)
    assert np.abs(error).sum() <= 2 * q[tail].sum()


@TAIL_WEIGHTS
def test_o13_no_error_where_the_tail_is_proportional(name: str) -> None:
    z, q = logits_and_q(14)
    p, head = oracle.softmax(z), [2]
    q, _ = oracle.tail_model(p, q, head)
    exact = update(z, q, [0], config(name, "exact"))
    modelled = update(z, q, [0], config(name, "tail"), head=head)
    np.testing.assert_allclose(modelled, exact, atol=1e-14)


@pytest.mark.parametrize("head", [[0], [1, 2, 3], [0, 1, 2, 3, 4, 5]], ids=len)
def test_o14_coefficients_sum_to_one_minus_rho(head: list[int]) -> None:
    z, q = logits_and_q(15)
    rho = oracle.tail_model(oracle.softmax(z), q, head)[1]
    c = coefficients(z, q, config("one", "tail"), head=head)
    np.testing.assert_allclose(1.0 - c.sum(), rho, atol=1e-14)


@ALL_WEIGHTS
def test_o15_adding_a_constant_to_all_logits_changes_nothing(name: str) -> None:
    z, q = logits_and_q(16)
    tokens = [0, 4, 6]
    cases: list[dict[str, Any]] = [{}, {"draws": [[0, 1], [2, 2], [5, 3]]}]
    for case in cases:
        settings = config(name, "sampled" if case else "exact")
        before, after = (evaluate(x, q, tokens, settings, **case).loss for x in (z, z + 37.5))
        np.testing.assert_allclose(after, before, atol=1e-13)
        np.testing.assert_allclose(
            update(z + 37.5, q, tokens, settings, **case),
            update(z, q, tokens, settings, **case),
            atol=1e-14,
        )


def test_o15_exact_unweighted_loss_needs_no_normaliser() -> None:
    z, q = logits_and_q(17)
    settings = config("one", "exact")
    got = evaluate(z, q, [3], settings, normalise=False, advantages=1.4).loss
    np.testing.assert_allclose(got, -1.4 * (z[3] - q @ z), atol=1e-14)
    np.testing.assert_allclose(got, evaluate(z, q, [3], settings, advantages=1.4).loss, atol=1e-14)
    np.testing.assert_allclose(
        update(z, q, [3], settings, normalise=False), update(z, q, [3], settings), atol=1e-14
    )


def test_o16_unweighted_draws_need_no_normaliser() -> None:
    z, q = logits_and_q(18)
    settings, draws = config("one", "sampled"), [1, 1, 5]
    got = evaluate(z, q, [3], settings, normalise=False, draws=[draws]).loss
    np.testing.assert_allclose(got, -(z[3] - z[draws].mean()), atol=1e-14)
    np.testing.assert_allclose(
        update(z, q, [3], settings, normalise=False, draws=[draws]),
        update(z, q, [3], settings, draws=[draws]),
        atol=1e-14,
    )


@pytest.mark.parametrize(
    ("name", "centering"), [("one", "off"), ("band", "exact"), ("one", "tail")], ids=str
)
def test_o16_unnormalised_rows_are_refused_where_the_normaliser_stays(
    name: str, centering: Any
) -> None:
    z, q = logits_and_q(18)
    with pytest.raises(ValueError, match="unnormalised trainer values"):
        evaluate(z, q, [3], config(name, centering), normalise=False)


def test_o21_the_sampled_token_does_not_enter_the_head() -> None:
    z, q = logits_and_q(24)
    head = [0, 1]
    corrections = [
        update(z, q, [a], config("one", "off"), head=head)
        - update(z, q, [a], config("one", "tail"), head=head)
        for a in range(V)
    ]
    for correction in corrections[1:]:
        np.testing.assert_allclose(correction, corrections[0], atol=1e-15)


@ALL_WEIGHTS
def test_rejected_tokens_are_centered_too(name: str) -> None:
    z, q = logits_and_q(25, spread=3.0)
    p, f = oracle.softmax(z), WEIGHTS[name][1]
    rejected = [a for a in range(V) if f(p[a], q[a]) == 0.0]
    if name in ("band", "ipo"):
        assert rejected
    for a in rejected:
        got = update(z, q, [a], config(name, "exact"), advantages=2.0)
        np.testing.assert_allclose(got, -2.0 * oracle.drift(p, q, f), atol=1e-14)


def test_an_exact_row_is_centered_exactly_whatever_the_estimator() -> None:
    z, q = logits_and_q(26)
    want = update(z, q, [1], config("one", "exact"))
    for estimator in ("tail", "sampled"):
        np.testing.assert_array_equal(update(z, q, [1], config("one", estimator)), want)


def test_coefficients_carry_no_gradient() -> None:
    z, q = logits_and_q(27)
    logits = torch.tensor(z, requires_grad=True)
    settings = config("truncated", "exact")
    rows = select_rows(make_inputs(logits, q, [0]), settings)
    assert not centering_coefficients(rows, settings).requires_grad


def test_tail_floor_keeps_a_vanishing_trainer_tail_finite() -> None:
    tails = torch.tensor([1e-3, 0.0, 1e-9], dtype=torch.float32)
    rho = tail_ratio(tails, torch.zeros(3), 1e-6)
    torch.testing.assert_close(rho, torch.tensor([1e3, 0.0, 1.0]))
    for name in ("one", "truncated", "band"):
        alpha = tail_coefficient(rho, config(name, "tail"))
        assert torch.isfinite(alpha).all()
        assert alpha[1] == 0.0
    capped = tail_coefficient(rho, config("ratio", "tail"))
    assert capped.tolist() == [1.0, 0.0, 1.0]


def test_ipo_with_a_tail_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"\|p - q\|.*inside the tail"):
        LossConfig(loss="ipo", centering="tail")


@pytest.mark.parametrize(
    ("centering", "case"),
    [
        ("exact", {"draws": [[0, 1]]}),
        ("exact", {"head": [0, 1]}),
        ("tail", {"draws": [[0, 1]]}),
        ("sampled", {"head": [0, 1]}),
    ],
    ids=["exact-draws", "exact-head", "tail-draws", "sampled-head"],
)
def test_a_support_of_another_kind_is_refused(centering: Any, case: dict[str, object]) -> None:
    z, q = logits_and_q(28)
    with pytest.raises(ValueError, match="another kind of support"):
        evaluate(z, q, [0], config("one", centering), **case)


def test_tail_without_the_trainers_tail_mass_is_refused() -> None:
    z, q = logits_and_q(28)
    with pytest.raises(ValueError, match="trainer_tail_mass is missing for 1 tokens"):
        evaluate(z, q, [0], config("one", "tail"), head=[0, 1], trainer_tail_mass=None)


def test_centering_l1_is_reported() -> None:
    z, q = logits_and_q(29)
    logits = torch.tensor(z)
    metrics = compute_loss(make_inputs(logits, q, [0, 1]), config("band", "exact")).metrics
    p = oracle.softmax(z)
    want = float(np.abs(q * oracle.weights(p, q, oracle.weight_band)).sum())
    assert metrics.summary()["centering_l1"] == pytest.approx(want, rel=1e-12)
