"""The reward function that a job names: found and digested before any weight loads."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rollout.errors import InputError

RewardFunction = Callable[[dict[str, Any], str, list[int]], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A function reward(prompt row, completion text, token ids) -> float, and what it was."""

    name: str
    function: RewardFunction
    digest: str
    """sha256 of the file that defines it."""


def load_reward(name: str) -> Reward:
    """Import `file.py:function` or `module:function`.

    Raises:
        InputError: the name has another form, the module can't be imported, or it has no such
            function.
    """
    source, colon, attribute = name.rpartition(":")
    if not colon or not source or not attribute:
        raise InputError(f"reward is {name!r}, expected file.py:function or module:function")
    try:
        module = _load_file(source) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise InputError(f"reward {name}: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise InputError(f"reward {name}: no function `{attribute}` in {source}")
    try:
        inspect.signature(function).bind({}, "", [])
    except TypeError as error:
        raise InputError(
            f"reward {name}: expected a function of (prompt, completion, token_ids): {error}"
        ) from None
    file = Path(inspect.getsourcefile(function) or module.__file__ or source)
    return Reward(
        name=name, function=function, digest=hashlib.sha256(file.read_bytes()).hexdigest()
    )


def _load_file(source: str) -> ModuleType:
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"no file {source}")
    spec = importlib.util.spec_from_file_location(f"rollout_reward_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
