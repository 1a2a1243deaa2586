"""`rollout replay`: train a causal LM on recorded rollouts, with no engine running.

The whole of it: the loader yields micro-batches, the model's body gives hidden states, the head
gives log-probabilities over the recorded supports, the loss is differentiated, AdamW steps. Each of
these is a library call of its own; this file is one way to string them together, made to be read
and copied.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from rollout.batch import RolloutBatch
from rollout.config import ModelConfig
from rollout.dataset_view import read_dataset
from rollout.errors import OutputError, TrainingError
from rollout.full_rows import read_tables
from rollout.head import Normaliser
from rollout.loader import RolloutLoader
from rollout.losses import LossMetrics, compute_loss
from rollout.model_files import resolve_model
from rollout.replay_checkpoint import (
    TrainerState,
    check_settings,
    load_optimizer,
    newest_checkpoint,
    read_ancestors,
    read_state,
    save_checkpoint,
)
from rollout.replay_config import ReplayConfig
from rollout.replay_data import check_advantages, check_origin, check_vocabulary
from rollout.replay_log import MetricsLog
from rollout.replay_model import ReplayModel, check_installed, load_model
from rollout.schema.layout import DATASET_FILE
from rollout.storage import Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySummary:
    """What a training run did."""

    steps: int
    """Optimizer steps, those of earlier runs included."""
    checkpoint: Path
    """The newest one."""
    losses: tuple[float, ...]
    """Of the steps of this run."""
    seconds: float
    """Of the steps of this run alone: no reading, no checkpoints, no evaluation."""
    tokens: int
    """Scored tokens of the steps of this run."""


def replay(config: ReplayConfig, *, stream: IO[str] | None = None) -> ReplaySummary:
    """Train until the epochs or the steps are done.

    Args:
        config: the run.
        stream: where a line a step goes; standard output by default.

    Returns:
        What was done.

    Raises:
        InputError: the model can't be read or trained.
        DatasetError: the dataset can't be read, or nothing could be learned from it.
        ConfigError: a checkpoint of other settings is in the output.
        OutputError: the output is a dataset.
        TrainingError: a loss or gradient is not finite.
    """
    trainer = Trainer(config, stream=stream)
    try:
        return trainer.run()
    finally:
        trainer.close()


class Trainer:
    """One run; everything is checked when it is made, before the first step."""

    def __init__(self, config: ReplayConfig, *, stream: IO[str] | None = None) -> None:
        """Load model, data and, if there is one, the newest checkpoint.

        Raises:
            RolloutError: see `replay`.
        """
        self.config = config
        self._output = Path(config.output.path)
        if (self._output / DATASET_FILE).exists():
            raise OutputError(
                f"output {self._output} is a dataset: choose another folder for the checkpoints"
            )
        check_installed()
        self._files = resolve_model(
            ModelConfig(path=config.model.path, revision=config.model.revision)
        )
        self._ancestors = (self._files.weights_digest, *read_ancestors(self._files.folder))
        self._check_data()
        checkpoint = newest_checkpoint(self._output)
        torch.manual_seed(config.seed)
        self.model: ReplayModel = load_model(
            checkpoint or self._files.path,
            revision=None if checkpoint else self._files.revision,
            compute_dtype=config.model.compute_dtype,
            device=config.model.device,
        )
        self.model.model.train()
        self._loader = self._make_loader()
        options = config.optimizer
        self._optimizer = torch.optim.AdamW(
            self.model.model.parameters(),
            lr=options.learning_rate,
            betas=options.betas,
            weight_decay=options.weight_decay,
        )
        self._loss = config.loss.build()
        self.step = 0
        self._saved: Path | None = None
        if checkpoint is not None:
            self._resume(checkpoint)
        elif config.model.keep_moments and read_ancestors(self._files.folder):
            load_optimizer(self._files.folder, self.model.model, self._optimizer)
        self._log = MetricsLog(self._output, first_step=self.step, stream=stream)

    def run(self) -> ReplaySummary:
        """Train; a run that is done already does nothing."""
        config, losses, tokens, seconds = self.config, [], 0, 0.0
        if config.evaluation is not None and config.evaluation.before and self.step == 0:
            self._evaluate(self.save())
        for batches in self._steps():
            start = time.monotonic()
            values = self._train(batches)
            seconds += time.monotonic() - start
            losses.append(values["loss"])
            tokens += int(values["tokens"])
            self._log.write(self.step, values)
            every = config.output.checkpoint_steps
            if every is not None and self.step % every == 0:
                self._checkpoint()
        if self._saved is None or losses:
            self._checkpoint()
        assert self._saved is not None
        return ReplaySummary(
            steps=self.step,
            checkpoint=self._saved,
            losses=tuple(losses),
            seconds=seconds,
            tokens=tokens,
        )

    def save(self) -> Path:
        """Write a checkpoint of the present step and return its folder."""
        state = TrainerState(
            step=self.step,
            loader=self._loader.state_dict(),
            settings=self._settings(),
            ancestors=self._ancestors,
        )
        self._saved = save_checkpoint(
            self._output, self.model.model, self._optimizer, state, self._files
        )
        return self._saved

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def _check_data(self) -> None:
        data = self.config.data
        view = read_dataset(Storage.open(data.path, data.storage_options))
        check_origin(view, self._files, self._ancestors, other_weights=data.other_weights)
        check_advantages(view, data.advantage)
        sizes = self._files.config
        if isinstance(sizes.get("vocab_size"), int):
            check_vocabulary(view, sizes["vocab_size"])  # before any weights load

    def _make_loader(self) -> RolloutLoader:
        data = self.config.data
        return RolloutLoader(
            data.path,
            vocab_size=self.model.vocab_size,
            storage_options=data.storage_options,
            head_dtype=self.config.model.compute_dtype,
            groups_per_step=data.groups_per_step,
            token_budget=data.token_budget,
            advantage=data.advantage,
            untruncated=data.untruncated,
            shuffle=data.shuffle,
            seed=data.seed,
        )

    def _settings(self) -> dict[str, Any]:
        """Return what decides the numbers of a step."""
        values = self.config.model_dump(
            mode="json",
            exclude={"output": True, "epochs": True, "max_steps": True, "evaluation": True}
            | {"data": {"path", "storage_options"}, "model": {"path", "revision", "device"}},
        )
        values["weights"] = self._files.weights_digest
        return values

    def _resume(self, checkpoint: Path) -> None:
        state = read_state(checkpoint)
        check_settings(checkpoint, state.settings, self._settings())
        load_optimizer(checkpoint, self.model.model, self._optimizer)
        self._loader.load_state_dict(state.loader)
        self.step, self._saved = state.step, checkpoint

    def _steps(self) -> Iterator[list[RolloutBatch]]:
        """Yield the micro-batches of each step that is still to be done."""
        while self._loader.epoch < self.config.epochs and not self._is_done():
            batches: list[RolloutBatch] = []
            for batch in self._loader:
                batches.append(batch)
                if batch.micro_batch + 1 < batch.num_micro_batches:
                    continue
                yield batches
                batches = []
                if self._is_done():
                    return

    def _is_done(self) -> bool:
        return self.config.max_steps is not None and self.step >= self.config.max_steps

    def _train(self, batches: list[RolloutBatch]) -> dict[str, float]:
        """Do one optimizer step and return its numbers."""
        start, options = time.monotonic(), self.config.optimizer
        normaliser: Normaliser = "cancels" if self._loss.cancels_normaliser else "needed"
        losses, parts = [], []
        for batch in batches:
            inputs = self.model.loss_inputs(
                batch, normaliser=normaliser, over=self.config.normaliser
            )
            outputs = compute_loss(inputs, self._loss)
            torch.autograd.backward(outputs.loss)
            losses.append(outputs.loss.detach())
            parts.append(outputs.metrics)
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.model.parameters(), options.max_grad_norm
        ).item()
        loss = torch.stack(losses).sum().item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"step {self.step + 1}: loss {loss}, gradient norm {norm}, expected finite ones; "
                f"its first rollout is {batches[0].rollout_ids[0]}; the last checkpoint is "
                f"{self._saved}"
            )
        warm = min(1.0, (self.step + 1) / max(options.warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate * warm
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        seconds = time.monotonic() - start
        return {
            "epoch": self._loader.epoch,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": options.learning_rate * warm,
            "tokens_per_second": sum(batch.num_tokens for batch in batches) / seconds,
            **LossMetrics.merge(parts).summary(),
        }

    def _checkpoint(self) -> None:
        if self._saved is not None and read_state(self._saved).step == self.step:
            return
        folder = self.save()
        if self.config.evaluation is not None:
            self._evaluate(folder)

    def _evaluate(self, folder: Path) -> None:
        """Sample with a checkpoint, by the same command as always, and log the mean reward."""
        assert self.config.evaluation is not None
        data = self._output / "evaluation" / folder.name
        command = [sys.executable, "-m", "rollout", "generate"]
        command += ["--config", self.config.evaluation.job, "--set", f"model.path={folder}"]
        command += ["--set", f"output.path={data}"]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            raise TrainingError(f"evaluation of {folder} failed: {' '.join(command[3:])}")
        self._log.write(self.step, {"reward": mean_reward(data)})


def mean_reward(path: str | Path) -> float:
    """Return the mean reward of a dataset; NaN where no rollout has one."""
    view = read_dataset(Storage.open(path))
    rewards: list[float] = []
    for record in view.shards:
        for table in read_tables(view, record, ["reward"]):
            rewards += table["reward"].drop_null().to_pylist()
    return sum(rewards) / len(rewards) if rewards else math.nan
