"""Let Triton's interpreter run the kernels where there is no GPU, whatever the tests import first.

Triton chooses between compiler and interpreter when a kernel is decorated, and its own library is
decorated when triton is first imported, so the variable has to stand before any test module does
it. It is taken back once all are imported: engines that tests start must not inherit it.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

_VARIABLE = "TRITON_INTERPRET"
_SET_HERE = not Path("/dev/nvidiactl").exists() and _VARIABLE not in os.environ

if _SET_HERE:
    os.environ[_VARIABLE] = "1"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take the variable back after the imports of the test modules.

    Args:
        session: the test session.
    """
    if not _SET_HERE:
        return
    if "triton" in sys.modules:
        # imported at the first launch otherwise, where it wants the variable or a compiled library
        importlib.import_module("triton.experimental.gluon")
    os.environ.pop(_VARIABLE, None)
