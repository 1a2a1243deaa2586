"""The losses: trust regions, replay, normalisation, hazards. Identities carry their numbers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from loss_cases import evaluate, make_inputs, update
from torch import Tensor

from rollout.errors import ConfigError
from rollout.losses import LossConfig, LossInputs, LossMetrics, LossOutputs, compute_loss
from rollout.trust_region import probability_gap

LOSSES = pytest.mark.parametrize("loss", ["ipo", "icepop", "reinforce"])
CENTERED = pytest.mark.parametrize(
    ("loss", "centering"),
    [
        (loss, centering)
        for loss in ("ipo", "icepop", "reinforce")
        for centering in ("off", "exact")
    ],
)


def test_reinforce_is_minus_advantage_log_p() -> None:
    z, q = [0.3, -1.0, 0.4], [0.2, 0.5, 0.3]
    p = oracle.softmax(z)
    got = evaluate(z, q, [0, 2], LossConfig(loss="reinforce"), advantages=[2.0, -1.0]).loss
    np.testing.assert_allclose(got, -2.0 * np.log(p[0]) + np.log(p[2]), atol=1e-15)


@pytest.mark.parametrize("cap", [1.5, 1e4])
def test_truncated_reinforce_weighs_by_the_capped_ratio(cap: float) -> None:
    z, q = [0.3, -1.0, 0.4], [0.1, 0.5, 0.4]
    p = oracle.softmax(z)
    settings = LossConfig(loss="reinforce", importance="truncated", ratio_cap=cap)
    got = evaluate(z, q, [0], settings).loss
    np.testing.assert_allclose(got, -min(p[0] / 0.1, cap) * np.log(p[0]), atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"loss": "icepop", "ratio_low": 0.5, "ratio_high": 2.0}, oracle.weight_band),
        ({"loss": "ipo", "max_probability_gap": 0.2}, oracle.weight_ipo),
    ],
    ids=["icepop", "ipo"],
)
def test_ratio_losses_by_formula(settings: dict[str, Any], kept: Any) -> None:
    z, q = [0.9, -1.0, 0.4, 0.0], [0.1, 0.5, 0.3, 0.1]
    p = oracle.softmax(z)
    bounds = (0.5, 2.0) if settings["loss"] == "icepop" else (0.2,)
    weights = [kept(p[a], q[a], *bounds) for a in range(4)]
    assert 0 < np.count_nonzero(weights) < 4
    for a, weight in enumerate(weights):
        case = {"advantages": -1.5}
        outputs = evaluate(z, q, [a], LossConfig(**settings), **case)
        np.testing.assert_allclose(outputs.loss, 1.5 * weight, atol=1e-15)
        assert int(outputs.metrics.num_masked) == (weight == 0.0)
        np.testing.assert_allclose(
            update(z, q, [a], LossConfig(**settings), **case),
            -1.5 * weight * oracle.scores(p)[a],
            atol=1e-15,
        )


def test_advantage_scale_multiplies_every_advantage() -> None:
    z, q = [0.9, -1.0, 0.4], [0.2, 0.5, 0.3]
    scaled = LossConfig(loss="icepop", centering="exact", advantage_scale=0.25)
    plain = LossConfig(loss="icepop", centering="exact")
    np.testing.assert_allclose(
        update(z, q, [0, 1], scaled), 0.25 * update(z, q, [0, 1], plain), atol=1e-15
    )


def pair(log_p: float, log_q: float, dtype: torch.dtype = torch.float64) -> LossInputs:
    """One token, whose support is never read."""
    return make_inputs(
        torch.zeros(1, dtype=dtype),
        [1.0],
        [0],
        trainer_logprobs=torch.tensor([log_p], dtype=dtype),
        sampler_logprobs=torch.tensor([log_q], dtype=dtype),
    )


def is_masked(inputs: LossInputs, **settings: Any) -> bool:
    return bool(compute_loss(inputs, LossConfig(**settings)).metrics.num_masked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_o34_ipo_keeps_a_gap_on_the_bound(dtype: torch.dtype) -> None:
    inputs = pair(math.log(0.31), math.log(0.30), dtype)
    assert not is_masked(inputs, loss="ipo", max_probability_gap=0.01)
    assert is_masked(inputs, loss="ipo", max_probability_gap=0.00999)
    assert not is_masked(inputs, loss="ipo", max_probability_gap=0.01001)
    swapped = pair(math.log(0.30), math.log(0.31), dtype)
    assert not is_masked(swapped, loss="ipo", max_probability_gap=0.01)
    assert is_masked(swapped, loss="ipo", max_probability_gap=0.00999)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("p", "q"), [(0.5, 0.1), (0.1, 0.02), (0.1, 0.5), (0.02, 0.1)], ids=str)
def test_o34_icepop_keeps_both_bounds(p: float, q: float, dtype: torch.dtype) -> None:
    inputs = pair(math.log(p), math.log(q), dtype)
    assert not is_masked(inputs, loss="icepop", ratio_low=0.2, ratio_high=5.0)
    assert is_masked(inputs, loss="icepop", ratio_low=0.2001, ratio_high=4.999)


def test_ipo_gap_does_not_cancel() -> None:
    # exp(-1e-8) and exp(-6e-8) are 1 and 1 - 2^-24 in float32: their difference is 19 % off
    log_p, log_q = torch.tensor([-1e-8, -6e-8]), torch.tensor([-6e-8, -1e-8])
    gap = probability_gap(log_p, log_q).double()
    torch.testing.assert_close(gap, torch.full((2,), 5e-8).double(), rtol=1e-6, atol=0)
    assert probability_gap(log_p, log_p).tolist() == [0.0, 0.0]


def test_ratio_is_capped_with_the_gradient_straight_through() -> None:
    log_p = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    inputs = dataclasses.replace(pair(-1.0, -60.0), trainer_logprobs=log_p)
    outputs = compute_loss(inputs, LossConfig(loss="ipo", max_probability_gap=1.0))
    torch.autograd.backward(outputs.loss)
    assert float(outputs.loss.detach()) == pytest.approx(-1e4, rel=1e-12)
    assert log_p.grad is not None
    assert float(log_p.grad) == pytest.approx(-1e4, rel=1e-12)


def truncated(kept: list[int], p_full: oracle.Vector) -> oracle.Vector:
    q = np.zeros(len(p_full))
    q[kept] = p_full[kept] / p_full[kept].sum()
    return q


@pytest.mark.parametrize("mass", [0.895, 0.965, 0.994])
def test_o29_without_replay_every_ratio_is_the_kept_mass(mass: float) -> None:
    # five kept ids share the mass, two lost ids the rest
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05, 0.0, 0.0]) * mass
    p[5:] = (1 - mass) / 2
    q = truncated([0, 1, 2, 3, 4], p)
    tokens = [0, 1, 2, 3, 4]
    token = LossConfig(loss="reinforce")
    bare = evaluate(np.log(p), q + 1e-300, tokens, token).metrics
    np.testing.assert_allclose(bare.log_ratio.exp(), mass, rtol=1e-12)
    # the measured table of the report: .895 -> .896, .965 -> .965, .994 -> .995
    reported = {0.895: 0.896, 0.965: 0.965, 0.994: 0.995}[mass]
    assert bare.summary()["ratio_mean"] == pytest.approx(reported, abs=1.1e-3)
    replayed = evaluate(np.log(p), q, tokens, token, support=tokens).metrics
    np.testing.assert_allclose(replayed.log_ratio, 0.0, atol=1e-14)
    assert replayed.summary()["ratio_mean"] == pytest.approx(1.0, abs=1e-14)


def test_o30_without_replay_k3_is_wrong_on_equal_models() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    q = truncated([0, 1], p)
    metrics = evaluate(np.log(p), q + 1e-300, [0, 1], LossConfig(loss="reinforce")).metrics
    assert metrics.summary()["k3"] == pytest.approx(0.8 - 1 - math.log(0.8), rel=1e-12)
    replayed = evaluate(np.log(p), q, [0, 1], LossConfig(loss="reinforce"), support=[0, 1])
    assert replayed.metrics.summary()["k3"] == pytest.approx(0.0, abs=1e-15)


def test_o31_without_replay_the_log_ratio_shifts_by_the_log_of_the_kept_mass() -> None:
    rng = np.random.default_rng(31)
    z, kept = rng.normal(size=6), [0, 2, 3]
    # another sampler model than the trainer's: the shift is still log P_S at every token
    q = truncated(kept, oracle.softmax(rng.normal(size=6)))
    mass = oracle.softmax(z)[kept].sum()
    plain = LossConfig(loss="reinforce")
    bare = evaluate(z, q + 1e-300, kept, plain).metrics.log_ratio
    replayed = evaluate(z, q, kept, plain, support=kept).metrics.log_ratio
    np.testing.assert_allclose(bare - replayed, math.log(mass), atol=1e-14)


@CENTERED
def test_o32_replay_has_no_gradient_off_the_support(loss: Any, centering: Any) -> None:
    rng = np.random.default_rng(32)
    z, kept = rng.normal(size=6), [0, 2, 3]
    q = truncated(kept, oracle.softmax(rng.normal(size=6)))
    settings = LossConfig(loss=loss, centering=centering, kl_q_p=0.1, kl_p_q=0.1)
    got = update(z, q, [0, 2, 3], settings, support=kept)
    assert got[[1, 4, 5]].tolist() == [0.0, 0.0, 0.0]
    assert np.abs(got[kept]).max() > 1e-3


@CENTERED
def test_o33_a_singleton_is_free(loss: Any, centering: Any) -> None:
    settings = LossConfig(loss=loss, centering=centering, kl_q_p=1.0, kl_p_q=1.0)
    q = np.array([0.0, 1.0, 0.0])
    case: dict[str, Any] = {"support": [1], "advantages": 1.0}
    outputs = evaluate([0.4, -2.0, 9.0], q, [1], settings, **case)
    assert update([0.4, -2.0, 9.0], q, [1], settings, **case).tolist() == [0.0, 0.0, 0.0]
    assert outputs.metrics.log_ratio.tolist() == [0.0]
    assert int(outputs.metrics.num_masked) == 0
    # -A r is -1, and log p = 0 makes the rest vanish
    assert float(outputs.metrics.policy_loss) == (0.0 if loss == "reinforce" else -1.0)
    # A sum_v c_v log p_v = A log 1
    assert float(outputs.metrics.centering_loss) == 0.0
    assert [float(outputs.metrics.kl_q_p), float(outputs.metrics.kl_p_q)] == [0.0, 0.0]


def random_batch(
    seed: int, num_rows: int = 24, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Any], list[list[int]]]:
    """Return fields of ragged exact rows over 40 ids, and each row's ids."""
    rng = np.random.default_rng(seed)
    rows, fields = [], {"trainer": [], "sampler": [], "p": [], "q": [], "target": []}  # type: ignore[var-annotated]
    for i in range(num_rows):
        ids = rng.permutation(40)[: 1 + i % 9].tolist()
        p, q = (oracle.softmax(rng.normal(size=len(ids))) for _ in range(2))
        rows.append(ids)
        fields["trainer"] += np.log(p).tolist()
        fields["sampler"] += np.log(q).tolist()
        fields["p"].append(math.log(p[i % len(ids)]))
        fields["q"].append(math.log(q[i % len(ids)]))
        fields["target"].append(ids[i % len(ids)])
    offsets = np.cumsum([0, *(len(ids) for ids in rows)])
    values = {
        "trainer_logprobs": torch.tensor(fields["p"], dtype=dtype),
        "sampler_logprobs": torch.tensor(fields["q"], dtype=dtype),
        "advantages": torch.tensor(rng.normal(size=num_rows), dtype=dtype),
        "loss_mask": torch.tensor(rng.random(num_rows) < 0.8),
        "temperature": torch.ones(num_rows, dtype=dtype),
        "support_offsets": torch.tensor(offsets),
        "trainer_support_logprobs": torch.tensor(fields["trainer"], dtype=dtype),
        "sampler_support_logprobs": torch.tensor(fields["sampler"], dtype=dtype),
        "support_valid": torch.ones(num_rows, dtype=torch.bool),
        "support_is_samples": torch.zeros(num_rows, dtype=torch.bool),
        "sampler_tail_mass": torch.zeros(num_rows, dtype=dtype),
        "global_denominator": float(num_rows),
        "target_ids": torch.tensor(fields["target"]),
        "support_ids": torch.tensor([i for ids in rows for i in ids], dtype=torch.int32),
    }
    return values, rows


