"""What the job tells the capture about a request, sent along in the request's own parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

KEY = "rollout"  # under SamplingParams.extra_args

# kinds of a row; the values are those of rollout.kernels.support_capture
SKIP, KEPT, GREEDY, TOP, NONE = range(5)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSettings:
    """What the job asks for; the fields are those of the job's `capture` section."""

    support_capacity: int
    top: int
    draws: int


def extra_args(kind: int, seed: int) -> dict[str, Any]:
    """Return the `extra_args` of a request.

    Args:
        kind: KEPT, GREEDY, TOP or NONE.
        seed: seed of the recorded draws, in [0, 2**63).
    """
    return {KEY: {"kind": kind, "seed": seed}}


def kind_and_seed(params: Any) -> tuple[int, int]:
    """Read what `extra_args` wrote; requests that are not ours (warm-up) are skipped.

    Args:
        params: the engine's SamplingParams, or null.
    """
    ours = (getattr(params, "extra_args", None) or {}).get(KEY)
    return (int(ours["kind"]), int(ours["seed"])) if ours else (SKIP, 0)


def has_ours(kinds: npt.NDArray[np.int8], batch: Any) -> bool:
    """Return whether requests of ours are in a step of the V2 runner; all its ranks say the same.

    Args:
        kinds: what `kind_and_seed` says of the request in each slot.
        batch: vLLM's InputBatch; null in its warm-up, which calls the sampler by itself.
    """
    return batch is not None and bool(kinds[batch.idx_mapping_np].any())  # SKIP is 0
