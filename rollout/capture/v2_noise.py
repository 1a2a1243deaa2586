"""The noise by which vLLM's V2 sampler draws, where a version has it as a function of its own.

Importing this module fails where there is none, or where it takes something else than what is known
here; then vLLM draws.
Source: vllm/v1/worker/gpu/sample/gumbel.py of 0.32 and 0.33.
"""

from __future__ import annotations

import inspect

from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

_KNOWN = (
    "logits",
    "keys",
    "mask",
    "seed",
    "pos",
    "temp",
    "IS_DRAFTING",
    "USE_FP64",
    "APPLY_TEMPERATURE",
)
_found = tuple(inspect.signature(gumbel_noised_argmax.fn).parameters)
if _found != _KNOWN:
    raise ImportError(f"gumbel_noised_argmax: got the parameters {_found}, expected {_KNOWN}")


@triton.jit
def add_noise(value, ids, seed, position):  # type: ignore[no-untyped-def]
    """Add the noise of each id, see `rollout.kernels.token_draw.TokenDraw`."""
    keys = tl.expand_dims(ids, 0)
    # the largest along an axis of one is the sum itself
    sums, _ = gumbel_noised_argmax(
        tl.expand_dims(value, 0),
        keys,
        keys >= 0,
        seed,
        position,
        1.0,
        IS_DRAFTING=False,
        USE_FP64=False,
        APPLY_TEMPERATURE=False,
    )
    return sums
