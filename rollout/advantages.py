"""Advantages of rollouts relative to their own group, from what the group really holds."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

AdvantageRule = Literal["group_mean", "group_normalised", "column"]
SPREAD_FLOOR: Final = 1e-6


def group_advantages(
    rewards: NDArray[np.float64],  # [R]
    groups: NDArray[np.int64],  # [R]
    *,
    normalised: bool = False,
) -> NDArray[np.float64]:
    """Return reward minus the mean of the group, over the rollouts that are there.

    A group may hold fewer rollouts than were asked for: the mean is over those that were scored. A
    group of one has advantage 0.

    Args:
        rewards: [R] finite rewards.
        groups: [R] group of each rollout, integers from 0.
        normalised: also divide by the group's standard deviation plus 1e-6.

    Returns:
        [R] advantages.
    """
    counts = np.maximum(np.bincount(groups), 1)
    means = np.bincount(groups, weights=rewards) / counts
    centered: NDArray[np.float64] = rewards - means[groups]
    if not normalised:
        return centered
    spread = np.sqrt(np.bincount(groups, weights=centered**2) / counts)
    result: NDArray[np.float64] = centered / (spread[groups] + SPREAD_FLOOR)
    return result
