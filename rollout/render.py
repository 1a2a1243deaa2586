"""From a prompt row to the token ids that the engine sees, and from ids to text for people.

The stored ids are the truth: nothing downstream tokenises again.
"""

from __future__ import annotations

from typing import Any

from rollout.config import PromptsConfig
from rollout.errors import InputError
from rollout.model_files import ModelFiles
from rollout.prompts import Prompt
from rollout.rows import Rejection


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
        self._vocab_size = _vocab_size(files.config)
        self._tokenizer = _load_tokenizer(files, trust_remote_code)

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
            return self._reject(prompt, "render_failed", f"{type(error).__name__}: {error}", None)
        if not ids:
            return self._reject(prompt, "empty_prompt", "got no token, expected at least one", 0)
        outside = [i for i in ids if not 0 <= i < self._vocab_size]
        if outside:
            detail = (
                f"token id {outside[0]} is outside of the model's vocabulary of {self._vocab_size}"
            )
            return self._reject(prompt, "bad_token_id", detail, len(ids))
        if max_model_len is not None and len(ids) >= max_model_len:
            return self._too_long(prompt, ids, max_model_len)
        return ids

    def decode(self, token_ids: list[int]) -> str | None:
        """Decode a completion for people: lossy where it ends inside a character.

        Args:
            token_ids: ids, also such as have no tokenizer entry.
        """
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def show(self, token_ids: list[int]) -> str | None:
        """Decode a prompt with its special tokens, for a person to check."""
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _tokenise(self, prompt: Prompt) -> list[int]:
        if prompt.prompt_token_ids is not None:
            return prompt.prompt_token_ids
        if self._tokenizer is None:
            raise ValueError(f"model {self._name} has no tokenizer, expected prompt_token_ids")
        if prompt.messages is not None:
            encoded = self._tokenizer.apply_chat_template(
                prompt.messages,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **prompt.chat_template_kwargs,
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
                f"prompts {self._config.path} line {prompt.line}: {detail}; shorten it, or set "
                "prompts.long_prompts to reject or truncate_left"
            )
        if self._config.long_prompts == "reject":
            return self._reject(prompt, "prompt_too_long", detail, len(ids))
        room = min(prompt.sampling.max_tokens, limit - 1)
        return ids[-(limit - room) :]

    def _reject(self, prompt: Prompt, reason: str, detail: str, tokens: int | None) -> Rejection:
        return Rejection(
            prompt_key=prompt.key,
            prompt_id=prompt.prompt_id,
            sample_index=None,
            file=self._config.path,
            line=prompt.line,
            stage="render",
            reason=reason,
            detail=detail,
            num_prompt_tokens=tokens,
        )


def _vocab_size(config: dict[str, Any]) -> int:
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise InputError("model: config.json has no vocab_size")
    return size


def _load_tokenizer(files: ModelFiles, trust_remote_code: bool) -> Any:
    if not any(files.folder.glob("tokenizer*")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(files.folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged file surfaces as any of a dozen types
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"model {files.name}: tokenizer can't be loaded: {first}") from error
