"""Who draws the tokens of an engine's worker, with stand-ins for vLLM's parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout.capture.batch import BatchRows
from rollout.capture.core import CaptureCore
from rollout.capture.request import KEPT, SKIP, CaptureSettings
from rollout.capture.worker import CaptureWorkerMixin


class Worker:
    """Stands in for vLLM's worker."""

    vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))

    def compile_or_warm_up_model(self) -> str:
        return "warm"


class Capturing(CaptureWorkerMixin, Worker):
    """A worker whose capture draws what `check_draw` says."""

    def __init__(self, agrees: bool) -> None:
        self.warmed: list[Any] = []
        self.tried: list[Any] = []
        recorder = SimpleNamespace(warm_up=self.warmed.append, try_draw="try")
        self._capture: Any = SimpleNamespace(
            recorder=recorder,
            start=lambda _folder: None,
            stop=lambda: None,
            on_step="record",
            on_draw="draw",
        )

        def check_draw(try_draw: Any) -> bool:
            self.tried.append(try_draw)
            return agrees

        self._adapter: Any = SimpleNamespace(check_draw=check_draw, on_step=None, on_draw=None)


@pytest.mark.parametrize(("agrees", "ranks"), [(True, 1), (False, 1), (True, 2)])
def test_the_capture_draws_where_it_agrees_and_is_alone(
    agrees: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: ranks)
    worker = Capturing(agrees)
    assert worker.compile_or_warm_up_model() == "warm"
    assert [set(dtypes) for dtypes in worker.warmed] == [{torch.float32, torch.bfloat16}]
    assert worker.tried == (["try"] if ranks == 1 else [])
    worker.capture_start("folder")
    draws = agrees and ranks == 1
    assert (worker._adapter.on_step, worker._adapter.on_draw) == (
        "record",
        "draw" if draws else None,
    )
    worker.capture_stop()
    assert worker._adapter.on_step is None


def test_steps_are_numbered_whoever_draws() -> None:
    settings = CaptureSettings(support_capacity=9, top=0, draws=0)
    core = CaptureCore(
        settings, device=torch.device("cpu"), max_rows=2, vocab_size=5, steps_in_flight=1
    )
    numbers: list[int] = []
    drawn = torch.tensor([3])

    def record(
        number: int, _logits: torch.Tensor, sampled: torch.Tensor | None, _rows: BatchRows
    ) -> torch.Tensor | None:
        numbers.append(number)
        return drawn if sampled is None else None

    recorder: Any = SimpleNamespace(record=record, start=lambda _: None, stop=lambda: None)
    core.recorder = recorder

    def rows(kind: int) -> BatchRows:
        return BatchRows(
            request_ids=["a"],
            positions=np.zeros(1, np.int32),
            kinds=np.array([kind], np.int8),
            seeds=np.zeros(1, np.int64),
        )

    logits = torch.zeros(1, 5)
    assert core.on_draw(logits, rows(KEPT)) is None  # nothing is recorded yet
    core.start("folder")
    assert core.on_draw(logits, rows(KEPT)) is drawn
    core.on_step(logits, drawn, rows(KEPT))
    assert core.on_draw(logits, rows(SKIP)) is None  # no row counts
    assert core.on_draw(logits, rows(KEPT)) is drawn
    core.stop()
    assert core.on_draw(logits, rows(KEPT)) is None
    assert numbers == [0, 1, 2]
