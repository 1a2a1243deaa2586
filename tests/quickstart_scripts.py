"""Load a script of jobs/quickstart as a module; jobs are no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

QUICKSTART = Path(__file__).resolve().parents[1] / "jobs" / "quickstart"


def load_script(name: str) -> ModuleType:
    """Run jobs/quickstart/<name>.py and return it as a module."""
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", QUICKSTART / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
