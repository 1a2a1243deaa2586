"""Packed support entries: `(float32 bits of log q) << 32 | token id`, as uint64.

A valid entry holds +0.0 or a negative finite logprob and an id in [0, 2**31). Because the bits of
negative floats grow with their magnitude, ascending unsigned order is most probable first, ties by
id, and +0.0 (the bare id) before everything.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_TOKEN_ID: Final = 2**31 - 1

_ID_SIGN: Final = np.uint64(0x80000000)
_SHIFT: Final = np.uint64(32)
# smallest packed value of a negative logprob, and the first of minus infinity and NaN
_NEGATIVE_START: Final = np.uint64(0x80000001_00000000)
_NEGATIVE_END: Final = np.uint64(0xFF800000_00000000)
_ZERO_END: Final = np.uint64(1 << 32)

# rows up to this length are sorted as one matrix per length, longer ones in place one by one
_MATRIX_ROW_LENGTH: Final = 48
# entries looked at in one go: with what is made of them they stay in a core's cache
AT_ONCE: Final = 1 << 15


def pack_entries(ids: ArrayLike, logprobs: ArrayLike) -> NDArray[np.uint64]:
    """Pack token ids and logprobs into entries.

    -0.0 becomes +0.0, so that one logprob has one representation.

    Args:
        ids: [E] integers in [0, 2**31).
        logprobs: [E] log q in nats, rounded to float32; finite and not positive.

    Returns:
        [E] uint64 entries.

    Raises:
        ValueError: lengths differ, an id is out of range, or a logprob is NaN, positive or -inf.
    """
    id_array = np.asarray(ids)
    values = np.asarray(logprobs, dtype=np.float32)
    if id_array.shape != values.shape or id_array.ndim != 1:
        raise ValueError(
            f"ids and logprobs: got shapes {id_array.shape} and {values.shape}, "
            "expected two equal [E]"
        )
    if id_array.size == 0:
        return np.empty(0, np.uint64)
    if id_array.dtype.kind not in "iu":
        raise ValueError(f"ids: got dtype {id_array.dtype}, expected integers")
    if int(id_array.min()) < 0 or int(id_array.max()) > MAX_TOKEN_ID:
        raise ValueError(
            f"ids: got {int(id_array.min())}..{int(id_array.max())}, expected 0..{MAX_TOKEN_ID}"
        )
    if not (np.isfinite(values) & (values <= 0)).all():
        raise ValueError("logprobs: got NaN, infinite or positive values, expected finite and <= 0")
    bits = (values + np.float32(0.0)).view(np.uint32)
    return (bits.astype(np.uint64) << _SHIFT) | id_array.astype(np.uint64)


def unpack_entries(entries: NDArray[np.uint64]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Split entries into token ids and logprobs, bit for bit.

    Args:
        entries: [E] uint64.

    Returns:
        [E] int32 ids and [E] float32 logprobs (nats).

    Raises:
        ValueError: entries are not uint64.
    """
    if entries.dtype != np.uint64:
        raise ValueError(f"entries: got dtype {entries.dtype}, expected uint64")
    ids = entries.astype(np.uint32).view(np.int32)  # the low half of each
    logprobs = (entries >> _SHIFT).astype(np.uint32).view(np.float32)
    return ids, logprobs


def invalid_entries(entries: NDArray[np.uint64]) -> int:
    """Count the entries that may not reach a file.

    Args:
        entries: [E] uint64.

    Returns:
        How many hold NaN, -0.0, a positive or infinite logprob, or an id of 2**31 or more.
    """
    invalid = 0
    for start in range(0, entries.size, AT_ONCE):
        piece = entries[start : start + AT_ONCE]
        # subtracting moves the zeros to the top, so that two extremes bound the logprobs
        if (
            piece.max() < _NEGATIVE_END
            and (piece - _ZERO_END).min() >= _NEGATIVE_START - _ZERO_END
            and not np.bitwise_or.reduce(piece) & _ID_SIGN
        ):
            continue
        valid = (piece >= _NEGATIVE_START) & (piece < _NEGATIVE_END)
        valid |= piece < _ZERO_END
        valid &= (piece & _ID_SIGN) == 0
        invalid += piece.size - int(np.count_nonzero(valid))
    return invalid


def canonical_order(
    entries: NDArray[np.uint64], offsets: NDArray[np.int64], *, in_place: bool = False
) -> NDArray[np.uint64]:
    """Sort each row of a CSR support ascending as unsigned numbers.

    Args:
        entries: [E] uint64 entries of all rows, row i in offsets[i]:offsets[i + 1].
        offsets: [N + 1] int64, from 0 to E, never falling.
        in_place: sort `entries` itself.

    Returns:
        [E] uint64, the same array when sorted in place or when every row was in order already.
    """
    if entries.size < 2:
        return entries
    if _is_ordered(entries, offsets):
        return entries
    out = entries if in_place else entries.copy()
    starts, lengths = offsets[:-1], np.diff(offsets)
    for length in np.unique(lengths[(lengths > 1) & (lengths <= _MATRIX_ROW_LENGTH)]):
        index = starts[lengths == length][:, None] + np.arange(length)
        rows = out[index]
        rows.sort(axis=1)
        out[index] = rows
    long = lengths > _MATRIX_ROW_LENGTH
    for start, length in zip(starts[long].tolist(), lengths[long].tolist(), strict=True):
        out[start : start + length].sort()
    return out


def _is_ordered(entries: NDArray[np.uint64], offsets: NDArray[np.int64]) -> bool:
    # in pieces, since what is in no order shows that in the first
    for start in range(0, entries.size - 1, AT_ONCE):
        piece = entries[start : start + AT_ONCE + 1]
        ascending = piece[1:] >= piece[:-1]
        # the step into a new row may fall
        first, last = np.searchsorted(offsets, (start + 1, start + piece.size))
        ascending[offsets[first:last] - start - 1] = True
        if not ascending.all():
            return False
    return True
