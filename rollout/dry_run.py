"""`rollout generate --dry-run`: everything that a job means, in words, with no weights loaded."""

from __future__ import annotations

import itertools
from typing import Any

import yaml

from rollout.commits import dataset_exists, find_record
from rollout.config import JobConfig
from rollout.devices import describe_devices
from rollout.engine_args import engine_arguments, engine_has_device
from rollout.prompts import Prompt, read_prompts
from rollout.resolve import other_reward, resolve_job
from rollout.rows import Rejection
from rollout.storage import Storage

_SHOWN_PROMPTS = 3


def describe_job(config: JobConfig) -> str:
    """Resolve a job as `generate` does, and describe what it would do.

    Raises:
        RolloutError: as `generate` would, before it loads weights.
    """
    job = resolve_job(config)
    output = config.output
    storage = Storage.open(output.path, output.storage_options, retry_seconds=output.retry_seconds)
    storage.probe()
    there = find_record(storage) if dataset_exists(storage, job.record) else None
    other = None if there is None else other_reward(there, job.record)
    effective = config.model_dump(mode="json")
    for section in ("prompts", "output"):
        effective[section].pop("storage_options")
    sections: dict[str, Any] = {
        "output": "starts a dataset" if there is None else "goes on with the dataset there",
        **({} if other is None else {"reward": other}),
        "fingerprint": job.record.fingerprint,
        "job": effective,
        "model": job.files.record(),
        "inherited from generation_config.json": {"eos_token_ids": list(job.stop_ids)},
        "support recorded": config.sampling.support_kind(config.capture.top),
        "devices": _devices(config.engine),
        "engine arguments": engine_arguments(
            job.files, config.capture, config.engine, 0, job.renderer.has_tokenizer
        ),
        "first prompts": [],
    }
    stated = config.engine.get("max_model_len")
    limit = stated if isinstance(stated, int) else None
    rows = read_prompts(config.prompts, config.sampling)
    for row in itertools.islice(rows, _SHOWN_PROMPTS):
        rendered = job.renderer.render(row, limit) if isinstance(row, Prompt) else row
        shown: dict[str, Any] = {"line": row.line}
        if isinstance(rendered, Rejection):
            shown["rejected"] = f"{rendered.reason}: {rendered.detail}"
        else:
            shown |= {"token_ids": rendered, "text": job.renderer.show(rendered)}
        sections["first prompts"].append(shown)
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=100).rstrip()


def _devices(args: dict[str, Any]) -> str:
    found = describe_devices(args)
    if not engine_has_device():
        found += "; vLLM finds no device either, and checks the engine's arguments where it starts"
    return found
