"""Forward kernels of the sparse head: keys, sampled product, log-softmax of each row.

The product is balanced by tiles of entries, not by rows, so that a row of 100 k ids and a hundred
thousand rows of one id cost the same per entry. A tile inside one row, the common case, loads that
row's hidden state once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels.head_config import DOT_TILE, DOT_WARPS, ENTRY_BLOCK, row_blocks, width_block

# N rows, E entries of all rows, V vocabulary, H hidden size


@triton.jit
def _entry_keys_kernel(
    ids_ptr,
    offsets_ptr,
    targets_ptr,
    wide_ptr,
    rows_ptr,
    keys_ptr,
    positions_ptr,
    num_entries,
    num_rows,
    vocab,
    search_steps,
    HAS_WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_entries
    # the last row that starts at or before the entry: the one that holds it, as no later one does
    low = tl.zeros((BLOCK,), tl.int32)
    high = tl.zeros((BLOCK,), tl.int32) + (num_rows - 1)
    for _ in range(search_steps):
        middle = (low + high + 1) // 2
        before = tl.load(offsets_ptr + middle, mask=inside, other=0) <= entry
        low = tl.where(before, middle, low)
        high = tl.where(before, high, tl.maximum(middle - 1, low))
    start = tl.load(offsets_ptr + low, mask=inside, other=0)
    end = tl.load(offsets_ptr + low + 1, mask=inside, other=0)
    ids = tl.load(ids_ptr + entry, mask=inside, other=-1).to(tl.int64)
    target = tl.load(targets_ptr + low, mask=inside, other=-2)
    tl.atomic_min(positions_ptr + low, entry, mask=inside & (ids == target))
    # the key of an entry that needs no work, or can't have any, lies behind the vocabulary
    none = (end - start == 1) | (ids < 0) | (ids >= vocab)
    if HAS_WIDE:
        none = none | (tl.load(wide_ptr + low, mask=inside, other=0) != 0)
    keys = tl.where(none, vocab, ids)
    tl.store(rows_ptr + entry, low, mask=inside)
    tl.store(keys_ptr + entry, keys.to(tl.int32), mask=inside)


@triton.jit
def _dot_kernel(
    hidden_ptr,
    weight_ptr,
    keys_ptr,
    rows_ptr,
    list_ptr,
    count_ptr,
    scale_ptr,
    logits_ptr,
    hidden_stride,
    weight_stride,
    num_entries,
    vocab,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_LIST: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    entry = place
    inside = place < num_entries
    if HAS_LIST:
        count = tl.load(count_ptr)
        if tl.program_id(0).to(tl.int64) * BLOCK_E >= count:
            return
        inside = place < count
        entry = tl.load(list_ptr + place, mask=inside, other=0).to(tl.int64)
    key = tl.load(keys_ptr + entry, mask=inside, other=vocab).to(tl.int64)
    row = tl.load(rows_ptr + entry, mask=inside, other=0).to(tl.int64)
    work = key < vocab
    low = tl.min(tl.where(inside, row, 1 << 40))
    high = tl.max(tl.where(inside, row, 0))
    # [BLOCK_E, BLOCK_H], summed over its columns only once
    total = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
    if low == high:
        for begin in tl.static_range(0, WIDTH, BLOCK_H):
            column = begin + tl.arange(0, BLOCK_H)
            known = column < WIDTH
            h = tl.load(hidden_ptr + low * hidden_stride + column, mask=known, other=0.0)
            w = tl.load(
                weight_ptr + key[:, None] * weight_stride + column[None, :],
                mask=work[:, None] & known[None, :],
                other=0.0,
            )
            total += w.to(tl.float32) * h.to(tl.float32)[None, :]
    else:
        for begin in range(0, WIDTH, BLOCK_H):
            column = begin + tl.arange(0, BLOCK_H)
            mask = work[:, None] & (column < WIDTH)[None, :]
            h = tl.load(
                hidden_ptr + row[:, None] * hidden_stride + column[None, :], mask=mask, other=0.0
            )
            w = tl.load(
                weight_ptr + key[:, None] * weight_stride + column[None, :], mask=mask, other=0.0
            )
            total += w.to(tl.float32) * h.to(tl.float32)
    scale = tl.load(scale_ptr + row, mask=inside, other=1.0)
    # an id out of the vocabulary is read as nothing and shows as NaN; a lone entry is never read
    logits = tl.where(work, tl.sum(total, 1) * scale, float("nan"))
    tl.store(logits_ptr + entry, logits, mask=inside)


@triton.jit
def _peak_and_sum(logits_ptr, start, end, BLOCK: tl.constexpr):
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(start, end, BLOCK):
        entry = begin + tl.arange(0, BLOCK).to(tl.int64)
        z = tl.load(logits_ptr + entry, mask=entry < end, other=float("-inf"))
        higher = tl.where(z > top, z, top)
        # a lane that has seen nothing keeps a total of 0: its -inf - -inf must not be taken
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.exp(z - shift)
        top = higher
    peak = tl.max(top)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, tl.sum(total * tl.exp(top - shift))


@triton.jit
def _row_softmax_kernel(
    logits_ptr,
    offsets_ptr,
    positions_ptr,
    targets_ptr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets_ptr + row)
    end = tl.load(offsets_ptr + row + 1)
    position = tl.load(positions_ptr + row)
    missing = position >= end
    if end - start < 2:
        if end > start:
            tl.store(logits_ptr + start, 0.0)
        tl.store(targets_ptr + row, tl.where(missing, float("nan"), 0.0))
    else:
        target = tl.load(logits_ptr + tl.minimum(position, end - 1))
        peak, total = _peak_and_sum(logits_ptr, start, end, BLOCK=BLOCK)
        logsumexp = peak + tl.log(total)
        # every lane has read the target before any lane overwrites it
        tl.debug_barrier()
        for begin in range(start, end, BLOCK):
            entry = begin + tl.arange(0, BLOCK).to(tl.int64)
            z = tl.load(logits_ptr + entry, mask=entry < end, other=0.0)
            tl.store(logits_ptr + entry, z - logsumexp, mask=entry < end)
        tl.store(targets_ptr + row, tl.where(missing, float("nan"), target - logsumexp))


def entry_keys(
    support_ids: torch.Tensor,  # [E]
    support_offsets: torch.Tensor,  # [N + 1]
    target_ids: torch.Tensor,  # [N]
    vocab: int,
    wide: torch.Tensor | None = None,  # [N]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each entry's row and key and each row's target position.

    Args:
        support_ids: [E] int32 or int64.
        support_offsets: [N + 1] int64.
        target_ids: [N] int64.
        vocab: V.
        wide: [N] int8, not 0 in rows that are done by the product with the whole weight.

    Returns:
        rows: [E] int32.
        keys: [E] int32, the id; V in single-entry and wide rows and for an id out of [0, V).
        positions: [N] int64, the first entry that names the target; E where there is none.
    """
    num_rows, num_entries = target_ids.shape[0], support_ids.shape[0]
    rows = torch.empty(num_entries, dtype=torch.int32, device=support_ids.device)
    keys = torch.empty_like(rows)
    positions = torch.full_like(target_ids, num_entries)
    if num_entries:
        _entry_keys_kernel[(triton.cdiv(num_entries, ENTRY_BLOCK),)](
            support_ids,
            support_offsets,
            target_ids,
            wide,
            rows,
            keys,
            positions,
            num_entries,
            num_rows,
            vocab,
            num_rows.bit_length(),
            HAS_WIDE=wide is not None,
            BLOCK=ENTRY_BLOCK,
        )
    return rows, keys, positions


