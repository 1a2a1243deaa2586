"""Show token ids as text, where the tokenizer that made them can be found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.errors import InputError, RolloutError
from rollout.model_files import tokenizer_digest
from rollout.schema.records import DatasetRecord


class TokenText:
    """Turns token ids into text; into nothing where no tokenizer is known.

    Args:
        tokenizer: with `decode(ids, skip_special_tokens=...)`, or None.
        note: why there is no text, or None.
    """

    def __init__(self, tokenizer: Any | None, note: str | None) -> None:
        self._tokenizer = tokenizer
        self.note = note
        """Why there is no text; None where there is."""

    def one(self, token_id: int) -> str | None:
        """The text of one token; a part of a character comes out as U+FFFD."""
        return self.many([token_id])

    def many(self, token_ids: Sequence[int]) -> str | None:
        """The text of consecutive tokens, special ones included."""
        if self._tokenizer is None:
            return None
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def find_token_text(record: DatasetRecord, folder: str | None = None) -> TokenText:
    """Load the tokenizer of the model that made a dataset.

    Args:
        record: the dataset's; its model is tried where it is a local folder.
        folder: another folder with the model's tokenizer.json.

    Returns:
        What turns ids into text, with a note instead of text where the tokenizer is not found or
        is no longer the one that made the data.

    Raises:
        InputError: the folder that was asked for has no readable tokenizer.json.
    """
    if folder is not None:
        return TokenText(_load(Path(folder)), None)
    model = record.provenance.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    if not isinstance(name, str):
        return TokenText(None, "no model is recorded: --tokenizer names a folder")
    if not (Path(name) / "tokenizer.json").is_file():
        return TokenText(None, f"no {name}/tokenizer.json here: --tokenizer names a folder")
    inputs = record.fingerprint_inputs.get("tokenizer")
    expected = inputs.get("tokenizer_digest") if isinstance(inputs, dict) else None
    try:
        if expected is not None and tokenizer_digest(Path(name)) != expected:
            return TokenText(None, f"the tokenizer in {name} is not the one that made the data")
        return TokenText(_load(Path(name)), None)
    except RolloutError as error:
        return TokenText(None, str(error))


def _load(folder: Path) -> Any:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InputError(
            f"tokenizer {folder}: no tokenizer.json in it, expected the folder of the run's model"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError("tokenizer: pip install tokenizers, which reads it") from error
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare Exception
        raise InputError(f"tokenizer {file}: can't be read: {error}") from error
