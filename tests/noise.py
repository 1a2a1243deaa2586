"""Noise of one id, for tests: in Triton as the capture runs it, and in torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def add_noise(value, ids, seed, position):  # type: ignore[no-untyped-def]
    """Add to each logit the noise of its id."""
    word = ids.to(tl.uint32) * 0x9E3779B1 + position.to(tl.uint32) * 0x85EBCA77
    word = (word + seed.to(tl.uint32)) * 0xC2B2AE3D
    word = (word ^ (word >> 15)) * 0x27D4EB2F
    return value + (word >> 8).to(tl.int32).to(tl.float32) * 3.814697265625e-06  # 2**-18


def noise_of(seeds: list[int], positions: list[int], vocab_size: int) -> torch.Tensor:
    """Return the noise of every id, in [0, 64).

    Args:
        seeds: N; the low 32 bits count.
        positions: N; likewise.
        vocab_size: V.

    Returns:
        [N, V] float32, on the GPU where there is one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mask = 0xFFFFFFFF
    of_row = [s + p * 0x85EBCA77 & mask for s, p in zip(seeds, positions, strict=True)]
    word = torch.arange(vocab_size, device=device) * 0x9E3779B1
    word = (word + torch.tensor(of_row, device=device)[:, None]) & mask
    word = _times(word, 0xC2B2AE3D)
    word = _times(word ^ (word >> 15), 0x27D4EB2F)
    return (word >> 8).float() * 2.0**-18


def _times(word: torch.Tensor, factor: int) -> torch.Tensor:
    """Multiply 32-bit words, of which int64 could not hold the product."""
    high = ((word >> 16) * factor) & 0xFFFF
    return ((high << 16) + (word & 0xFFFF) * factor) & 0xFFFFFFFF
