"""Memory is used again, and only when nobody holds a part of it."""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import pytest
import torch

from rollout.recycled import RecycledArrays

MIB = 2**20


def a_tensor(array: Any) -> Any:
    return torch.from_numpy(array)[5:]


def a_view(array: Any) -> Any:
    return array[3:].view(np.float32)[7:]


def a_buffer(array: Any) -> Any:
    return array.data


@pytest.mark.parametrize("hold", [a_tensor, a_view, a_buffer])
def test_memory_is_used_again_only_when_nobody_holds_it(hold: Any) -> None:
    memory = RecycledArrays()
    first = memory.empty(2**19, np.int32)
    place = first.ctypes.data
    part = hold(first)
    del first
    gc.collect()
    assert memory.empty(2**19, np.int32).ctypes.data != place
    del part
    again = [memory.empty(2**19, np.int32), memory.empty(2**19, np.int32)]
    assert place in [array.ctypes.data for array in again]


def test_idle_memory_goes_where_there_would_be_too_much() -> None:
    memory = RecycledArrays(10 * MIB)
    held = [memory.empty(3 * MIB, np.uint8) for _ in range(2)]
    held.clear()
    # neither fits 8 MiB, and both beside it would be more than 10
    held.append(memory.empty(7 * MIB, np.uint8))
    assert (memory._total, len(memory._idle)) == (8 * MIB, 0)
    # what is given out is given whatever the bound is
    held += [memory.empty(7 * MIB, np.uint8) for _ in range(2)]
    assert memory._total == 24 * MIB
    assert copy.copy(memory)._most == 10 * MIB
