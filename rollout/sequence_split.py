"""The scored tokens of one rank when a packed sequence is split over several.

A token is scored where the hidden state is that predicts it, one position before its own, which may
be the last of another rank's slice. `hidden_index` says where, so a slice takes the tokens whose
index lies in it, and nothing is shifted a second time.
"""

from __future__ import annotations

import dataclasses

import torch

from rollout.batch import RolloutBatch

# N scored tokens, M of one slice, E support entries


def slice_tokens(batch: RolloutBatch, start: int, end: int) -> RolloutBatch:
    """Return a batch with only the tokens that the hidden states start:end predict.

    The losses of all slices add up to that of the batch: the denominator is the global one. How the
    model splits ids and positions is its own affair, so these stay whole.

    Args:
        batch: on the CPU, where the loader made it.
        start: first position of the slice in the packed sequence.
        end: position after its last.

    Returns:
        The batch with M scored tokens and their supports; `hidden_index` counts from `start`.

    Raises:
        ValueError: the slice is not one of the packed sequence.
    """
    if not 0 <= start <= end <= batch.num_tokens:
        raise ValueError(
            f"slice {start}:{end} of a packed sequence of {batch.num_tokens} tokens, expected "
            "0 <= start <= end <= its length"
        )
    inside = (batch.hidden_index >= start) & (batch.hidden_index < end)
    counts = batch.support_offsets.diff()
    of_entries = inside.repeat_interleave(counts)
    chosen = {
        name: getattr(batch, name)[inside]
        for name in (
            "target_ids",
            "sampler_logprobs",
            "advantages",
            "loss_mask",
            "temperature",
            "support_valid",
            "support_is_samples",
            "sampler_tail_mass",
            "rollout_index",
        )
    }
    return dataclasses.replace(
        batch,
        hidden_index=batch.hidden_index[inside] - start,
        support_offsets=torch.nn.functional.pad(counts[inside].cumsum(0), (1, 0)),
        support_ids=batch.support_ids[of_entries],
        sampler_support_logprobs=batch.sampler_support_logprobs[of_entries],
        **chosen,
    )
