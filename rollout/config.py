"""The job file: what a person may say, checked before anything heavy is imported.

Unset sampling values are neutral; a model's generation_config.json never changes them. The fields'
descriptions are the reference of the job file.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MIN_TEMPERATURE = 0.01  # vLLM raises lower positive temperatures to this without saying so
MAX_TEMPERATURE = 2.0  # vLLM refuses more

SupportKind = Literal["kept", "top", "none"]


class Section(BaseModel):
    """Base of all sections: frozen; unknown keys and `${...}` are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_placeholders(cls, value: Any) -> Any:
        if isinstance(value, str) and "${" in value:
            raise ValueError(
                f"got {value!r}: environment variables are not expanded here, write the value"
            )
        return value


class ModelConfig(Section):
    """Which weights sample."""

    path: str
    """Folder of a Hugging Face checkpoint, or a hub id."""
    revision: str | None = None
    """Commit, branch or tag of a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in the engine; `auto` takes the checkpoint's."""
    policy_step: int | None = None
    """Training step of these weights, carried into every row."""


class PromptsConfig(Section):
    """Where the prompts are and how they become token ids."""

    path: str
    """fsspec URL of a .jsonl, .jsonl.gz or .parquet file. A row holds `prompt` (text), `messages`
    (chat) or `prompt_token_ids`, optionally `id`, `sampling` and `chat_template_kwargs`; other
    columns become metadata."""
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Options of the fsspec filesystem; never logged or recorded."""
    chat_template_kwargs: dict[str, Any] = {}
    """Keyword arguments of the chat template, for all rows."""
    long_prompts: Literal["reject", "fail", "truncate_left"] = "reject"
    """What happens to a prompt that leaves no room for one token."""
    duplicate_ids: Literal["fail", "allow"] = "fail"
    """Whether two rows may have the same `id`."""


class SamplingConfig(Section):
    """How tokens are drawn. A row may override any value but `seed` under its own `sampling`."""

    max_tokens: int = Field(ge=1)
    """Most tokens of a rollout."""
    n: int = Field(default=1, ge=1)
    """Rollouts of each prompt."""
    temperature: float = Field(default=1.0, ge=0.0, le=MAX_TEMPERATURE, allow_inf_nan=False)
    """0 is greedy; else at least 0.01."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus; 1 keeps all."""
    top_k: int = Field(default=0, ge=-1)
    """Most probable ids kept; 0 and -1 keep all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Ids less probable than this share of the most probable one are dropped; 0 keeps all."""
    min_tokens: int = Field(default=0, ge=0)
    """Tokens before a stop is allowed."""
    stop: tuple[str, ...] = ()
    """Strings that end a rollout."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a rollout."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only ids that may be drawn."""
    bad_words: tuple[str, ...] = ()
    """Strings that may not be drawn."""
    seed: int | None = Field(default=None, ge=0)
    """Base of the per-rollout seeds; null samples afresh in each run. Seeds slow vLLM's sampler."""
    repetition_penalty: float = 1.0
    """Only 1: a penalty depends on the history and replay could not undo it."""
    presence_penalty: float = 0.0
    """Only 0, as above."""
    frequency_penalty: float = 0.0
    """Only 0, as above."""
    logit_bias: dict[int, float] | None = None
    """Only null: a bias changes the distribution in a way that replay could not undo."""

    @field_validator("top_k")
    @classmethod
    def _one_spelling_of_off(cls, value: int) -> int:
        return max(value, 0)

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_string_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _replayable(self) -> Self:
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}, expected 0 or at least {MIN_TEMPERATURE}: "
                f"vLLM would sample at {MIN_TEMPERATURE} without saying so"
            )
        for name, neutral in (
            ("repetition_penalty", 1.0),
            ("presence_penalty", 0.0),
            ("frequency_penalty", 0.0),
        ):
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, expected {neutral}: penalties depend on the "
                    "history, so that replay could not undo them"
                )
        if self.logit_bias:
            raise ValueError("logit_bias is set, expected null: replay could not undo it")
        if self.temperature == 0.0 and self.n > 1:
            raise ValueError(
                f"n is {self.n} at temperature 0, expected 1: all samples would be the same"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, expected at most max_tokens ({self.max_tokens})"
            )
        masks = [k for k in ("min_tokens", "allowed_token_ids", "bad_words") if getattr(self, k)]
        if masks and not self.truncated and self.temperature > 0.0:
            raise ValueError(
                f"{masks[0]} masks ids in an untruncated job, a hidden truncation: set top_p, "
                "top_k or min_p so that the whole support is recorded"
            )
        return self

    @property
    def truncated(self) -> bool:
        """Whether top_p, top_k or min_p drops ids."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def support_kind(self, top: int) -> SupportKind:
        """Name what is recorded for these values.

        Args:
            top: ids kept of an untruncated row.
        """
        if self.truncated or self.temperature == 0.0:
            return "kept"
        return "top" if top > 0 else "none"


class CaptureConfig(Section):
    """What is recorded beside the tokens; the kind of support follows from the sampling values."""

    support_capacity: int = Field(default=16 * 2**20, ge=1, le=2**31 - 1)
    """Entries of one sampling step over all its rows; 8 bytes each on the device, several times."""
    top: int = Field(default=128, ge=0, le=4096)
    """Most probable ids recorded of an untruncated row, beside its tail mass; 0 records neither."""
    draws: int = Field(default=0, ge=0, le=1024)
    """Independent draws from the sampler's distribution recorded with each token."""


class OutputConfig(Section):
    """Where the dataset goes."""

    path: str
    """fsspec URL of the dataset's folder."""
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Options of the fsspec filesystem; never logged or recorded."""
    unit_prompts: int = Field(default=512, ge=1)
    """Prompts of a unit, the slice that is committed together."""
    shard_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Raw bytes after which a part of a unit is committed early."""
    flush_seconds: float = Field(default=100.0, gt=0.0)
    """Finished rollouts are committed at least this often."""


class JobConfig(Section):
    """A whole job."""

    model: ModelConfig
    prompts: PromptsConfig
    sampling: SamplingConfig
    output: OutputConfig
    capture: CaptureConfig = CaptureConfig()
    reward: str | None = None
    """`file.py:function` or `module:function`, called with (prompt row, text, token ids)."""
    engine: dict[str, Any] = {}
    """Arguments of vLLM's engine, by name."""
