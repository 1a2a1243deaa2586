"""Take one replay step: recorded rollouts -> loader -> model -> icepop loss -> AdamW.

No engine runs here. The trainer's log-probabilities are renormalised over the support that each
token was really drawn from, so before the step the importance ratio p / q is 1. The same weights
normalised over the whole vocabulary give the ratio that training without replay would see: it is
off by the probability that top_p cut away.

    python jobs/quickstart/replay_step.py --path out/quickstart --model out/quickstart-model
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from rollout.batch import RolloutBatch
from rollout.errors import RolloutError
from rollout.head import plan_batch, score_batch
from rollout.loader import RolloutLoader
from rollout.losses import LossConfig, LossMetrics, compute_loss

LOSS = LossConfig(loss="icepop", centering="exact")
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One pass over the step's rollouts."""

    loss: float
    metrics: dict[str, float]
    """See `LossMetrics.summary`."""
    dense_ratio: float
    """Mean p / q with p normalised over the whole vocabulary."""


def scored_hidden(model: Any, batch: RolloutBatch) -> Tensor:
    """Run the model's body and select the hidden states that predict the sampled tokens.

    Args:
        model: A Hugging Face causal LM.
        batch: N scored tokens.

    Returns:
        [N, H] in the model's dtype.
    """
    padded = batch.padded("right")
    hidden = model.model(
        input_ids=padded.input_ids,
        attention_mask=padded.attention_mask,
        position_ids=padded.position_ids,
        use_cache=False,
    ).last_hidden_state
    selected: Tensor = hidden.flatten(0, 1)[padded.hidden_index]
    return selected


def evaluate(model: Any, batches: list[RolloutBatch], *, backward: bool) -> Evaluation:
    """Compute the loss over all micro-batches of a step, and its gradient if asked for.

    Args:
        model: A Hugging Face causal LM with an untied head.
        batches: The micro-batches; each carries the denominator of the whole step.
        backward: Whether gradients are added to the model's parameters.

    Returns:
        Loss, metrics and the unreplayed ratio.
    """
    losses, parts, ratios = [], [], []
    with torch.set_grad_enabled(backward):
        for batch in batches:
            hidden, weight = scored_hidden(model, batch), model.lm_head.weight
            plan = plan_batch(batch, LOSS, vocab_size=weight.shape[0], weight_dtype=weight.dtype)
            outputs = compute_loss(score_batch(hidden, weight, batch, plan), LOSS)
            if backward:
                torch.autograd.backward(outputs.loss)
            losses.append(outputs.loss.item())
            parts.append(outputs.metrics)
            ratios.append(_dense_ratio(hidden.detach(), weight.detach(), batch))
    return Evaluation(
        loss=sum(losses),
        metrics=LossMetrics.merge(parts).summary(),
        dense_ratio=torch.cat(ratios).mean().item(),
    )


def _dense_ratio(hidden: Tensor, weight: Tensor, batch: RolloutBatch) -> Tensor:
    """Return p / q [N] with p over the whole vocabulary; a greedy row has no such p and gets 1."""
    logits = (hidden @ weight.T).float() * batch.inverse_temperature[:, None]
    log_p = logits.log_softmax(-1).gather(-1, batch.target_ids[:, None]).squeeze(-1)
    ratio = (log_p - batch.sampler_logprobs).exp()
    return torch.where(batch.temperature == 0.0, torch.ones_like(ratio), ratio)


def read_step(path: str, vocab_size: int, groups: int, token_budget: int) -> list[RolloutBatch]:
    """Read the micro-batches of the first step.

    Args:
        path: The dataset.
        vocab_size: Rows of the model's output weight.
        groups: Prompt groups in the step.
        token_budget: Tokens in a micro-batch, prompts included.

    Returns:
        The micro-batches, on the CPU.

    Raises:
        click.ClickException: Rows without an exact support; exact centering has no use for them.
    """
    loader = RolloutLoader(
        path, vocab_size=vocab_size, groups_per_step=groups, token_budget=token_budget
    )
    batches = list(takewhile(lambda batch: batch.step == 0, loader))
    for batch in batches:
        exact = batch.support_valid & ~batch.support_is_samples & (batch.sampler_tail_mass == 0)
        if not bool(exact.all()):
            raise click.ClickException(
                f"{path} holds untruncated rollouts, expected kept supports only: "
                "sample with top_p, top_k or min_p"
            )
    return batches


def format_table(rows: list[tuple[str, Evaluation, float | None]]) -> str:
    """Lay evaluations out for a terminal.

    Args:
        rows: (name, evaluation, norm of its gradient or None).

    Returns:
        A header and one line a row, under 100 columns.
    """
    lines = [
        f"{'':<14}{'loss':>10}{'grad norm':>11}{'ratio':>10}{'k3':>11}{'kept tokens':>15}"
        f"{'ratio, no replay':>19}"
    ]
    for name, evaluation, norm in rows:
        metrics = evaluation.metrics
        tokens = int(metrics["tokens"])
        kept = round(tokens * (1.0 - metrics["masked_share"]))
        lines.append(
            f"{name:<14}{evaluation.loss:>10.4f}{'' if norm is None else f'{norm:.4f}':>11}"
            f"{metrics['ratio_mean']:>10.5f}{metrics['k3']:>11.2e}{f'{kept} of {tokens}':>15}"
            f"{evaluation.dense_ratio:>19.5f}"
        )
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--path", default="out/quickstart", help="The dataset, a folder or fsspec URL.")
@click.option("--model", "folder", type=click.Path(path_type=Path), default="out/quickstart-model")
@click.option("--groups", type=click.IntRange(min=1), default=64, help="Prompts in the step.")
@click.option("--token-budget", type=click.IntRange(min=1), default=4096, help="Of a micro-batch.")
@click.option("--learning-rate", type=float, default=2e-4)
def main(path: str, folder: Path, groups: int, token_budget: int, learning_rate: float) -> None:
    """Replay the first step of a dataset and show what it does."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not (folder / "config.json").is_file():
        raise click.ClickException(
            f"model {folder}: no config.json in it, expected the checkpoint that sampled"
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    try:
        batches = read_step(path, model.lm_head.weight.shape[0], groups, token_budget)
    except RolloutError as error:
        raise click.ClickException(str(error)) from None

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    before = evaluate(model, batches, backward=True)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item()
    optimizer.step()
    after = evaluate(model, batches, backward=False)

    rollouts = sum(len(batch.rollout_ids) for batch in batches)
    click.echo(
        f"one icepop step with exact score centering: {rollouts} rollouts, "
        f"{len(batches)} micro-batch{'' if len(batches) == 1 else 'es'}"
    )
    click.echo(format_table([("before", before, norm), ("after", after, None)]))


if __name__ == "__main__":
    main()
