"""From a prompt row to the token ids that the engine sees, and from ids to text for people.

The stored ids are the truth: nothing downstream tokenises again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from rollout.chat import Messages, for_template
from rollout.config import PromptsConfig, SamplingConfig
from rollout.errors import InputError
from rollout.model_files import ModelFiles, has_tokenizer, vocab_size
from rollout.prompts import Prompt
from rollout.rows import Rejection

_log = logging.getLogger(__name__)
_DETAIL_CHARACTERS = 500
_REPLACEMENT = "\ufffd"  # what stands in a text for what has none


class Renderer:
    """Tokenises prompts as the model's own template and tokenizer do."""

    def __init__(
        self, files: ModelFiles, config: PromptsConfig, *, trust_remote_code: bool
    ) -> None:
        """Load the tokenizer.

        Args:
            files: the checkpoint.
            config: the job's `prompts` section.
            trust_remote_code: whether the tokenizer may bring code of its own.

        Raises:
            InputError: the tokenizer's files are there but can't be loaded.
        """
        self._config = config
        self._name = files.name
        self._vocab_size = vocab_size(files)
        self._tokenizer = _load_tokenizer(files, trust_remote_code)
        self._warned = False
        self.truncated = 0
        """Prompts that were cut on the left."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be rendered and decoded; without it only token ids are accepted."""
        return self._tokenizer is not None

    def render(self, prompt: Prompt, max_model_len: int | None) -> list[int] | Rejection:
        """Return the prompt's token ids, or why it can't run.

        Args:
            prompt: the row.
            max_model_len: tokens of prompt and output together; null skips the check.

        Raises:
            InputError: the prompt is too long and the policy is `fail`.
        """
        try:
            ids = self._tokenise(prompt)
        except Exception as error:  # templates raise whatever their author chose
            reason = " ".join(str(error).split())
            return self._reject(prompt, "render_failed", f"{type(error).__name__}: {reason}", None)
        if not ids:
            return self._reject(prompt, "empty_prompt", "got no token, expected at least one", 0)
        outside = self._outside("prompt", ids) or self.unknown_id(prompt.sampling)
        if outside is not None:
            return self._reject(prompt, "bad_token_id", outside, len(ids))
        self._warn_of_two(ids, prompt)
        if max_model_len is not None and len(ids) >= max_model_len:
            return self._too_long(prompt, ids, max_model_len)
        return ids

    def unknown_id(self, sampling: SamplingConfig) -> str | None:
        """Say which token id of sampling values the model does not have, if there is one."""
        return self._outside(
            "sampling.allowed_token_ids", sampling.allowed_token_ids or ()
        ) or self._outside("sampling.stop_token_ids", sampling.stop_token_ids)

    def decode(self, token_ids: list[int]) -> str | None:
        """Decode a completion for people: lossy where it ends inside a character.

        Args:
            token_ids: ids, also such as have no tokenizer entry.
        """
        return self._decode(token_ids, skip_special_tokens=True)

    def show(self, token_ids: list[int]) -> str | None:
        """Decode a prompt with its special tokens, for a person to check."""
        return self._decode(token_ids, skip_special_tokens=False)

    def _outside(self, name: str, given: Iterable[int]) -> str | None:
        size = self._vocab_size
        outside = next((i for i in given if not 0 <= i < size), None)
        if outside is None:
            return None
        return f"{name}: token id {outside} is outside of the model's vocabulary of {size}"

    def _decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str | None:
        if self._tokenizer is None:
            return None
        try:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except Exception:  # tokenizers in Python fail on ids that have no entry, each in its way
            size = len(self._tokenizer)
            known = [i for i in token_ids if i < size]
            text = self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
            text += _REPLACEMENT * (len(token_ids) - len(known))
        return str(text)

    def _tokenise(self, prompt: Prompt) -> list[int]:
        if prompt.prompt_token_ids is not None:
            return prompt.prompt_token_ids
        if self._tokenizer is None:
            raise ValueError(f"model {self._name} has no tokenizer, expected prompt_token_ids")
        if prompt.messages is not None:
            arguments = {"add_generation_prompt": True} | prompt.chat_template_kwargs
            tokenizer = self._tokenizer

            def text_of(messages: Messages) -> str:
                return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))

            encoded = tokenizer.apply_chat_template(
                for_template(prompt.messages, text_of), tokenize=True, return_dict=True, **arguments
            )
            return list(encoded["input_ids"])
        text = prompt.prompt or ""
        bos = self._tokenizer.bos_token
        # a prompt that was rendered elsewhere already starts with the token that would be added
        add_special_tokens = not (bos and text.startswith(bos))
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _too_long(self, prompt: Prompt, ids: list[int], limit: int) -> list[int] | Rejection:
        detail = f"got {len(ids)} tokens, expected at most {limit - 1} (max_model_len {limit})"
        if self._config.long_prompts == "fail":
            raise InputError(
                f"prompts {self._config.name} line {prompt.line}: {detail}; shorten it, or set "
                "prompts.long_prompts to reject or truncate_left"
            )
        if self._config.long_prompts == "reject":
            return self._reject(prompt, "prompt_too_long", detail, len(ids))
        # never less than half for the prompt, or a large max_tokens would leave next to nothing
        room = min(prompt.sampling.max_tokens, limit // 2)
        if room == 0:
            return self._reject(prompt, "prompt_too_long", detail, len(ids))
        self.truncated += 1
        return ids[room - limit :]

    def _warn_of_two(self, ids: list[int], prompt: Prompt) -> None:
        bos = None if self._tokenizer is None else self._tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos] and not self._warned:
            self._warned = True
            _log.warning(
                "prompts %s line %d: the prompt starts with two begin-of-sequence tokens (id %d)",
                self._config.name,
                prompt.line,
                bos,
            )

    def _reject(self, prompt: Prompt, reason: str, detail: str, tokens: int | None) -> Rejection:
        if self._config.bad_rows == "fail" and reason != "prompt_too_long":
            raise InputError(
                f"prompts {self._config.name} line {prompt.line}: {detail}; correct it, or set "
                "prompts.bad_rows: reject"
            )
        return Rejection(
            prompt_key=prompt.key,
            prompt_id=prompt.prompt_id,
            sample_index=None,
            file=self._config.name,
            line=prompt.line,
            stage="render",
            reason=reason,
            detail=detail.encode("utf-8", "backslashreplace").decode()[:_DETAIL_CHARACTERS],
            num_prompt_tokens=tokens,
        )


def _load_tokenizer(files: ModelFiles, trust_remote_code: bool) -> Any:
    if not has_tokenizer(files):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            files.folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # a damaged file surfaces as any of a dozen types
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_DETAIL_CHARACTERS]
        raise InputError(f"model {files.name}: tokenizer can't be loaded: {reason}") from error
