"""A step's words arrive on the device, and the ids from an address that only memory holds."""

from __future__ import annotations

import pytest
import torch

from rollout.kernels.fetch_step import FETCH_BLOCK, fetch_step

CPU_AND_GPU = [
    ("reference", "cpu"),
    ("triton", "cpu"),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("impl", "device"), CPU_AND_GPU)
@pytest.mark.parametrize("words", [3, FETCH_BLOCK + 5])
@pytest.mark.parametrize(
    ("count", "room"), [(0, 3), (1, 1), (5, 8), (FETCH_BLOCK, FETCH_BLOCK), (FETCH_BLOCK + 1, 1300)]
)
def test_all_arrives_and_nothing_behind_it(
    impl: str, device: str, count: int, room: int, words: int
) -> None:
    # what lies behind the ids and the words is somebody else's
    memory = torch.randint(1, 2**40, (count + 64,), device=device)
    host = torch.randint(1, 2**40, (words,), pin_memory=device == "cuda")
    host[1:3] = torch.tensor([memory.data_ptr(), count])
    arrived, ids = (torch.full((size + 7,), -7, device=device) for size in (words, room))
    fetch_step(host, arrived[:words], ids[:room], impl=impl)  # type: ignore[arg-type]
    assert arrived.tolist() == host.tolist() + [-7] * 7
    assert ids.tolist() == memory[:count].tolist() + [0] * (room - count) + [-7] * 7


def test_other_sizes_and_dtypes_are_refused() -> None:
    four, five = torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"host: got \[5\] .* expected contiguous \[4\]"):
        fetch_step(five, four, four)
    with pytest.raises(ValueError, match=r"host: got \[2\] .* expected contiguous \[3\]"):
        fetch_step(four[:2], four[:2], four)
    with pytest.raises(ValueError, match=r"ids: got .* torch\.int32"):
        fetch_step(four, four, torch.zeros(4, dtype=torch.int32))
