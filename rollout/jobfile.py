"""From a YAML file and `--set` overrides to a checked `JobConfig`.

YAML is read by the 1.2 rules where 1.1 surprises (`1e-6` is a number); repeated keys are errors.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rollout.config import JobConfig
from rollout.errors import ConfigError

S = typing.TypeVar("S", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses repeated keys and reads `1e-6` as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key `{key}` stands twice in one mapping", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Read a job file, apply overrides, and check everything that needs no other file.

    Args:
        path: the YAML file.
        overrides: `dotted.key=value`, the value in YAML.

    Raises:
        ConfigError: the file can't be read, is no mapping, or values are wrong; all are named.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"job file {path}: {error.strerror or error}") from error
    data = _parse(text, f"job file {path}")
    if not isinstance(data, dict):
        raise ConfigError(
            f"job file {path} holds a {type(data).__name__}, "
            "expected a mapping with `model`, `prompts`, ..."
        )
    for override in overrides:
        _apply_override(data, override)
    return check_job(data)


def check_job(data: dict[str, Any]) -> JobConfig:
    """Check a mapping as a job.

    Raises:
        ConfigError: with one line for each wrong value.
    """
    return check_section(JobConfig, data)


def check_section(model: type[S], data: Any, prefix: str = "") -> S:
    """Check data as one section, with errors that a person can act on.

    Args:
        model: the section.
        data: what was written.
        prefix: the section's own dotted key, for the messages.

    Raises:
        ConfigError: with one line for each wrong value.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [_explain(model, item, prefix) for item in error.errors()]
        raise ConfigError("; ".join(lines)) from None


def _parse(text: str, what: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what}: {' '.join(str(error).split())}") from None


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"override {override!r}: expected dotted.key=value, such as sampling.top_p=0.9"
        )
    section = data
    for part in parts[:-1]:
        if section.get(part) is None:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            raise ConfigError(f"override {override!r}: `{part}` is not a section")
    section[parts[-1]] = _parse(value, f"override {override!r}")


def _explain(model: type[BaseModel], item: Any, prefix: str) -> str:
    location = [str(part) for part in item["loc"]]
    key = ".".join(([prefix] if prefix else []) + location)
    if item["type"] == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(sorted(known))}"
        return f"{key}: unknown key; {hint}"
    if item["type"] == "missing":
        return f"{key}: missing"
    if item["type"] == "value_error":
        return f"{key}: {item['ctx']['error']}" if key else str(item["ctx"]["error"])
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{key}: got {item['input']!r}, expected: {message}"


def _fields_at(model: type[BaseModel], location: list[str]) -> list[str]:
    for part in location:
        annotation = model.model_fields[part].annotation
        candidates = (
            typing.get_args(annotation)
            if isinstance(annotation, types.UnionType)
            else (annotation,)
        )
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)
