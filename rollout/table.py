"""Turn rollouts into the table of a row group by joining their numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollout.rows import RolloutRow
from rollout.schema.columns import SCHEMA
from rollout.schema.entries import AT_ONCE, canonical_order, invalid_entries

_Array = NDArray[Any]


class BuiltTable(NamedTuple):
    """One row group."""

    table: pa.Table
    """All columns; null in place of every list of support entries."""
    entries: _Array
    """[E] uint64 support entries of all rows, those of each token in canonical order."""
    lists: list[int | None]
    """How many of them each row has; null for a null list."""
    largest: int
    """Largest token id."""


def build_table(rows: Sequence[RolloutRow]) -> BuiltTable:
    """Build the table of one row group.

    Support entries come out in canonical order, and -0.0 in sampled logprobs as +0.0.

    Args:
        rows: at least one rollout, under 2**31 elements in every list column.

    Raises:
        ValueError: a length, kind or value that may not reach a file.
    """
    _check_lengths(rows)
    supports = [row.support_entries for row in rows]
    entries = _sorted_entries(rows)
    sampled = _flat([row.sampled_logprobs for row in rows], np.float32)
    if not (np.isfinite(sampled) & (sampled <= 0)).all():
        raise ValueError("sampled_logprobs: NaN, infinite or positive, expected finite and <= 0")
    draws = _flat([row.draw_entries for row in rows], np.uint64)
    largest_listed = _largest_packed("support_entries", entries)
    largest_drawn = _largest_packed("draw_entries", draws)
    prompts = _flat([row.prompt_token_ids for row in rows], np.int32)
    tokens = _flat([row.token_ids for row in rows], np.int32)
    # a kept support has no tail, so its zeros need not be handed in
    tails = [
        np.zeros(row.token_ids.size, np.float32)
        if row.tail_mass is None and row.support_kind == "kept"
        else row.tail_mass
        for row in rows
    ]
    arrays: dict[str, tuple[Sequence[_Array | None], _Array]] = {
        "prompt_token_ids": ([row.prompt_token_ids for row in rows], prompts),
        "token_ids": ([row.token_ids for row in rows], tokens),
        "sampled_logprobs": (
            [row.sampled_logprobs for row in rows],
            sampled + np.float32(0),
        ),
        "support_offsets": (
            [row.support_offsets for row in rows],
            _flat([row.support_offsets for row in rows], np.int64),
        ),
        "tail_mass": (tails, _flat(tails, np.float32)),
        "draw_entries": ([row.draw_entries for row in rows], draws),
    }
    counted = {
        "num_prompt_tokens": [row.prompt_token_ids.size for row in rows],
        "num_tokens": [row.token_ids.size for row in rows],
        "num_support_entries": [0 if part is None else part.size for part in supports],
    }
    columns = []
    for field in SCHEMA:
        if field.name in arrays:
            columns.append(_list_array(field.type, *arrays[field.name]))
        elif field.name == "support_entries":
            columns.append(pa.nulls(len(rows), field.type))
        elif field.name in counted:
            columns.append(pa.array(counted[field.name], field.type))
        else:
            columns.append(pa.array([getattr(row, field.name) for row in rows], field.type))
    largest = max(_largest(prompts), _largest(tokens), largest_listed, largest_drawn)
    lists = [None if part is None else part.size for part in supports]
    return BuiltTable(pa.Table.from_arrays(columns, schema=SCHEMA), entries, lists, largest)


def _check_lengths(rows: Sequence[RolloutRow]) -> None:
    for row in rows:
        tokens = row.token_ids.size
        support = (row.support_offsets is None, row.support_entries is None)
        none = row.support_kind == "none"
        if row.sampled_logprobs.size != tokens or support != (none, none):
            raise ValueError(
                f"rollout {row.rollout_id}: support_kind {row.support_kind}, {tokens} tokens and "
                f"{row.sampled_logprobs.size} logprobs don't fit its support"
            )
        if row.support_offsets is not None and row.support_offsets.size != tokens + 1:
            raise ValueError(
                f"rollout {row.rollout_id}: {row.support_offsets.size} support_offsets, "
                f"expected {tokens + 1}"
            )
        if row.draw_entries is not None and row.draw_entries.size % max(tokens, 1):
            raise ValueError(
                f"rollout {row.rollout_id}: {row.draw_entries.size} draws for {tokens} tokens"
            )
        if (row.tail_mass is None) != none and row.support_kind != "kept":
            raise ValueError(f"rollout {row.rollout_id}: tail_mass goes with support_kind top")


def _flat(parts: Sequence[_Array | None], dtype: type) -> _Array:
    arrays = [part for part in parts if part is not None]
    for array in arrays:
        if array.dtype != dtype:
            raise ValueError(f"got an array of {array.dtype}, expected {dtype.__name__}")
    if not arrays:
        return np.empty(0, dtype)
    joined = _neighbours(arrays)
    return np.concatenate(arrays) if joined is None else joined


def _neighbours(arrays: Sequence[_Array]) -> _Array | None:
    """Return arrays that follow each other in the memory of one array as a view of that, or None.

    A part's entries do (`rollout.part_work`), and copying them would take a tenth of the time.
    """
    if len(arrays) == 1:
        return arrays[0]
    base = arrays[0].base
    if not isinstance(base, np.ndarray) or base.dtype != arrays[0].dtype or base.ndim != 1:
        return None
    first = following = arrays[0].ctypes.data
    for array in arrays:
        if array.base is not base or not array.flags.c_contiguous:
            return None
        if array.ctypes.data != following:
            return None
        following += array.nbytes
    start = (first - base.ctypes.data) // base.itemsize
    return base[start : start + sum(array.size for array in arrays)]


def _sorted_entries(rows: Sequence[RolloutRow]) -> NDArray[np.uint64]:
    """All support entries in one array, each token's in canonical order; those given stay."""
    entries = _flat([row.support_entries for row in rows], np.uint64)
    if entries.size == 0:
        return entries
    offsets = [np.zeros(1, np.int64)]
    base = 0
    for row in rows:
        if row.support_offsets is None or row.support_entries is None:
            continue
        own = row.support_offsets
        if own[0] != 0 or own[-1] != row.support_entries.size or (np.diff(own) < 0).any():
            raise ValueError(
                f"rollout {row.rollout_id}: support_offsets must rise from 0 to "
                f"{row.support_entries.size}"
            )
        offsets.append(own[1:] + base)
        base += row.support_entries.size
    return canonical_order(entries, np.concatenate(offsets))


