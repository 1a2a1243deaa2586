"""What one sampling step leaves on the device: buffers, kinds of rows, flags of rows.

A row of the step is one request's next token. Every buffer is allocated once, before the engine
serves, and is overwritten by each step, so that a step allocates nothing and never asks the device
for a size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag

import torch

from rollout.kernels.launch import CaptureScratch, can_cut


class RowKind(IntEnum):
    """What is recorded of a row; the value is what stands in `kinds`."""

    SKIP = 0
    """Nothing: a row that is no sampled token (a discarded prefill row, padding)."""
    KEPT = 1
    """Every id with a logit above -inf; where the step has cuts, those up to the row's."""
    GREEDY = 2
    """The sampled id alone, with logprob 0: the sampler's distribution is one point."""
    TOP = 3
    """The most probable ids and the mass of the rest."""
    NONE = 4
    """The sampled token's logprob alone."""


class RowFlag(IntFlag):
    """What went wrong with a row; bits of `StepOutput.flags`."""

    NONFINITE = 1
    """The row holds NaN or +inf: nothing is packed, its logprobs are NaN."""
    EMPTY = 2
    """Every logit is -inf: nothing is packed, its logprobs are NaN."""
    OVERFLOW = 4
    """The row's end lies past the capacity: its entries were not written."""
    SAMPLED_MISSING = 8
    """The sampled id is outside the vocabulary or has a logit of -inf: its logprob is -inf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """The buffers that one sampling step fills; a step of N rows writes the first N rows of each.

    Rows flagged NONFINITE or EMPTY, and SKIP rows, have count 0. The order of the entries within a
    row is not specified. Entries and draws hold the bits of uint64 `(float32 bits of logprob) << 32
    | id`.
    """

    counts: torch.Tensor
    """[R] int32, entries of each row."""
    offsets: torch.Tensor
    """[R + 1] int64, where rows start; goes on past the capacity, so offsets[N] is the step's
    need."""
    sampled_logprobs: torch.Tensor
    """[R] float32, log q of the sampled id (nats); 0 for SKIP and GREEDY."""
    tail_mass: torch.Tensor
    """[R] float32, for TOP rows the probability of all ids that have no entry; 0 for the other
    kinds."""
    flags: torch.Tensor
    """[R] int32, bits of `RowFlag`."""
    entries: torch.Tensor
    """[capacity] int64."""
    draws: torch.Tensor
    """[R, K] int64, K independent samples of q with their logprobs; 0 for SKIP, NONFINITE and EMPTY
    rows."""
    sampled_ids: torch.Tensor
    """[R] int64, room for the ids that the sampler drew, so that they leave with the rest."""
    header: torch.Tensor
    """[B] uint8, the memory of all of the above but the entries: one copy takes it to the host."""
    scratch: CaptureScratch
    """Working memory of the kernels, never read by a caller."""

    @classmethod
    def allocate(
        cls,
        *,
        max_rows: int,
        vocab_size: int,
        capacity: int,
        top: int,
        draws: int,
        device: torch.device | str,
        scratch: CaptureScratch | None = None,
    ) -> StepOutput:
        """Allocate the buffers of one ring slot.

        Args:
            max_rows: the most rows R that a step may have.
            vocab_size: the widest logits row V that a step may have.
            capacity: entries that `entries` holds.
            top: ids recorded of a TOP row; 0 if the job has none.
            draws: independent samples of every row, K.
            device: where the logits are.
            scratch: the working memory of another slot on the same launch stream, to share it;
                steps of one stream run one after the other. None allocates one, in which rows may
                be cut if there are no draws.

        Returns:
            Buffers that are zero throughout.

        Raises:
            ValueError: a size is out of range.
        """
        if max_rows < 1 or vocab_size < 1 or capacity < 1 or draws < 0:
            raise ValueError(
                f"step output: got {max_rows} rows, vocabulary {vocab_size}, capacity {capacity} "
                f"and {draws} draws, expected draws >= 0 and the others >= 1"
            )
        place = torch.device(device)
        if scratch is None:
            scratch = CaptureScratch.allocate(
                max_rows=max_rows,
                vocab_size=vocab_size,
                top=top,
                draws=draws,
                cut=can_cut(vocab_size, draws),
                device=place,
            )
        header = torch.zeros(cls.header_bytes(max_rows, draws), dtype=torch.uint8, device=place)
        return cls(
            **cls.header_fields(header, max_rows, draws),
            entries=torch.zeros(capacity, dtype=torch.int64, device=place),
            header=header,
            scratch=scratch,
        )

    @staticmethod
    def header_bytes(max_rows: int, draws: int) -> int:
        """Return the bytes of a header.

        Args:
            max_rows: the most rows R that a step may have.
            draws: independent samples of every row, K.
        """
        return 8 * (max_rows + 1) + 8 * max_rows * (draws + 1) + 16 * max_rows

    @staticmethod
    def header_fields(header: torch.Tensor, max_rows: int, draws: int) -> dict[str, torch.Tensor]:
        """Return the fields that a header, or a copy of one on the host, consists of.

        Args:
            header: [B] uint8.
            max_rows: the most rows R that a step may have.
            draws: independent samples of every row, K.

        Returns:
            Views of the header by their names.
        """
        fields: dict[str, torch.Tensor] = {}
        start = 0
        # the wide ones first, so that each is aligned
        for name, size, dtype in (
            ("offsets", max_rows + 1, torch.int64),
            ("sampled_ids", max_rows, torch.int64),
            ("draws", max_rows * draws, torch.int64),
            ("counts", max_rows, torch.int32),
            ("flags", max_rows, torch.int32),
            ("sampled_logprobs", max_rows, torch.float32),
            ("tail_mass", max_rows, torch.float32),
        ):
            end = start + size * dtype.itemsize
            fields[name] = header[start:end].view(dtype)
            start = end
        fields["draws"] = fields["draws"].view(max_rows, draws)
        return fields

    @property
    def num_bytes(self) -> int:
        """Device bytes of the outputs, without the scratch (which slots may share)."""
        return self.header.numel() + 8 * self.entries.numel()
