"""Does a trainer compute the probabilities that the sampler drew from?

On the weights that sampled, p / q over the recorded support is 1 for every token; over the whole
vocabulary it is the probability that truncation kept. Both are measured here, token by token, as
mean and quantiles, by position and by the size of the support, with what is not finite counted
and never averaged away.
"""

# N scored tokens

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.batch import RolloutBatch, pack_rollouts
from rollout.dataset_view import DatasetView, read_dataset
from rollout.errors import DatasetError, TrainingError
from rollout.full_rows import read_full_rows
from rollout.kernels.dense_head import dense_logprobs
from rollout.replay_model import ReplayModel, load_model
from rollout.rows import RolloutRow
from rollout.storage import Storage

QUANTILES: Final = (0.0, 0.01, 0.5, 0.99, 1.0)
"""The worst tokens on both sides are part of the report."""
_COLUMNS: Final = (
    "rollout_id",
    "group_id",
    "prompt_id",
    "sample_index",
    "group_size",
    "prompt_token_ids",
    "token_ids",
    "sampled_logprobs",
    "temperature",
    "support_kind",
    "support_offsets",
    "support_entries",
    "tail_mass",
    "draw_entries",
)
_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioStats:
    """Importance ratios of a set of tokens."""

    label: str
    tokens: int
    mean: float
    quantiles: tuple[float, ...]
    """At `QUANTILES`."""
    k3: float
    """Mean of r - 1 - log r, an estimate of KL(q || p), nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreementReport:
    """How far a trainer's probabilities are from the sampler's."""

    rollouts: int
    tokens: int
    nonfinite_trainer: int
    """Tokens whose log p is NaN or infinite; in no mean below."""
    nonfinite_sampler: int
    """Tokens whose recorded log q is NaN or infinite; in no mean below."""
    replayed: RatioStats
    """p over the recorded support, where there is one."""
    unreplayed: RatioStats
    """p over the whole vocabulary, as training without replay sees it; truncated rows only."""
    kept_mass: float
    """Mean probability under p of the support, over the same rows; equals the unreplayed ratio's
    mean where the weights are those that sampled."""
    kept_mass_gap: float
    """Largest |unreplayed ratio - kept mass| of a token."""
    by_position: tuple[RatioStats, ...]
    """Replayed, by position in the completion; the first is the first token alone."""
    by_support: tuple[RatioStats, ...]
    """Replayed, by the number of ids in the support; rows without an exact one are named so."""

    @property
    def largest_deviation(self) -> float:
        """Largest |ratio - 1| of a token; infinite if anything is not finite."""
        if self.nonfinite_trainer or self.nonfinite_sampler:
            return float("inf")
        low, high = self.replayed.quantiles[0], self.replayed.quantiles[-1]
        return max(abs(low - 1.0), abs(high - 1.0))

    @property
    def first_token_mean(self) -> float:
        """Mean ratio of first tokens, off where temperature or prompt differ between the sides."""
        return self.by_position[0].mean

    def check(self, tolerance: float | None) -> None:
        """Refuse a token whose ratio is further than a tolerance from 1; None takes anything.

        Raises:
            TrainingError: naming the largest deviation.
        """
        if tolerance is not None and not self.largest_deviation <= tolerance:
            raise TrainingError(
                f"the weights do not agree with the data: a ratio is {self.largest_deviation:.3g} "
                f"from 1, expected at most {tolerance:g}"
            )

    def table(self) -> str:
        """Lay the report out for a terminal, under 100 columns."""
        names = [
            "min" if q == 0 else "max" if q == 1 else f"p{round(100 * q):02d}" for q in QUANTILES
        ]
        head = f"{'':<26}{'tokens':>9}{'mean':>10}" + "".join(f"{name:>10}" for name in names)
        lines = [
            f"{self.rollouts} rollouts, {self.tokens} tokens; not finite: "
            f"{self.nonfinite_trainer} of the trainer's, {self.nonfinite_sampler} of the sampler's",
            "",
            head,
            _line(self.replayed, "ratio"),
            _line(self.unreplayed, "ratio without replay"),
            "",
            f"k3 {self.replayed.k3:.3e}; largest |ratio - 1| {self.largest_deviation:.3e}; "
            f"first token {self.first_token_mean:.6f}",
            f"kept mass {self.kept_mass:.6f}, ratio without replay {self.unreplayed.mean:.6f}, "
            f"largest gap of a token {self.kept_mass_gap:.3e}",
            "",
            "ratio by position" + head[17:],
            *(_line(stats, stats.label) for stats in self.by_position),
            "",
            "ratio by support size" + head[21:],
            *(_line(stats, stats.label) for stats in self.by_support),
        ]
        return "\n".join(lines)


def agree(
    path: str | Path,
    model: str | Path,
    *,
    compute_dtype: str = "float32",
    device: str = "auto",
    max_rollouts: int = 4096,
    storage_options: Mapping[str, Any] | None = None,
) -> AgreementReport:
    """Load both sides and compare them; see `measure_agreement`.

    Args:
        path: the dataset.
        model: a Hugging Face checkpoint.
        compute_dtype: `float32` or `bfloat16`.
        device: `auto`, `cpu` or `cuda`.
        max_rollouts: the first of the dataset.
        storage_options: options of the dataset's fsspec filesystem.

    Returns:
        The report.

    Raises:
        DatasetError: the dataset can't be read or compared.
        InputError: the model can't be loaded.
        ConfigError: there is no such device, or a package is missing.
    """
    view = read_dataset(Storage.open(path, dict(storage_options or {})))
    trainer = load_model(model, revision=None, compute_dtype=compute_dtype, device=device)
    return measure_agreement(trainer, view, max_rollouts=max_rollouts)


def measure_agreement(
    model: ReplayModel, view: DatasetView, *, token_budget: int = 8192, max_rollouts: int = 4096
) -> AgreementReport:
    """Compare a trainer's probabilities with those that a dataset recorded.

    Args:
        model: the trainer's.
        view: the dataset.
        token_budget: tokens (prompt and completion) computed at a time.
        max_rollouts: the first of the dataset, in the order of its records.

    Returns:
        The report.

    Raises:
        DatasetError: the dataset is empty, damaged, or holds ids that the model does not have.
    """
    largest = max((record.max_token_id for record in view.shards), default=-1)
    if largest < 0:
        raise DatasetError(f"dataset {view.storage.url} holds no rollouts: nothing to compare")
    if largest >= model.vocab_size:
        raise DatasetError(
            f"dataset {view.storage.url} holds token id {largest}, expected below the model's "
            f"vocab_size {model.vocab_size}"
        )
    model.model.eval()
    parts: list[dict[str, NDArray[Any]]] = []
    rollouts = 0
    for rows in _chunks(view, token_budget, max_rollouts):
        rollouts += len(rows)
        batch = pack_rollouts(rows, [0.0] * len(rows))
        with torch.no_grad():
            parts.append(_measure(model, batch))
    tokens = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return _report(tokens, rollouts)


def _chunks(view: DatasetView, budget: int, max_rollouts: int) -> Iterator[list[RolloutRow]]:
    """Yield the dataset's first rollouts, as many at a time as the budget holds."""
    rows: list[RolloutRow] = []
    held = 0
    stored = (row for part in view.shards for row in read_full_rows(view, part, _COLUMNS))
    for row in islice(stored, max_rollouts):
        size = row.prompt_token_ids.size + row.token_ids.size
        if rows and held + size > budget:
            yield rows
            rows, held = [], 0
        rows.append(row)
        held += size
    if rows:
        yield rows


