"""The entries of a batch in the order of their ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# E entries of all rows, V vocabulary


@triton.jit
def _id_offsets_kernel(
    keys_ptr, offsets_ptr, num_entries, num_offsets, search_steps, BLOCK: tl.constexpr
):
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # the first place whose key is not below this one
    low = tl.zeros((BLOCK,), tl.int64)
    high = tl.zeros((BLOCK,), tl.int64) + num_entries
    for _ in range(search_steps):
        middle = (low + high) // 2
        open_ = low < high
        below = tl.load(keys_ptr + middle, mask=open_, other=0) < key
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & ~below, middle, high)
    tl.store(offsets_ptr + key, low, mask=key < num_offsets)


@dataclass(frozen=True, kw_only=True, slots=True)
class IdOrder:
    """The entries of a batch sorted by id, stable, so that an id's rows ascend."""

    keys: torch.Tensor
    """[E] int32 keys, ascending; V for entries without work, last."""
    entries: torch.Tensor
    """[E] int64, the entry at each place."""
    offsets: torch.Tensor
    """[V + 1] int64, the places of id v in offsets[v]:offsets[v + 1]."""


def sort_by_id(keys: torch.Tensor, vocab: int) -> IdOrder:
    """Sort the entries of a batch by key.

    Args:
        keys: [E] int32 in [0, V].
        vocab: V.

    Returns:
        The order and the CSR offsets over the ids.
    """
    sorted_keys, entries = torch.sort(keys, stable=True)
    offsets = torch.empty(vocab + 1, dtype=torch.int64, device=keys.device)
    _id_offsets_kernel[(triton.cdiv(vocab + 1, 256),)](
        sorted_keys, offsets, keys.shape[0], vocab + 1, keys.shape[0].bit_length() + 1, BLOCK=256
    )
    return IdOrder(keys=sorted_keys, entries=entries, offsets=offsets)
