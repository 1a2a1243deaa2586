"""A batch of weight zero, for a rank that has nothing to train on while others do."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from rollout.batch import RolloutBatch, pack_rollouts
from rollout.rows import RolloutRow


def blank_batch(**fields: Any) -> RolloutBatch:
    """Return a batch of weight zero: two tokens whose one scored token is masked.

    A rank gets it where others still have rollouts to train on, so that all of them call the model
    equally often. It adds nothing to loss or gradient.

    Args:
        fields: of `pack_rollouts`, such as `global_denominator` and `step`.

    Returns:
        The batch; its `loss_mask` is False and `rollout_ids` is empty.
    """
    row = RolloutRow(
        prompt_key="",
        rollout_id="",
        group_id="",
        prompt_id="",
        sample_index=0,
        group_size=1,
        prompt_token_ids=np.zeros(1, np.int32),
        token_ids=np.zeros(1, np.int32),
        sampled_logprobs=np.zeros(1, np.float32),
        temperature=1.0,
        support_kind="kept",
        support_offsets=np.array([0, 1], np.int64),
        support_entries=np.zeros(1, np.uint64),
    )
    batch = pack_rollouts([row], [0.0], **fields)
    return dataclasses.replace(
        batch, loss_mask=torch.zeros(1, dtype=torch.bool), rollout_ids=(), columns={}
    )
