"""Block sizes, working memory and the choice between Triton and the reference.

Configurations are fixed, not searched: a search in a serving engine would time kernels while
requests wait. Each says where it was measured.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Literal

import torch
from triton.runtime import driver

Impl = Literal["triton", "reference"]

GROUP = 32
"""Consecutive ids that share one word of the mask, one maximum and one sum."""

CHUNK = 8192
"""Consecutive ids that one program of the first pass reads."""

SPARSE = 512
"""Entries up to which one program packs a whole row, by searches in memory.

A wider row is packed by a program a chunk, by searches among the chunk's words in registers.
"""

MAX_CUT_VOCAB = 2**21
"""The widest row that is cut here: a key has 22 bits for an id, one of them to spare."""

MAX_TOP = 1024
"""The widest head of a TOP row: one program holds `top * GROUP` candidates."""

# measured on an H200, November 2026, at 512 x 151,936 float32 and 89 k to 9.3 M entries, against
# chunks of 2 to 16 k ids, blocks of 128 to 1,024 entries and 1 to 8 warps
CHUNK_WARPS = 4
CACHED_BYTES = 32 << 20
"""Logits that the first pass leaves in the cache for the second: about half of it."""
PACK_BLOCK_SPARSE = 256
"""Entries of a sparse row that a program of the second pass writes at a time."""
PACK_BLOCK = 1024
"""The same in a chunk of a wide row, or half of it where that is enough."""
PACK_WARPS = 4
# the same step, top 128 and 8 draws; 2 to 32 warps and 64 to 255 registers, 1 to 8 draws
HEAD_WARPS = 4
HEAD_REGISTERS = 128
"""Registers of a thread in the selection of heads, so that four programs run at a time."""
DRAW_BLOCK = 2
"""Draws of a row that one program makes together."""
DRAW_WARPS = 1
# the same step untruncated: the noise costs .29 ms, an engine's own pass .31
NOISE_WARPS = 4
NOISE_REGISTERS = 128
"""Registers of a thread where noise is added to all ids."""
# the same step not truncated, top_p .95 of 8 to 55,000 ids, against 256 and 512 words, 4 and 16
# pivots, 1 to 16 warps, blocks half and twice as large, 512 to 8,192 candidates as few
CUT_WORDS = 1024
"""Words in which a row's candidates for the cut may be, or else the row is a wide one."""
CUT_LIST = CUT_WORDS * GROUP
"""Candidates that are listed; where there are more, the row's logits are read again."""
CUT_PIVOTS = 8
"""Logits of a wide row at and above which the mass is taken."""
CUT_READ_WARPS = 4
CUT_HEAD_WARPS = 8
CUT_HEAD_REGISTERS = 128
"""Registers of a thread there, so that two programs run at a time."""
CUT_LIST_BLOCK = 64
"""Words whose ids one program lists."""
CUT_LIST_WARPS = 4
CUT_SEARCH_PIVOTS = 8
"""Keys that a pass over a row's candidates tries."""
CUT_FEW = 4096
"""Candidates up to which one warp searches them."""
CUT_FEW_BLOCK = 128
"""Candidates that it looks at together."""
CUT_SEARCH_BLOCK = 1024
"""The same where there are more."""
CUT_SEARCH_WARPS = 8
TAKE_BLOCK = 128
"""Rows whose sampled token one program takes."""
TAKE_WARPS = 4


