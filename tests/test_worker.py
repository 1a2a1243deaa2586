"""Who draws the tokens of an engine's worker, with stand-ins for vLLM's parts."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import v2_fakes
from noise import add_noise
from spool_blocks import entries_of

from rollout.capture import core
from rollout.capture import worker as worker_module
from rollout.capture.batch import BatchRows, RowCut, RowNoise
from rollout.capture.core import CaptureCore
from rollout.capture.request import KEPT, SKIP, CaptureSettings
from rollout.capture.v2 import V2Adapter
from rollout.capture.v2_follower import V2Follower
from rollout.capture.worker import CaptureWorkerMixin
from rollout.capture.worker_config import CONFIG_KEY
from rollout.kernels.support_capture import capture_step
from rollout.spool import SpoolReader


class Worker:
    """Stands in for vLLM's worker."""

    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, hf_config=None, get_vocab_size=lambda: 5
        ),
        scheduler_config=SimpleNamespace(async_scheduling=True, max_num_seqs=2),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        additional_config={CONFIG_KEY: {"support_capacity": 9, "top": 0, "draws": 0}},
        max_concurrent_batches=1,
    )
    device = torch.device("cpu")

    def determine_available_memory(self) -> int:
        return 2**30

    def compile_or_warm_up_model(self) -> str:
        return "warm"


class Capturing(CaptureWorkerMixin, Worker):
    """A worker whose capture draws what `check_draw` says, and truncates what `check_cut` says."""

    def __init__(
        self, draw_agrees: bool, cut_agrees: bool = True, draws: int = 0, noise: bool = True
    ) -> None:
        self.warmed: list[Any] = []
        self.tried: list[Any] = []
        recorder = SimpleNamespace(warm_up=self.warmed.append, try_draw="try", device_bytes=1)
        self._capture: Any = SimpleNamespace(
            recorder=recorder,
            can_draw=noise,
            can_truncate=noise and draws == 0,
            start=lambda _folder: None,
            stop=lambda: None,
            on_step="record",
            on_draw="draw",
        )

        def check_draw(try_draw: Any) -> bool:
            self.tried.append(("draw", try_draw))
            return draw_agrees

        def check_cut(try_draw: Any) -> bool:
            self.tried.append(("cut", try_draw))
            return cut_agrees

        self._adapter: Any = SimpleNamespace(
            check_draw=check_draw,
            check_cut=check_cut,
            on_step=None,
            on_draw=None,
            truncates=False,
            logits_dtype="float32",
        )
        self.model_runner = SimpleNamespace(get_model=lambda: None)


@pytest.mark.parametrize("agrees", [True, False])
def test_the_capture_draws_where_it_agrees(agrees: bool) -> None:
    worker = Capturing(agrees)
    assert worker.compile_or_warm_up_model() == "warm"
    assert [set(dtypes) for dtypes in worker.warmed] == [{torch.float32, torch.bfloat16}]
    assert worker.tried[:1] == [("draw", "try")]
    worker.capture_start("folder")
    assert (worker._adapter.on_step, worker._adapter.on_draw) == (
        "record",
        "draw" if agrees else None,
    )
    worker.capture_stop()
    assert worker._adapter.on_step is None


def test_the_capture_has_the_noise_of_its_adapter() -> None:
    worker = Capturing(draw_agrees=True)
    worker._adapter.add_noise = add_noise
    assert worker.determine_available_memory() == 2**30 - worker._capture.recorder.device_bytes
    assert worker._capture.can_draw
    assert worker._capture.can_truncate


