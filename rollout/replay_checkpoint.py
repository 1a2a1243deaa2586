"""Checkpoints: a Hugging Face folder that an engine loads, and what training goes on from.

    step-000128/            config.json, model.safetensors, tokenizer files as they were
    step-000128/trainer/    optimizer.safetensors, state.json

A checkpoint is written under another name and renamed, so that one which exists is whole.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.errors import ConfigError, InputError, OutputError
from rollout.model_files import ModelFiles, text_files

STATE_VERSION = 1

_FOLDER = re.compile(r"step-(\d{6,})")
_STATE = "trainer/state.json"
_TENSORS = "trainer/optimizer.safetensors"
_RNG = "rng"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """Where a run stands, beside weights and optimizer moments. Plain JSON."""

    version: int = STATE_VERSION
    step: int
    """Optimizer steps done."""
    loader: dict[str, Any]
    """The loader's own state."""
    settings: dict[str, Any]
    """What decides the numbers of a step; a resumed run must have the same."""
    ancestors: tuple[str, ...]
    """Digests of the weights that these were trained from."""


def newest_checkpoint(output: Path) -> Path | None:
    """Return the checkpoint of the most steps in a run's folder."""
    if not output.is_dir():
        return None
    found = [path for path in output.iterdir() if _FOLDER.fullmatch(path.name)]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def read_ancestors(folder: Path) -> tuple[str, ...]:
    """Return the digests of the weights that a checkpoint was trained from; none of a foreign one.

    Raises:
        InputError: the record is there and can't be read.
    """
    path = folder / _STATE
    return read_state(folder).ancestors if path.exists() else ()


def read_state(folder: Path) -> TrainerState:
    """Read where a checkpoint's run stood.

    Raises:
        InputError: it can't be read, or is of another version.
    """
    path = folder / _STATE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["version"] != STATE_VERSION:
            raise InputError(
                f"{path} has version {raw['version']}, expected {STATE_VERSION}: start anew"
            )
        raw["ancestors"] = tuple(raw["ancestors"])
        return TrainerState(**raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} can't be read: {error!r}") from error


def save_checkpoint(
    output: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    files: ModelFiles,
) -> Path:
    """Write a checkpoint.

    Args:
        output: the run's folder.
        model: the Hugging Face module.
        optimizer: AdamW over its parameters.
        state: where the run stands.
        files: the checkpoint that training started from; its tokenizer is copied.

    Returns:
        The checkpoint's folder.

    Raises:
        OutputError: it can't be written.
    """
    from safetensors.torch import save_file

    folder = output / f"step-{state.step:06d}"
    partial = output / f".{folder.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "trainer").mkdir(parents=True)
        model.save_pretrained(partial)
        for path in text_files(files):  # the sampler's business, kept byte by byte
            copy = partial / path.relative_to(files.folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        save_file(_optimizer_tensors(model, optimizer), str(partial / _TENSORS))
        text = json.dumps(asdict(state), allow_nan=False, indent=1)
        (partial / _STATE).write_text(text + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise OutputError(f"checkpoint {folder} can't be written: {error}") from error
    return folder


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Restore optimizer moments and torch's random state from a checkpoint.

    Args:
        folder: the checkpoint.
        model: with the checkpoint's weights.
        optimizer: AdamW over its parameters, changed in place.

    Raises:
        InputError: it can't be read, or belongs to other parameters.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / _TENSORS
    try:
        tensors = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} can't be read: {error}") from error
    torch.set_rng_state(tensors.pop(_RNG))
    state: dict[int, dict[str, Tensor]] = {}
    names = [name for name, _ in model.named_parameters()]
    for key, tensor in tensors.items():
        name, _, moment = key.rpartition("/")
        if name not in names:
            raise InputError(f"{path}: moments of `{name}`, which the model does not have")
        state.setdefault(names.index(name), {})[moment] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def check_settings(folder: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings than those a checkpoint was made with.

    Args:
        folder: the checkpoint.
        saved: of its state.
        current: of this run.

    Raises:
        ConfigError: naming the first that differs.
    """
    for key in sorted({*saved, *current}):
        if saved.get(key) != current.get(key):
            raise ConfigError(
                f"{folder} was trained with {key} {saved.get(key)!r}, got {current.get(key)!r}: go "
                "on with the same, or give output.path another folder"
            )


def _optimizer_tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {_RNG: torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{moment}"] = value.detach().cpu().contiguous()
    return tensors
