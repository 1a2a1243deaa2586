"""The losses: trust regions, replay, refusals, metrics. Identities carry their numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from loss_cases import evaluate, everything, make_inputs, random_batch, run, update

from rollout.errors import ConfigError
from rollout.losses import LossConfig, LossInputs, LossMetrics, compute_loss
from rollout.trust_region import probability_gap

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
