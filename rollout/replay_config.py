"""The replay file: how a model is trained on a dataset, checked before anything heavy is imported.

The fields' descriptions are the reference of the file that `rollout replay --config` reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rollout.config import Float, Int, Section, Text

if TYPE_CHECKING:
    from rollout.loss_types import LossConfig


def _off(value: Any) -> Any:
    return "off" if value is False else value  # what YAML makes of an unquoted off


class StartConfig(Section):
    """Which weights training starts from."""

    path: Text
    """Folder of a Hugging Face causal LM, or a hub id."""
    revision: str | None = None
    """Commit, branch or tag of a hub id."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the model's arithmetic; weights, gradients and checkpoints are float32 either way."""
    keep_moments: bool = False
    """Go on with the optimizer's moments where the checkpoint was written by this trainer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; `auto` takes a GPU if there is one."""


class DataConfig(Section):
    """Which rollouts, and how they become steps; see `rollout.loader.LoaderConfig`."""

    path: Text
    """fsspec URL of the dataset."""
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Options of the fsspec filesystem; never logged or recorded."""
    groups_per_step: Int = Field(ge=1)
    """Prompt groups of one optimizer step."""
    token_budget: Int = Field(ge=1)
    """Most tokens (prompt and completion) of a micro-batch."""
    advantage: Literal["group_mean", "group_normalised", "column"] = "group_mean"
    """Reward minus the group's mean; the same over its deviation; or the `advantage` column."""
    untruncated: Literal["head", "draws"] = "head"
    """Whether untruncated rows bring their recorded head or their draws."""
    shuffle: bool = True
    """Whether groups come in a seeded order, another one in each epoch."""
    seed: Int = Field(default=0, ge=0, lt=2**31)
    """Of that order."""
    other_weights: bool = False
    """Take rollouts of weights that are neither the model's own nor an ancestor's; ratios are then
    not 1 even before the first step."""


class LossSection(Section):
    """Which loss; see `rollout.loss_types.LossConfig`, whose fields these are."""

    loss: Literal["ipo", "icepop", "reinforce"]
    """Which policy term."""
    advantage_scale: Float = 1.0
    """Factor on every advantage."""
    ratio_low: Float = 0.2
    """icepop: smallest importance ratio kept."""
    ratio_high: Float = 5.0
    """icepop: largest importance ratio kept."""
    max_probability_gap: Float = 0.3
    """ipo: largest |p - q| kept."""
    importance: Literal["none", "truncated"] = "none"
    """reinforce: weight 1, or min(ratio, ratio_cap)."""
    ratio_cap: Float = 1e4
    """Cap on the ratio of ipo and of truncated reinforce."""
    centering: Annotated[Literal["off", "exact", "tail", "sampled"], BeforeValidator(_off)] = "off"
    """Score centering: over an exact support, head + modelled tail, or K draws."""
    tail_floor: Float = 1e-6
    """Smallest tail mass of either side."""
    kl_q_p: Float = 0.0
    """Coefficient of KL(sampler || trainer)."""
    kl_p_q: Float = 0.0
    """Coefficient of KL(trainer || sampler)."""
    kl_estimator: Literal["exact", "tail", "sampled", "token"] = "exact"
    """How the KL is estimated."""

    @model_validator(mode="after")
    def _computable(self) -> Self:
        self.build()
        return self

    def build(self) -> LossConfig:
        """Return the loss's own settings.

        Raises:
            ConfigError: a value is out of range, or the combination can't be computed.
        """
        from rollout.loss_types import LossConfig

        return LossConfig(**self.model_dump())


class OptimizerConfig(Section):
    """AdamW with a linear warm-up and a constant learning rate after it."""

    learning_rate: Float = Field(gt=0.0)
    """Of every parameter."""
    betas: tuple[
        Annotated[Float, Field(ge=0.0, lt=1.0)], Annotated[Float, Field(ge=0.0, lt=1.0)]
    ] = (0.9, 0.999)
    """Decay of the two moments."""
    weight_decay: Float = Field(default=0.0, ge=0.0)
    """Decoupled."""
    max_grad_norm: Float = Field(default=1.0, gt=0.0)
    """Gradients are scaled down to this norm."""
    warmup_steps: Int = Field(default=0, ge=0)
    """Steps until the learning rate is reached."""


class TrainOutputConfig(Section):
    """Where checkpoints and metrics go."""

    path: Text
    """Local folder; running again goes on from its newest checkpoint."""
    checkpoint_steps: Int | None = Field(default=None, ge=1)
    """Steps between checkpoints; null writes one at the end."""


class EvaluationConfig(Section):
    """Generation with the weights just saved, by `rollout generate` in a process of its own."""

    job: Text
    """A job file; model and output are replaced."""
    before: bool = True
    """Whether the weights that training starts from are evaluated too."""


class ReplayConfig(Section):
    """A whole training run."""

    model: StartConfig
    data: DataConfig
    loss: LossSection
    optimizer: OptimizerConfig
    output: TrainOutputConfig
    epochs: Int = Field(default=1, ge=1)
    """Passes over the dataset."""
    max_steps: Int | None = Field(default=None, ge=1)
    """Stop after this many steps; a later run with more goes on from there."""
    seed: Int = Field(default=0, ge=0, lt=2**31)
    """Of dropout, where a model has any."""
    normaliser: Literal["support", "vocabulary"] = "support"
    """What the trainer's probabilities are normalised over. `vocabulary` is what training without
    replay does and is wrong for truncated sampling: it is here to be compared with."""
    evaluation: EvaluationConfig | None = None
    """Mean reward of fresh rollouts, at every checkpoint."""