def _measure(model: ReplayModel, batch: RolloutBatch) -> dict[str, NDArray[Any]]:
    """Return per-token numbers: both log-ratios, kept mass, position, size of the support."""
    on_device = batch.to(model.device)
    hidden = model.scored_hidden(on_device)
    head = model.head(batch, hidden)
    dense = dense_logprobs(
        hidden,
        model.weight.detach().to(hidden.dtype),
        on_device.support_ids,
        on_device.support_offsets,
        on_device.target_ids,
        on_device.inverse_temperature,
    )
    owner = torch.repeat_interleave(batch.support_offsets.diff())
    kept = torch.zeros(batch.num_scored, dtype=torch.float64)
    kept.index_add_(0, owner, dense.entries.cpu().double().exp())
    exact = batch.support_valid & ~batch.support_is_samples & (batch.sampler_tail_mass == 0)
    first = torch.ones(batch.num_scored, dtype=torch.bool)
    first[1:] = batch.rollout_index.diff() != 0
    index = torch.arange(batch.num_scored)
    position = index - torch.where(first, index, 0).cummax(0).values
    values = {
        "log_p": head.target_logprobs.cpu().double(),
        "log_q": batch.sampler_logprobs.double(),
        "dense_log_p": dense.targets.cpu().double(),
        "kept": kept,
        "position": position,
        "size": batch.support_offsets.diff(),
        "exact": exact,
        "greedy": batch.temperature == 0.0,
    }
    return {name: value.numpy() for name, value in values.items()}


