"""The reward function that a job names: found and digested before any weight loads."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
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
    """sha256 of the file that the job names; where another file defines the function, of both."""


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
    except (Exception, SystemExit) as error:  # the user's module may do anything when imported
        raise InputError(f"reward {name}: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise InputError(f"reward {name}: no function `{attribute}` in {source}")
    if inspect.iscoroutinefunction(function):
        raise InputError(f"reward {name}: an async function, expected a plain one")
    try:
        inspect.signature(function).bind({}, "", [])
    except TypeError as error:
        raise InputError(
            f"reward {name}: expected a function of (prompt, completion, token_ids): {error}"
        ) from None
    except ValueError:  # some functions written in C do not say what they take
        pass
    return Reward(name=name, function=function, digest=_digest(module, function))


def _digest(module: ModuleType, function: RewardFunction) -> str:
    files = [getattr(module, "__file__", None)]
    with contextlib.suppress(TypeError):  # an object with __call__, or a function written in C
        files.append(inspect.getsourcefile(inspect.unwrap(function)))
    digests = [
        hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for file in dict.fromkeys(str(Path(file).resolve()) for file in files if file)
    ]
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def _load_file(source: str) -> ModuleType:
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"no file {source}")
    # named after the whole path, and registered: dataclasses look their module up by name
    name = f"rollout_reward_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
