"""Float64 oracles of the losses, written from the formulas with numpy and no code of the product.

One prefix: logits z [V], trainer p = softmax(z), sampler q [V]. Scores are taken with respect to
the logits, so s_v = grad_z log p_v = e_v - p is row v of a V x V matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Weight = Callable[[float, float], float]


def softmax(logits: Any) -> Vector:
    """Return exp(z) / sum exp(z)."""
    z = np.asarray(logits, dtype=np.float64)
    e = np.exp(z - z.max())
    result: Vector = e / e.sum()
    return result


def scores(p: Vector) -> Vector:
    """Return s [V, V], row v the gradient of log p_v by the logits."""
    result: Vector = np.eye(len(p)) - p[None, :]
    return result


def weight_one(p: float, q: float) -> float:
    """No importance weight."""
    return 1.0


def weight_ratio(p: float, q: float) -> float:
    """Plain importance sampling."""
    return p / q


def weight_truncated(p: float, q: float, cap: float = 2.0) -> float:
    """Truncated importance sampling."""
    return min(p / q, cap)


def weight_band(p: float, q: float, low: float = 0.5, high: float = 5.0) -> float:
    """IcePop: the ratio inside the band, nothing outside."""
    return p / q if low <= p / q <= high else 0.0


def weight_ipo(p: float, q: float, gap: float = 0.1, cap: float = 1e4) -> float:
    """IPO: the capped ratio where the probabilities are close."""
    return min(p / q, cap) if abs(p - q) <= gap else 0.0


def weights(p: Vector, q: Vector, f: Weight) -> Vector:
    """Return w_v = f(p_v, q_v) where q_v > 0, else 0."""
    return np.array([f(a, b) if b > 0.0 else 0.0 for a, b in zip(p, q, strict=True)])


def drift(p: Vector, q: Vector, f: Weight = weight_one) -> Vector:
    """Return mu_w = sum_v q_v w_v s_v."""
    result: Vector = (q * weights(p, q, f)) @ scores(p)
    return result


def covariance(p: Vector, q: Vector, advantages: Vector) -> Vector:
    """Return Cov_q(A, s)."""
    s = scores(p)
    result: Vector = (q * (advantages - q @ advantages)) @ (s - q @ s)
    return result


def tail_model(p: Vector, q: Vector, head: list[int]) -> tuple[Vector, float]:
    """Return qhat (q on the head, rho p on the tail) and rho."""
    inside = np.zeros(len(p), dtype=bool)
    inside[head] = True
    rho = float(q[~inside].sum() / p[~inside].sum())
    return np.where(inside, q, rho * p), rho


def kl(x: Vector, y: Vector) -> float:
    """Return sum x log(x / y) over x > 0."""
    inside = x > 0.0
    return float(np.sum(x[inside] * np.log(x[inside] / y[inside])))


def aggregated_kl(x: Vector, y: Vector, head: list[int]) -> float:
    """Return the KL with everything outside the head as one bin."""
    folded = [np.append(v[head], v.sum() - v[head].sum()) for v in (x, y)]
    return kl(folded[0], folded[1])


def gradient(f: Callable[[Vector], float], z: Vector, step: float = 1e-5) -> Vector:
    """Return the central finite difference of f at z."""
    result = np.zeros_like(z)
    for i in range(len(z)):
        up, down = z.copy(), z.copy()
        up[i] += step
        down[i] -= step
        result[i] = (f(up) - f(down)) / (2 * step)
    return result
