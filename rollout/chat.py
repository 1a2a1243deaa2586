"""Chat messages in the one form that chat templates are written for.

People write a tool call's arguments as an object or as a string of JSON, and an assistant that only
calls tools has no content, spelled in three ways. Templates expect objects (the convention of
Transformers); of a missing content some print the word None and some raise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]


def for_template(messages: Messages, render: Callable[[Messages], str]) -> Messages:
    """Return the messages as the model's template takes them.

    Args:
        messages: as `rollout.prompts` checked them.
        render: the model's template.

    Raises:
        ValueError: arguments of a tool call are no object.
    """
    parsed = [_with_objects(message, i) for i, message in enumerate(messages)]
    if all(message.get("content", "") is not None for message in parsed):
        return parsed
    filled = [m | {"content": ""} if m.get("content", "") is None else m for m in parsed]
    try:
        with_null = render(parsed)
    except Exception:  # templates raise whatever their author chose
        return filled
    if with_null.count("None") > render(filled).count("None"):
        return filled
    return parsed


def _with_objects(message: dict[str, Any], index: int) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = []
    for k, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            place = f"messages.{index}.tool_calls.{k}.function.arguments"
            arguments = _object(function["arguments"], place)
            call = call | {"function": function | {"arguments": arguments}}
        changed.append(call)
    return message | {"tool_calls": changed}


def _object(arguments: Any, place: str) -> dict[str, Any]:
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"{place}: not JSON: {error}") from None
    if arguments is None or arguments == "":
        return {}  # a call without arguments, as clients spell it
    if not isinstance(arguments, dict):
        raise ValueError(f"{place}: got a {type(arguments).__name__}, expected an object")
    return arguments
