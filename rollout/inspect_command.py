"""The body of `rollout inspect`: the overview, or one prompt, sample or token."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rollout.dataset import read_dataset
from rollout.drill import show_prompt, show_sample
from rollout.drill_text import format_prompt, format_sample, format_token
from rollout.errors import ConfigError
from rollout.inspect import inspect_dataset
from rollout.inspect_text import format_report
from rollout.report import INSPECT_VERSION
from rollout.storage import Storage
from rollout.storage_arguments import parse_storage_options
from rollout.terminal_text import WIDTH, wrap
from rollout.token_text import find_token_text


def run_inspect(
    path: str,
    storage_options: Sequence[str],
    *,
    prompt: str | None,
    sample: int | None,
    token: int | None,
    full: bool,
    tokenizer: str | None,
    as_json: bool,
) -> str:
    """Answer one call of `rollout inspect`.

    Returns:
        What is printed: lines for people, or one JSON object.

    Raises:
        ConfigError: a sample without a prompt, or a token without a sample.
        DatasetError: no dataset, or nothing in it by this name.
        InputError: no tokenizer where one was named.
    """
    if (sample is not None and prompt is None) or (token is not None and sample is None):
        raise ConfigError("--sample goes with --prompt, and --token with --sample")
    if prompt is None:
        report = inspect_dataset(path, parse_storage_options(storage_options), full=full)
        return json.dumps(report.as_dict(), allow_nan=False) if as_json else format_report(report)
    view = read_dataset(Storage.open(path, parse_storage_options(storage_options)))
    text = find_token_text(view.record, tokenizer)
    shown: Any
    if sample is None:
        shown = show_prompt(view, prompt, text)
        printed = "" if as_json else format_prompt(shown)
    else:
        shown = show_sample(view, prompt, sample, text, token=token)
        layout = format_sample if token is None else format_token
        printed = "" if as_json else layout(shown)
    if as_json:
        return json.dumps(
            {"inspect_version": INSPECT_VERSION} | dataclasses.asdict(shown), allow_nan=False
        )
    if text.note is not None:
        note = f"no text of single tokens: {text.note}"
        printed += "\n\n" + "\n".join(wrap(note, WIDTH))
    return printed
