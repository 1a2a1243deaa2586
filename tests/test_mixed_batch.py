"""One batch of every kind of row, from recorded rollouts to loss and gradients, on every path.

The other side is written out token by token from the rollouts: dense float64 logits, a log-softmax
over the recorded ids or over the vocabulary, the formulas of the losses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from synthetic import make_row
from torch import Tensor

from rollout.batch import RolloutBatch, pack_rollouts
from rollout.batch_rows import Untruncated
from rollout.head import plan_batch, score_batch
from rollout.kernels.support_head import support_logprobs
from rollout.losses import LossConfig, LossMetrics, compute_loss
from rollout.rows import RolloutRow
from rollout.schema.entries import unpack_entries

V, H, LOW, HIGH = 60, 8, 0.05, 20.0
ADVANTAGES = {"kept": 0.7, "greedy": -0.4, "top": -1.3, "draws": 0.9, "none": 1.1, "kept 2": -0.8}
OFF = 3  # every third token is no loss token


def rollouts(names: Sequence[str]) -> list[RolloutRow]:
    """Return rollouts over V ids; the trainer below gives them ratios within the band and beyond.

    `draws` is an untruncated rollout with nothing but its draws, `none` has not even these.
    """
    shapes: dict[str, dict[str, Any]] = {
        "kept": {"lengths": [5, 1, 9, 2, 30], "temperature": 0.7},
        "greedy": {"lengths": [1, 1, 1], "temperature": 0.0},
        "top": {"lengths": [4, 4, 4, 4], "kind": "top", "draws": 3},
        "draws": {"lengths": [3, 3, 3, 3, 3], "kind": "none", "draws": 3, "temperature": 1.3},
        "none": {"lengths": [6, 6, 6, 6], "kind": "none"},
        "kept 2": {"lengths": [1, 8, 8]},
    }
    return [make_row(name, seed=5, vocab=V, **shapes[name]) for name in names]


def states_of(rows: Sequence[RolloutRow]) -> dict[str, Tensor]:
    """Return each rollout's hidden states [prompt + completion, H]."""
    generator = torch.Generator().manual_seed(3)
    sizes = [row.prompt_token_ids.size + row.token_ids.size for row in rows]
    return {
        row.prompt_key: torch.randn(size, H, generator=generator).double().requires_grad_()
        for row, size in zip(rows, sizes, strict=True)
    }


def output_weight() -> Tensor:
    return torch.randn(V, H, generator=torch.Generator().manual_seed(4)).double().requires_grad_()


def pack(rows: Sequence[RolloutRow], untruncated: Untruncated, denominator: float) -> RolloutBatch:
    advantages = [ADVANTAGES[row.prompt_key] for row in rows]
    batch = pack_rollouts(rows, advantages, untruncated=untruncated, global_denominator=denominator)
    mask = torch.cat([torch.arange(row.token_ids.size) % OFF != OFF - 1 for row in rows])
    return dataclasses.replace(batch, loss_mask=mask)


Entries = Literal["exact", "head", "draws", "nothing"]


def recorded(
    row: RolloutRow, t: int, untruncated: Untruncated
) -> tuple[Entries, Tensor, Tensor, float]:
    """Return what one token's entries are, their ids, log q, and the tail mass."""
    kind: Entries = "nothing"
    entries = np.empty(0, np.uint64)
    tail = 0.0
    draws = row.support_kind == "none" or (row.support_kind == "top" and untruncated == "draws")
    if draws and row.draw_entries is not None:
        kind, entries = "draws", row.draw_entries.reshape(row.token_ids.size, -1)[t]
    elif row.support_entries is not None and row.support_offsets is not None:
        kind = "exact" if row.support_kind == "kept" else "head"
        entries = row.support_entries[row.support_offsets[t] : row.support_offsets[t + 1]]
        tail = 0.0 if row.tail_mass is None else float(row.tail_mass[t])
    ids, log_q = unpack_entries(entries)
    return kind, torch.from_numpy(ids).long(), torch.from_numpy(log_q).double(), tail


def weight_of(log_p: Tensor, log_q: Tensor, config: LossConfig) -> Tensor:
    """Return f(p / q) by its formula."""
    ratio = (log_p - log_q).exp()
    if config.loss == "icepop":
        return torch.where((ratio >= LOW) & (ratio <= HIGH), ratio, 0.0)
    if config.loss == "ipo":
        gap = (log_p.exp() - log_q.exp()).abs() <= config.max_probability_gap
        return torch.where(gap, ratio.clamp(max=config.ratio_cap), 0.0)
    return torch.ones_like(ratio)


