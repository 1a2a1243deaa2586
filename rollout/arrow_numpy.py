"""Numbers of Arrow arrays in numpy, without pandas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def numpy_view(array: pa.Array) -> NDArray[Any]:
    """Return the numbers of an array without nulls, read-only and without a copy.

    As `pyarrow.Array.to_numpy`, which imports pandas where it is installed: half a second.

    Raises:
        pyarrow.ArrowTypeError: there are nulls, or these are no numbers.
    """
    view: NDArray[Any] = np.from_dlpack(array)
    return view
