"""Reward functions are found by name, checked, and digested."""

import hashlib
import sys
from pathlib import Path

import pytest

from rollout.errors import InputError
from rollout.reward import load_reward

GOOD = "def reward(prompt, text, ids):\n    return len(text) + 0.5 * len(ids)\n"


def refusal(name: str) -> str:
    with pytest.raises(InputError) as caught:
        load_reward(name)
    return str(caught.value)


def write(folder: Path, content: str, name: str = "task.py") -> Path:
    path = folder / name
    path.write_text(content)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_function_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "my: task.v1.py")
    found = load_reward(f"{path}:reward")
    assert found.function({}, "abc", [1, 2]) == 4.0
    assert found.name == f"{path}:reward"
    assert found.digest == sha256(path)


def test_a_function_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_rewards"
    package.mkdir()
    write(package, "", "__init__.py")
    path = write(package, GOOD, "first.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = load_reward("some_rewards.first:reward")
    assert found.function({}, "a", []) == 1.0
    assert found.digest == sha256(path)


def test_the_digest_follows_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    first = load_reward(f"{path}:reward")
    write(tmp_path, GOOD + "# changed\n")
    second = load_reward(f"{path}:reward")
    copy = write(tmp_path, GOOD, "copy.py")
    assert first.digest != second.digest
    assert load_reward(f"{copy}:reward").digest == first.digest


def test_the_digest_covers_the_file_that_defines_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, GOOD, "helper_of_rewards.py")
    path = write(tmp_path, "from helper_of_rewards import reward\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = load_reward(f"{path}:reward")
    write(tmp_path, "from helper_of_rewards import reward\nSCALE = 2\n")
    second = load_reward(f"{path}:reward")
    write(tmp_path, GOOD + "# changed\n", "helper_of_rewards.py")
    third = load_reward(f"{path}:reward")
    assert len({first.digest, second.digest, third.digest}) == 3


def test_two_files_of_one_name_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = write(tmp_path / "a", "def reward(p, t, i):\n    return 1\n")
    second = write(tmp_path / "b", "def reward(p, t, i):\n    return 2\n")
    one, two = load_reward(f"{first}:reward"), load_reward(f"{second}:reward")
    assert (one.function({}, "", []), two.function({}, "", [])) == (1, 2)


def test_a_file_may_define_dataclasses_with_postponed_annotations(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Score:\n    value: float\n"
        "def reward(prompt, text, ids):\n    return Score(2.0).value\n",
    )
    assert load_reward(f"{path}:reward").function({}, "", []) == 2.0


def test_objects_and_decorated_functions(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "import functools\n"
        "class Reward:\n    def __call__(self, prompt, text, ids):\n        return 3.0\n"
        "reward = Reward()\n"
        "def general(prompt, text, ids, scale, *, more=1):\n    return scale\n"
        "partial = functools.partial(general, scale=4.0)\n"
        "@functools.lru_cache\ndef cached(*args):\n    return 5.0\n",
    )
    for name, value in (("reward", 3.0), ("partial", 4.0)):
        found = load_reward(f"{path}:{name}")
        assert found.function({}, "", []) == value
        assert found.digest == sha256(path)
    assert load_reward(f"{path}:cached").digest == sha256(path)


@pytest.mark.parametrize("name", ["reward", ":reward", "task.py", "task.py:", "", ":"])
def test_other_forms(name: str) -> None:
    assert refusal(name) == f"reward is {name!r}, expected file.py:function or module:function"


def test_what_is_not_there(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "VALUE = 1\n")
    assert "FileNotFoundError: no file nowhere.py" in refusal("nowhere.py:reward")
    assert "no file" in refusal(f"{tmp_path}/x.py:reward")
    assert "No module named 'no_such_module'" in refusal("no_such_module:reward")
    assert refusal(f"{path}:rewrad").endswith(f"no function `rewrad` in {path}")
    assert refusal(f"{path}:VALUE").endswith(f"no function `VALUE` in {path}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def reward(\n", "SyntaxError: '(' was never closed"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('usage: task')\n", "SystemExit: usage: task"),
        ("\x00", "null bytes"),
    ],
)
def test_files_that_cannot_be_imported(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path, content)
    before = set(sys.modules)
    assert message in refusal(f"{path}:reward")
    assert not [name for name in set(sys.modules) - before if name.startswith("rollout_reward")]


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("def reward(prompt, text):", "too many positional arguments"),
        ("def reward():", "too many positional arguments"),
        ("def reward(prompt, text, ids, more):", "missing a required argument: 'more'"),
        ("def reward(prompt, *, text, ids):", "too many positional arguments"),
        ("async def reward(prompt, text, ids):", "an async function, expected a plain one"),
    ],
)
def test_other_signatures(tmp_path: Path, signature: str, message: str) -> None:
    path = write(tmp_path, f"{signature}\n    return 0.0\n")
    found = refusal(f"{path}:reward")
    assert message in found
    assert found.startswith(f"reward {path}:reward: ")


def test_functions_written_in_c() -> None:
    assert "expected a function of (prompt, completion, token_ids)" in refusal("math:sqrt")
    assert load_reward("builtins:max").digest
