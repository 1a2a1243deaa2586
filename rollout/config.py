"""The job file: what a person may say, checked before anything heavy is imported.

Unset sampling values are neutral; a model's generation_config.json never changes them. The fields'
descriptions are the reference of the job file.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rollout.redact import public_url

MIN_TEMPERATURE = 0.01  # vLLM raises lower positive temperatures to this without saying so
MAX_TEMPERATURE = 2.0  # vLLM refuses more
MOST_SAMPLES = 2**20  # of a prompt

SupportKind = Literal["kept", "top", "none"]

_PLACEHOLDER = re.compile(r"\$\{\w+\}")
_FREE_TEXT = ("stop", "bad_words", "chat_template_kwargs")  # where `${NAME}` may be meant
_TEMPLATE_OWNED = ("conversation", "tokenize", "return_dict", "return_tensors")


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"got {value}, expected a number")
    return value


def _json_only(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected values that JSON can hold: {error}") from None
    return value


def check_template_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse keyword arguments of a chat template that the renderer itself decides.

    Raises:
        ValueError: naming the argument.
    """
    for name in _TEMPLATE_OWNED:
        if name in value:
            raise ValueError(f"`{name}` is decided by the job, remove it")
    return value


# YAML's `yes` is no 1
Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
# recorded with the dataset, so JSON must have a form for it
JsonDict = Annotated[dict[str, Any], AfterValidator(_json_only)]
TokenId = Annotated[Int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections: frozen; unknown keys, `${NAME}`, NaN and infinities are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_placeholders(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        annotation = cls.model_fields[name].annotation
        if name in _FREE_TEXT or (isinstance(annotation, type) and issubclass(annotation, Section)):
            return value  # a section looks after its own values
        found = _placeholder(value)
        if found is not None:
            raise ValueError(
                f"got {found}: environment variables are not expanded here, write the value"
            )
        return value


class ModelConfig(Section):
    """Which weights sample."""

    path: Text
    """Folder of a Hugging Face checkpoint, or a hub id."""
    revision: str | None = None
    """Commit, branch or tag of a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in the engine; `auto` takes the checkpoint's."""
    policy_step: Annotated[Int, Field(ge=0, lt=2**63)] | None = None
    """Training step of these weights, carried into every row."""


class PromptsConfig(Section):
    """Where the prompts are and how they become token ids."""

    path: Text
    """fsspec URL of a .jsonl, .jsonl.gz or .parquet file. A row holds `prompt` (text), `messages`
    (chat) or `prompt_token_ids`, optionally `id`, `sampling` and `chat_template_kwargs`; other
    columns become metadata."""
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Options of the fsspec filesystem; never logged or recorded."""
    chat_template_kwargs: Annotated[JsonDict, AfterValidator(check_template_kwargs)] = {}
    """Keyword arguments of the chat template, for all rows."""
    long_prompts: Literal["reject", "fail", "truncate_left"] = "reject"
    """What happens to a prompt that leaves no room for one token. `truncate_left` keeps its last
    tokens and leaves room for `max_tokens`, at most half of the model's length."""
    duplicate_ids: Literal["fail", "allow"] = "fail"
    """Whether two rows may have the same `id`."""
    bad_rows: Literal["reject", "fail"] = "reject"
    """What happens to a row that can't be read or rendered."""

    @property
    def name(self) -> str:
        """The path without secrets, for messages and tables."""
        return public_url(self.path)


class SamplingConfig(Section):
    """How tokens are drawn. A row may override any value but `seed` under its own `sampling`."""

    max_tokens: Int = Field(ge=1, lt=2**31)
    """Most tokens of a rollout."""
    n: Int = Field(default=1, ge=1, le=MOST_SAMPLES)
    """Rollouts of each prompt."""
    temperature: Float = Field(default=1.0, ge=0.0, le=MAX_TEMPERATURE)
    """0 is greedy; else at least 0.01."""
    top_p: Float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus; 1 keeps all."""
    top_k: Int = Field(default=0, ge=-1, lt=2**31)
    """Most probable ids kept; 0 and -1 keep all."""
    min_p: Float = Field(default=0.0, ge=0.0, le=1.0)
    """Ids less probable than this share of the most probable one are dropped; 0 keeps all."""
    min_tokens: Int = Field(default=0, ge=0)
    """Tokens before a stop is allowed."""
    stop: tuple[Text, ...] = ()
    """Strings that end a rollout."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Token ids that end a rollout."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)] | None = None
    """The only ids that may be drawn."""
    bad_words: tuple[Text, ...] = ()
    """Strings that may not be drawn."""
    seed: Annotated[Int, Field(ge=0, lt=2**63)] | None = None
    """Base of the per-rollout seeds; null samples afresh in each run. Seeds slow vLLM's sampler."""
    repetition_penalty: Float = 1.0
    """Only 1: a penalty depends on the history and replay could not undo it."""
    presence_penalty: Float = 0.0
    """Only 0, as above."""
    frequency_penalty: Float = 0.0
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
        return (value,) if isinstance(value, (str, bool, int, float)) else value

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

    support_capacity: Int = Field(default=16 * 2**20, ge=1, le=2**31 - 1)
    """Entries of one sampling step over all its rows; 8 bytes each on the device, several times."""
    top: Int = Field(default=128, ge=0, le=1024)
    """Most probable ids recorded of an untruncated row, beside its tail mass; 0 records neither."""
    spool_bytes: Annotated[Int, Field(ge=2**20)] | None = None
    """Captured data on the host after which no request is admitted; at twice as much the widest
    requests are dropped. Null: a quarter of the memory that is free at the start, shared out among
    the host's GPUs, or 8 GiB if that is more and a quarter holds it."""
    draws: Int = Field(default=0, ge=0, le=1024)
    """Independent draws from the sampler's distribution recorded with each token."""


