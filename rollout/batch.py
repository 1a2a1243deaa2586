"""Pack rollouts into one batch without padding: token ids for the model, supports for the loss.

The hidden state at position prompt_len + t - 1 of a rollout predicts its completion token t, and so
meets support row t. `hidden_index` says where that position is in the packed sequence, so nothing
after the packing shifts anything.
"""

# B rollouts, L tokens of all rollouts, N scored tokens, E support entries of all rows

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.batch_rows import BatchRow, Untruncated, batch_row
from rollout.entry_pages import Entries, SplitEntries, write_entries
from rollout.loss_types import LossInputs
from rollout.rows import RolloutRow

Side = Literal["left", "right"]
_Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PaddedInputs:
    """The same tokens in a rectangle, for models that take no packed sequences."""

    input_ids: Tensor
    """[B, L_max] int64."""
    attention_mask: Tensor
    """[B, L_max] int64, 1 for a token."""
    position_ids: Tensor
    """[B, L_max] int64, 0 at each rollout's first token, and in padding."""
    hidden_index: Tensor
    """[N] int64 into the B * L_max flattened hidden states, in the batch's order of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RolloutBatch:
    """One micro-batch of whole rollouts."""

    input_ids: Tensor
    """[L] int64, prompt and completion of one rollout after the other."""
    position_ids: Tensor
    """[L] int64, from 0 in every rollout."""
    cu_seqlens: Tensor
    """[B + 1] int32, where each rollout starts; no sequence crosses a boundary."""
    max_seqlen: int
    """Longest rollout, prompt included."""
    hidden_index: Tensor
    """[N] int64, position in the packed sequence whose hidden state predicts the token."""
    target_ids: Tensor
    """[N] int64, the sampled ids."""
    sampler_logprobs: Tensor
    """[N] float32, log q of the sampled ids, nats."""
    advantages: Tensor
    """[N] float32, each rollout's advantage on all of its tokens."""
    loss_mask: Tensor
    """[N] bool."""
    temperature: Tensor
    """[N] float32; 0 for greedy rows."""
    support_offsets: Tensor
    """[N + 1] int64, rebased to this batch."""
    support_ids: Tensor
    """[E] int32."""
    sampler_support_logprobs: Tensor
    """[E] float32, nats."""
    support_valid: Tensor
    """[N] bool, False where nothing but the sampled token was recorded."""
    support_is_samples: Tensor
    """[N] bool, True where the entries are draws."""
    sampler_tail_mass: Tensor
    """[N] float32, probability outside the entries; 0 for kept supports and for draws."""
    rollout_index: Tensor
    """[N] int64, which of the B rollouts a token belongs to."""
    global_denominator: float
    """Scored tokens of the whole global batch."""
    rollout_ids: tuple[str, ...]
    """B ids, to find a rollout in the dataset again; empty in a batch of weight zero."""
    columns: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """B values of each column of the dataset that was asked for by name."""
    epoch: int = 0
    step: int = 0
    """Global batch within the epoch."""
    micro_batch: int = 0
    """Micro-batch of this rank within the step."""
    num_micro_batches: int = 1
    """Micro-batches of this step, as many on every rank."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads, L."""
        return self.input_ids.shape[0]

    @property
    def num_scored(self) -> int:
        """Tokens that the loss reads, N."""
        return self.target_ids.shape[0]

    @property
    def inverse_temperature(self) -> Tensor:
        """[N] float32 1 / T; 1 for greedy rows, whose single-id support needs none."""
        greedy = self.temperature == 0.0
        return torch.where(greedy, 1.0, 1.0 / torch.where(greedy, 1.0, self.temperature))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> RolloutBatch:
        """Return the batch on a device; with pinned memory and `non_blocking`, without waiting."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> RolloutBatch:
        """Return the batch in page-locked host memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def padded(self, side: Side, pad_token_id: int = 0) -> PaddedInputs:
        """Lay the tokens out in a rectangle.

        Args:
            side: where the padding goes.
            pad_token_id: what it holds.

        Returns:
            The rectangle, and where in it each scored token is predicted.

        Raises:
            ValueError: the side is neither `left` nor `right`.
        """
        if side not in ("left", "right"):
            raise ValueError(f"side is {side!r}, expected left or right")
        starts = self.cu_seqlens[:-1].long()
        lengths = self.cu_seqlens.diff().long()
        num_rows, width = lengths.shape[0], self.max_seqlen
        shift = torch.arange(num_rows, device=starts.device) * width - starts
        if side == "left":
            shift = shift + width - lengths
        row = torch.repeat_interleave(lengths, output_size=self.num_tokens)
        place = torch.arange(self.num_tokens, device=starts.device) + shift[row]

        def laid_out(values: Tensor, pad: int) -> Tensor:
            flat = values.new_full((num_rows * width,), pad)
            return flat.index_put((place,), values).view(num_rows, width)

        return PaddedInputs(
            input_ids=laid_out(self.input_ids, pad_token_id),
            attention_mask=laid_out(torch.ones_like(self.input_ids), 0),
            position_ids=laid_out(self.position_ids, 0),
            hidden_index=place[self.hidden_index],
        )

    def loss_inputs(
        self,
        trainer_logprobs: Tensor,  # [N]
        trainer_support_logprobs: Tensor,  # [E]
        *,
        trainer_tail_mass: Tensor | None = None,
        trainer_is_normalised: Tensor | None = None,
        loss_weights: Tensor | None = None,
    ) -> LossInputs:
        """Join the batch with the trainer's side, in the batch's order of tokens and entries.

        Args:
            trainer_logprobs: [N] log p of the sampled ids, nats.
            trainer_support_logprobs: [E] log p of `support_ids`, nats.
            trainer_tail_mass: [N] p outside the entries, where rows have a tail.
            trainer_is_normalised: [N] bool, see `LossInputs`.
            loss_weights: [N], see `LossInputs`.

        Returns:
            What `rollout.losses.compute_loss` takes.

        Raises:
            ValueError: shapes or devices disagree.
        """
        return LossInputs(
            trainer_logprobs=trainer_logprobs,
            sampler_logprobs=self.sampler_logprobs,
            advantages=self.advantages,
            loss_mask=self.loss_mask,
            temperature=self.temperature,
            support_offsets=self.support_offsets,
            trainer_support_logprobs=trainer_support_logprobs,
            sampler_support_logprobs=self.sampler_support_logprobs,
            support_valid=self.support_valid,
            support_is_samples=self.support_is_samples,
            sampler_tail_mass=self.sampler_tail_mass,
            trainer_tail_mass=trainer_tail_mass,
            global_denominator=self.global_denominator,
            loss_weights=loss_weights,
            target_ids=self.target_ids,
            support_ids=self.support_ids,
            trainer_is_normalised=trainer_is_normalised,
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> RolloutBatch:
        """Return a copy with every tensor changed."""
        tensors: dict[str, Any] = {
            field.name: change(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **tensors)


def pack_rollouts(
    rows: Sequence[RolloutRow],
    advantages: Sequence[float],
    *,
    untruncated: Untruncated = "head",
    columns: Sequence[str] = (),
    **fields: Any,
) -> RolloutBatch:
    """Pack whole rollouts into one batch.

    Args:
        rows: B rollouts, as the dataset holds them; the text is never read.
        advantages: B numbers.
        untruncated: which entries an untruncated row brings: the recorded head, or its draws. A row
            of kind `none` brings its draws, if it has any.
        columns: fields of the rows that the batch carries along.
        fields: of `pack_rows`.

    Returns:
        The batch, on the CPU.

    Raises:
        ValueError: as `pack_rows`.
    """
    own = [batch_row(row, untruncated, columns) for row in rows]
    return pack_rows(own, advantages, columns=columns, **fields)


def pack_rows(
    rows: Sequence[BatchRow],
    advantages: Sequence[float],
    *,
    global_denominator: float | None = None,
    columns: Sequence[str] = (),
    empty: Callable[[int, Any], NDArray[Any]] = np.empty,
    write: Callable[[Sequence[Entries], SplitEntries], Any] = write_entries,
    epoch: int = 0,
    step: int = 0,
    micro_batch: int = 0,
    num_micro_batches: int = 1,
) -> RolloutBatch:
    """Pack whole rollouts into one batch.

    Args:
        rows: B rollouts.
        advantages: B numbers.
        global_denominator: scored tokens of the global batch; unset, this batch is all of it.
        columns: what every row carries along.
        empty: makes the arrays of the entries, from a count and a dtype.
        write: writes the entries of all rows to these arrays, or sees to it that they are written
            before the batch is used.
        epoch: for the batch's own record.
        step: for the batch's own record.
        micro_batch: for the batch's own record.
        num_micro_batches: for the batch's own record.

    Returns:
        The batch, on the CPU.

    Raises:
        ValueError: there are no rollouts, counts disagree, or a rollout has no prompt token, so
            that nothing predicts its first token.
    """
    if not rows or len(rows) != len(advantages):
        raise ValueError(
            f"got {len(rows)} rollouts and {len(advantages)} advantages, expected one each"
        )
    for row in rows:
        if row.prompt_token_ids.size == 0:
            raise ValueError(
                f"rollout {row.rollout_id}: no prompt token, expected at least one to predict the "
                "first sampled token from"
            )
    prompts = np.array([row.prompt_token_ids.size for row in rows], np.int64)
    counts = np.array([row.token_ids.size for row in rows], np.int64)
    starts = _offsets(prompts + counts)
    ends = _offsets(counts)
    numbers = np.arange(len(rows))
    # every other value of a token is looked up by these: faster than repeating each one
    owner = np.repeat(numbers, counts)
    place_owner = np.repeat(numbers, prompts + counts)
    num_scored = owner.size
    supports = [row.support for row in rows]
    num_entries = sum(part.entries.size for part in supports)
    entries = SplitEntries(empty(num_entries, np.int32), empty(num_entries, np.float32))
    write([part.entries for part in supports], entries)
    pieces = [piece for row in rows for piece in (row.prompt_token_ids, row.token_ids)]

    def per_token(values: Sequence[Any], dtype: Any) -> Tensor:
        return torch.from_numpy(np.array(values, dtype)[owner])

    return RolloutBatch(
        input_ids=_joined(pieces, np.int64),
        position_ids=torch.from_numpy(np.arange(place_owner.size) - starts[place_owner]),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=int((prompts + counts).max()),
        # token t is predicted one position earlier than where it stands
        hidden_index=torch.from_numpy(
            np.arange(num_scored) + (starts[:-1] + prompts - 1 - ends[:-1])[owner]
        ),
        target_ids=_joined([row.token_ids for row in rows], np.int64),
        sampler_logprobs=_joined([row.sampled_logprobs for row in rows], np.float32),
        advantages=per_token(advantages, np.float32),
        loss_mask=torch.ones(num_scored, dtype=torch.bool),
        temperature=per_token([row.temperature for row in rows], np.float32),
        support_offsets=torch.from_numpy(_rebased([part.offsets for part in supports], num_scored)),
        support_ids=torch.from_numpy(entries.ids),
        sampler_support_logprobs=torch.from_numpy(entries.logprobs),
        support_valid=per_token([part.valid for part in supports], np.bool_),
        support_is_samples=per_token([part.is_samples for part in supports], np.bool_),
        sampler_tail_mass=_joined([part.tail_mass for part in supports], np.float32),
        rollout_index=torch.from_numpy(owner),
        global_denominator=float(num_scored if global_denominator is None else global_denominator),
        rollout_ids=tuple(row.rollout_id for row in rows),
        columns={name: tuple(row.columns[name] for row in rows) for name in columns},
        epoch=epoch,
        step=step,
        micro_batch=micro_batch,
        num_micro_batches=num_micro_batches,
    )


def _rebased(parts: Sequence[NDArray[np.int64]], num_scored: int) -> NDArray[np.int64]:
    """Join the offsets of all parts, each from 0, into [N + 1] of the batch."""
    result = np.zeros(num_scored + 1, np.int64)
    first, base = 1, 0
    for offsets in parts:
        stop = first + offsets.size - 1
        np.add(offsets[1:], base, out=result[first:stop])
        first, base = stop, base + int(offsets[-1])
    return result


def _joined(parts: Sequence[_Array], dtype: Any) -> Tensor:
    """Concatenate into one tensor of its own memory."""
    return torch.from_numpy(np.concatenate(parts, dtype=dtype))


def _offsets(counts: _Array) -> NDArray[np.int64]:
    """Return exclusive prefix sums with the total at the end."""
    result = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=result[1:])
    return result
