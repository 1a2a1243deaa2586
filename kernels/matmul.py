"""Matrix products with an fp32 result, and the walk over the vocabulary in blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def matmul_fp32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply two matrices with fp32 accumulation and an fp32 result.

    Args:
        left: [A, B], any float dtype.
        right: [B, C], the same.

    Returns:
        [A, C] fp32.
    """
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def add_matmul_fp32(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return total + left @ right in fp32.

    Args:
        total: [A, C] fp32.
        left: [A, B], any float dtype.
        right: [B, C], the same.

    Returns:
        [A, C] fp32; `total` must not be used afterwards.
    """
    if left.dtype != torch.float32 and left.is_cuda:
        return torch.addmm(total, left, right, out_dtype=torch.float32)
    return total.add_(matmul_fp32(left, right))


def vocab_blocks(
    num_rows: int, vocab: int, width: int, max_elements: int
) -> Iterator[tuple[int, int]]:
    """Yield the bounds of blocks of ids whose [N, block] matrices stay small.

    Args:
        num_rows: N.
        vocab: V.
        width: H; a block has at least H ids, so that a product of it fills the device.
        max_elements: of one matrix, unless H ids already have more.

    Yields:
        The first id of a block and that behind its last.
    """
    size = max(width, max_elements // max(1, num_rows)) // 128 * 128
    for first in range(0, vocab, max(128, size)):
        yield first, min(vocab, first + max(128, size))