def _list_array(type_: pa.DataType, parts: Sequence[_Array | None], values: _Array) -> pa.Array:
    lengths = np.fromiter((0 if part is None else part.size for part in parts), np.int64)
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    present = np.fromiter((part is not None for part in parts), bool)
    nulls = int(present.size - np.count_nonzero(present))
    validity = pa.py_buffer(np.packbits(present, bitorder="little")) if nulls else None
    child = pa.Array.from_buffers(
        type_.value_type, values.size, [None, pa.py_buffer(np.ascontiguousarray(values))]
    )
    return pa.Array.from_buffers(
        type_, len(parts), [validity, pa.py_buffer(offsets)], nulls, children=[child]
    )


def _largest(ids: NDArray[np.int32]) -> int:
    if ids.size and int(ids.min()) < 0:
        raise ValueError(f"token ids: got {int(ids.min())}, expected at least 0")
    return int(ids.max()) if ids.size else -1


def _largest_packed(name: str, entries: NDArray[np.uint64]) -> int:
    """Check entries on the way, so that each is fetched from memory once."""
    invalid, largest = 0, -1
    for start in range(0, entries.size, AT_ONCE):
        piece = entries[start : start + AT_ONCE]
        invalid += invalid_entries(piece)
        # the low halves, without a copy
        largest = max(largest, int(piece.view("<u4")[::2].max()))
    if invalid:
        raise ValueError(f"{name}: {invalid} hold NaN, -0.0, a positive logprob or a bad id")
    return largest