def take(values: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Return the fields of some rows, in that order."""
    offsets = values["support_offsets"].tolist()
    entries = torch.tensor([e for i in rows for e in range(offsets[i], offsets[i + 1])]).long()
    counts = [offsets[i + 1] - offsets[i] for i in rows]
    result = dict(values)
    for name, value in values.items():
        if name == "support_offsets":
            result[name] = torch.tensor(np.cumsum([0, *counts]))
        elif name in ("trainer_support_logprobs", "sampler_support_logprobs", "support_ids"):
            result[name] = value[entries]
        elif isinstance(value, Tensor):
            result[name] = value[rows]
    return result


def run(values: dict[str, Any], settings: LossConfig) -> tuple[LossOutputs, Tensor, Tensor]:
    """Return outputs and the gradients of both trainer fields."""
    leaves = [
        values[name].clone().requires_grad_()
        for name in ("trainer_logprobs", "trainer_support_logprobs")
    ]
    inputs = LossInputs(
        **{**values, "trainer_logprobs": leaves[0], "trainer_support_logprobs": leaves[1]}
    )
    outputs = compute_loss(inputs, settings)
    torch.autograd.backward(outputs.loss)
    outputs = dataclasses.replace(outputs, loss=outputs.loss.detach())
    assert leaves[0].grad is not None
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return outputs, grads[0], grads[1]


def everything(loss: Any) -> LossConfig:
    """Every term at once."""
    return LossConfig(
        loss=loss,
        centering="exact",
        kl_q_p=0.3,
        kl_p_q=0.2,
        max_probability_gap=0.1,
        ratio_low=0.5,
        ratio_high=2.0,
    )


@LOSSES
def test_invariance_order_of_a_support(loss: Any) -> None:
    values, rows = random_batch(1)
    order = np.random.default_rng(0)
    offsets = values["support_offsets"].tolist()
    shuffled = torch.tensor(
        [offsets[i] + j for i, ids in enumerate(rows) for j in order.permutation(len(ids))]
    )
    moved = dict(values)
    for name in ("trainer_support_logprobs", "sampler_support_logprobs", "support_ids"):
        moved[name] = values[name][shuffled]
    before, grad_p, grad_s = run(values, everything(loss))
    after, moved_p, moved_s = run(moved, everything(loss))
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(moved_p, grad_p, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(moved_s, grad_s[shuffled], rtol=1e-13, atol=1e-15)


@LOSSES
@pytest.mark.parametrize("cut", [[1], [3, 4, 20], list(range(1, 24))], ids=len)
def test_invariance_micro_batches(loss: Any, cut: list[int]) -> None:
    values, _ = random_batch(2)
    whole, grad_p, grad_s = run(values, everything(loss))
    bounds = [0, *cut, 24]
    parts = [
        run(take(values, list(range(a, b))), everything(loss))
        for a, b in itertools.pairwise(bounds)
    ]
    torch.testing.assert_close(
        torch.stack([part[0].loss for part in parts]).sum(), whole.loss, rtol=1e-13, atol=1e-15
    )
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), grad_p, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), grad_s, rtol=0, atol=0)
    merged = LossMetrics.merge([part[0].metrics for part in parts]).summary()
    assert merged == pytest.approx(whole.metrics.summary(), rel=1e-12, nan_ok=True)


@LOSSES
def test_invariance_padded_supports(loss: Any) -> None:
    values, rows = random_batch(3)
    width = max(len(ids) for ids in rows)
    offsets = values["support_offsets"].tolist()
    padded = dict(values, support_offsets=torch.arange(len(rows) + 1) * width)
    # as padded trainers have it: a constant 0 (p = 1!) on their side, -inf on the sampler's
    pads = {"trainer_support_logprobs": 0.0, "sampler_support_logprobs": -math.inf}
    for name, pad in {**pads, "support_ids": -1}.items():
        padded[name] = torch.full((len(rows) * width,), pad, dtype=values[name].dtype)
        for i in range(len(rows)):
            row = values[name][offsets[i] : offsets[i + 1]]
            padded[name][i * width : i * width + len(row)] = row
    before, grad_p, grad_s = run(values, everything(loss))
    after, padded_p, padded_s = run(padded, everything(loss))
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(padded_p, grad_p, rtol=1e-13, atol=1e-15)
    real = padded["sampler_support_logprobs"] > -math.inf
    torch.testing.assert_close(padded_s[real], grad_s, rtol=1e-13, atol=1e-15)
    assert not padded_s[~real].any()


@LOSSES
def test_invariance_weights_of_one_are_no_weights(loss: Any) -> None:
    values, _ = random_batch(4)
    before = run(values, everything(loss))
    after = run(dict(values, loss_weights=torch.ones(24, dtype=torch.float64)), everything(loss))
    assert torch.equal(before[0].loss, after[0].loss)
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[2], after[2])


@LOSSES
def test_weights_multiply_every_term(loss: Any) -> None:
    values, _ = random_batch(5)
    twice = dict(values, loss_weights=torch.full((24,), 2.0, dtype=torch.float64))
    before, after = run(values, everything(loss)), run(twice, everything(loss))
    torch.testing.assert_close(after[1], 2 * before[1], rtol=1e-14, atol=0)
    torch.testing.assert_close(after[2], 2 * before[2], rtol=1e-14, atol=0)


def test_a_masked_micro_batch_has_a_zero_loss_with_a_graph() -> None:
    values, _ = random_batch(6)
    nothing = dict(values, loss_mask=torch.zeros(24, dtype=torch.bool))
    outputs, grad_p, grad_s = run(nothing, everything("icepop"))
    assert float(outputs.loss) == 0.0
    assert not grad_p.any()
    assert not grad_s.any()
    empty, _, _ = run(take(values, []), everything("icepop"))
    assert float(empty.loss) == 0.0


HAZARDS: dict[str, tuple[str, dict[str, float], dict[str, Any]]] = {
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


def plant(values: dict[str, Any], row: int, hazard: str) -> None:
    """Write a hazard into a row of cloned fields."""
    _, token, entry = HAZARDS[hazard]
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
    values, _ = random_batch(8, 20, torch.float32)
    dirty = {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
    off = (~values["loss_mask"]).nonzero()[:, 0].tolist()
    assert off
    names = [n for n in HAZARDS if n != "tail nan"]
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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("advantages", torch.zeros(3), r"advantages has shape \(3,\), expected \(24,\)"),
        ("loss_mask", torch.zeros(24), "loss_mask is torch.float32, expected bool"),
        ("support_offsets", torch.zeros(24, dtype=torch.int64), r"expected \(25,\)"),
        ("support_ids", torch.zeros(1, dtype=torch.int32), "support_ids has shape"),
        ("sampler_logprobs", torch.zeros(24, dtype=torch.int64), "expected a float dtype"),
        ("global_denominator", 0.0, "global_denominator is 0.0, expected a positive"),
    ],
    ids=lambda v: v if isinstance(v, str) and v.isidentifier() else "",
)
def test_inputs_that_disagree_are_refused(name: str, value: Any, message: str) -> None:
    values, _ = random_batch(11)
    with pytest.raises(ValueError, match=message):
        LossInputs(**{**values, name: value})


def test_offsets_that_do_not_end_at_the_entries_are_refused() -> None:
    values, _ = random_batch(12)
    values["support_offsets"][-1] += 1
    with pytest.raises(ValueError, match=r"support_offsets go from 0 to \d+ .* expected 0 to"):
        run(values, everything("icepop"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "ppo"}, "loss is 'ppo', expected one of ipo, icepop, reinforce"),
        ({"loss": "ipo", "centering": "top"}, "centering is 'top', expected one of off"),
        ({"loss": "icepop", "ratio_low": 6.0}, "ratio_low is 6.0 and ratio_high is 5.0"),
        ({"loss": "ipo", "max_probability_gap": 0.0}, "max_probability_gap is 0.0"),
        ({"loss": "ipo", "ratio_cap": 0.0}, "ratio_cap is 0.0, expected above 0"),
        ({"loss": "icepop", "tail_floor": 0.0}, "tail_floor is 0.0"),
        ({"loss": "icepop", "kl_q_p": -1.0}, "kl_q_p is -1.0"),
        ({"loss": "ipo", "importance": "truncated"}, "importance is 'truncated' with loss 'ipo'"),
    ],
    ids=lambda v: "" if isinstance(v, str) else next(reversed(v)),
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossConfig(**settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logprobs_are_worked_on_in_float32(dtype: torch.dtype) -> None:
    values, _ = random_batch(13, dtype=torch.float32)
    rough = dict(values)
    for name in ("trainer_logprobs", "trainer_support_logprobs"):
        rough[name] = values[name].to(dtype)
        values[name] = rough[name].float()
    before, after = run(values, everything("icepop")), run(rough, everything("icepop"))
    assert after[0].loss.dtype == torch.float32
    assert torch.equal(after[0].loss, before[0].loss)
    assert torch.equal(after[1], before[1].to(dtype))


def test_metrics_by_hand() -> None:
    z, q = np.log([0.5, 0.3, 0.2]), np.array([0.25, 0.25, 0.5])
    settings = LossConfig(loss="icepop", ratio_low=0.5, ratio_high=1.5)
    summary = evaluate(
        z, q, [0, 1, 2, 2], settings,
        loss_mask=torch.tensor([True, True, True, False]),
        kept_mass=torch.tensor([0.9, 0.8, float("nan"), 0.1]),
        kept_mass_known=torch.tensor([True, True, False, True]),
    ).metrics.summary()  # fmt: skip
    ratios = np.array([2.0, 1.2, 0.4])
    assert summary["tokens"] == 3
    assert summary["ratio_mean"] == pytest.approx(1.2)
    assert summary["k3"] == pytest.approx(np.mean(ratios - 1 - np.log(ratios)))
    assert summary["masked_share"] == pytest.approx(2 / 3)
    assert summary["kept_mass"] == pytest.approx(0.85)
    for share in (0.01, 0.05, 0.5, 0.95, 0.99):
        got = summary[f"ratio_p{round(share * 100):02d}"]
        assert got == pytest.approx(np.quantile(ratios, share))


def test_nothing_to_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="got no metrics to merge"):
        LossMetrics.merge([])
