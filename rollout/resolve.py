"""Everything that a job means, settled and checked before any weight loads."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rollout.config import JobConfig
from rollout.engine_args import THROUGHPUT_ARGS, check_engine_args, check_engine_config
from rollout.errors import ConfigError, InputError
from rollout.model_files import ModelFiles, resolve_model, vocab_size
from rollout.prompts import check_prompts_file
from rollout.redact import public_url
from rollout.render import Renderer
from rollout.reward import Reward, load_reward
from rollout.schema.records import DatasetRecord, fingerprint_of
from rollout.version import VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedJob:
    """A job whose every name has been followed to what it stands for."""

    config: JobConfig
    files: ModelFiles
    renderer: Renderer
    reward: Reward | None
    stop_ids: tuple[int, ...]
    """End-of-sequence ids inherited from the checkpoint."""
    record: DatasetRecord
    """What the dataset will say of itself."""


def resolve_job(config: JobConfig) -> ResolvedJob:
    """Follow the job's names, check what can be checked, and digest what makes the data.

    Raises:
        InputError: model, prompts or reward can't be read.
        ConfigError: an engine argument is refused, or a token id is none of the model's.
        EngineError: vLLM is not installed.
    """
    check_prompts_file(config.prompts)
    reward = load_reward(config.reward) if config.reward else None
    files = resolve_model(config.model)
    check_engine_args(config.engine)
    trust = bool(config.engine.get("trust_remote_code", False))
    renderer = Renderer(files, config.prompts, trust_remote_code=trust)
    unknown = renderer.unknown_id(config.sampling)
    if unknown is not None:
        # in a row's own sampling it is the rejection of that row
        raise ConfigError(f"{unknown}: every prompt would be rejected, correct it in the job")
    check_engine_config(files, config.capture, config.engine, renderer.has_tokenizer)
    stop_ids = inherited_stop_ids(files.folder)
    size = vocab_size(files)
    beyond = [item for item in stop_ids if item >= size]
    if beyond and not config.sampling.ignore_eos:
        raise InputError(
            f"{files.folder / 'generation_config.json'}: eos_token_id {beyond[0]} is outside of "
            f"the model's vocabulary of {size}, so vLLM would refuse every request: correct it, "
            "or set sampling.ignore_eos and sampling.stop_token_ids"
        )
    inputs = fingerprint_inputs(config, files, stop_ids)
    record = DatasetRecord(
        fingerprint=fingerprint_of(inputs),
        fingerprint_inputs=inputs,
        provenance=_provenance(config, files, reward, stop_ids),
    )
    return ResolvedJob(
        config=config,
        files=files,
        renderer=renderer,
        reward=reward,
        stop_ids=stop_ids,
        record=record,
    )


def fingerprint_inputs(
    config: JobConfig, files: ModelFiles, stop_ids: tuple[int, ...]
) -> dict[str, Any]:
    """Collect what changes a rollout's distribution, and nothing else.

    Throughput knobs, the list of prompts and n are left out, so that a job can be tuned, extended
    and resumed; each prompt's own overrides are in its key.
    """
    sampling = config.sampling.model_dump(mode="json")
    for name in ("n", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"):
        del sampling[name]
    sampling["eos_token_ids"] = [] if config.sampling.ignore_eos else sorted(stop_ids)
    return {
        "model": {
            "weights_digest": files.weights_digest,
            "config_digest": files.config_digest,
            "dtype": files.dtype,
            "policy_step": config.model.policy_step,
        },
        "tokenizer": {
            "tokenizer_digest": files.tokenizer_digest,
            "template_digest": files.template_digest,
            "chat_template_kwargs": config.prompts.chat_template_kwargs,
            "truncate_left": config.prompts.long_prompts == "truncate_left",
        },
        "sampling": sampling,
        "capture": {"top": config.capture.top, "draws": config.capture.draws},
        "engine": {k: v for k, v in config.engine.items() if k not in THROUGHPUT_ARGS},
    }


def other_reward(there: DatasetRecord, now: DatasetRecord) -> str | None:
    """Say that a dataset was begun with another reward function, which no fingerprint holds.

    Args:
        there: the dataset's record.
        now: the job's.
    """
    before, after = (record.provenance.get("reward") or {} for record in (there, now))
    if (before.get("digest"), _function(before)) == (after.get("digest"), _function(after)):
        return None
    changed = before.get("name") == after.get("name")
    what = f"{before.get('name', 'no function')}{' as it was then' if changed else ''}"
    return (
        f"the rollouts there were scored by {what}, new ones are by "
        f"{after.get('name', 'no function')}: what is there stays, `rollout join` replaces it"
    )


def _function(reward: dict[str, Any]) -> str:
    return str(reward.get("name", "")).rpartition(":")[2]


def inherited_stop_ids(folder: Path) -> tuple[int, ...]:
    """Read the end-of-sequence ids of a checkpoint's generation_config.json, its only lasting word.

    Args:
        folder: the checkpoint.

    Raises:
        InputError: the file is there and can't be read.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return ()
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path} can't be read: {error}") from error
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(item) is int and item >= 0 for item in ids):
        raise InputError(f"{path}: eos_token_id is {value!r}, expected token ids")
    return tuple(ids)


def _provenance(
    config: JobConfig, files: ModelFiles, reward: Reward | None, stop_ids: tuple[int, ...]
) -> dict[str, Any]:
    job = config.model_dump(mode="json")
    for section in ("prompts", "output"):
        # both may hold secrets
        del job[section]["storage_options"]
        job[section]["path"] = public_url(job[section]["path"])
    return {
        "rollout_version": VERSION,
        "job": job,
        "model": files.record(),
        "inherited": {"eos_token_ids": list(stop_ids)},
        "reward": {"name": reward.name, "digest": reward.digest} if reward else None,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "transformers", "pyarrow")},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
