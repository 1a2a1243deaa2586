"""A trainer with the sampler's weights sees ratio one for every replayed token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from loader_cases import (
    open_loader,
    write,
)
from synthetic import make_row
from torch import Tensor

from rollout.kernels.support_head import support_logprobs
from rollout.losses import LossConfig, LossMetrics, compute_loss
from rollout.rows import RolloutRow
from rollout.schema.entries import pack_entries


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "run [1] ü")
        return
    yield f"memory://{request.node.name}"
    fsspec.filesystem("memory").store.clear()


class TinyModel(torch.nn.Module):
    """Position-wise, so that a sampler can be written as a loop; 32 ids, 16 wide."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        weights = torch.randn(128, 16, generator=torch.Generator().manual_seed(5)).to(dtype)
        self.embedding = torch.nn.Parameter(weights[:32])
        self.position = torch.nn.Parameter(weights[32:96])
        self.head = torch.nn.Parameter(weights[96:])

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return hidden states [L, 16]."""
        return torch.tanh(self.embedding[ids] + self.position[positions])


def sample_rollout(model: TinyModel, rng: np.random.Generator, key: str, i: int) -> RolloutRow:
    """Sample top-p 0.8 at temperature 0.7, each third rollout greedily, by plain numpy."""
    temperature = 0.0 if i % 3 == 2 else 0.7
    ids = rng.integers(0, 32, 1 + i).tolist()
    prompt_len, entries, offsets, sampled = len(ids), [], [0], []
    for _ in range(3 + i):
        with torch.no_grad():
            hidden = model(torch.tensor([ids[-1]]), torch.tensor([len(ids) - 1]))
            logits = (hidden @ model.head.T)[0].double().numpy() / (temperature or 1.0)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        order = np.argsort(-p)
        count = 1 if temperature == 0.0 else 1 + int((np.cumsum(p[order]) < 0.8).sum())
        kept = order[:count]
        q = p[kept] / p[kept].sum()
        logprobs = np.minimum(np.log(q), 0).astype(np.float32)
        pick = int(rng.choice(count, p=q))
        ids.append(int(kept[pick]))
        sampled.append(logprobs[pick])
        entries.append(pack_entries(kept, logprobs))
        offsets.append(offsets[-1] + count)
    return make_row(
        key, i, temperature=temperature, reward=float(rng.integers(2)),
        prompt_token_ids=np.array(ids[:prompt_len], np.int32),
        token_ids=np.array(ids[prompt_len:], np.int32),
        sampled_logprobs=np.array(sampled, np.float32),
        support_offsets=np.array(offsets, np.int64), support_entries=np.concatenate(entries),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_u01_unchanged_weights_replay_with_ratio_one(url: str, dtype: torch.dtype) -> None:
    model, rng = TinyModel(dtype), np.random.default_rng(0)
    rows = [sample_rollout(model, rng, f"p{g}", i) for g in range(6) for i in range(4)]
    write(url, [rows])
    settings = LossConfig(loss="icepop", centering="exact", kl_q_p=0.1, kl_p_q=0.1)
    parts = []
    full_ratio, kept = [], []
    for batch in open_loader(url, vocab_size=32, groups_per_step=6):
        hidden = model(batch.input_ids, batch.position_ids)[batch.hidden_index]
        targets, supports = support_logprobs(
            hidden, model.head, batch.support_ids, batch.support_offsets,
            batch.target_ids, batch.inverse_temperature,
        )  # fmt: skip
        outputs = compute_loss(batch.loss_inputs(targets, supports), settings)
        torch.autograd.backward(outputs.loss)
        parts.append(outputs.metrics)
        # the dense, unreplayed ratio is the kept mass, token by token
        logits = (hidden.detach() @ model.head.detach().T).double()
        dense = (logits * batch.inverse_temperature[:, None]).log_softmax(-1)
        chosen = dense.gather(1, batch.target_ids[:, None])[:, 0]
        full_ratio.append((chosen - batch.sampler_logprobs).exp())
        entry_row = torch.repeat_interleave(batch.support_offsets.diff())
        mass = dense[entry_row, batch.support_ids.long()].exp()
        kept.append(torch.zeros(batch.num_scored).double().index_add(0, entry_row, mass))
    assert len(parts) > 2
    merged = LossMetrics.merge(parts)
    torch.testing.assert_close(
        merged.log_ratio, torch.zeros_like(merged.log_ratio), rtol=0, atol=3e-6
    )
    summary = merged.summary()
    assert summary["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert summary["masked_share"] == 0.0
    assert summary["nonfinite"] == summary["unsupported"] == 0.0
    assert summary["kl_q_p"] == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(torch.cat(full_ratio), torch.cat(kept), rtol=3e-6, atol=0)
    assert float(torch.cat(kept).mean()) < 0.95
    # on policy the centering vanishes, so what is left is the plain policy gradient
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()
    assert model.head.grad is not None
    assert float(model.head.grad.abs().max()) > 1e-3
