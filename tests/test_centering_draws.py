"""Score centering from K draws; each test is named after the identity that it shows."""

from __future__ import annotations

import itertools

import numpy as np
import oracle
import pytest
from centering_cases import ALL_WEIGHTS, WEIGHTS, V, config, logits_and_q
from loss_cases import update
from numpy.typing import NDArray


def all_pairs(q: oracle.Vector) -> tuple[list[list[int]], NDArray[np.float64]]:
    """Return every ordered pair of draws and its probability."""
    pairs = [list(pair) for pair in itertools.product(range(V), repeat=2)]
    return pairs, np.array([q[i] * q[j] for i, j in pairs])


@ALL_WEIGHTS
def test_o17_draws_are_unbiased(name: str) -> None:
    z, q = logits_and_q(19)
    pairs, chances = all_pairs(q)
    got = update(z, q, [2] * len(pairs), config(name, "sampled"), draws=pairs, weights=chances)
    np.testing.assert_allclose(got, update(z, q, [2], config(name, "exact")), atol=1e-14)


@ALL_WEIGHTS
def test_o18_variance_of_k_draws_is_the_covariance_trace_over_k(name: str) -> None:
    z, q = logits_and_q(20)
    p, f = oracle.softmax(z), WEIGHTS[name][1]
    weighted = oracle.weights(p, q, f)[:, None] * oracle.scores(p)
    trace = float(q @ ((weighted - q @ weighted) ** 2).sum(1))
    off = update(z, q, [2], config(name, "off"))
    mu = oracle.drift(p, q, f)
    single: list[list[int]] = [[j] for j in range(V)]
    for draws, chances, k in ((single, q, 1), (*all_pairs(q), 2)):
        estimates = np.array(
            [off - update(z, q, [2], config(name, "sampled"), draws=[row]) for row in draws]
        )
        variance = float(chances @ ((estimates - mu) ** 2).sum(1))
        np.testing.assert_allclose(variance, trace / k, rtol=1e-12)


def test_o18_error_falls_as_one_over_root_k() -> None:
    z, q = logits_and_q(21)
    p = oracle.softmax(z)
    rng = np.random.default_rng(21)
    off = update(z, q, [2], config("one", "off"))
    trace = float(q @ ((oracle.scores(p) - q @ oracle.scores(p)) ** 2).sum(1))
    for k in (16, 256, 4096):
        repeats = 40
        squares = []
        for _ in range(repeats):
            draws = rng.choice(V, size=k, p=q).tolist()
            mu_hat = off - update(z, q, [2], config("one", "sampled"), draws=[draws])
            squares.append(((mu_hat - oracle.drift(p, q)) ** 2).sum())
        # mean of 40 squared errors of trace / k: 5 sigma of a relative 0.23 at most
        assert 0.2 < np.mean(squares) * k / trace < 2.2


@pytest.mark.parametrize("k", [1, 2, 5])
def test_o19_the_sampled_token_among_the_draws_shrinks_the_update(k: int) -> None:
    z, q = logits_and_q(22)
    # over all other draws, and the sampled token as one of the K
    others = [list(pair) for pair in itertools.product(range(V), repeat=min(k - 1, 1))]
    total = np.zeros(V)
    for a in range(V):
        for row in others:
            chance = q[a] * np.prod(q[row]) if row else q[a]
            draws = [a, *(row * (k - 1))]
            total += chance * update(
                z, q, [a], config("one", "sampled"), draws=[draws], advantages=a * 1.0
            )
    independent = oracle.covariance(oracle.softmax(z), q, np.arange(V, dtype=float))
    np.testing.assert_allclose(total, (1 - 1 / k) * independent, atol=1e-13)


def test_o20b_repeats_are_kept_since_dropping_them_is_biased() -> None:
    z, q = logits_and_q(23)
    triples = [list(t) for t in itertools.product(range(V), repeat=3)]
    chances = np.array([np.prod(q[t]) for t in triples])
    exact = update(z, q, [2], config("one", "exact"))
    kept = update(
        z, q, [2] * len(triples), config("one", "sampled"), draws=triples, weights=chances
    )
    np.testing.assert_allclose(kept, exact, atol=1e-13)
    unique = [sorted(set(t)) for t in triples]
    dropped = update(
        z, q, [2] * len(triples), config("one", "sampled"), draws=unique, weights=chances
    )
    assert np.abs(dropped - exact).max() > 1e-3