def dense_token(
    logits: Tensor, row: RolloutRow, t: int, untruncated: Untruncated, config: LossConfig
) -> Tensor | None:
    """Return the loss of one token for an advantage of 1, or None for one without a support."""
    kind, ids, log_q, tail = recorded(row, t, untruncated)
    usable = {"off": True, "tail": kind in ("exact", "head"), "sampled": kind in ("exact", "draws")}
    if not usable[config.centering]:
        return None
    logprobs = logits.log_softmax(0)
    if kind == "exact":
        inside = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
        logprobs = logits.masked_fill(~inside, -torch.inf).log_softmax(0)
    log_p, log_q_a = logprobs[int(row.token_ids[t])], torch.tensor(float(row.sampled_logprobs[t]))
    weight = weight_of(log_p.detach(), log_q_a.double(), config)
    loss = -weight * log_p if config.loss == "reinforce" else -weight * (log_p - log_p.detach())
    loss = loss - (0.0 if config.loss == "reinforce" else weight)
    if config.centering == "off":
        return loss
    mine = logprobs[ids]
    weights = weight_of(mine.detach(), log_q, config)
    if kind == "draws":
        return loss + (weights * mine).sum() / len(ids)
    coefficients = log_q.exp() * weights
    if kind == "head":
        outside = torch.ones(V, dtype=torch.bool).index_fill(0, ids, False)
        rho = tail / float(logprobs.detach()[outside].exp().sum())
        alpha = rho if config.loss == "reinforce" else float(LOW <= 1 / rho <= HIGH)
        coefficients = coefficients - alpha * mine.detach().exp()
    return loss + (coefficients * mine).sum()


def dense_loss(
    rows: Sequence[RolloutRow],
    states: dict[str, Tensor],
    weight: Tensor,
    untruncated: Untruncated,
    config: LossConfig,
) -> tuple[Tensor, int]:
    """Return the loss, and how many loss tokens have no support that it can use."""
    total, unsupported = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        for t in range(row.token_ids.size):
            if t % OFF == OFF - 1:
                continue
            hidden = states[row.prompt_key][row.prompt_token_ids.size + t - 1]
            logits = weight @ hidden / (row.temperature or 1.0)
            loss = dense_token(logits, row, t, untruncated, config)
            if loss is None:
                unsupported += 1
            else:
                # advantages and temperatures are float32 in a batch
                total = total + float(np.float32(ADVANTAGES[row.prompt_key])) * loss
    return total, unsupported


ALL = ("kept", "greedy", "top", "draws", "none", "kept 2")
WITH_A_HEAD = ("kept", "greedy", "top", "none", "kept 2")
BAND = {"ratio_low": LOW, "ratio_high": HIGH}
CASES = [
    pytest.param(ALL, "head", {"loss": "icepop", **BAND}, id="icepop"),
    pytest.param(ALL, "draws", {"loss": "ipo"}, id="ipo"),
    pytest.param(WITH_A_HEAD, "head", {"loss": "icepop", "centering": "tail", **BAND}, id="tail"),
    pytest.param(WITH_A_HEAD, "head", {"loss": "reinforce", "centering": "tail"}, id="plain-tail"),
    pytest.param(ALL, "draws", {"loss": "icepop", "centering": "sampled", **BAND}, id="sampled"),
    pytest.param(ALL, "draws", {"loss": "reinforce", "centering": "sampled"}, id="cancelling"),
]
CUTS = [
    pytest.param([], id="whole"),
    pytest.param([2, 3], id="three-micro-batches"),
    pytest.param([1, 2, 3, 4], id="a-rollout-each"),
]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("names", "untruncated", "settings"), CASES)
def test_loss_and_gradients_equal_dense_float64(
    names: tuple[str, ...], untruncated: Untruncated, settings: dict[str, Any], cuts: list[int]
) -> None:
    config, rows = LossConfig(**settings), rollouts(names)
    states, weight = states_of(rows), output_weight()
    denominator = 17.0
    parts, losses = [], []
    for first, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        chosen = rows[first:end]
        batch = pack(chosen, untruncated, denominator)
        plan = plan_batch(batch, config, vocab_size=V, weight_dtype=torch.float64)
        packed = torch.cat([states[row.prompt_key] for row in chosen])
        inputs = score_batch(packed[batch.hidden_index], weight, batch, plan)
        outputs = compute_loss(inputs, config)
        torch.autograd.backward(outputs.loss)
        losses.append(outputs.loss.detach())
        parts.append(outputs.metrics)
    leaves = [weight, *states.values()]
    got = [leaf.grad for leaf in leaves]

    want, unsupported = dense_loss(rows, states, weight, untruncated, config)
    want = want / denominator
    grads = torch.autograd.grad(want, leaves, allow_unused=True)
    torch.testing.assert_close(torch.stack(losses).sum(), want.detach(), rtol=1e-6, atol=1e-7)
    for ours, exact in zip(got, grads, strict=True):
        assert ours is not None
        exact = torch.zeros_like(ours) if exact is None else exact
        # 1 / T is float32 in a batch
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-7)
    metrics = LossMetrics.merge(parts)
    assert int(metrics.num_unsupported) == unsupported
    assert int(metrics.num_nonfinite) == 0
    if config.loss == "icepop" and config.centering != "tail":
        assert 0 < int(metrics.num_masked) < int(metrics.num_tokens)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("names", "untruncated", "settings"), [CASES[i] for i in (2, 4, 5)])
