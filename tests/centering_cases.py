"""One prefix with a trainer and a sampler far apart, and every weight with its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from numpy.typing import NDArray

from rollout.losses import LossConfig

V = 7
INF = float("inf")
# the weight functions of the product, each with the oracle's formula for it
WEIGHTS: dict[str, tuple[dict[str, Any], oracle.Weight]] = {
    "one": ({"loss": "reinforce"}, oracle.weight_one),
    "ratio": (
        {"loss": "reinforce", "importance": "truncated", "ratio_cap": INF},
        oracle.weight_ratio,
    ),
    "truncated": (
        {"loss": "reinforce", "importance": "truncated", "ratio_cap": 2.0},
        oracle.weight_truncated,
    ),
    "band": ({"loss": "icepop", "ratio_low": 0.5, "ratio_high": 5.0}, oracle.weight_band),
    "ipo": ({"loss": "ipo", "max_probability_gap": 0.1}, oracle.weight_ipo),
}
ALL_WEIGHTS = pytest.mark.parametrize("name", list(WEIGHTS))
TAIL_WEIGHTS = pytest.mark.parametrize("name", ["one", "ratio", "truncated", "band"])


def config(name: str, centering: Any, **changes: Any) -> LossConfig:
    return LossConfig(**{**WEIGHTS[name][0], "centering": centering, **changes})


def logits_and_q(seed: int, spread: float = 1.5) -> tuple[NDArray[np.float64], oracle.Vector]:
    """Return logits and an unrelated sampler, far apart, so that every rule rejects some ids."""
    rng = np.random.default_rng(seed)
    return spread * rng.normal(size=V), oracle.softmax(spread * rng.normal(size=V))
