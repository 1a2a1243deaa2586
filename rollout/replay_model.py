"""The trainer's side of a batch: a Hugging Face causal LM's body, and its output weight.

The head is never called: `rollout.head` computes log-probabilities over the recorded supports from
the body's hidden states and the head's weight. Heads that do more than one product are refused.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rollout.batch import RolloutBatch
from rollout.errors import ConfigError, InputError
from rollout.head import HeadOutput, Normaliser, head_logprobs, plan_head
from rollout.loss_types import LossInputs

# N scored tokens, H hidden size, V vocabulary

Over = Literal["support", "vocabulary"]

# what makes logits other than hidden . weight, and the value at which it does not
_HEAD_CHANGES: dict[str, tuple[Any, ...]] = {
    "final_logit_softcapping": (None, 0, 0.0),
    "logit_softcapping": (None, 0, 0.0),
    "logits_soft_cap": (None, 0, 0.0),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "lm_head_multiplier": (None, 1, 1.0),
}
_PROBE_TOKENS = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplayModel:
    """A causal LM with a plain output weight."""

    model: Any
    """The Hugging Face module, weights in float32."""
    compute_dtype: torch.dtype
    """Of the body's products and of the head."""

    @property
    def weight(self) -> Tensor:
        """[V, H] the output weight."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.weight.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weight.device

    def scored_hidden(self, batch: RolloutBatch) -> Tensor:
        """Run the body and select the hidden states that predict the sampled tokens.

        Args:
            batch: N scored tokens, on the model's device.

        Returns:
            [N, H] in `compute_dtype`.
        """
        padded = batch.padded("right")
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16
        ):
            hidden = self.model.base_model(
                input_ids=padded.input_ids,
                attention_mask=padded.attention_mask,
                position_ids=padded.position_ids,
                use_cache=False,
            ).last_hidden_state
        selected: Tensor = hidden.flatten(0, 1)[padded.hidden_index]
        return selected.to(self.compute_dtype)

    def loss_inputs(
        self, batch: RolloutBatch, *, normaliser: Normaliser = "needed", over: Over = "support"
    ) -> LossInputs:
        """Compute the trainer's log-probabilities of a batch and join them with the sampler's.

        Args:
            batch: on the CPU, as the loader yields it.
            normaliser: see `rollout.head.plan_head`.
            over: `vocabulary` normalises exact supports over all ids, to compare with.

        Returns:
            What `rollout.losses.compute_loss` takes, on the model's device.
        """
        moved = batch.to(self.device, non_blocking=True)
        head = self.head(batch, self.scored_hidden(moved), normaliser=normaliser, over=over)
        return moved.loss_inputs(
            head.target_logprobs,
            head.support_logprobs,
            trainer_tail_mass=head.tail_mass,
            trainer_is_normalised=head.is_normalised,
        )

    def head(
        self,
        batch: RolloutBatch,
        hidden: Tensor,
        *,
        normaliser: Normaliser = "needed",
        over: Over = "support",
    ) -> HeadOutput:
        """Compute the log-probabilities alone; see `loss_inputs`.

        Args:
            batch: N scored tokens, on the CPU.
            hidden: [N, H] from `scored_hidden`.
            normaliser: see `rollout.head.plan_head`.
            over: see `loss_inputs`.

        Returns:
            The trainer's side, on the model's device.
        """
        tail_mass = batch.sampler_tail_mass
        plan = plan_head(
            support_offsets=batch.support_offsets,
            support_valid=batch.support_valid,
            support_is_samples=batch.support_is_samples,
            # a row with a tail is normalised over the vocabulary
            sampler_tail_mass=tail_mass if over == "support" else torch.ones_like(tail_mass),
            vocab_size=self.vocab_size,
            weight_dtype=self.compute_dtype,
            normaliser=normaliser,
        )
        return head_logprobs(
            hidden,
            self.weight.to(self.compute_dtype),
            batch.support_ids.to(self.device, non_blocking=True),
            batch.support_offsets.to(self.device, non_blocking=True),
            batch.target_ids.to(self.device, non_blocking=True),
            batch.temperature.to(self.device, non_blocking=True),
            plan.to(self.device),
        )


def check_installed() -> None:
    """Look for the packages that read a model, which no engine may have brought along here.

    Raises:
        ConfigError: one is not installed.
    """
    for name in ("transformers", "safetensors"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"models are read by the package {name}: pip install transformers")


def load_model(folder: str | Path, *, revision: str | None, compute_dtype: str, device: str) -> Any:
    """Load a causal LM for training and check that its head is one product.

    Args:
        folder: a Hugging Face checkpoint or a hub id.
        revision: of a hub id.
        compute_dtype: `float32` or `bfloat16`.
        device: `auto`, `cpu` or `cuda`.

    Returns:
        A `ReplayModel`.

    Raises:
        InputError: it can't be loaded, or the head adds a bias, a scale or a soft cap.
        ConfigError: there is no such device, or a package is missing.
    """
    check_installed()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device: expected cpu or auto")
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, revision=revision, dtype=torch.float32
        ).to(device)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise InputError(f"model {folder} can't be loaded for training: {first}") from error
    check_head(model, str(folder))
    return ReplayModel(model=model, compute_dtype=getattr(torch, compute_dtype))


def check_head(model: Any, name: str) -> None:
    """Refuse a model whose logits are not hidden . weight, by its settings and by its values.

    Args:
        model: a Hugging Face causal LM.
        name: for the messages.

    Raises:
        InputError: naming what the head does beside its product.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise InputError(f"model {name} has no output embeddings, expected a causal LM")
    if getattr(head, "bias", None) is not None:
        raise InputError(
            f"model {name}: its LM head has a bias, expected none: replay multiplies hidden states "
            "by the weight alone"
        )
    config = getattr(model.config, "text_config", None) or model.config
    for key, neutral in _HEAD_CHANGES.items():
        value = getattr(config, key, None)
        if value not in neutral:
            raise InputError(
                f"model {name}: config.json has {key} {value}, expected {neutral[-1]}: replay does "
                "not apply it to the logits"
            )
    _probe_head(model, name)


def _probe_head(model: Any, name: str) -> None:
    """Raise InputError where the model's own logits differ from the product."""
    weight = model.get_output_embeddings().weight
    ids = torch.arange(_PROBE_TOKENS, device=weight.device)[None] % weight.shape[0]
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        product = (hidden @ weight.T).float()
    model.train(training)
    gap = (logits - product).abs().max().item()
    # written so that NaN fails
    if not gap <= 1e-3 * max(1.0, logits.abs().max().item()):
        raise InputError(
            f"model {name}: its logits differ from hidden states times output weight by {gap:.3g}, "
            "expected the same: the head does more than one product, or weights are not finite"
        )
