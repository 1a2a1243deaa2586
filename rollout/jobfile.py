"""From a YAML file and `--set` overrides to a checked `JobConfig`.

YAML is read by the 1.2 rules where 1.1 surprises: `1e-6` is a number, `2024-01-01` and `1:30` are
text, repeated keys are errors. `yes` and `no` stay booleans, and are refused where text is meant.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rollout.config import JobConfig
from rollout.errors import ConfigError

S = typing.TypeVar("S", bound=BaseModel)

_SHOWN_CHARACTERS = 80  # of a wrong value in a message
_MERGE_TAG = "tag:yaml.org,2002:merge"
_FLOAT = re.compile(
    r"""^[-+]?(?:
    (?:[0-9][0-9_]*)?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |[0-9][0-9_]*\.(?:[eE][-+]?[0-9]+)?
    |[0-9][0-9_]*[eE][-+]?[0-9]+
    |\.(?:inf|Inf|INF))$
    |^\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$")


class _Loader(yaml.SafeLoader):
    """Safe loader with the number rules of YAML 1.2 that refuses repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is a list or a mapping, expected text", key_node.start_mark
                )
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key `{key}` stands twice in one mapping", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Read an integer, `0o17` as octal; `017` never comes here."""
        text = str(self.construct_scalar(node)).replace("_", "")
        return int(text, 0)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Take YAML 1.1's implicit types without its numbers, dates and `=`."""
    replaced = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp", "value")}
    kept = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in replaced]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for first in "-+.0123456789":
        kept[first] = [
            ("tag:yaml.org,2002:int", _INT),
            ("tag:yaml.org,2002:float", _FLOAT),
            *kept.get(first, []),
        ]
    return kept


_Loader.yaml_implicit_resolvers = _resolvers()
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Read a job file, apply overrides, and check everything that needs no other file.

    Args:
        path: the YAML file.
        overrides: `dotted.key=value`, the value in YAML.

    Raises:
        ConfigError: the file can't be read, is no mapping, or values are wrong; all are named.
    """
    return load_file(JobConfig, path, overrides)


def load_file(
    model: type[S], path: str | Path, overrides: Sequence[str] = (), *, what: str = "job file"
) -> S:
    """Read a YAML file as one section; see `load_job`.

    Args:
        model: the section that the whole file is.
        path: the YAML file.
        overrides: `dotted.key=value`, the value in YAML.
        what: what the messages call it.

    Raises:
        ConfigError: the file can't be read, is no mapping, or values are wrong; all are named.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{what} {path}: expected YAML in UTF-8: {error}") from error
    data = _parse(text, f"{what} {path}")
    first, second, *_ = model.model_fields
    if data is None:
        raise ConfigError(f"{what} {path} is empty, expected `{first}`, `{second}`, ...")
    if not isinstance(data, dict):
        raise ConfigError(
            f"{what} {path} holds a {type(data).__name__}, "
            f"expected a mapping with `{first}`, `{second}`, ..."
        )
    for override in overrides:
        _apply_override(data, override)
    return check_section(model, data)


def check_job(data: dict[str, Any]) -> JobConfig:
    """Check a mapping as a job.

    Raises:
        ConfigError: naming every wrong value.
    """
    return check_section(JobConfig, data)


def check_section(model: type[S], data: Any, prefix: str = "") -> S:
    """Check data as one section, with errors that a person can act on.

    Args:
        model: the section.
        data: what was written.
        prefix: the section's own dotted key, for the messages.

    Raises:
        ConfigError: naming every wrong value.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        items = error.errors(include_url=False)
        lines = dict.fromkeys(_explain(model, item, prefix) for item in items)
        raise ConfigError("; ".join(lines)) from None
    except RecursionError:
        raise ConfigError(f"{prefix or 'job'}: nested too deeply, or holds itself") from None


def _parse(text: str, what: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        # the parser's own text would quote the lines around, which may hold secrets
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = ", ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{what}{place}: {reason}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{what}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{what}: nested too deeply") from None


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(
            f"override {_short(override)}: expected dotted.key=value, such as sampling.top_p=0.9"
        )
    what = f"override of {'.'.join(parts)}"
    section = data
    for part in parts[:-1]:
        inner = section.get(part)
        if inner is not None and not isinstance(inner, dict):
            raise ConfigError(f"{what}: `{part}` is not a section")
        # a copy: YAML aliases may let two sections share one mapping
        section[part] = {} if inner is None else dict(inner)
        section = section[part]
    section[parts[-1]] = _parse(value, what)


def _explain(model: type[BaseModel], item: Any, prefix: str) -> str:
    location = [str(part) for part in item["loc"] if part != "[key]"]
    key = ".".join(([prefix] if prefix else []) + location)
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key; {_hint(model, location)}"
    if item["type"] == "missing":
        return f"{key}: missing"
    if item["type"] == "value_error":
        return f"{key}: {item['ctx']['error']}" if key else str(item["ctx"]["error"])
    got = "a value" if "storage_options" in location else _short(item["input"])
    return f"{key}: got {got}, expected {_expected(item, _section_at(model, location))}"


def _expected(item: Any, section: type[BaseModel] | None) -> str:
    """Say what a value should have been, in the job file's terms rather than in Python's."""
    kind, value = item["type"], item["input"]
    if kind == "invalid_key":
        return "a name in text as key; put it in quotes"
    if kind.endswith("_type") and kind.startswith(("model", "dataclass")):
        names = "" if section is None else f" with {', '.join(section.model_fields)}"
        return f"a mapping{names}"
    if kind == "dict_type":
        return "a mapping"
    if kind == "tuple_type":
        return "a list"
    if kind in ("too_short", "string_too_short"):
        return "one entry or more" if kind == "too_short" else "text that is not empty"
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        why = ": YAML reads unquoted yes, no, on and off as booleans" if value in (0, 1) else ""
        return f"text; put it in quotes{why if isinstance(value, bool) else ''}"
    message = str(item["msg"]).removeprefix("Input should be ")
    return message[0].lower() + message[1:]


def _hint(model: type[BaseModel], location: list[str]) -> str:
    """Name where an unknown key belongs, or the known key that looks most like it."""
    name = location[-1]
    here = _section_at(model, location[:-1])
    known = list(here.model_fields) if here else []
    elsewhere = [
        ".".join((*section, name))
        for section in [(), *((field,) for field in model.model_fields)]
        if (found := _section_at(model, list(section))) and name in found.model_fields
    ]
    if elsewhere:
        return f"did you mean `{'` or `'.join(elsewhere)}`?"
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"known here: {', '.join(sorted(known))}"


def _section_at(model: type[BaseModel], location: list[str]) -> type[BaseModel] | None:
    """Follow field names down to the section that they name, if they name one."""
    for part in location:
        field = model.model_fields.get(part)
        if field is None:
            return None
        options = (
            typing.get_args(field.annotation)
            if isinstance(field.annotation, types.UnionType)
            else (field.annotation,)
        )
        sections = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
        if not sections:
            return None
        model = sections[0]
    return model


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