def sampled_product(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H]
    keys: torch.Tensor,  # [E]
    rows: torch.Tensor,  # [E]
    inverse_temperature: torch.Tensor,  # [N]
    logits: torch.Tensor,  # [E]
    listed: torch.Tensor | None = None,  # [E]
    count: torch.Tensor | None = None,  # [1]
) -> None:
    """Write the scaled dot product of every entry, or of the listed ones, into `logits`.

    Args:
        hidden: [N, H] bf16, fp16 or fp32, unit stride along H.
        weight: [V, H], the same.
        keys: [E] int32 from `entry_keys`.
        rows: [E] int32 from `entry_keys`.
        inverse_temperature: [N] fp32.
        logits: [E] fp32, written; NaN where the key is V.
        listed: [E] int32, the entries to do, ascending; all when None.
        count: [1] int64, how many of them there are, on the device.
    """
    num_entries, (vocab, width) = keys.shape[0], weight.shape
    if not num_entries:
        return
    _dot_kernel[(triton.cdiv(num_entries, DOT_TILE),)](
        hidden,
        weight,
        keys,
        rows,
        listed,
        count,
        inverse_temperature,
        logits,
        hidden.stride(0),
        weight.stride(0),
        num_entries,
        vocab,
        WIDTH=width,
        BLOCK_E=DOT_TILE,
        BLOCK_H=width_block(width, 256),
        HAS_LIST=listed is not None,
        num_warps=DOT_WARPS,
    )


def row_softmax(
    logits: torch.Tensor,  # [E]
    support_offsets: torch.Tensor,  # [N + 1]
    positions: torch.Tensor,  # [N]
) -> torch.Tensor:
    """Turn logits into log-probabilities of their row, in place, and return the targets'.

    Args:
        logits: [E] fp32, overwritten; 0 in single-entry rows whatever it held.
        support_offsets: [N + 1] int64.
        positions: [N] int64 from `entry_keys`.

    Returns:
        [N] fp32; NaN where the target is missing, as it is in an empty row.
    """
    num_rows = positions.shape[0]
    targets = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _row_softmax_kernel[(num_rows,)](
        logits, support_offsets, positions, targets, **row_blocks(num_rows, logits.shape[0])
    )
    return targets
