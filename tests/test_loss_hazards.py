"""Impossible values: counted, left out by selection, or refused; never a trace in a gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from loss_cases import LOSSES, everything, make_inputs, random_batch, run, take
from torch import Tensor

from rollout.batch import RolloutBatch
from rollout.head import plan_batch, score_batch
from rollout.losses import LossConfig, LossOutputs, compute_loss

Hazards = dict[str, tuple[str, dict[str, float], dict[str, Any]]]
HAZARDS: Hazards = {
    # name: which counter, values of the token, values of its entries or row
    "sampler -inf": ("nonfinite", {"sampler_logprobs": -math.inf}, {}),
    "sampler nan": ("nonfinite", {"sampler_logprobs": math.nan}, {}),
    "sampler sentinel -9999": ("nonfinite", {"sampler_logprobs": -9999.0}, {}),
    "sampler positive": ("nonfinite", {"sampler_logprobs": 0.5}, {}),
    "trainer nan": ("nonfinite", {"trainer_logprobs": math.nan}, {}),
    "trainer -inf, id outside": ("nonfinite", {"trainer_logprobs": -math.inf}, {}),
    "trainer logit -1e30": ("nonfinite", {"trainer_logprobs": -1e30}, {}),
    "trainer +inf": ("nonfinite", {"trainer_logprobs": math.inf}, {}),
    "advantage nan": ("nonfinite", {"advantages": math.nan}, {}),
    "tail nan": ("nonfinite", {"sampler_tail_mass": math.nan}, {}),
    "entry logit -1e30": ("nonfinite", {}, {"trainer_support_logprobs": -1e30}),
    "entry outside": ("nonfinite", {}, {"trainer_support_logprobs": -math.inf}),
    "entry nan": ("nonfinite", {}, {"trainer_support_logprobs": math.nan}),
    "entry sampler nan": ("nonfinite", {}, {"sampler_support_logprobs": math.nan}),
    "row of padding": ("unsupported", {}, {"sampler_support_logprobs": -math.inf, "all": True}),
    "row of sentinels": ("unsupported", {}, {"sampler_support_logprobs": -9999.0, "all": True}),
    "no support": ("unsupported", {"support_valid": False}, {}),
}
UNREAD: Hazards = {
    # beside all of these, on tokens outside of the loss mask
    "ratio e^95": ("", {"trainer_logprobs": 0.0, "sampler_logprobs": -95.0}, {}),
    "entry ratio e^95": ("", {}, {"sampler_support_logprobs": -95.0}),
    "raw logit": ("", {"trainer_logprobs": 300.0}, {"trainer_support_logprobs": 300.0}),
}


def plant(values: dict[str, Any], row: int, hazard: str) -> None:
    """Write a hazard into a row of cloned fields."""
    _, token, entry = {**HAZARDS, **UNREAD}[hazard]
    start, end = values["support_offsets"][row : row + 2].tolist()
    for name, value in token.items():
        values[name][row] = value
    for name, value in entry.items():
        if name != "all":
            values[name][start : end if entry.get("all") else start + 1] = value


@LOSSES
@pytest.mark.parametrize("centering", ["exact", "sampled"])
def test_planted_hazards_are_counted_and_leave_no_trace(loss: Any, centering: Any) -> None:
    num_rows = len(HAZARDS) + 8
    clean, _ = random_batch(7, num_rows, torch.float32)
    clean["loss_mask"] = torch.ones(num_rows, dtype=torch.bool)
    settings = dataclasses.replace(
        everything(loss),
        centering=centering,
        kl_estimator="token" if centering == "sampled" else "exact",
    )
    values = {k: v.clone() if isinstance(v, Tensor) else v for k, v in clean.items()}
    if centering == "sampled":
        values["support_is_samples"][:] = True
        clean = dict(clean, support_is_samples=values["support_is_samples"])
    bad_rows = list(range(4, 4 + len(HAZARDS)))
    names = [n for n in HAZARDS if not (centering == "sampled" and n == "tail nan")]
    bad_rows = bad_rows[: len(names)]
    for row, hazard in zip(bad_rows, names, strict=True):
        plant(values, row, hazard)
    outputs, grad_p, grad_s = run(values, settings)

    assert torch.isfinite(outputs.loss)
    assert torch.isfinite(grad_p).all()
    assert torch.isfinite(grad_s).all()
    counts = {
        kind: sum(HAZARDS[n][0] == kind for n in names) for kind in ("nonfinite", "unsupported")
    }
    assert int(outputs.metrics.num_nonfinite) == counts["nonfinite"]
    assert int(outputs.metrics.num_unsupported) == counts["unsupported"]
    # exactly what the other rows give alone, under the same denominator
    good = [i for i in range(num_rows) if i not in bad_rows]
    alone, alone_p, alone_s = run(take(clean, good), settings)
    torch.testing.assert_close(outputs.loss, alone.loss, rtol=1e-5, atol=1e-6)
    assert torch.equal(grad_p[good], alone_p)
    assert not grad_p[bad_rows].any()
    offsets = values["support_offsets"].tolist()
    for row in bad_rows:
        assert not grad_s[offsets[row] : offsets[row + 1]].any()
    kept = torch.tensor([e for i in good for e in range(offsets[i], offsets[i + 1])])
    assert torch.equal(grad_s[kept], alone_s)
    summary = outputs.metrics.summary()
    assert all(math.isfinite(v) for k, v in summary.items() if k != "kept_mass")


@LOSSES
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_planted_hazards_leave_no_trace_behind_the_heads(
    loss: Any, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if impl == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    names = ["good", "padding", "no support", "id outside", "-1e30", "masked", "rejected", "good"]
    generator = torch.Generator().manual_seed(3)
    hidden = (0.2 * torch.rand(len(names), 6, generator=generator)).requires_grad_()
    weight = torch.randn(12, 6, generator=generator)
    weight[11] = 0.0
    weight[11, 0] = -1e30  # of the vocabulary, and of one support
    weight.requires_grad_()
    supports = [[i, i + 1, i + 2] for i in range(len(names))]
    supports[2], supports[4] = [], [4, 11, 6]
    log_q = torch.tensor([1 / 3] * 21).log()
    log_q[3:6] = -math.inf
    log_q[[12, 15]] = -95.0  # log p - log q is above 89 for the sampled ids of rows 5 and 6
    sampled = torch.tensor([1 / 3] * 8).log()
    sampled[[5, 6]] = -95.0
    batch = RolloutBatch(
        input_ids=torch.zeros(9, dtype=torch.int64),
        position_ids=torch.arange(9),
        cu_seqlens=torch.tensor([0, 9], dtype=torch.int32),
        max_seqlen=9,
        hidden_index=torch.arange(8),
        target_ids=torch.tensor([0, 1, 2, 9, 4, 5, 6, 7]),
        sampler_logprobs=sampled,
        advantages=torch.ones(8),
        loss_mask=torch.tensor([name != "masked" for name in names]),
        temperature=torch.ones(8),
        support_offsets=torch.tensor([0, *map(len, supports)]).cumsum(0),
        support_ids=torch.tensor([i for ids in supports for i in ids], dtype=torch.int32),
        sampler_support_logprobs=log_q,
        support_valid=torch.tensor([name != "no support" for name in names]),
        support_is_samples=torch.zeros(8, dtype=torch.bool),
        sampler_tail_mass=torch.zeros(8),
        rollout_index=torch.zeros(8, dtype=torch.int64),
        global_denominator=7.0,
        rollout_ids=("r",),
    )
    config = LossConfig(loss=loss, centering="exact", check_values=False)

    def gradients(batch: RolloutBatch) -> tuple[LossOutputs, Tensor, Tensor]:
        plan = plan_batch(batch, config, vocab_size=12, weight_dtype=torch.float32)
        inputs = score_batch(hidden, weight, batch, plan, check_targets=False)
        outputs = compute_loss(inputs, config)
        grads = torch.autograd.grad(outputs.loss, [hidden, weight])
        return outputs, grads[0], grads[1]

    outputs, grad_hidden, grad_weight = gradients(batch)
    assert int(outputs.metrics.num_nonfinite) == 2
    assert int(outputs.metrics.num_unsupported) == 2
    assert int(outputs.metrics.num_masked) == (loss != "reinforce")
    assert torch.isfinite(outputs.loss)
    assert torch.isfinite(grad_hidden).all()
    assert torch.isfinite(grad_weight).all()
    assert not grad_hidden[1:6].any()
    assert grad_hidden[[0, 7]].any(1).all()
    # the same without these rows: not one bit of theirs is in the weight's gradient
    valid = torch.tensor([name in ("good", "rejected") for name in names])
    alone, alone_hidden, alone_weight = gradients(dataclasses.replace(batch, loss_mask=valid))
    assert torch.equal(outputs.loss, alone.loss)
    assert torch.equal(grad_hidden, alone_hidden)
    assert torch.equal(grad_weight, alone_weight)
    plan = plan_batch(batch, config, vocab_size=12, weight_dtype=torch.float32)
    with pytest.raises(ValueError, match="target id 9 is not in its support"):
        score_batch(hidden, weight, batch, plan, check_targets=True)


@LOSSES
def test_a_ratio_beyond_float32_on_a_rejected_token_is_harmless(loss: Any) -> None:
    # log r = 95: exp overflows float32; ipo rejects it for its gap, icepop for its band
    logits = torch.tensor([0.0, -30.0], dtype=torch.float32, requires_grad=True)
    inputs = make_inputs(
        logits, [1.0, 1.0], [0, 0], advantages=[1.0, 0.5], loss_weights=None,
        sampler_logprobs=torch.tensor([-95.0, 0.0]),
        sampler_support_logprobs=torch.tensor([-95.0, 0.0, 0.0, -95.0]),
    )  # fmt: skip
    outputs = compute_loss(inputs, LossConfig(loss=loss, centering="exact"))
    torch.autograd.backward(outputs.loss)
    assert torch.isfinite(outputs.loss)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert int(outputs.metrics.num_masked) == (loss != "reinforce")


def test_masked_tokens_may_hold_anything() -> None:
    values, _ = random_batch(8, 120, torch.float32)
    dirty = {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
    off = (~values["loss_mask"]).nonzero()[:, 0].tolist()
    assert len(off) > len(HAZARDS) + len(UNREAD)
    names = [n for n in [*UNREAD, *HAZARDS] if n != "tail nan"]
    for i, row in enumerate(off):
        plant(dirty, row, names[i % len(names)])
    before, after = run(values, everything("icepop")), run(dirty, everything("icepop"))
    torch.testing.assert_close(after[0].loss, before[0].loss, rtol=1e-6, atol=1e-7)
    assert torch.equal(after[1], before[1])
    assert int(after[0].metrics.num_nonfinite) == 0


def test_a_sampled_id_missing_from_its_support_raises() -> None:
    values, rows = random_batch(9)
    values["loss_mask"][:] = True
    row = 5
    values["target_ids"][row] = next(i for i in range(40) if i not in rows[row])
    with pytest.raises(ValueError, match=r"token 5: sampled id \d+ stands 0 times in its support"):
        run(values, everything("icepop"))
    # the trainer that missed it reports -inf: still misaligned data, not a number to skip
    values["trainer_logprobs"][row] = -math.inf
    with pytest.raises(ValueError, match="token 5"):
        run(values, everything("icepop"))
    run(values, dataclasses.replace(everything("icepop"), check_values=False))


def test_supports_shifted_by_one_row_raise() -> None:
    values, _ = random_batch(10)
    values["loss_mask"][:] = True
    shifted = take(values, [*range(1, 24), 0])
    for name in ("trainer_logprobs", "sampler_logprobs", "target_ids"):
        shifted[name] = values[name]
    with pytest.raises(ValueError, match="misaligned"):
        run(shifted, everything("icepop"))
