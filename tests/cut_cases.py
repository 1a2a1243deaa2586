"""Logits and cuts that tests of top-k and top-p share."""

from __future__ import annotations

import math

import numpy as np
import torch

SPREADS = [0.3, 1.0, 3.0, 12.0]
"""Standard deviations of `normal` rows, in turn."""

TIED = ["halves", "two", "zeros", "close", "far", "equal", "descending", "ascending"]
"""The names of `tied`."""


def normal(rows: int, vocab: int, *, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make random logits, of another spread in each row.

    Args:
        rows: N.
        vocab: V.
        seed: the first row has `SPREADS[seed % 4]`.
        dtype: to round to.

    Returns:
        [N, V].
    """
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([SPREADS[(i + seed) % len(SPREADS)] for i in range(rows)])
    return (torch.randn(rows, vocab, generator=generator) * spread[:, None]).to(dtype)


def tied(name: str, vocab: int) -> torch.Tensor:
    """Make a row with many equal or nearly equal logits.

    Args:
        name: of `TIED`.
        vocab: V.

    Returns:
        [V] float32.
    """
    generator = torch.Generator().manual_seed(vocab)
    values = torch.randn(vocab, generator=generator)
    two = torch.where(torch.rand(vocab, generator=generator) < 0.3, 1.5, -0.25)
    zeros = torch.where(torch.rand(vocab, generator=generator) < 0.5, 0.0, -0.0)
    steps = torch.arange(vocab).div(vocab / 40, rounding_mode="floor") / 4
    return {
        "halves": (values * 6.0).round() / 2,
        "two": two,
        "zeros": torch.where(values > 1.0, 0.5, zeros),
        # neighbours in float32, and others that an id far above them makes look like one
        "close": 1.0 + (values * 20.0).round() * 2.0**-23,
        "far": torch.where(torch.arange(vocab) == vocab // 2, 1e30, values),
        "equal": torch.full((vocab,), -7.25),
        "descending": steps.flip(0),
        "ascending": steps,
    }[name]


def random_logits(generator: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Make logits of some random shape, with ties or -inf in some; each row has a finite one.

    Args:
        generator: advanced by it.
        rows: N.
        vocab: V.

    Returns:
        [N, V] float64, within float16.
    """
    logits = generator.normal(size=(rows, vocab)) * generator.choice([0.01, 0.3, 2, 12, 80])
    match generator.integers(6):
        case 0:
            logits = np.round(logits * 2) / 2
        case 1:
            logits = np.where(logits > 0.3, 4.0, generator.normal())
        case 2:
            logits[:, :: generator.integers(1, 5)] = 0.0
        case 3:
            logits[generator.random((rows, vocab)) < generator.random()] = -math.inf
    logits[np.arange(rows), generator.integers(vocab, size=rows)] = generator.normal() * 9
    return np.asarray(logits + generator.choice([0.0, 500.0, -3000.0]))


def random_cut(generator: np.random.Generator, vocab: int) -> tuple[int, float]:
    """Choose a top_k and a top_p; either may be none.

    Args:
        generator: advanced by it.
        vocab: V.
    """
    top_k = generator.choice([0, 0, 1, vocab, int(generator.integers(1, vocab + 3))])
    top_p = generator.choice([1.0, 0.95, 1e-6, generator.random(), 1 - generator.random() ** 4])
    return int(top_k), max(float(top_p), 1e-30)
