"""Batches on the GPU: the values of the CPU's, copied without waiting, no memory reused early."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from loader_cases import write
from synthetic import VOCAB, realistic_rows

from rollout.batch import RolloutBatch
from rollout.loader import RolloutLoader

pytestmark = pytest.mark.gpu

# about two seconds of an H200: longer than the host needs for an epoch of this dataset
_BUSY_CYCLES = 4_000_000_000


def tensors(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def open_loader(path: Path, device: str) -> RolloutLoader:
    return RolloutLoader(
        path, vocab_size=VOCAB, groups_per_step=2, token_budget=1000, device=device
    )


def epoch(loader: RolloutLoader) -> list[RolloutBatch]:
    loader.set_epoch(0)
    return list(loader)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    rows = realistic_rows(48, tokens=128)
    for index, row in enumerate(rows):
        row.reward = float(index % 3)
    write(str(tmp_path), [rows[:24], rows[24:]], row_group_bytes=2**20)
    return tmp_path


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_batches_are_those_of_the_cpu_while_the_device_is_behind(dataset: Path) -> None:
    expected = epoch(open_loader(dataset, "cpu"))
    loader = open_loader(dataset, "cuda")
    assert len(expected) > 8
    assert max(batch.support_ids.shape[0] for batch in expected) > 50_000
    # once to have the memory of both sides, which asking for makes the device finish
    for timed in (False, True):
        torch.cuda.synchronize()
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
        torch.cuda.set_sync_debug_mode("error" if timed else "default")
        try:
            found = epoch(loader)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # every copy is still to come, from memory that the host has long let go
        assert not timed or not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert len(found) == len(expected)
        for got, want in zip(found, expected, strict=True):
            assert got.rollout_ids == want.rollout_ids
            values = tensors(want)
            assert tensors(got).keys() == values.keys()
            for name, tensor in tensors(got).items():
                assert tensor.device.type == "cuda", name
                assert tensor.dtype == values[name].dtype, name
                assert torch.equal(tensor.cpu(), values[name]), name
        del found, got


def test_large_arrays_are_made_in_page_locked_memory(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[tuple[str, bool]] = []
    to = RolloutBatch.to

    def watched(batch: RolloutBatch, *args: object, **kwargs: object) -> RolloutBatch:
        copied.extend((name, tensor.is_pinned()) for name, tensor in tensors(batch).items())
        return to(batch, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(RolloutBatch, "to", watched)
    epoch(open_loader(dataset, "cuda"))
    assert len(copied) > 100
    assert all(pinned for _, pinned in copied)
