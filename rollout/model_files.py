"""Which files a model name means, whether they are whole, and their digests, before any loads."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.config import ModelConfig
from rollout.errors import InputError

# in the order in which an engine prefers them
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state).*\.(bin|pt)")
# what else decides how weights are read; code of its own runs only where it is trusted
_CONFIG = ("config.json", "*.py", "*quant*config.json")
_TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)
_TEMPLATE = ("chat_template*", "additional_chat_templates/*")
_LFS_POINTER = b"version https://git-lfs"


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
    """Find a checkpoint's files, check that they are whole, and digest them.

    Args:
        config: the job's `model` section.

    Raises:
        InputError: no such folder or hub id, no config.json, or no whole weights in a folder.
    """
    folder, revision = _find(config)
    model_config = _read_config(config.path, folder)
    if revision is None:
        weights = _weight_files(config.path, folder)
        for path in weights:
            _check_whole(config.path, path)
        weights_digest = _digest(folder, weights)
    else:
        weights_digest = f"commit:{revision}"
    return ModelFiles(
        name=config.path,
        path=str(folder) if revision is None else config.path,
        folder=folder,
        revision=revision,
        weights_digest=weights_digest,
        config_digest=_digest(folder, _files(folder, _CONFIG)),
        tokenizer_digest=tokenizer_digest(folder),
        template_digest=_digest(folder, _files(folder, _TEMPLATE)),
        config=model_config,
        dtype=_dtype(config, model_config),
    )


def vocab_size(files: ModelFiles) -> int:
    """Return how many ids the model's logits have.

    Raises:
        InputError: config.json does not say.
    """
    for section in _config_sections(files.config):
        size = section.get("vocab_size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    raise InputError(f"model {files.name}: config.json has no vocab_size")


def tokenizer_digest(folder: Path) -> str:
    """Digest the tokenizer of a checkpoint's folder, as `ModelFiles.tokenizer_digest` does.

    Raises:
        InputError: a file can't be read.
    """
    return _digest(folder, _files(folder, _TOKENIZER))


def text_files(files: ModelFiles) -> list[Path]:
    """List what turns text into ids, and the defaults of generation: all but weights and shape."""
    return _files(files.folder, (*_TOKENIZER, *_TEMPLATE, "generation_config.json"))


def has_tokenizer(files: ModelFiles) -> bool:
    """Whether a checkpoint brings a tokenizer of any kind."""
    return bool(_files(files.folder, _TOKENIZER))


def _dtype(config: ModelConfig, model_config: dict[str, Any]) -> str:
    """Follow `auto` to the checkpoint's own type; vLLM's `auto` would halve float32 weights."""
    if config.dtype != "auto":
        return config.dtype
    for section in _config_sections(model_config):
        for name in ("dtype", "torch_dtype"):
            found = section.get(name)
            if found in ("float32", "bfloat16", "float16"):
                return str(found)
    raise InputError(
        f"model {config.path}: config.json names no dtype that can be used, "
        "set model.dtype to float32, bfloat16 or float16"
    )


def _config_sections(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a model's configuration, then that of its text part if it has one."""
    nested = config.get("text_config")
    return [config, nested] if isinstance(nested, dict) else [config]


def _find(config: ModelConfig) -> tuple[Path, str | None]:
    """Return a local folder, and the commit if a hub id is meant."""
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        if config.revision is not None:
            raise InputError(
                f"model.revision is {config.revision!r} but model.path {config.path} is a folder: "
                "a revision belongs to a hub id"
            )
        return folder, None
    if folder.is_file():
        raise InputError(f"model {config.path}: a file, expected the folder of a checkpoint")
    if config.path.startswith(("/", ".", "~")) or config.path.count("/") > 1:
        raise InputError(f"model {config.path}: no such folder")
    return _from_hub(config)


def _from_hub(config: ModelConfig) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            config.path,
            revision=config.revision,
            allow_patterns=["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py"],
        )
    except Exception as error:  # the hub's client raises many kinds, all meaning the same here
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"model {config.path}: no such folder, and the hub did not give it: {first}"
        ) from error
    return Path(folder), Path(folder).name


def _read_config(name: str, folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"model {name}: no config.json in it, expected a Hugging Face checkpoint"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"model {name}: config.json can't be read: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"model {name}: config.json holds no object")
    return config


def _weight_files(name: str, folder: Path) -> list[Path]:
    """Return the weight files of the kind that the engine loads, and their index."""
    for pattern in _WEIGHTS:
        files = [p for p in _files(folder, (pattern,)) if not _NOT_WEIGHTS.fullmatch(p.name)]
        if files:
            indexes = _files(folder, (f"{pattern}.index.json",))
            for index in indexes:
                _check_index(name, index, {path.name for path in files})
            return files + indexes
    raise InputError(f"model {name}: no weight file ({', '.join(_WEIGHTS)})")


def _check_index(name: str, index: Path, present: set[str]) -> None:
    try:
        listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"model {name}: {index.name} can't be read: {error!r}") from error
    missing = sorted(listed - present)
    if missing:
        raise InputError(
            f"model {name}: {len(missing)} of {len(listed)} weight files are missing, "
            f"the first is {missing[0]}"
        )


def _check_whole(name: str, path: Path) -> None:
    """Refuse a weight file that its header says is cut, without reading the weights."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise InputError(f"model {name}: {path.name} is a Git LFS pointer, fetch the weights")
        if not start:
            raise InputError(f"model {name}: {path.name} is empty")
    except OSError as error:
        raise InputError(
            f"model {name}: {path.name} can't be read: {error.strerror or error}"
        ) from error
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"model {name}: {path.name} is damaged or cut short: {error}"
            ) from error


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
