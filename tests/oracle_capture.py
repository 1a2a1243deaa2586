"""What a sampling step must record, in float64 from the formulas, and how its buffers are read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from rollout.kernels.support_capture import StepOutput, capture_step

SKIP, KEPT, GREEDY, TOP, NONE = range(5)
NONFINITE, EMPTY, OVERFLOW, SAMPLED_MISSING = 1, 2, 4, 8

_MASK_32 = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a step recorded of one row."""

    count: int
    ids: list[int]
    """Ascending; empty where the row overflowed."""
    logprobs: np.ndarray
    bits: list[int]
    """Of the logprobs, as uint32."""
    sampled: float
    tail: float
    flags: int
    draw_ids: list[int]
    draw_logprobs: np.ndarray


def log_softmax(logits: torch.Tensor) -> np.ndarray:
    """Normalise the finite logits of one row in float64.

    Args:
        logits: [V].

    Returns:
        [V] float64 in nats, -inf where the logit is.
    """
    values = logits.double().numpy()
    largest = values.max()
    return np.asarray(values - largest - math.log(math.fsum(np.exp(values - largest))))


def head(logits: torch.Tensor, top: int) -> list[int]:
    """Choose the most probable ids of a row, of equal ones the lowest.

    Args:
        logits: [V].
        top: how many.

    Returns:
        Ids, ascending.
    """
    values = logits.tolist()
    kept = [i for i, value in enumerate(values) if value > -math.inf]
    return sorted(sorted(kept, key=lambda i: (-values[i], i))[:top])


def tail_mass(logits: torch.Tensor, ids: list[int]) -> float:
    """Sum the probability of all ids but some, in float64.

    Args:
        logits: [V].
        ids: those left out.

    Returns:
        The mass, exactly 0 if nothing is left.
    """
    logprobs = log_softmax(logits)
    logprobs[ids] = -np.inf
    return math.fsum(np.exp(logprobs))


def philox(key: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Compute one block of Philox 4x32-10 in Python's integers.

    Args:
        key: 64 bits.
        counter: four words of 32 bits.

    Returns:
        Four words of 32 bits.
    """
    k0, k1 = key & _MASK_32, (key >> 32) & _MASK_32
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 & _MASK_32,
            (p0 >> 32) ^ c3 ^ k1,
            p0 & _MASK_32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK_32, (k1 + 0xBB67AE85) & _MASK_32
    return [c0, c1, c2, c3]


def allowed_error(logprobs: np.ndarray) -> np.ndarray:
    """Return the error that logprobs may have.

    Args:
        logprobs: float64, exact.

    Returns:
        The same shape.
    """
    return np.asarray(5e-7 + 2.0**-23 * np.abs(logprobs))


def read_rows(out: StepOutput, num_rows: int) -> list[Row]:
    """Take the buffers of a step apart.

    Args:
        out: filled by a step.
        num_rows: rows of the step.

    Returns:
        The rows in the batch's order.
    """
    entries = out.entries.cpu().numpy().view(np.uint64)
    draws = out.draws.cpu().numpy().view(np.uint64)
    offsets = out.offsets.tolist()
    assert offsets[0] == 0
    rows = []
    for i in range(num_rows):
        flags = int(out.flags[i])
        count = int(out.counts[i])
        assert offsets[i + 1] - offsets[i] == count
        packed = np.array([], dtype=np.uint64)
        if not flags & OVERFLOW:
            packed = entries[offsets[i] : offsets[i + 1]]
            packed = packed[np.argsort(packed & np.uint64(_MASK_32))]
        ids, bits = _unpack(packed)
        draw_ids, draw_bits = _unpack(draws[i])
        rows.append(
            Row(
                count=count,
                ids=ids.tolist(),
                logprobs=bits.view(np.float32),
                bits=bits.tolist(),
                sampled=float(out.sampled_logprobs[i]),
                tail=float(out.tail_mass[i]),
                flags=flags,
                draw_ids=draw_ids.tolist(),
                draw_logprobs=draw_bits.view(np.float32),
            )
        )
    return rows


def _unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ids = (packed & np.uint64(_MASK_32)).astype(np.int64)
    return ids, (packed >> np.uint64(32)).astype(np.uint32)


def capture(
    logits: torch.Tensor,
    kinds: list[int],
    sampled: list[int],
    *,
    impl: str,
    capacity: int | None = None,
    top: int = 0,
    draws: int = 0,
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    spare_rows: int = 3,
) -> tuple[list[Row], StepOutput]:
    """Run one step on poisoned buffers.

    Args:
        logits: [N, V].
        kinds: N row kinds.
        sampled: N ids.
        impl: "reference" or "triton".
        capacity: entries; all of the logits if None.
        top: ids of a TOP row.
        draws: draws of each row.
        seeds: N seeds; 0, 1, ... if None.
        positions: N positions; 0 if None.
        spare_rows: rows of the buffers beyond N.

    Returns:
        rows: what was recorded.
        out: the buffers.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    out = StepOutput.allocate(
        max_rows=num_rows + spare_rows,
        vocab_size=vocab_size,
        capacity=logits.numel() if capacity is None else capacity,
        top=top,
        draws=draws,
        device=device,
    )
    poison(out)
    capture_step(
        logits,
        torch.tensor(sampled, dtype=torch.int64, device=device),
        torch.tensor(kinds, dtype=torch.int8, device=device),
        out,
        top=top,
        draws=draws,
        seeds=torch.tensor(list(seeds or range(num_rows)), dtype=torch.int64, device=device),
        positions=torch.tensor(positions or [0] * num_rows, dtype=torch.int64, device=device),
        impl="triton" if impl == "triton" else "reference",
    )
    return read_rows(out, num_rows), out


def poison(out: StepOutput) -> None:
    """Fill every buffer with values that no step leaves.

    Args:
        out: the buffers of a step.
    """
    for name in ("counts", "offsets", "flags", "entries", "draws"):
        getattr(out, name).fill_(-77)
    for name in ("sampled_logprobs", "tail_mass"):
        getattr(out, name).fill_(77.0)
    scratch = out.scratch
    for name in ("chunk_max", "chunk_sum", "group_max", "group_sum", "row_max", "row_log_sum"):
        getattr(scratch, name).fill_(float("nan"))
    for name in ("chunk_count", "chunk_start", "word_start", "mask_words", "head_groups"):
        getattr(scratch, name).fill_(-77)
