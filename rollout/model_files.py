"""Which files a model name means, and their digests, all before any weight loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.config import ModelConfig
from rollout.errors import InputError

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.tiktoken",
    "tekken.json",
)
_TEMPLATE = ("chat_template*", "additional_chat_templates/*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """A checkpoint pinned to what its files hold."""

    name: str
    """As written in the job."""
    path: str
    """What the engine is given: a folder, or the hub id."""
    folder: Path
    """Local folder with at least the configuration and the tokenizer."""
    revision: str | None
    """Resolved commit of a hub id."""
    weights_digest: str
    """sha256 over the weight files, or `commit:<sha>` of a hub id."""
    config_digest: str
    tokenizer_digest: str
    template_digest: str
    config: dict[str, Any]
    """config.json."""
    dtype: str
    """Type of the weights in the engine; never a default of the engine's."""

    def record(self) -> dict[str, Any]:
        """Return what the dataset's record keeps."""
        return {
            "name": self.name,
            "revision": self.revision,
            "weights_digest": self.weights_digest,
            "config_digest": self.config_digest,
            "tokenizer_digest": self.tokenizer_digest,
            "template_digest": self.template_digest,
            "dtype": self.dtype,
            "architectures": self.config.get("architectures"),
            "tie_word_embeddings": bool(self.config.get("tie_word_embeddings", False)),
        }


def resolve_model(config: ModelConfig) -> ModelFiles:
    """Find a checkpoint's files and digest them.

    Args:
        config: the job's `model` section.

    Raises:
        InputError: no such folder or hub id, no config.json, or no weights in a folder.
    """
    folder = Path(config.path)
    if folder.is_dir():
        revision = None
        if config.revision is not None:
            raise InputError(
                f"model.revision is {config.revision!r} but model.path {config.path} is a folder: "
                "a revision belongs to a hub id"
            )
    else:
        folder, revision = _from_hub(config)
    model_config = _read_config(folder)
    if revision is None:
        weights = _files(folder, _WEIGHTS)
        if not weights:
            raise InputError(f"model {config.path}: no weight file ({', '.join(_WEIGHTS)})")
        weights_digest = _digest(folder, weights)
    else:
        weights_digest = f"commit:{revision}"
    return ModelFiles(
        name=config.path,
        path=str(folder) if revision is None else config.path,
        folder=folder,
        revision=revision,
        weights_digest=weights_digest,
        config_digest=_digest(folder, [folder / "config.json"]),
        tokenizer_digest=_digest(folder, _files(folder, _TOKENIZER)),
        template_digest=_digest(folder, _files(folder, _TEMPLATE)),
        config=model_config,
        dtype=_dtype(config, model_config),
    )


def _dtype(config: ModelConfig, model_config: dict[str, Any]) -> str:
    """Follow `auto` to the checkpoint's own type; vLLM's `auto` would halve float32 weights."""
    if config.dtype != "auto":
        return config.dtype
    nested = model_config.get("text_config") or {}
    for section in (model_config, nested):
        for name in ("dtype", "torch_dtype"):
            found = section.get(name)
            if found in ("float32", "bfloat16", "float16"):
                return str(found)
    raise InputError(
        f"model {config.path}: config.json names no dtype that can be used, "
        "set model.dtype to float32, bfloat16 or float16"
    )


def _from_hub(config: ModelConfig) -> tuple[Path, str]:
    if config.path.startswith(("/", ".", "~")) or config.path.count("/") > 1:
        raise InputError(f"model {config.path}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            config.path,
            revision=config.revision,
            allow_patterns=["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja"],
        )
    except Exception as error:  # the hub's client raises many kinds, all meaning the same here
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"model {config.path}: no such folder, and the hub did not give it: {first}"
        ) from error
    return Path(folder), Path(folder).name


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"model {folder}: config.json can't be read: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"model {folder}: config.json holds no object")
    return config


def _files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def _digest(folder: Path, files: list[Path]) -> str:
    """Digest names and contents; files are hashed side by side since weights are large."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        digests = list(pool.map(_file_sha256, files))
    lines = [f"{p.relative_to(folder)} {d}\n" for p, d in zip(files, digests, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"model file {path} can't be read: {error.strerror or error}") from error