def can_cut(vocab_size: int, draws: int) -> bool:
    """Return whether rows may be cut by the capture.

    Args:
        vocab_size: V.
        draws: independent samples of every row; they are made of masked logits.
    """
    return vocab_size <= MAX_CUT_VOCAB and draws == 0


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide, rounding up.

    Args:
        numerator: not negative.
        denominator: positive.

    Returns:
        The smallest integer not below the quotient.
    """
    return -(-numerator // denominator)


def next_power_of_2(value: int) -> int:
    """Round up to a power of two.

    Args:
        value: positive.

    Returns:
        The smallest power of two not below `value`.
    """
    return 1 << (value - 1).bit_length()


def choose_impl(tensor: torch.Tensor, impl: Impl | None) -> Impl:
    """Choose Triton on CUDA or under TRITON_INTERPRET=1, else the reference.

    Args:
        tensor: the tensor whose device decides.
        impl: overrides the choice, for tests.

    Returns:
        The implementation to run.
    """
    if impl is not None:
        return impl
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "triton" if tensor.is_cuda or interpreted else "reference"


def stream_handle(device: torch.device) -> int:
    """Return the handle of a CUDA device's current stream, as Triton's launches ask for it.

    Args:
        device: with its index.

    Returns:
        What `torch.cuda.Stream.cuda_stream` has.
    """
    return int(driver.active.get_current_stream(device.index))


def row_unit(logits: torch.Tensor) -> int:
    """Return the elements that the kernels may take for granted to divide a row's start and width.

    Args:
        logits: [N, V].

    Returns:
        The elements in 16 bytes if the first row, the row stride and V are multiples of 16 bytes,
        so that loads can be that wide; else 1.
    """
    size = logits.element_size()
    unit = 16 // size
    aligned = logits.data_ptr() % 16 == 0
    return unit if aligned and logits.stride(0) % unit == 0 and logits.size(1) % unit == 0 else 1


def distance(logits: torch.Tensor, unit: int, anchor: int) -> int:
    """Return how far behind an anchor logits start, as the kernels are told it.

    Args:
        logits: [N, V].
        unit: `row_unit` of the logits.
        anchor: an address on the same device, a multiple of 16.

    Returns:
        The distance in units of elements, perhaps negative.
    """
    return (logits.data_ptr() - anchor) // (unit * logits.element_size())


def cached_rows(logits: torch.Tensor) -> int:
    """Return how many of the last rows the first pass leaves in the cache for the second.

    Args:
        logits: [N, V].

    Returns:
        Rows in `CACHED_BYTES`.
    """
    return CACHED_BYTES // (logits.shape[1] * logits.element_size())


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureScratch:
    """What the capture kernels hand to each other within a step.

    C chunks of `CHUNK` ids cover the vocabulary; each has `CHUNK // GROUP` groups. Nothing in it
    outlives a step.
    """

    chunk_max: torch.Tensor
    """[R, C] float32, the largest logit."""
    chunk_sum: torch.Tensor
    """[R, C] float32, the sum of exp(logit - chunk_max)."""
    chunk_count: torch.Tensor
    """[R, C] int32, kept ids."""
    chunk_start: torch.Tensor
    """[R, power of 2 >= C] int32, kept ids of the row before the chunk."""
    word_start: torch.Tensor
    """[R, C * groups] int32, kept ids of the chunk before the word, if the chunk keeps at most
    SPARSE."""
    mask_words: torch.Tensor
    """[R, C * groups] int32, a bit an id, set if it is kept; the order of the ids within a chunk is
    the kernels' own, in which a thread holds all ids of a word."""
    group_max: torch.Tensor
    """[R, C * groups] float32 if a head is recorded, else [1, 1]."""
    group_sum: torch.Tensor
    """[R, C * groups] float32 if a head or draws are recorded, else [1, 1]; relative to
    chunk_max."""
    row_max: torch.Tensor
    """[R] float32, the largest logit."""
    row_log_sum: torch.Tensor
    """[R] float32, the log of the sum of exp(logit - row_max)."""
    chunk_best: torch.Tensor
    """[R, C] int64, where tokens are drawn: the largest `token_draw.score_key` of a chunk, in rows
    of other kinds than KEPT."""
    best_score: torch.Tensor
    """[R] int64, the same of the entries of a KEPT row."""
    head_groups: torch.Tensor
    """[R, top] int32, the groups that hold the head."""
    word_max: torch.Tensor
    """[R, C * groups] float32, the largest logit of each word of a row that is cut; [1, 1] if none
    may be."""
    cut_words: torch.Tensor
    """[R, CUT_WORDS] int32, the words in which the candidates for the cut are; [1, CUT_WORDS] if no
    rows may be cut."""
    num_cut_words: torch.Tensor
    """[R] int32, how many."""
    cut_state: torch.Tensor
    """[R] int32, see `cut_order`."""
    cut_pivots: torch.Tensor
    """[R, P] float32, logits from the highest down, of rows that are cut."""
    pivot_mass: torch.Tensor
    """[R, C, P] float32, the sum of exp(logit - row_max) of a chunk at and above each pivot."""
    pivot_count: torch.Tensor
    """[R, C, P] int32, the ids of a chunk there, if a count is needed."""
    bracket: torch.Tensor
    """[R, 3] float32: the cut is not below the first logit and below the second; and row_max."""
    bracket_mass: torch.Tensor
    """[R, 2] float64, the sum of exp(logit - row_max) of the row, and above the bracket."""
    bracket_count: torch.Tensor
    """[R, 2] int32, the ids within the bracket and above it."""
    bracket_keys: torch.Tensor
    """[R, CUT_LIST] int64, the ids within the bracket, as keys that order them; [1, CUT_LIST] if no
    rows may be cut."""
    cut_value: torch.Tensor
    """[R] float32, the logit of the last id that is kept."""
    cut_id: torch.Tensor
    """[R] int32, the last id kept of those that have this logit."""
    cut_bound: torch.Tensor
    """[R] int64, the lowest key of the row's list that is kept, if all that are kept are listed."""
    anchor: torch.Tensor
    """[16] uint8, an address that stays, from which logits are found whose address does not."""
    no_distance: torch.Tensor
    """[1] int64, 0."""

    @classmethod
    def allocate(
        cls,
        *,
        max_rows: int,
        vocab_size: int,
        top: int,
        draws: int,
        cut: bool,
        device: torch.device,
    ) -> CaptureScratch:
        """Allocate working memory for steps of up to `max_rows` rows.

        Args:
            max_rows: the most rows R of a step.
            vocab_size: the widest logits row.
            top: ids recorded of a TOP row.
            draws: independent samples of every row.
            cut: whether rows may be cut, which takes .3 MB a row.
            device: where the logits are.

        Returns:
            Working memory that is zero throughout.

        Raises:
            ValueError: `top` is out of range.
        """
        if not 0 <= top <= MAX_TOP:
            raise ValueError(f"top {top}: expected 0 to {MAX_TOP}")
        chunks = ceil_div(vocab_size, CHUNK)
        groups = chunks * (CHUNK // GROUP)
        wide = (max_rows, groups)
        none = (1, 1)
        cut_rows = max_rows if cut else 1

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            chunk_max=zeros((max_rows, chunks), torch.float32),
            chunk_sum=zeros((max_rows, chunks), torch.float32),
            chunk_count=zeros((max_rows, chunks), torch.int32),
            chunk_start=zeros((max_rows, next_power_of_2(chunks)), torch.int32),
            word_start=zeros(wide, torch.int32),
            mask_words=zeros(wide, torch.int32),
            group_max=zeros(wide if top else none, torch.float32),
            group_sum=zeros(wide if top or draws else none, torch.float32),
            row_max=zeros((max_rows,), torch.float32),
            row_log_sum=zeros((max_rows,), torch.float32),
            chunk_best=zeros((max_rows, chunks), torch.int64),
            best_score=zeros((max_rows,), torch.int64),
            head_groups=zeros((max_rows, max(top, 1)), torch.int32),
            word_max=zeros(wide if cut else none, torch.float32),
            cut_words=zeros((cut_rows, CUT_WORDS), torch.int32),
            num_cut_words=zeros((max_rows,), torch.int32),
            cut_state=zeros((max_rows,), torch.int32),
            cut_pivots=zeros((max_rows, CUT_PIVOTS), torch.float32),
            pivot_mass=zeros((max_rows, chunks, CUT_PIVOTS), torch.float32),
            pivot_count=zeros((max_rows, chunks, CUT_PIVOTS), torch.int32),
            bracket=zeros((max_rows, 3), torch.float32),
            bracket_mass=zeros((max_rows, 2), torch.float64),
            bracket_count=zeros((max_rows, 2), torch.int32),
            bracket_keys=zeros((cut_rows, CUT_LIST), torch.int64),
            cut_value=zeros((max_rows,), torch.float32),
            cut_id=zeros((max_rows,), torch.int32),
            cut_bound=zeros((max_rows,), torch.int64),
            anchor=zeros((16,), torch.uint8),
            no_distance=zeros((1,), torch.int64),
        )

    def start(
        self, logits: torch.Tensor, distance: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the kernels take for the logits' address.

        Args:
            logits: [N, V].
            distance: see `capture_step`.

        Returns:
            A tensor of the logits' dtype, and [1] int64, how far behind it they start.
        """
        if distance is None:
            return logits, self.no_distance
        return self.anchor.view(logits.dtype), distance

    def check(self, *, vocab_size: int, top: int, cut: bool) -> None:
        """Refuse a step that this working memory is too small for.

        Args:
            vocab_size: the width of the step's logits.
            top: ids recorded of a TOP row.
            cut: whether rows are cut.

        Raises:
            ValueError: it is too small.
        """
        groups = self.mask_words.shape[1]
        if vocab_size > groups * GROUP:
            raise ValueError(
                f"logits: {vocab_size} ids, expected at most {groups * GROUP} as `out` has"
            )
        if (top > 0 and self.group_max.shape[1] != groups) or top > self.head_groups.shape[1]:
            raise ValueError(f"top: got {top}, more than `out` was allocated for")
        if cut and self.word_max.shape != self.mask_words.shape:
            raise ValueError("draw.cut: got one, expected none as `out` was allocated for")
        if cut and vocab_size > MAX_CUT_VOCAB:
            raise ValueError(
                f"logits: {vocab_size} ids, expected at most {MAX_CUT_VOCAB} with cuts"
            )

    @property
    def num_bytes(self) -> int:
        """Device bytes of the working memory."""
        tensors = [getattr(self, field.name) for field in fields(self)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
