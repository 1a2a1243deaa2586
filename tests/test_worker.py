"""Who draws the tokens of an engine's worker, with stand-ins for vLLM's parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
