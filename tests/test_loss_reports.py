"""What people reported, on the loss's side: from hidden states through the head to the loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import make_inputs
from synthetic import make_row
from torch import Tensor

from rollout.batch import RolloutBatch, pack_rollouts
from rollout.head import plan_batch, score_batch
from rollout.kernels.support_head import support_logprobs
from rollout.losses import LossConfig, LossOutputs, compute_loss
from rollout.schema.entries import pack_entries

V, H, T = 40, 8, 600


def kept_ids(p: Tensor, sampling: dict[str, float]) -> Tensor:
    """Return the ids that top_p or min_p keeps of probabilities [V]; all of them without either."""
    if "top_p" in sampling:
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        return order[before < sampling["top_p"]]
    return (p >= sampling.get("min_p", 0.0) * p.max()).nonzero().squeeze(1)


def sample_batch(
    hidden: Tensor, weight: Tensor, sampling: dict[str, float], temperature: float
) -> RolloutBatch:
    """Sample T tokens from float64 logits and record them as the dataset would."""
    generator = torch.Generator().manual_seed(1)
    tokens, sampled, entries, counts, tails = [], [], [], [], []
    for state in hidden.double():
        p = (weight.double() @ state / temperature).softmax(0)
        kept = kept_ids(p, sampling)
        q = p[kept] / p[kept].sum()
        pick = int(torch.multinomial(q, 1, generator=generator))
        listed = q.argsort(descending=True)[: len(kept) if sampling else 5]
        tokens.append(int(kept[pick]))
        sampled.append(float(q[pick].log().float().clamp(max=0)))
        log_q = q[listed].log().float().clamp(max=0)
        entries.append(pack_entries(kept[listed].numpy(), log_q.numpy()))
        counts.append(len(listed))
        tails.append(0.0 if sampling else float(1 - q[listed].sum()))
    row = make_row(
        prompt_token_ids=np.array([1], np.int32),
        token_ids=np.array(tokens, np.int32),
        sampled_logprobs=np.array(sampled, np.float32),
        temperature=temperature,
        support_kind="kept" if sampling else "top",
        support_offsets=np.cumsum([0, *counts], dtype=np.int64),
        support_entries=np.concatenate(entries),
        tail_mass=None if sampling else np.array(tails, np.float32),
    )
    return pack_rollouts([row], [1.0])


def replayed(
    hidden: Tensor, weight: Tensor, batch: RolloutBatch, config: LossConfig
) -> LossOutputs:
    plan = plan_batch(batch, config, vocab_size=weight.shape[0], weight_dtype=weight.dtype)
    return compute_loss(score_batch(hidden, weight, batch, plan), config)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "sampling", [{}, {"top_p": 0.8}, {"min_p": 0.1}], ids=["untruncated", "top_p", "min_p"]
)
def test_u01_on_policy_ratios_are_one_over_the_replayed_support(
    sampling: dict[str, float], temperature: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator)
    weight = torch.randn(V, H, generator=generator) * 0.7
    batch = sample_batch(hidden, weight, sampling, temperature)
    config = LossConfig(loss="icepop", centering="exact" if sampling else "tail")
    outputs = replayed(hidden, weight, batch, config)
    summary = outputs.metrics.summary()
    assert summary["tokens"] == T
    assert summary["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert summary["ratio_p01"] == pytest.approx(summary["ratio_p99"], abs=1e-4)
    assert abs(summary["k3"]) < 1e-6
    assert summary["masked_share"] == 0.0

    # without replay: a full log-softmax, as a trainer that knows of no support takes it
    log_p = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    bare = (log_p.gather(1, batch.target_ids[:, None])[:, 0] - batch.sampler_logprobs).exp()
    rows = torch.repeat_interleave(batch.support_offsets.diff())
    kept = torch.zeros(T, dtype=torch.float64)
    kept.index_add_(0, rows, log_p[rows, batch.support_ids.long()].exp())
    if not sampling:
        kept += batch.sampler_tail_mass
    torch.testing.assert_close(bare, kept, rtol=1e-4, atol=0)
    assert float(kept.mean()) < 0.97 if sampling else float(kept.min()) > 0.9999


@pytest.mark.parametrize("loss", ["ipo", "icepop", "reinforce"])
def test_u04_a_row_of_garbage_logits_is_counted_and_not_neutralised(loss: Any) -> None:
    # what a trainer's log-softmax makes of broken logits; -inf off the support is no fault
    broken = [
        [math.nan] * 4,
        [0.0, math.inf, 0.0, 0.0],
        [-math.inf] * 4,
        [0.5, 1.0, -0.5, -math.inf],
    ]
    q = [0.5, 0.3, 0.2, 0.0]
    good = torch.tensor([0.2, 0.1, -0.3, 0.0]).requires_grad_()
    config = LossConfig(loss=loss, centering="exact", kl_q_p=0.1, kl_p_q=0.1)
    alone = compute_loss(make_inputs(good, q, [0], support=[0, 1, 2]), config)
    (want,) = torch.autograd.grad(alone.loss, good)
    for logits, num_bad in zip(broken, [1, 1, 1, 0], strict=True):
        bad = torch.tensor(logits, requires_grad=True)
        rows = [
            make_inputs(values, q, [0], support=[0, 1, 2], trainer_tail_mass=None)
            for values in (good, bad)
        ]
        names = ("trainer_logprobs", "trainer_support_logprobs")
        joined: dict[str, Any] = {
            name: torch.cat([getattr(row, name) for row in rows]) for name in names
        }
        both = make_inputs(good, q, [0, 0], support=[0, 1, 2], trainer_tail_mass=None, **joined)
        outputs = compute_loss(both, config)
        assert int(outputs.metrics.num_nonfinite) == num_bad
        assert outputs.metrics.summary()["tokens"] == 2
        if num_bad:
            torch.testing.assert_close(outputs.loss, alone.loss)
            assert int((~outputs.metrics.log_ratio.isnan()).sum()) == 1
            (got,) = torch.autograd.grad(outputs.loss, good)
            torch.testing.assert_close(got, want)


def test_u05_ids_beyond_the_tokenizer_are_scored_and_beyond_the_weight_refused() -> None:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(6, H, generator=generator)
    padded = torch.randn(520, H + 3, generator=generator)
    weight = padded[:, :H]  # a view whose row stride is not H
    ids = torch.tensor([3, 499, 500, 519, 7, 510] * 2, dtype=torch.int32)
    offsets = torch.arange(0, 13, 2)
    scale = torch.full((6,), 1 / 1.5)
    supports = ids.view(6, 2)
    targets = supports[:, 1].long()
    got = support_logprobs(hidden, weight, ids, offsets, targets, scale)[1]
    logits = (hidden.double() @ padded.double()[:, :H].T)[torch.arange(6)[:, None], supports.long()]
    want = (logits / 1.5).log_softmax(-1).view(-1)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    copied = support_logprobs(hidden, weight.contiguous(), ids, offsets, targets, scale)[1]
    assert torch.equal(got, copied)
    # a trainer whose weight ends with the tokenizer
    with pytest.raises(
        ValueError, match=r"support_ids span \[3, 519\], expected ids in \[0, 500\)"
    ):
        support_logprobs(hidden, weight[:500], ids, offsets, targets, scale)


def test_u08_a_bf16_head_gives_fp32_logprobs_and_leaves_the_tied_weight_alone() -> None:
    generator = torch.Generator().manual_seed(8)
    # logits between 16 and 32, where bf16 knows steps of 0.125
    weight = torch.randn(V, 64, generator=generator) * 0.1
    hidden = torch.randn(T, 64, generator=generator)
    weight[:, 0], hidden[:, 0] = 1.0, 24.0
    embedding = torch.nn.Embedding(V, 64, _weight=weight.bfloat16())
    before = embedding.weight.detach().clone()
    hidden = hidden.bfloat16()
    batch = sample_batch(hidden, before, {"top_p": 0.9}, 1.0)
    config = LossConfig(loss="icepop", centering="exact")
    outputs = replayed(hidden, embedding.weight, batch, config)
    gap = outputs.metrics.log_ratio.abs().max()
    assert float(gap) < 2e-5
    # the same head as a product in bf16, then a log-softmax in fp32
    rows = torch.repeat_interleave(batch.support_offsets.diff())
    kept = torch.full((T, V), -torch.inf)
    logits = (hidden @ before.T).float()
    kept[rows, batch.support_ids.long()] = logits[rows, batch.support_ids.long()]
    rough = kept.log_softmax(-1).gather(1, batch.target_ids[:, None])[:, 0]
    assert float((rough - batch.sampler_logprobs).abs().max()) > 500 * float(gap)
    # nothing was cast in place: the input embedding shares this memory
    torch.autograd.backward(outputs.loss)
    assert embedding.weight.dtype == torch.bfloat16
    assert torch.equal(embedding.weight.detach(), before)
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.dtype == torch.bfloat16
    # a head of another dtype than the body is not cast silently
    with pytest.raises(ValueError, match=r"hidden is torch.bfloat16 and weight torch.float32"):
        replayed(hidden, before.float(), batch, config)
