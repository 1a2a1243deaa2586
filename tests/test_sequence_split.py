"""A packed sequence over two ranks: every scored token on the rank that predicts it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_batch import HAND, u22_batch, u22_loss
from torch import Tensor

from rollout.batch import RolloutBatch
from rollout.sequence_split import slice_tokens


@pytest.mark.parametrize("cut", range(20))
def test_u22_two_slices_add_up_to_the_hand_value(cut: int) -> None:
    # every cut: within a prompt, between a state and the token that it predicts, between rollouts
    batch = u22_batch()
    total, scored = 0.0, 0
    for start, end in ((0, cut), (cut, 19)):
        part = slice_tokens(batch, start, end)
        loss = u22_loss(part, batch.position_ids[start:end], part.hidden_index)
        total, scored = total + float(loss), scored + part.num_scored
    assert scored == 8
    assert total == pytest.approx(sum(HAND) / 8, abs=1e-6)


@pytest.mark.parametrize("shift", [-1, 1])
def test_u22_a_second_shift_changes_the_loss(shift: int) -> None:
    batch = u22_batch()
    part = slice_tokens(batch, 10, 19)
    assert part.num_scored == 5
    positions = batch.position_ids[10:19]
    right = u22_loss(part, positions, part.hidden_index)
    moved = u22_loss(part, positions, part.hidden_index + shift)
    assert abs(float(moved) - float(right)) > 1e-3


def test_every_field_of_a_token_goes_with_it() -> None:
    batch = dataclasses.replace(
        u22_batch(),
        advantages=torch.arange(8.0),
        loss_mask=torch.arange(8) % 2 == 0,
        support_offsets=torch.tensor([0, 2, 4, 5, 8, 10, 11, 14, 16]),
    )
    # the states at 9 to 14 predict the tokens 2, 3 and 4
    part = slice_tokens(batch, 9, 15)
    assert part.hidden_index.tolist() == [0, 4, 5]
    assert part.support_offsets.tolist() == [0, 1, 4, 6]
    assert torch.equal(part.support_ids, batch.support_ids[4:10])
    assert torch.equal(part.sampler_support_logprobs, batch.sampler_support_logprobs[4:10])
    for field in dataclasses.fields(RolloutBatch):
        whole, own = getattr(batch, field.name), getattr(part, field.name)
        if not isinstance(whole, Tensor):
            assert own == whole
        elif len(whole) == 8 and field.name != "hidden_index":
            assert torch.equal(own, whole[2:5]), field.name
        elif field.name in ("input_ids", "position_ids", "cu_seqlens"):
            assert torch.equal(own, whole), field.name


def test_a_slice_beyond_the_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="slice 10:20 of a packed sequence of 19 tokens"):
        slice_tokens(u22_batch(), 10, 20)
