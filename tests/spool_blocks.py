"""Steps of a spool with made-up contents."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.spool import StepBlock, StoredStep
from rollout.spool_entries import load_entries

ARRAYS = (
    "positions",
    "sampled",
    "kinds",
    "flags",
    "counts",
    "sampled_logprobs",
    "tail_mass",
    "draws",
)


def random_block(
    rng: np.random.Generator, *, rows: int, draws: int = 0, step: int = 0
) -> StepBlock:
    """Any bits at all in every array; the counts sum to the entries."""

    def bits(dtype: type[np.generic], *shape: int) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(rng.bytes(size), dtype).reshape(shape)

    counts = rng.integers(0, 9, rows).astype(np.int32)
    names = ["plain-0", "\u00fcn\u00efc\u00f6de \U0001f600", "", "a b\tc", "x" * 300]
    return StepBlock(
        step=step,
        need=int(rng.integers(2**63)),
        waited=float(rng.random()),
        request_ids=[names[int(rng.integers(len(names)))] for _ in range(rows)],
        positions=bits(np.int32, rows),
        sampled=bits(np.int32, rows),
        kinds=bits(np.int8, rows),
        flags=bits(np.int32, rows),
        counts=counts,
        sampled_logprobs=bits(np.float32, rows),
        tail_mass=bits(np.float32, rows),
        draws=bits(np.uint64, rows, draws),
        entries=bits(np.uint64, int(counts.sum())),
    )


def entries_of(step: StoredStep) -> NDArray[np.uint64]:
    """Read a step's entries from the spool."""
    where = np.array([step.address], np.int64)
    return load_entries(step.segments.folder, where, np.array([step.num_entries], np.int32))


def assert_same(found: StoredStep, expected: StepBlock) -> None:
    """Compare a step that is still in the spool with what was written, bit by bit."""
    for name in ("step", "need", "waited", "request_ids"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ARRAYS:
        a, b = getattr(found, name), getattr(expected, name)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name
    assert entries_of(found).tobytes() == expected.entries.tobytes()