class OutputConfig(Section):
    """Where the dataset goes."""

    path: Text
    """fsspec URL of the dataset's folder."""
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Options of the fsspec filesystem; never logged or recorded."""
    unit_prompts: Int = Field(default=512, ge=1)
    """Prompts of a unit, the slice that is committed together."""
    shard_bytes: Int = Field(default=256 * 2**20, ge=2**20)
    """Raw bytes after which a part of a unit is committed early."""
    commit_threads: Annotated[Int, Field(ge=1)] | None = None
    """Parts written side by side; null: four fewer than cores that the job may use, but 4 to 16."""
    flush_seconds: Float = Field(default=100.0, gt=0.0)
    """Finished rollouts are committed at least this often."""
    retry_seconds: Float = Field(default=300.0, gt=0.0)
    """How long a failing call to the storage is repeated before finished parts are kept locally."""
    pending_path: Text | None = None
    """Local folder for finished parts that the output does not take; uploaded when it does, also by
    the next run. Null: `rollout/pending` in the user's cache folder."""
    pending_bytes: Int = Field(default=32 * 2**30, ge=0)
    """Most bytes kept there; past them no request is admitted until the output is back."""


class FailuresConfig(Section):
    """When a job gives up."""

    engine_restarts: Int = Field(default=3, ge=0)
    """How often an engine that died is started again; what was in flight is sampled again."""
    max_failed_share: Float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of failed rollouts above which the job stops, once 64 have ended or at its end; 1
    never stops."""


class JobConfig(Section):
    """A whole job."""

    model: ModelConfig
    prompts: PromptsConfig
    sampling: SamplingConfig
    output: OutputConfig
    capture: CaptureConfig = CaptureConfig()
    failures: FailuresConfig = FailuresConfig()
    reward: Text | None = None
    """`file.py:function` or `module:function`, called with (prompt row, text, token ids)."""
    engine: JsonDict = {}
    """Arguments of vLLM's engine, by name."""

    @field_validator("engine")
    @classmethod
    def _trust_is_said_plainly(cls, value: dict[str, Any]) -> dict[str, Any]:
        trust = value.get("trust_remote_code", False)
        if not isinstance(trust, bool):
            raise ValueError(f"trust_remote_code is {trust!r}, expected true or false")
        return value


def _placeholder(value: Any) -> str | None:
    """Find `${NAME}` in a value or in what it holds."""
    if isinstance(value, str):
        match = _PLACEHOLDER.search(value)
        return match[0] if match else None
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((found for item in value if (found := _placeholder(item))), None)
    return None
