"""The batches of the bench of the output heads: supports of some widths, ids of Zipf's law."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollout.head import HeadPlan, head_logprobs, plan_head

TOKENS = 16_384
VOCAB = 151_936
MAX_SUPPORT = 100_000
SEED = 20260101

# N tokens, E entries of all tokens, V vocabulary, H hidden size, K widest support


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One workload: how wide the supports are, over ids of Zipf's law."""

    name: str
    mean: int  # ids of a support
    single_share: float  # of the tokens, with one id; 0 makes all supports as wide as the mean
    spread: float  # standard deviation of the log of the other widths
    goal_ms: float | None  # with replay and exact centering at H 2048, on one H200


CASES = (
    Case(name="K 128", mean=128, single_share=0.0, spread=0.0, goal_ms=4.0),
    Case(name="realistic", mean=8, single_share=0.45, spread=1.35, goal_ms=1.0),
    Case(name="mean 174", mean=174, single_share=0.45, spread=2.0, goal_ms=6.0),
    Case(name="mean 4000", mean=4000, single_share=0.45, spread=2.5, goal_ms=None),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The tokens of a case on the device; all supports exact, temperature 1."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    ids: Tensor  # [E] int32
    offsets: Tensor  # [N + 1] int64
    chosen: Tensor  # [N] int64, the entry of each target
    targets: Tensor  # [N] int64
    sampler_logprobs: Tensor  # [E] fp32, log q
    advantages: Tensor  # [N] fp32
    plan: HeadPlan


def widths(case: Case, generator: torch.Generator) -> Tensor:
    """Return [N] int64 widths of supports with the case's mean."""
    if not case.single_share:
        return torch.full((TOKENS,), case.mean, device="cuda")
    single = torch.rand(TOKENS, generator=generator, device="cuda") < case.single_share
    shape = (torch.randn(TOKENS, generator=generator, device="cuda") * case.spread).exp()
    low, high = 1e-3, 1e6
    for _ in range(60):
        scale = math.sqrt(low * high)
        wide = (shape * scale).round().clamp(2, MAX_SUPPORT)
        result = torch.where(single, 1.0, wide)
        low, high = (scale, high) if float(result.mean()) < case.mean else (low, scale)
    return result.long()


def zipf_ids(lengths: Tensor, offsets: Tensor, generator: torch.Generator) -> Tensor:
    """Return [E] int32 ids, distinct within a token, of probability 1 / rank (Gumbel top k)."""
    names = torch.randperm(VOCAB, generator=generator, device="cuda").int()
    logprobs = -torch.arange(1, VOCAB + 1, device="cuda").log()
    ids = torch.empty(int(lengths.sum()), dtype=torch.int32, device="cuda")
    by_length = lengths.argsort(descending=True)
    for rows in torch.split(by_length, 512):
        widest = int(lengths[rows[0]])
        noise = torch.empty(len(rows), VOCAB, device="cuda").exponential_(generator=generator)
        ranks = (logprobs - noise.log()).topk(widest).indices
        place = torch.arange(widest, device="cuda")
        inside = place < lengths[rows, None]
        ids[(offsets[rows, None] + place)[inside]] = names[ranks][inside]
    return ids


def make_batch(case: Case, width: int) -> Batch:
    """Build a case's tokens; the sampler is the trainer with some noise."""
    generator = torch.Generator("cuda").manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    lengths = widths(case, generator)
    offsets = torch.zeros(TOKENS + 1, dtype=torch.int64, device="cuda")
    offsets[1:] = lengths.cumsum(0)
    ids = zipf_ids(lengths, offsets, generator)
    pick = (torch.rand(TOKENS, generator=generator, device="cuda") * lengths).long()
    chosen = offsets[:-1] + torch.minimum(pick, lengths - 1)
    batch = Batch(
        hidden=normal(TOKENS, width).bfloat16().requires_grad_(),
        weight=(normal(VOCAB, width) / math.sqrt(width)).bfloat16().requires_grad_(),
        ids=ids,
        offsets=offsets,
        chosen=chosen,
        targets=ids[chosen].long(),
        sampler_logprobs=torch.empty(0),
        advantages=normal(TOKENS),
        plan=make_plan(offsets),
    )
    with torch.no_grad():
        trainer = our_logprobs(batch)[1]
    noise = 0.1 * normal(ids.shape[0]) * (trainer < 0)
    return replace(batch, sampler_logprobs=(trainer + noise).clamp(max=0.0))


def make_plan(offsets: Tensor) -> HeadPlan:
    """Plan exact supports with these offsets, as a loader does on the CPU."""
    num_rows = offsets.shape[0] - 1
    return plan_head(
        support_offsets=offsets.cpu(),
        support_valid=torch.ones(num_rows, dtype=torch.bool),
        support_is_samples=torch.zeros(num_rows, dtype=torch.bool),
        sampler_tail_mass=torch.zeros(num_rows),
        vocab_size=VOCAB,
        weight_dtype=torch.bfloat16,
    ).to(offsets.device)


def our_logprobs(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return our target and support log-probabilities."""
    out = head_logprobs(
        batch.hidden,
        batch.weight,
        batch.ids,
        batch.offsets,
        batch.targets,
        torch.ones_like(batch.advantages),
        batch.plan,
    )
    return out.target_logprobs, out.support_logprobs