class Ranks:
    """Stands in for vLLM's groups of processes: of those that share a layer, and of the stages."""

    def __init__(
        self, rank: int = 0, ranks: int = 1, *, last: bool = True, others: int = 1
    ) -> None:
        self.rank_in_group, self.world_size = rank, ranks
        self.is_last_rank = last
        self.others = others
        """The least that the other ranks say."""
        self.asked: list[int] = []
        self.sent: list[list[int]] = []
        self.device_communicator: Any = SimpleNamespace(broadcast=self.broadcast)
        self.cpu_group = object()

    def broadcast(self, values: torch.Tensor, src: int) -> None:
        assert src == 0
        self.sent.append(values.tolist())

    def all_reduce(self, value: torch.Tensor, op: Any, group: object) -> None:
        assert (op, group) == (torch.distributed.ReduceOp.MIN, self.cpu_group)
        self.asked.append(int(value))
        value.clamp_(max=self.others)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.distributed import parallel_state

        monkeypatch.setattr(parallel_state, "get_tp_group", lambda: self)
        monkeypatch.setattr(parallel_state, "get_pp_group", lambda: self)
        monkeypatch.setattr(torch.distributed, "all_reduce", self.all_reduce)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    Ranks().install(monkeypatch)


class Sharing(Capturing):
    """One of two ranks, with stand-ins of the V2 runner for the sampler's hooks."""

    def __init__(self, rank: int, agrees: bool = True) -> None:
        super().__init__(agrees)
        self.model_runner = v2_fakes.Runner()
        if rank:
            self._adapter = self._capture = None
            self._follower = V2Follower(self.model_runner, lambda _tokens: None)
        else:
            stand_in = self._adapter
            self._adapter = V2Adapter(self.model_runner)
            self._adapter.check_draw, self._adapter.check_cut = (
                stand_in.check_draw,
                stand_in.check_cut,
            )


