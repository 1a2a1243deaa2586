"""Chat rows with tool calls, however people spell them (report U12)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tiny_model

from rollout.config import ModelConfig, PromptsConfig, SamplingConfig
from rollout.model_files import resolve_model
from rollout.prompts import Prompt, read_prompts
from rollout.render import Renderer
from rollout.rows import Rejection

CALLS = (
    "{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant', 'tool') %}"
    "{{ raise_exception('no such role: ' + message.role) }}{% endif %}"
    "{% if message.role == 'tool' and loop.index0 < 2 %}"
    "{{ raise_exception('a tool speaks before it was called') }}{% endif %}"
    "[{{ message.role }}]{CONTENT}"
    "{% for call in message.tool_calls or [] %}<{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}>"
    "{% endfor %}{% endfor %}"
)
TEMPLATES = {
    "prints None": "{{ message.content }}",
    "raises": "{{ '' + message.content }}",
    "tests for null": "{% if message.content is not none %}{{ message.content }}{% endif %}",
}
ARGUMENTS = {"mapping": {"x": 1}, "string": '{"x": 1}', "null": "null", "malformed": '{"x": '}


def rendered(folder: Path, template: str, rows: list[dict[str, Any]]) -> list[str | Rejection]:
    """Read and render rows with a template."""
    model = make_tiny_model(folder / "model")
    (model / "chat_template.jinja").write_text(template)
    prompts = folder / "p.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PromptsConfig(path=str(prompts))
    renderer = Renderer(
        resolve_model(ModelConfig(path=str(model))), config, trust_remote_code=False
    )
    found: list[str | Rejection] = []
    for prompt in read_prompts(config, SamplingConfig(max_tokens=4)):
        ids = renderer.render(prompt, 512) if isinstance(prompt, Prompt) else prompt
        if isinstance(ids, Rejection):
            found.append(ids)
            continue
        text = renderer.show(ids)
        assert text is not None
        found.append(text)
    return found


def call_row(content: str, arguments: str) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": ARGUMENTS[arguments]}}],
    }
    contents: dict[str, dict[str, Any]] = {
        "null": {"content": None},
        "empty": {"content": ""},
        "absent": {},
    }
    message |= contents[content]
    return {"id": f"{content} {arguments}", "messages": [{"role": "user", "content": "q"}, message]}


@pytest.mark.parametrize("template", TEMPLATES)
def test_u12_all_spellings_of_a_call_give_one_prompt(template: str, tmp_path: Path) -> None:
    spellings = list(itertools.product(["null", "empty", "absent"], ARGUMENTS))
    found = rendered(
        tmp_path,
        CALLS.replace("{CONTENT}", TEMPLATES[template]),
        [call_row(*spelling) for spelling in spellings],
    )
    for (_, arguments), result in zip(spellings, found, strict=True):
        if arguments == "malformed":
            assert isinstance(result, Rejection)
            assert (result.stage, result.reason) == ("render", "render_failed")
            assert "messages.1.tool_calls.0.function.arguments: not JSON" in result.detail
        else:
            expected = {"mapping": "<f x=1>", "string": "<f x=1>", "null": "<f>"}[arguments]
            assert result == f"[user]q[assistant]{expected}"


def test_u12_other_odd_rows_have_a_reason(tmp_path: Path) -> None:
    turn = {"role": "user", "content": "q"}
    rows: list[dict[str, Any]] = [
        {"id": "role", "messages": [{"role": "wizard", "content": "x"}]},
        {"id": "tool first", "messages": [{"role": "tool", "content": "x"}]},
        {"id": "none", "messages": []},
        {"id": "both", "prompt": "x", "messages": [turn]},
        {"id": "number", "messages": [turn, call_row("empty", "mapping")["messages"][1]]},
        {"id": "good", "messages": [turn]},
    ]
    rows[4]["messages"][1]["tool_calls"][0]["function"]["arguments"] = 3
    found = rendered(tmp_path, CALLS.replace("{CONTENT}", "{{ message.content }}"), rows)
    details = [item.detail for item in found if isinstance(item, Rejection)]
    assert len(details) == 5
    for detail, part in zip(
        details,
        [
            "no such role: wizard",
            "a tool speaks before it was called",
            "messages: got none",
            "got prompt and messages",
            "function.arguments: got a int, expected an object",
        ],
        strict=True,
    ):
        assert part in detail
    assert found[-1] == "[user]q"


def test_text_that_says_none_is_kept(tmp_path: Path) -> None:
    row = call_row("null", "mapping")
    row["messages"][0]["content"] = "None of it"
    (found,) = rendered(tmp_path, CALLS.replace("{CONTENT}", "{{ message.content }}"), [row])
    assert found == "[user]None of it[assistant]<f x=1>"


def test_a_template_that_knows_of_missing_contents_gets_them(tmp_path: Path) -> None:
    knows = "{% if message.content is not none %}({{ message.content }}){% endif %}"
    rows = [call_row(content, "mapping") for content in ("null", "absent", "empty")]
    found = rendered(tmp_path, CALLS.replace("{CONTENT}", knows), rows)
    without, empty = "[user](q)[assistant]<f x=1>", "[user](q)[assistant]()<f x=1>"
    assert found == [without, without, empty]
