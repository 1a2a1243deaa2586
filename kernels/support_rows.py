"""What every head asks of a CSR matrix of ids: its rows, its targets, and whether it is one."""

from __future__ import annotations

import sys

import torch

# N rows, E entries of all rows, V vocabulary, H hidden size


def entry_rows(
    support_offsets: torch.Tensor,  # [N + 1]
    num_entries: int,
) -> torch.Tensor:
    """Return the row of every entry of a CSR matrix, without waiting for the device.

    Args:
        support_offsets: [N + 1] int64.
        num_entries: E.

    Returns:
        [E] int64.
    """
    rows = torch.arange(support_offsets.shape[0] - 1, device=support_offsets.device)
    return rows.repeat_interleave(support_offsets.diff(), output_size=num_entries)


def target_positions(
    support_ids: torch.Tensor,  # [E]
    support_offsets: torch.Tensor,  # [N + 1]
    target_ids: torch.Tensor,  # [N]
) -> torch.Tensor:
    """Return the first entry of each row that names the row's target, or -1.

    Args:
        support_ids: [E] int32 or int64.
        support_offsets: [N + 1] int64.
        target_ids: [N] int64.

    Returns:
        [N] int64 positions into the entries; -1 where the support is empty or lacks the target.
    """
    num_entries = support_ids.shape[0]
    rows = entry_rows(support_offsets, num_entries)
    entries = torch.arange(num_entries, device=support_ids.device)
    entries = torch.where(support_ids == target_ids[rows], entries, num_entries)
    first = torch.full_like(target_ids, num_entries, dtype=torch.int64)
    first = first.scatter_reduce(0, rows, entries, "amin")
    return torch.where(first == num_entries, -1, first)


def missing_targets(
    support_ids: torch.Tensor,  # [E]
    support_offsets: torch.Tensor,  # [N + 1]
    target_ids: torch.Tensor,  # [N]
) -> torch.Tensor:
    """Return which rows have a support that lacks their target, without waiting for the device.

    Args:
        support_ids: [E] int32 or int64.
        support_offsets: [N + 1] int64.
        target_ids: [N] int64.

    Returns:
        [N] bool; True in rows with an empty support.
    """
    return target_positions(support_ids, support_offsets, target_ids) < 0


def raise_missing(
    support_ids: torch.Tensor, support_offsets: torch.Tensor, target_ids: torch.Tensor
) -> None:
    """Raise on the first row whose support lacks its target; waits for the device.

    Args:
        support_ids: [E] int32 or int64.
        support_offsets: [N + 1] int64.
        target_ids: [N] int64.

    Raises:
        ValueError: there is such a row.
    """
    missing = missing_targets(support_ids, support_offsets, target_ids).nonzero()
    if missing.numel():
        row = int(missing[0, 0])
        width = int(support_offsets[row + 1] - support_offsets[row])
        remedy = "exclude these rows or check that targets and supports are aligned"
        if width == 0:
            remedy = "a row without a support needs the whole vocabulary: use rollout.head"
        raise ValueError(
            f"row {row}: target id {int(target_ids[row])} is not in its support of {width} ids, "
            f"expected every sampled id in its own support ({missing.shape[0]} such rows); {remedy}"
        )


def check_arguments(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    support_ids: torch.Tensor,
    support_offsets: torch.Tensor,
    target_ids: torch.Tensor,
    inverse_temperature: torch.Tensor,
) -> None:
    """Check what every head takes, without waiting for a device.

    Args:
        hidden: [N, H] float.
        weight: [V, H], the dtype of `hidden`.
        support_ids: [E] int32 or int64.
        support_offsets: [N + 1] int64.
        target_ids: [N] int64.
        inverse_temperature: [N].

    Raises:
        ValueError: shapes, dtypes, devices or (on the CPU) values are wrong, or a tensor is
            sharded.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}, expected [N, H] and "
            "[V, H]"
        )
    if hidden.dtype != weight.dtype or not hidden.dtype.is_floating_point:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}, expected one floating dtype; "
            "cast one of them"
        )
    _refuse_sharded(hidden=hidden, weight=weight)
    num_rows = hidden.shape[0]
    for name, tensor, length in (
        ("support_offsets", support_offsets, num_rows + 1),
        ("target_ids", target_ids, num_rows),
        ("inverse_temperature", inverse_temperature, num_rows),
        ("support_ids", support_ids, support_ids.numel()),
    ):
        if list(tensor.shape) != [length]:
            raise ValueError(f"{name} is {list(tensor.shape)}, expected [{length}]")
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, expected {hidden.device} as hidden")
    if support_ids.shape[0] >= 1 << 31:
        raise ValueError(
            f"support_ids has {support_ids.shape[0]} entries, expected fewer than 2**31; split the "
            "batch"
        )
    if weight.device != hidden.device:
        raise ValueError(f"weight is on {weight.device}, expected {hidden.device} as hidden")
    for name, tensor, allowed in (
        ("support_ids", support_ids, (torch.int32, torch.int64)),
        ("support_offsets", support_offsets, (torch.int64,)),
        ("target_ids", target_ids, (torch.int64,)),
    ):
        if tensor.dtype not in allowed:
            raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, allowed))}")
    if hidden.device.type == "cpu":
        _check_values(support_ids, support_offsets, weight.shape[0])


def _refuse_sharded(**tensors: torch.Tensor) -> None:
    """Raise ValueError for a DTensor, whose local part would pass for all of it."""
    # looked up, not imported: the import takes a second, and without it there are none
    module = sys.modules.get("torch.distributed.tensor")
    for name, tensor in tensors.items():
        if module is not None and isinstance(tensor, module.DTensor):
            raise ValueError(
                f"{name} is a DTensor of placements {tensor.placements}, expected a plain one; "
                "run the head inside the forward of the module that fully_shard wraps, or pass "
                "rollout.sharded.whole_weight(weight)"
            )


def _check_values(support_ids: torch.Tensor, support_offsets: torch.Tensor, vocab: int) -> None:
    """Raise ValueError for offsets that are no CSR and ids out of the vocabulary."""
    num_entries = support_ids.shape[0]
    ends = int(support_offsets[0]), int(support_offsets[-1])
    if ends != (0, num_entries) or bool((support_offsets.diff() < 0).any()):
        raise ValueError(
            f"support_offsets run from {ends[0]} to {ends[1]}, expected ascending from 0 to "
            f"{num_entries}"
        )
    if num_entries:
        low, high = int(support_ids.min()), int(support_ids.max())
        if low < 0 or high >= vocab:
            raise ValueError(f"support_ids span [{low}, {high}], expected ids in [0, {vocab})")