@pytest.mark.parametrize(("agrees", "others"), [(True, 1), (True, 0), (False, 1)])
def test_the_rank_that_records_sends_its_tokens_where_all_can_take_them(
    agrees: bool, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_is_v2", lambda _runner: True)
    group = Ranks(0, 2, others=others)
    group.install(monkeypatch)
    worker = Sharing(0, agrees)
    worker.compile_or_warm_up_model()
    assert group.asked == [int(agrees)]
    draws = agrees and others == 1
    assert (worker._adapter.on_drawn is not None) == draws
    assert worker._adapter.truncates == draws
    worker.capture_start("folder")
    assert (worker._adapter.on_draw is not None) == draws
    if draws:
        worker._adapter.on_drawn(torch.tensor([4, 9]))
        assert group.sent == [[4, 9]]


@pytest.mark.parametrize(("can", "others"), [(True, 1), (True, 0), (False, 1)])
def test_another_rank_follows_where_it_can_and_is_sent_tokens(
    can: bool, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_is_v2", lambda _runner: True)
    group = Ranks(1, 2, others=others)
    group.install(monkeypatch)
    worker = Sharing(1)
    assert worker._follower is not None
    worker._follower.can_follow = can
    worker.compile_or_warm_up_model()
    assert group.asked == [int(can)]
    assert worker._follower.following == (can and others == 1)
    # whatever it is told of a recording, and when
    worker.capture_start("folder")
    worker.capture_stop()
    assert worker._follower.following == (can and others == 1)
    assert worker.capture_facts() is None


@pytest.mark.parametrize("nccl", [None, SimpleNamespace(disabled=True)])
def test_tokens_go_by_torch_where_vllm_has_no_nccl_of_its_own(
    nccl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Ranks(0, 2)
    group.install(monkeypatch)
    group.device_communicator = SimpleNamespace(pynccl_comm=nccl, broadcast=None)
    tokens: Any = SimpleNamespace(device=torch.device("cuda"), tolist=lambda: [3])
    worker_module._from_first_rank(tokens)
    assert group.sent == [[3]]


@pytest.mark.parametrize(
    ("ranks", "last", "is_v2"), [(1, True, True), (2, False, True), (2, True, False)]
)
def test_nothing_is_sent_without_need(
    ranks: int, last: bool, is_v2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_is_v2", lambda _runner: is_v2)
    group = Ranks(0, ranks, last=last)
    group.install(monkeypatch)
    worker = Capturing(draw_agrees=True)
    worker.compile_or_warm_up_model()
    assert not group.asked
    assert not group.sent


@pytest.mark.parametrize(
    ("draw_agrees", "cut_agrees", "draws", "noise", "checks"),
    [
        (True, True, 0, True, ["draw", "cut"]),
        (True, False, 0, True, ["draw", "cut"]),
        # each check takes memory and time, so none is made in vain
        (True, True, 4, True, ["draw"]),
        (False, True, 0, True, ["draw"]),
        (True, True, 0, False, []),
    ],
    ids=["agrees", "cut disagrees", "records draws", "draw disagrees", "no noise"],
)
def test_the_capture_truncates_what_it_draws(
    draw_agrees: bool,
    cut_agrees: bool,
    draws: int,
    noise: bool,
    checks: list[str],
) -> None:
    worker = Capturing(draw_agrees, cut_agrees, draws, noise)
    worker.compile_or_warm_up_model()
    assert worker.tried == [(check, "try") for check in checks]
    drawn, truncated = draw_agrees and noise, checks == ["draw", "cut"] and cut_agrees
    assert worker._adapter.truncates == truncated
    facts = worker.capture_facts()
    assert facts is not None
    assert facts["tokens_drawn_by"] == ("capture" if drawn else "engine")
    assert facts["truncated_by"] == ("capture" if truncated else "engine")


def make_core(draws: int = 0) -> CaptureCore:
    return CaptureCore(
        CaptureSettings(support_capacity=9, top=0, draws=draws),
        device=torch.device("cpu"),
        max_rows=2,
        vocab_size=5,
        steps_in_flight=1,
        add_noise=add_noise,
    )


@pytest.mark.parametrize(("draws", "truncates"), [(0, True), (1, False)])
def test_draws_are_recorded_of_masked_logits(draws: int, truncates: bool) -> None:
    assert make_core(draws).can_truncate == truncates


def test_the_cut_of_a_step_is_that_of_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(core, "capture_step", functools.partial(capture_step, impl="triton"))
    made = make_core()
    made.start(str(tmp_path))
    logits = torch.tensor([[0.1, 0.5, 0.3, 0.2, 0.4], [0.1, 0.2, 0.3, 9.0, 0.4]])
    rows = BatchRows(
        request_ids=["a", "b"],
        positions=np.zeros(2, np.int32),
        kinds=np.full(2, KEPT, np.int8),
        seeds=np.zeros(2, np.int64),
        noise=RowNoise(
            seeds=np.zeros(2, np.int64),
            lead=np.zeros(2, np.int64),
            untruncated=False,
            cut=RowCut(top_k=np.array([3, 5], np.int32), top_p=np.array([1.0, 0.9], np.float32)),
        ),
    )
    drawn = made.on_draw(logits, rows)
    made.stop()
    (block,) = SpoolReader(tmp_path).poll()
    kept = (entries_of(block) & np.uint64(0xFFFFFFFF)).astype(int)
    assert block.counts.tolist() == [3, 1]
    assert sorted(kept[:3]) == [1, 2, 4]
    assert kept[3] == 3
    assert drawn is not None
    assert drawn.tolist() == block.sampled.tolist()
    assert drawn[0] in (1, 2, 4)
    assert drawn[1] == 3


def test_steps_are_numbered_whoever_draws() -> None:
    made = make_core()
    numbers: list[int] = []
    drawn = torch.tensor([3])

    def record(
        number: int, _logits: torch.Tensor, sampled: torch.Tensor | None, _rows: BatchRows
    ) -> torch.Tensor | None:
        numbers.append(number)
        return drawn if sampled is None else None

    recorder: Any = SimpleNamespace(record=record, start=lambda _: None, stop=lambda: None)
    made.recorder = recorder

    def rows(kind: int) -> BatchRows:
        return BatchRows(
            request_ids=["a"],
            positions=np.zeros(1, np.int32),
            kinds=np.array([kind], np.int8),
            seeds=np.zeros(1, np.int64),
        )

    logits = torch.zeros(1, 5)
    assert made.on_draw(logits, rows(KEPT)) is None  # nothing is recorded yet
    made.start("folder")
    assert made.on_draw(logits, rows(KEPT)) is drawn
    made.on_step(logits, drawn, rows(KEPT))
    assert made.on_draw(logits, rows(SKIP)) is None  # no row counts
    assert made.on_draw(logits, rows(KEPT)) is drawn
    made.stop()
    assert made.on_draw(logits, rows(KEPT)) is None
    assert numbers == [0, 1, 2]
