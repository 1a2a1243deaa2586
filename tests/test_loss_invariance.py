"""What a loss must not depend on: order, padding, micro-batches, weights of one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import LOSSES, everything, random_batch, run, take

from rollout.losses import LossMetrics


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
