"""Give one rank of a sequence-parallel group its stretch of a packed batch.

Labels and supports are tied to hidden states by `hidden_index`, not by position, so a cut through
a rollout shifts nothing: the rank that holds the state which predicts a token scores that token.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rollout.batch import RolloutBatch


def sequence_shard(
    batch: RolloutBatch, rank: int, size: int, pad_token_id: int = 0
) -> RolloutBatch:
    """Return a rank's equal stretch of the packed tokens, and the tokens scored there.

    Losses of all ranks sum to the loss of the whole batch: the denominator stays the global one.

    Args:
        batch: a packed batch.
        rank: in the sequence-parallel group.
        size: ranks of the group.
        pad_token_id: fills the last stretch up to the others' length.

    Returns:
        The batch with `input_ids`, `position_ids` and everything about scored tokens cut;
        `cu_seqlens` and `max_seqlen` stay those of the whole sequence, as attention over all
        ranks needs them.

    Raises:
        ValueError: the rank is not below the size.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}, expected 0 to below the size {size}")
    length = -(-batch.num_tokens // size)
    start, stop = rank * length, (rank + 1) * length

    def stretch(values: Tensor, pad: int) -> Tensor:
        own = values[start:stop]
        return torch.cat([own, own.new_full((length - own.shape[0],), pad)])

    # scored tokens come in the order of their hidden states
    bounds = torch.searchsorted(
        batch.hidden_index, torch.tensor([start, stop], device=batch.hidden_index.device)
    )
    first, last = bounds.tolist()
    rows = slice(first, last)
    entries = slice(*batch.support_offsets[[first, last]].tolist())
    return dataclasses.replace(
        batch,
        input_ids=stretch(batch.input_ids, pad_token_id),
        position_ids=stretch(batch.position_ids, 0),
        hidden_index=batch.hidden_index[rows] - start,
        target_ids=batch.target_ids[rows],
        sampler_logprobs=batch.sampler_logprobs[rows],
        advantages=batch.advantages[rows],
        loss_mask=batch.loss_mask[rows],
        temperature=batch.temperature[rows],
        support_offsets=batch.support_offsets[first : last + 1] - batch.support_offsets[first],
        support_ids=batch.support_ids[entries],
        sampler_support_logprobs=batch.sampler_support_logprobs[entries],
        support_valid=batch.support_valid[rows],
        support_is_samples=batch.support_is_samples[rows],
        sampler_tail_mass=batch.sampler_tail_mass[rows],
        rollout_index=batch.rollout_index[rows],
    )
