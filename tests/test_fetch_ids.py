"""Ids are fetched from an address that only memory holds."""

from __future__ import annotations

import pytest
import torch

from rollout.kernels.fetch_ids import FETCH_BLOCK, fetch_ids

CPU_AND_GPU = [
    ("reference", "cpu"),
    ("triton", "cpu"),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("impl", "device"), CPU_AND_GPU)
@pytest.mark.parametrize(
    ("count", "room"), [(0, 3), (1, 1), (5, 8), (FETCH_BLOCK, FETCH_BLOCK), (FETCH_BLOCK + 1, 1300)]
)
def test_the_ids_arrive_and_nothing_behind_them(
    impl: str, device: str, count: int, room: int
) -> None:
    # what lies behind the ids is somebody else's
    memory = torch.randint(1, 2**40, (count + 64,), device=device)
    source = torch.tensor([memory.data_ptr(), count], device=device)
    out = torch.full((room,), -7, device=device)
    fetch_ids(source, out, impl=impl)  # type: ignore[arg-type]
    assert out.tolist() == memory[:count].tolist() + [0] * (room - count)


def test_other_dtypes_are_refused() -> None:
    ids = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"source: got \[3\] .* expected contiguous \[2\]"):
        fetch_ids(torch.zeros(3, dtype=torch.int64), ids)
    with pytest.raises(ValueError, match="out: got"):
        fetch_ids(ids[:2], torch.zeros(4, dtype=torch.int32))
