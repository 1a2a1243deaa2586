"""Rollouts sampled by hand from a tiny model, and what a training step over them comes to.

Everything is written out in float64 over dense logits and a mask; nothing of the package is used
but the row that the dataset takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from synthetic import make_row
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout.rows import RolloutRow
from rollout.schema.entries import pack_entries

VOCAB, TEMPERATURE, TOP_P = 48, 0.8, 0.9
PROMPTS, SAMPLES = 5, 4


def make_model(folder: Path, **settings: Any) -> Any:
    """Write a tiny causal LM and return it in float64."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        **settings,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(0.0, 0.4)
        model.model.embed_tokens.weight.normal_(0.0, 0.5)
    model.save_pretrained(folder)
    return model.double().eval()


def masked_logprobs(logits: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Normalise over the kept ids."""
    return logits.masked_fill(~kept, -torch.inf).log_softmax(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One rollout with what its sampler kept."""

    row: RolloutRow
    kept: torch.Tensor
    """[T, V] bool."""


def sample(model: Any, prompt: str, index: int, seed: int) -> Sampled:
    """Nucleus sampling written out: the smallest set of most probable ids that reaches top_p."""
    generator = torch.Generator().manual_seed(seed)
    prompt_ids = torch.randint(VOCAB, (3 + seed % 4,), generator=generator).tolist()
    ids = list(prompt_ids)
    kept_rows, entries, chosen = [], [], []
    for _ in range(2 + seed % 7):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1] / TEMPERATURE
        order = logits.argsort(descending=True)
        before = logits.softmax(-1)[order].cumsum(-1) - logits.softmax(-1)[order]
        kept = torch.zeros(VOCAB, dtype=torch.bool)
        kept[order[before < TOP_P]] = True
        log_q = masked_logprobs(logits, kept)
        token = int(torch.multinomial(log_q.exp(), 1, generator=generator))
        support = kept.nonzero().squeeze(1)
        entries.append(pack_entries(support.numpy(), log_q[support].float().clamp(max=0).numpy()))
        chosen.append(float(log_q[token].float().clamp(max=0)))
        kept_rows.append(kept)
        ids.append(token)
    row = make_row(
        prompt,
        index,
        group_size=SAMPLES,
        prompt_token_ids=np.array(prompt_ids, np.int32),
        token_ids=np.array(ids[len(prompt_ids) :], np.int32),
        sampled_logprobs=np.array(chosen, np.float32),
        temperature=TEMPERATURE,
        support_offsets=np.cumsum([0, *(len(part) for part in entries)], dtype=np.int64),
        support_entries=np.concatenate(entries),
        reward=float(torch.rand((), generator=generator)),
    )
    return Sampled(row=row, kept=torch.stack(kept_rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """One line of the table, in float64."""

    loss: torch.Tensor
    ratio: float
    k3: float
    dense_ratio: float


def expected_line(model: Any, rollouts: list[Sampled], model_q: Any) -> Expected:
    """Icepop with centering from the formula, q from the weights that sampled."""
    means: dict[str, float] = {}
    for key in {item.row.prompt_key for item in rollouts}:
        group = [np.float32(i.row.reward) for i in rollouts if i.row.prompt_key == key]
        means[key] = float(np.mean(np.array(group, np.float64)))
    tokens = sum(item.row.token_ids.size for item in rollouts)
    loss = torch.zeros((), dtype=torch.float64)
    ratios, dense = [], []
    for item in rollouts:
        row = item.row
        ids = torch.tensor([*row.prompt_token_ids.tolist(), *row.token_ids.tolist()])
        first = row.prompt_token_ids.size - 1
        logits = model(ids[None]).logits[0, first:-1] / TEMPERATURE
        with torch.no_grad():
            log_q = masked_logprobs(model_q(ids[None]).logits[0, first:-1] / TEMPERATURE, item.kept)
        log_p = masked_logprobs(logits, item.kept)
        targets = ids[first + 1 :, None]
        ratio = (log_p - log_q).gather(1, targets).squeeze(1).exp()
        advantage = float(np.float32(row.reward)) - means[row.prompt_key]
        keep = (ratio.detach() >= 0.2) & (ratio.detach() <= 5.0)
        candidates = (log_p.detach() - log_q).exp()
        band = item.kept & (candidates >= 0.2) & (candidates <= 5.0)
        weight = torch.where(band, log_p.detach().exp(), 0.0)
        centering = (weight * torch.where(item.kept, log_p, 0.0)).sum(-1)
        loss = loss + advantage * (centering - torch.where(keep, ratio, 0.0)).sum() / tokens
        ratios.append(ratio.detach())
        full = logits.detach().log_softmax(-1).gather(1, targets).squeeze(1)
        dense.append((full - log_q.gather(1, targets).squeeze(1)).exp())
    r = torch.cat(ratios)
    return Expected(
        loss=loss,
        ratio=r.mean().item(),
        k3=(r - 1 - r.log()).mean().item(),
        dense_ratio=torch.cat(dense).mean().item(),
    )