def _report(tokens: dict[str, NDArray[Any]], rollouts: int) -> AgreementReport:
    """Sum the per-token numbers up."""
    bad_p, bad_q = ~np.isfinite(tokens["log_p"]), ~np.isfinite(tokens["log_q"])
    good = ~(bad_p | bad_q)
    log_ratio = np.where(good, tokens["log_p"] - np.where(good, tokens["log_q"], 0.0), np.nan)
    # a greedy row is no sample of p, so its mass under p says nothing
    truncated = good & tokens["exact"] & ~tokens["greedy"] & np.isfinite(tokens["dense_log_p"])
    dense = (tokens["dense_log_p"] - tokens["log_q"])[truncated]
    kept = tokens["kept"][truncated]
    gap = np.abs(np.exp(dense) - kept)

    def stats(label: str, chosen: NDArray[np.bool_]) -> RatioStats:
        return _stats(label, log_ratio[good & chosen])

    size, exact = tokens["size"], tokens["exact"]
    by_support = [stats(label, exact & inside) for label, inside in _doubling(size, first=1)]
    by_support.append(stats("not an exact support", ~exact))
    return AgreementReport(
        rollouts=rollouts,
        tokens=len(good),
        nonfinite_trainer=int(bad_p.sum()),
        nonfinite_sampler=int(bad_q.sum()),
        replayed=stats("replayed", np.ones_like(good)),
        unreplayed=_stats("unreplayed", dense),
        kept_mass=float(kept.mean()) if kept.size else float("nan"),
        kept_mass_gap=float(gap.max()) if gap.size else float("nan"),
        by_position=tuple(stats(*item) for item in _doubling(tokens["position"], first=0)),
        by_support=tuple(item for item in by_support if item.tokens),
    )


def _stats(label: str, log_ratio: _Floats) -> RatioStats:
    if not log_ratio.size:
        nan = float("nan")
        return RatioStats(label=label, tokens=0, mean=nan, quantiles=(nan,) * 5, k3=nan)
    ratio = np.exp(log_ratio)
    return RatioStats(
        label=label,
        tokens=log_ratio.size,
        mean=float(ratio.mean()),
        quantiles=tuple(np.quantile(ratio, QUANTILES).tolist()),
        k3=float((np.expm1(log_ratio) - log_ratio).mean()),
    )


def _doubling(values: NDArray[Any], *, first: int) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield ranges that double, `first` alone first: 0, 1, 2-3, 4-7 or 1, 2, 3-4, 5-8."""
    low, width = first, 1
    largest = int(values.max()) if values.size else first
    while low <= largest:
        high = low + width - 1
        label = f"{low}" if width == 1 else f"{low}-{high}"
        yield label, (values >= low) & (values <= high)
        low, width = high + 1, 1 if low == first else 2 * width


def _line(stats: RatioStats, label: str) -> str:
    numbers = "".join(f"{value:>10.5f}" for value in (stats.mean, *stats.quantiles))
    return f"{label:<26}{stats.tokens:>9}{numbers}"
