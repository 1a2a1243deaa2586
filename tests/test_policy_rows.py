"""The loss as one kernel against the same loss in plain torch, on batches full of hazards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from loss_cases import random_batch, run, take
from test_loss_hazards import HAZARDS, UNREAD, plant
from torch import Tensor

from rollout.kernels.policy_kernel import expm1, policy_rows_kernel
from rollout.losses import LossConfig

pytestmark = [
    # numpy, which interprets the kernel here, warns where a GPU computes NaN on purpose
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
BAND = {"ratio_low": 0.5, "ratio_high": 2.0}
KL = {"kl_q_p": 0.3, "kl_p_q": 0.2}
TRUNCATED = {"loss": "reinforce", "importance": "truncated", "ratio_cap": 1.2}
SETTINGS: dict[str, dict[str, Any]] = {
    "icepop": {"loss": "icepop", "ratio_low": 0.0, "advantage_scale": 0.5},
    "icepop exact": {"loss": "icepop", "centering": "exact", **BAND, **KL},
    "icepop tail": {"loss": "icepop", "centering": "tail", "kl_estimator": "tail", **BAND, **KL},
    "icepop sampled": {
        "loss": "icepop", "centering": "sampled", "kl_estimator": "sampled", **BAND, **KL,
    },
    "ipo": {"loss": "ipo", "kl_estimator": "token", "max_probability_gap": 0.1, **KL},
    "ipo exact": {"loss": "ipo", "centering": "exact", "max_probability_gap": 0.1},
    "plain exact": {"loss": "reinforce", "centering": "exact"},
    "plain tail": {"loss": "reinforce", "centering": "tail", "kl_estimator": "tail", **KL},
    "plain sampled": {"loss": "reinforce", "centering": "sampled"},
    "truncated tail": {**TRUNCATED, "centering": "tail"},
    "truncated sampled": {**TRUNCATED, "centering": "sampled", "kl_estimator": "token", **KL},
}  # fmt: skip


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what the launcher allocates, so that an element which the kernel did not write shows."""

    def poisoned(allocate: Any) -> Any:
        def fill(*args: Any, **kwargs: Any) -> Tensor:
            tensor: Tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else 77)

        return fill

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def mixed_batch(seed: int) -> dict[str, Any]:
    """Return 24 rows of every kind of support, then one of each hazard."""
    names = [*HAZARDS, *UNREAD]
    num_rows = 24 + len(names)
    values, _ = random_batch(seed, num_rows, torch.float32)
    kind = torch.arange(num_rows) % 4
    values["support_is_samples"] = kind == 1
    values["support_valid"] = kind != 2
    generator = torch.Generator().manual_seed(seed)
    tails = 0.3 * torch.rand(2, num_rows, generator=generator)
    tails[0, 4:8], tails[1, 8:12] = 1e-9, 0.0  # below the floor
    values["sampler_tail_mass"] = torch.where(kind == 3, tails[0], 0.0)
    values["trainer_tail_mass"] = torch.where(kind == 3, tails[1], 0.0)
    values["trainer_is_normalised"] = torch.arange(num_rows) % 13 != 5
    values["loss_weights"] = torch.rand(num_rows, generator=generator) + 0.5
    for i, name in enumerate(names):
        plant(values, 24 + i, name)
    values["loss_mask"][24:] = torch.arange(len(names)) % 5 != 4
    values["trainer_logprobs"][:2] += 1.5  # a ratio beyond the caps, a log p above 0
    return values


def both(
    values: dict[str, Any], settings: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Any, Tensor, Tensor]]:
    """Return outputs and gradients of plain torch on the CPU, and of the kernel."""
    config = LossConfig(**settings, check_values=False)
    calls: list[int] = []

    class Counted:
        def __getitem__(self, grid: tuple[int]) -> Any:
            calls.append(grid[0])
            return policy_rows_kernel[grid]

    monkeypatch.setattr("rollout.kernels.policy_rows.policy_rows_kernel", Counted())
    want = run(values, config)
    assert not calls
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    got = run(moved, config)
    assert len(calls) == bool(len(values["loss_mask"]))
    return [want, got]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(SETTINGS))
