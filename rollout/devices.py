"""How many CUDA devices a job's engine asks for, and how many this machine shows."""

from __future__ import annotations

import math
import os
from typing import Any

from rollout.errors import ConfigError

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
_OF_THIS_MACHINE = (None, "mp", "uni")  # executors whose processes all run here


def num_cuda_devices() -> int:
    """Count the CUDA devices that this process may use, without using one."""
    import torch

    # unlike is_available, this asks the driver's management library: the job's process starts no
    # CUDA context, which would take memory of the device
    return torch.cuda.device_count()


def check_devices(args: dict[str, Any]) -> None:
    """Refuse an engine of more devices than this machine shows.

    A machine that shows none is no reason to refuse: a job may be checked where it does not run.

    Args:
        args: the job's `engine` section.

    Raises:
        ConfigError: with both numbers.
    """
    asked, there = _num_asked(args), num_cuda_devices()
    if not 0 < there < asked or not _is_of_this_machine(args):
        return
    sizes = " x ".join(f"engine.{name} {args[name]}" for name in _SIZES if args.get(name, 1) != 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    raise ConfigError(
        f"{sizes}: needs {asked} CUDA devices, expected at most the {there} that this machine "
        f"shows{why}: lower it, or run the job where there are more"
    )


def describe_devices(args: dict[str, Any]) -> str:
    """Say what became of the comparison in `check_devices`.

    Args:
        args: the job's `engine` section.
    """
    asked, there = _num_asked(args), num_cuda_devices()
    if not _is_of_this_machine(args):
        return f"{asked} asked for, perhaps of other machines: not compared with the {there} here"
    if there:
        return f"{asked} of the {there} CUDA devices here"
    none = "no CUDA device here"
    return f"{asked} asked for, not compared: {none}" if asked > 1 else none


def _num_asked(args: dict[str, Any]) -> int:
    # what is no number is refused by name elsewhere
    sizes = (args.get(name) for name in _SIZES)
    return math.prod(size for size in sizes if isinstance(size, int))


def _is_of_this_machine(args: dict[str, Any]) -> bool:
    return args.get("distributed_executor_backend") in _OF_THIS_MACHINE and (
        args.get("nnodes") in (None, 1)
    )
