"""What stands in for vLLM's V2 sampler: methods of ours in the place of its functions."""

from __future__ import annotations

import importlib
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rollout.kernels.launch import choose_impl

_log = logging.getLogger(__name__)
_FUSED = ("use_flashinfer", "use_xpu_sampler")  # the second exists since 0.31


def switch_fused_off(sampler: Any) -> list[str]:
    """Keep a sampler from drawing by a fused kernel, which masks nothing and calls no other.

    Returns:
        The names of the switches that it has.
    """
    names = [name for name in _FUSED if hasattr(sampler, name)]
    for name in names:
        setattr(sampler, name, False)
    return names


def hook(owner: Any, sampler: Any, name: str, method: str) -> Callable[..., torch.Tensor]:
    """Put a method in the place of a function that a sampler's module has.

    Args:
        owner: of the method; the module outlives its engine, whose weights must not stay with it.
        sampler: vLLM's.
        name: of the function.
        method: of the owner; takes what the function takes.

    Returns:
        The function.
    """
    module = sys.modules[type(sampler).__module__]
    found = getattr(module, name)
    # the hook of an earlier engine of this process goes
    stock: Callable[..., torch.Tensor] = getattr(found, "stock", found)
    reference = weakref.ref(owner)

    def hooked(*args: Any, **kwargs: Any) -> torch.Tensor:
        there = reference()
        call = stock if there is None else getattr(there, method)
        result: torch.Tensor = call(*args, **kwargs)
        return result

    hooked.stock = stock  # type: ignore[attr-defined]
    setattr(module, name, hooked)
    return stock


def has_function(sampler: Any, name: str) -> bool:
    """Return whether a sampler's module has a function of that name."""
    return hasattr(sys.modules[type(sampler).__module__], name)


def has_cuts(sampler: Any) -> bool:
    """Return whether a sampler truncates by a function and by numbers that are known here."""
    states = sampler.sampling_states
    return has_function(sampler, "apply_top_k_top_p") and all(
        isinstance(getattr(getattr(states, name, None), "np", None), np.ndarray)
        for name in ("top_k", "top_p")
    )


def find_noise(sampler: Any) -> Any:
    """Return the noise of a sampler's draws, or null if it is not known."""
    if not has_function(sampler, "gumbel_sample") or getattr(sampler, "use_fp64_gumbel", False):
        return None
    if choose_impl(sampler.sampling_states.seeds.gpu, None) == "reference":
        return None  # the noise is a kernel's
    try:
        return importlib.import_module("rollout.capture.v2_noise").add_noise
    except ImportError as error:
        _log.info("vLLM draws the tokens: %s", error)
        return None