def test_the_kernel_equals_plain_torch(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, got = both(mixed_batch(3), SETTINGS[name], device, monkeypatch)
    torch.testing.assert_close(got[0].loss.cpu(), want[0].loss, rtol=2e-5, atol=2e-6)
    assert torch.isfinite(want[0].loss)
    for ours, exact in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(ours.cpu(), exact, rtol=2e-5, atol=1e-6)
        # what is 0 by selection is so exactly
        assert torch.equal(ours.cpu() == 0, exact == 0)
    for field in type(want[0].metrics).__slots__:
        ours, exact = getattr(got[0].metrics, field), getattr(want[0].metrics, field)
        assert ours.dtype == exact.dtype
        torch.testing.assert_close(
            ours.cpu(), exact, rtol=2e-5, atol=2e-6, equal_nan=True, msg=f"{field}: {ours} {exact}"
        )
    assert int(want[0].metrics.num_nonfinite) > 5
    assert int(want[0].metrics.num_tokens) < len(want[1])


@pytest.mark.parametrize("device", DEVICES)
def test_wide_supports_and_half_precision(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    widths = [1, 3000, 0, 2, 700, 1]
    rows = [torch.tensor(rng.normal(size=(2, n))).log_softmax(-1).float() for n in widths]
    joined = torch.cat(rows, 1)
    values = {
        "trainer_logprobs": torch.tensor([0.0, -8.0, -1.0, -0.5, -6.0, 0.0]),
        "sampler_logprobs": torch.tensor([0.0, -8.1, -1.0, -0.7, -6.1, 0.0]),
        "advantages": torch.tensor(rng.normal(size=6)).float(),
        "loss_mask": torch.ones(6, dtype=torch.bool),
        "temperature": torch.ones(6),
        "support_offsets": torch.tensor([0, *widths]).cumsum(0),
        "trainer_support_logprobs": joined[0].bfloat16(),
        "sampler_support_logprobs": joined[1],
        "support_valid": torch.ones(6, dtype=torch.bool),
        "support_is_samples": torch.zeros(6, dtype=torch.bool),
        "sampler_tail_mass": torch.zeros(6),
        "global_denominator": torch.tensor(6.0, dtype=torch.float64),
    }
    want, got = both(values, SETTINGS["icepop exact"], device, monkeypatch)
    assert got[2].dtype == torch.bfloat16
    assert got[0].loss.dtype == torch.float32
    torch.testing.assert_close(got[0].loss.cpu(), want[0].loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[2].cpu(), want[2])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_free_of_waits_on_cuda() -> None:
    values = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in mixed_batch(6).items()}
    config = LossConfig(**SETTINGS["icepop tail"], check_values=False)
    run(values, config)
    torch.cuda.set_sync_debug_mode("error")
    run(values, config)
    torch.cuda.set_sync_debug_mode("default")


def test_misaligned_data_is_refused_before_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    values, _ = random_batch(9, dtype=torch.float32)
    values["target_ids"][5], values["loss_mask"][5] = 41, True
    with pytest.raises(ValueError, match="token 5: sampled id 41 stands 0 times in its support"):
        run(values, LossConfig(loss="icepop", centering="exact"))


def test_no_rows_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    want, got = both(take(mixed_batch(5), []), SETTINGS["icepop exact"], "cpu", monkeypatch)
    assert float(got[0].loss) == float(want[0].loss) == 0.0


@triton.jit
def _expm1_kernel(x_ptr, result_ptr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, 64)
    tl.store(result_ptr + place, expm1(tl.load(x_ptr + place)))


@pytest.mark.parametrize("device", DEVICES)
def test_small_exponents_do_not_cancel(device: str) -> None:
    x = torch.cat([torch.logspace(-9, 1, 32), -torch.logspace(-9, 1, 32)])
    result = torch.empty(64, device=device)
    _expm1_kernel[(1,)](x.to(device), result)
    torch.testing.assert_close(result.double().cpu(), x.double().expm1(), rtol=3e-7, atol=0)
