"""Arrays in page-locked host memory, from which a device copies without anybody waiting."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

_DTYPES: Final = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


def page_locked_array(count: int, dtype: Any) -> NDArray[Any]:
    """Return an array of int32 or float32 whose content is undefined.

    torch keeps such memory for later arrays, and gives it out again only after the copies that
    were begun from it have ended, so an array may be dropped while it is being copied.
    """
    array: NDArray[Any] = torch.empty(
        count, dtype=_DTYPES[np.dtype(dtype)], pin_memory=True
    ).numpy()
    return array
