"""Packing: every completion token meets the hidden state and the support that belong to it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import make_row
from torch import Tensor

from rollout.batch import RolloutBatch, pack_rollouts
from rollout.blank_batch import blank_batch
from rollout.kernels.support_head import support_logprobs
from rollout.losses import LossConfig, compute_loss
from rollout.rows import RolloutRow
from rollout.schema.entries import pack_entries, unpack_entries

VOCAB = 12
# prompt lengths 1, 7, 3 and completions of 1, 2 and 5 tokens; ids odd and even
COMPLETIONS = [[3], [4, 7], [9, 2, 6, 5, 8]]
PROMPTS = [1, 7, 3]
# logits[p, v] = 0.1 p (v % 2) over {token, token + 1}: log p = -log(1 + e^-0.1p) for an odd token,
# -log(1 + e^0.1p) for an even one, at p = prompt_len + t - 1 = 0; 6, 7; 2, 3, 4, 5, 6
HAND = [
    0.69314718,
    1.03748795,
    0.40318604,
    0.59813887,
    0.85435524,
    0.91301525,
    0.47407698,
    1.03748795,
]


def two_id_row(index: int) -> RolloutRow:
    tokens = np.array(COMPLETIONS[index], np.int32)
    ids = np.stack([tokens, tokens + 1], 1).reshape(-1)
    half = np.full(tokens.size, math.log(0.5), np.float32)
    return make_row(
        f"p{index}",
        prompt_token_ids=np.full(PROMPTS[index], 1, np.int32),
        token_ids=tokens,
        sampled_logprobs=half,
        support_offsets=2 * np.arange(tokens.size + 1, dtype=np.int64),
        support_entries=pack_entries(ids, np.repeat(half, 2)),
    )


def u22_batch() -> RolloutBatch:
    return pack_rollouts([two_id_row(i) for i in range(3)], [1.0, 1.0, 1.0])


def u22_loss(batch: RolloutBatch, positions: Tensor, hidden_index: Tensor) -> Tensor:
    """Score a batch with the fake model: hidden state 0.1 p, output weight v % 2."""
    hidden = 0.1 * positions.double()[:, None]
    weight = (torch.arange(VOCAB) % 2).double()[:, None]
    targets, supports = support_logprobs(
        hidden[hidden_index], weight, batch.support_ids, batch.support_offsets,
        batch.target_ids, batch.inverse_temperature,
    )  # fmt: skip
    return compute_loss(batch.loss_inputs(targets, supports), LossConfig(loss="reinforce")).loss


def test_u22_packed_loss_is_the_hand_value() -> None:
    batch = u22_batch()
    assert batch.num_scored == 8
    assert batch.global_denominator == 8.0
    assert batch.target_ids.tolist() == [3, 4, 7, 9, 2, 6, 5, 8]
    assert batch.cu_seqlens.tolist() == [0, 2, 11, 19]
    assert batch.hidden_index.tolist() == [0, 8, 9, 13, 14, 15, 16, 17]
    loss = u22_loss(batch, batch.position_ids, batch.hidden_index)
    assert float(loss) == pytest.approx(sum(HAND) / 8, abs=1e-6)
    assert float(loss) == pytest.approx(0.7513619, abs=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_u22_padded_loss_is_the_hand_value(side: Any) -> None:
    batch = u22_batch()
    padded = batch.padded(side, pad_token_id=11)
    rows = [[1] * n + c for n, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    pads = [[11] * (9 - len(row)) for row in rows]
    want = [p + r if side == "left" else r + p for p, r in zip(pads, rows, strict=True)]
    assert padded.input_ids.tolist() == want
    assert padded.attention_mask.sum(1).tolist() == [2, 9, 8]
    # positions as a model derives them from the mask; wild in the padding, where none may be read
    positions = (padded.attention_mask.cumsum(1) - 1) * padded.attention_mask
    assert torch.equal(positions, padded.position_ids)
    wild = torch.where(padded.attention_mask == 1, positions, 1000).view(-1)
    assert float(u22_loss(batch, wild, padded.hidden_index)) == pytest.approx(
        sum(HAND) / 8, abs=1e-6
    )


@pytest.mark.parametrize("layout", ["packed", "left", "right"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_u22_shifted_logits_change_the_loss(layout: Any, shift: int) -> None:
    batch = u22_batch()
    positions, index = batch.position_ids, batch.hidden_index
    if layout != "packed":
        padded = batch.padded(layout)
        positions, index = padded.position_ids.view(-1), padded.hidden_index
    moved = u22_loss(batch, positions, (index + shift).clamp(0, len(positions) - 1))
    assert abs(float(moved) - sum(HAND) / 8) > 1e-3


def test_a_side_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="side is 'longest', expected left or right"):
        u22_batch().padded("longest")  # type: ignore[arg-type]


@pytest.mark.parametrize("shift", [-1, 1])
def test_u22_shifted_labels_are_refused(shift: int) -> None:
    batch = u22_batch()
    moved = dataclasses.replace(batch, target_ids=batch.target_ids.roll(shift))
    with pytest.raises(ValueError, match="support"):
        u22_loss(moved, batch.position_ids, batch.hidden_index)
    # the loss refuses too when the head did not look
    inputs = moved.loss_inputs(torch.full((8,), -0.7), torch.full((16,), -0.7))
    with pytest.raises(ValueError, match="misaligned"):
        compute_loss(inputs, LossConfig(loss="reinforce"))


@pytest.mark.parametrize("shift", [-1, 1])
def test_u22_shifted_supports_are_refused(shift: int) -> None:
    batch = u22_batch()
    moved = dataclasses.replace(batch, support_ids=batch.support_ids.roll(2 * shift))
    with pytest.raises(ValueError, match="support"):
        u22_loss(moved, batch.position_ids, batch.hidden_index)


def rows_of_all_kinds() -> list[RolloutRow]:
    return [
        make_row("a", 0, lengths=[1, 4, 2], draws=2, seed=1, temperature=0.6),
        make_row("b", 1, lengths=[3, 5], kind="top", draws=3, seed=2),
        make_row("c", 2, lengths=[2, 2, 2], kind="none", draws=2, seed=3),
        make_row("d", 3, lengths=[2], kind="none", seed=4, temperature=0.0),
    ]


@pytest.mark.parametrize("untruncated", ["head", "draws"])
def test_every_field_against_a_loop_over_tokens(untruncated: Any) -> None:
    rows = rows_of_all_kinds()
    advantages = [0.5, -1.0, 2.0, 0.25]
    batch = pack_rollouts(rows, advantages, untruncated=untruncated, global_denominator=77.0)
    position, token = 0, 0
    for index, row in enumerate(rows):
        ids = [*row.prompt_token_ids.tolist(), *row.token_ids.tolist()]
        span = slice(position, position + len(ids))
        assert batch.input_ids[span].tolist() == ids
        assert batch.position_ids[span].tolist() == list(range(len(ids)))
        draws = row.support_kind == "none" or (row.support_kind == "top" and untruncated == "draws")
        for t in range(row.token_ids.size):
            assert batch.input_ids[batch.hidden_index[token] + 1] == row.token_ids[t]
            assert batch.target_ids[token] == row.token_ids[t]
            assert batch.sampler_logprobs[token] == row.sampled_logprobs[t]
            assert batch.advantages[token] == advantages[index]
            assert batch.temperature[token] == pytest.approx(row.temperature)
            assert batch.rollout_index[token] == index
            entries = np.empty(0, np.uint64)
            if draws and row.draw_entries is not None:
                entries = row.draw_entries.reshape(row.token_ids.size, -1)[t]
            elif row.support_entries is not None and row.support_offsets is not None:
                entries = row.support_entries[row.support_offsets[t] : row.support_offsets[t + 1]]
            start, end = batch.support_offsets[token : token + 2].tolist()
            want_ids, want_logprobs = unpack_entries(entries)
            assert batch.support_ids[start:end].tolist() == want_ids.tolist()
            assert batch.sampler_support_logprobs[start:end].tolist() == want_logprobs.tolist()
            assert bool(batch.support_valid[token]) == (index != 3)
            assert bool(batch.support_is_samples[token]) == (draws and index != 3)
            tail = 0.1 if row.support_kind == "top" and not draws else 0.0
            assert float(batch.sampler_tail_mass[token]) == pytest.approx(tail)
            token += 1
        position += len(ids)
    assert (position, token) == (batch.num_tokens, batch.num_scored)
    assert batch.support_offsets[-1] == batch.support_ids.shape[0]
    assert batch.loss_mask.all()
    assert batch.max_seqlen == 10
    assert batch.global_denominator == 77.0
    assert batch.rollout_ids == ("a.0", "b.1", "c.2", "d.3")
    assert batch.support_ids.dtype == torch.int32
    assert batch.cu_seqlens.dtype == torch.int32


def test_inverse_temperature_of_a_greedy_row_is_one() -> None:
    batch = pack_rollouts(rows_of_all_kinds(), [0.0] * 4)
    want = [1 / np.float32(0.6)] * 3 + [1.0] * 6
    assert batch.inverse_temperature.tolist() == pytest.approx(want, rel=1e-7)


def test_moving_a_batch_keeps_every_field() -> None:
    batch = pack_rollouts(rows_of_all_kinds(), [0.0] * 4, step=3, micro_batch=1)
    moved = batch.to("cpu", non_blocking=True)
    for field in dataclasses.fields(batch):
        before, after = getattr(batch, field.name), getattr(moved, field.name)
        assert torch.equal(before, after) if isinstance(before, Tensor) else before == after


def test_packing_refuses_what_it_can_not_align() -> None:
    with pytest.raises(ValueError, match="got 0 rollouts"):
        pack_rollouts([], [])
    with pytest.raises(ValueError, match="got 1 rollouts and 2 advantages"):
        pack_rollouts([make_row()], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"rollout p0\.0: no prompt token"):
        pack_rollouts([make_row(prompt_token_ids=np.empty(0, np.int32))], [1.0])


def test_ids_of_a_large_vocabulary_survive() -> None:
    row = make_row(token_ids=np.array([151_643] * 4, np.int32))
    batch = pack_rollouts([row], [1.0])
    assert batch.target_ids.tolist() == [151_643] * 4
    assert batch.input_ids[-4:].tolist() == [151_643] * 4


def test_o35_entries_come_back_bit_for_bit() -> None:
    rng = np.random.default_rng(35)
    ids = rng.integers(0, 2**31, 1000).astype(np.int32)
    # every finite negative float32 pattern, subnormals and -0.0's neighbours included
    bits = rng.integers(0x80000001, 0xFF800000, 1000, dtype=np.uint64).astype(np.uint32)
    got_ids, got = unpack_entries(pack_entries(ids, bits.view(np.float32)))
    assert np.array_equal(got_ids, ids)
    assert np.array_equal(got.view(np.uint32), bits)


def test_o36_a_certain_token_packs_to_its_bare_id_and_minus_infinity_is_no_entry() -> None:
    assert pack_entries([8], [0.0]).tolist() == [8]
    assert pack_entries([8], [-0.0]).tolist() == [8]
    # a foreign file may hold it: read as it stands, and padding for the loss
    ids, logprobs = unpack_entries(np.array([0xFF800000 << 32 | 8], np.uint64))
    assert (ids.tolist(), logprobs.tolist()) == ([8], [-math.inf])
    with pytest.raises(ValueError, match="infinite"):
        pack_entries([8], [-math.inf])


@pytest.mark.parametrize("loss", ["ipo", "icepop", "reinforce"])
def test_a_blank_batch_weighs_nothing(loss: Any) -> None:
    batch = blank_batch(global_denominator=5.0, step=3)
    assert (batch.num_tokens, batch.num_scored, batch.rollout_ids) == (2, 1, ())
    assert (batch.global_denominator, batch.step) == (5.0, 3)
    hidden = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    targets, supports = support_logprobs(
        hidden, weight, batch.support_ids, batch.support_offsets,
        batch.target_ids, batch.inverse_temperature,
    )  # fmt: skip
    settings = LossConfig(loss=loss, centering="exact", kl_q_p=0.5)
    value = compute_loss(batch.loss_inputs(targets, supports), settings).loss
    value.backward()  # type: ignore[no-untyped-call]
    assert float(value.detach()) == 0.0
    for leaf in (hidden, weight):
        assert leaf.grad is None or not leaf.grad.any()