# numpy, which interprets the kernels here, warns where a GPU computes NaN on purpose
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_the_kernels_equal_dense_float64_and_wait_for_nothing(
    names: tuple[str, ...],
    untruncated: Untruncated,
    settings: dict[str, Any],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, rows = LossConfig(**settings, check_values=False), rollouts(names)
    states, weight = states_of(rows), output_weight()
    want, _ = dense_loss(rows, states, weight, untruncated, config)
    leaves = [weight, *states.values()]
    grads = torch.autograd.grad(want, leaves, allow_unused=True)
    full = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]

    hidden = torch.cat(leaves[1:]).detach().to(device, torch.float32).requires_grad_()
    output = weight.detach().to(device, torch.float32).requires_grad_()
    batch = pack(rows, untruncated, 1.0)
    plan = plan_batch(batch, config, vocab_size=V, weight_dtype=torch.float32)
    batch, plan = batch.to(device), plan.to(torch.device(device))
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    else:
        torch.cuda.set_sync_debug_mode("error")
    inputs = score_batch(hidden.index_select(0, batch.hidden_index), output, batch, plan)
    outputs = compute_loss(inputs, config)
    torch.autograd.backward(outputs.loss)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    assert int(outputs.metrics.num_nonfinite) == 0
    torch.testing.assert_close(outputs.loss.double().cpu(), want.detach(), rtol=1e-4, atol=1e-4)
    assert hidden.grad is not None
    assert output.grad is not None
    for ours, exact in ((hidden.grad, torch.cat(full[1:])), (output.grad, full[0])):
        error = float((ours.double().cpu() - exact).norm() / exact.norm())
        assert error < 1e-5


def test_the_plan_follows_the_loss() -> None:
    batch = pack(rollouts(ALL), "draws", 1.0)
    draws = batch.support_is_samples

    def free(**settings: Any) -> Tensor:
        config = LossConfig(**settings)
        return ~plan_batch(batch, config, vocab_size=V, weight_dtype=torch.float64).is_normalised

    assert torch.equal(free(loss="reinforce", centering="sampled"), draws & batch.loss_mask)
    assert not free(loss="reinforce").any()
    assert not free(loss="reinforce", centering="exact").any()
    assert not free(loss="icepop", centering="sampled").any()
    assert not free(loss="reinforce", centering="sampled", kl_q_p=0.1).any()


def test_a_row_without_a_support_never_passes_for_a_certain_token() -> None:
    # the mistake: the sparse head for a whole batch that holds an untruncated rollout
    rows = rollouts(["kept", "none"])
    states, weight = states_of(rows), output_weight()
    batch = pack(rows, "head", 1.0)
    hidden = torch.cat(list(states.values()))[batch.hidden_index]
    arguments = (
        hidden, weight, batch.support_ids, batch.support_offsets, batch.target_ids,
        batch.inverse_temperature,
    )  # fmt: skip
    with pytest.raises(ValueError, match="needs the whole vocabulary"):
        support_logprobs(*arguments)
    # where the values are not looked at, as on a GPU, every such token is counted and left out
    targets, entries = support_logprobs(*arguments, check_targets=False)
    outputs = compute_loss(batch.loss_inputs(targets, entries), LossConfig(loss="reinforce"))
    lost = int((batch.loss_mask & ~batch.support_valid).sum())
    assert int(outputs.metrics.num_nonfinite) == lost > 0
    assert torch.isfinite(outputs.loss)


def test_scores_that_were_not_asked_for_are_no_numbers() -> None:
    # planned for fewer tokens than the loss then reads
    rows = rollouts(["kept", "top"])
    states, weight = states_of(rows), output_weight()
    batch = pack(rows, "head", 1.0)
    config = LossConfig(loss="icepop")
    plan = plan_batch(batch, config, vocab_size=V, weight_dtype=torch.float64)
    everything = dataclasses.replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    hidden = torch.cat(list(states.values()))[batch.hidden_index]
    outputs = compute_loss(score_batch(hidden, weight, everything, plan), config)
    assert int(outputs.metrics.num_nonfinite) == int((~batch.loss_mask).sum()) > 0


def test_a_batch_without_loss_tokens_stays_in_the_graph() -> None:
    rows = rollouts(["kept", "top"])
    states, weight = states_of(rows), output_weight()
    batch = pack(rows, "head", 1.0)
    batch = dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    config = LossConfig(loss="icepop")
    plan = plan_batch(batch, config, vocab_size=V, weight_dtype=torch.float64)
    hidden = torch.cat(list(states.values()))[batch.hidden_index]
    loss = compute_loss(score_batch(hidden, weight, batch, plan), config).loss
    assert float(loss.detach()) == 0.0
    for grad in torch.autograd.grad(loss, [weight, *states.values()]):
        assert not grad.any()
