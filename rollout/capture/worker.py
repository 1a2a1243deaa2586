"""vLLM workers that capture, installed by name through the engine argument `worker_cls`.

The mixin overrides two steps of the worker's life: after the weights are loaded the sampler is
hooked, and before the KV cache is sized the capture's memory is set aside. What is sampled before
the driver calls `capture_start` (vLLM's own warm-up) is not recorded.
"""

from __future__ import annotations

from typing import Any

import torch

from rollout.capture.core import CaptureCore
from rollout.capture.lifeline import follow_job
from rollout.capture.request import CaptureSettings
from rollout.capture.v1 import V1Adapter
from rollout.capture.v2 import V2Adapter
from rollout.capture.v2_follower import V2Follower
from rollout.capture.worker_config import CONFIG_KEY


class CaptureWorkerMixin:
    """Adds the capture to a vLLM worker class."""

    model_runner: Any
    vllm_config: Any
    device: Any
    _capture: CaptureCore | None = None
    _adapter: V1Adapter | V2Adapter | None = None
    _follower: V2Follower | None = None
    _draws_tokens = False

    def init_device(self, *args: Any, **kwargs: Any) -> Any:
        """Tie this process to the job before anything takes long."""
        follow_job()
        return super().init_device(*args, **kwargs)  # type: ignore[misc]

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load the weights, then hook the sampler of the ranks that sample.

        One of them returns its samples, and records.
        """
        result = super().load_model(*args, **kwargs)  # type: ignore[misc]
        rank, _ = _sampling_rank()
        if rank == 0:
            adapter = V2Adapter if _is_v2(self.model_runner) else V1Adapter
            self._adapter = adapter(self.model_runner)
        elif rank is not None and _is_v2(self.model_runner):
            self._follower = V2Follower(self.model_runner, _from_first_rank)
        return result

    def determine_available_memory(self) -> int:
        """Take the capture's memory out of the KV cache's budget, where vLLM chooses the budget.

        The buffers are made after vLLM's profiling, since its versions count what exists before
        in different ways.
        """
        available: int = super().determine_available_memory()  # type: ignore[misc]
        if self._adapter is None:
            return available
        self._capture = CaptureCore(
            CaptureSettings(**self.vllm_config.additional_config[CONFIG_KEY]),
            device=self.device,
            max_rows=self.vllm_config.scheduler_config.max_num_seqs,
            vocab_size=self.vllm_config.model_config.get_vocab_size(),
            steps_in_flight=self.vllm_config.max_concurrent_batches,
            add_noise=self._adapter.add_noise,
        )
        if self.vllm_config.cache_config.kv_cache_memory_bytes is not None:
            return available
        return available - self._capture.recorder.device_bytes

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """Warm the capture's kernels before vLLM arms its own checks on compilation."""
        if self._capture is not None:
            dtype = self.vllm_config.model_config.dtype
            self._capture.recorder.warm_up(tuple({torch.float32, dtype}))
            adapter, try_draw = self._adapter, self._capture.recorder.try_draw
            assert adapter is not None
            self._draws_tokens = self._capture.can_draw and adapter.check_draw(try_draw)
            adapter.truncates = (
                self._draws_tokens and self._capture.can_truncate and adapter.check_cut(try_draw)
            )
        self._share_draws()
        return super().compile_or_warm_up_model(*args, **kwargs)  # type: ignore[misc]

    def _share_draws(self) -> None:
        """Have the ranks that sample agree on whether the capture draws the tokens of all."""
        rank, ranks = _sampling_rank()
        if rank is None or ranks == 1 or not _is_v2(self.model_runner):
            return
        follower = self._follower
        self._draws_tokens = _all_ranks(
            self._draws_tokens if follower is None else follower.can_follow
        )
        if follower is not None:
            follower.following = self._draws_tokens
        elif isinstance(self._adapter, V2Adapter):
            self._adapter.on_drawn = _from_first_rank if self._draws_tokens else None
            self._adapter.truncates &= self._draws_tokens

    def capture_start(self, folder: str) -> None:
        """Start recording into a spool folder."""
        if self._adapter is not None:
            assert self._capture is not None
            self._capture.start(folder)
            self._adapter.on_step = self._capture.on_step
            self._adapter.on_draw = self._capture.on_draw if self._draws_tokens else None

    def capture_stop(self) -> None:
        """Stop recording: sampling goes on as in stock vLLM."""
        if self._adapter is not None and self._capture is not None:
            self._adapter.on_step = None
            self._capture.stop()

    def capture_flush(self) -> str | None:
        """Return once everything captured so far is in the spool, or say why it can't be."""
        if self._capture is None:
            return None
        self._capture.recorder.flush()
        return self._capture.recorder.error

    def capture_facts(self) -> dict[str, Any] | None:
        """Describe what produced the logits; null on ranks that do not capture."""
        if self._adapter is None:
            return None
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        weight = getattr(head, "weight", None)
        return {
            "runner": "v2" if _is_v2(self.model_runner) else "v1",
            "head_dtype": None if weight is None else str(weight.dtype).removeprefix("torch."),
            "model_dtype": str(self.vllm_config.model_config.dtype).removeprefix("torch."),
            "logits_dtype": self._adapter.logits_dtype,
            "tokens_drawn_by": "capture" if self._draws_tokens else "engine",
            "truncated_by": "capture" if self._adapter.truncates else "engine",
            "async_scheduling": bool(self.vllm_config.scheduler_config.async_scheduling),
            "capture_device_bytes": self._capture.recorder.device_bytes if self._capture else 0,
            "tied_embeddings": bool(
                getattr(self.vllm_config.model_config.hf_config, "tie_word_embeddings", False)
            ),
        }


def _is_v2(runner: Any) -> bool:
    # the CPU build's V2 runner is a subclass in another module
    modules = (cls.__module__ for cls in type(runner).__mro__)
    return any(module.startswith("vllm.v1.worker.gpu.") for module in modules)


def _sampling_rank() -> tuple[int | None, int]:
    """Return this process's rank among those that sample, null if it does not, and their number.

    Rank 0 returns its samples.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    group = get_tp_group()
    return (group.rank_in_group if get_pp_group().is_last_rank else None), group.world_size


def _all_ranks(mine: bool) -> bool:
    """Return whether something holds on all ranks that sample; each of them asks."""
    from vllm.distributed.parallel_state import get_tp_group

    value = torch.tensor([mine], dtype=torch.int64)
    torch.distributed.all_reduce(
        value, op=torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group
    )
    return bool(value.item())


def _from_first_rank(values: torch.Tensor) -> None:
    """Fill a tensor with what the first of the ranks that sample has in it; on all of them."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    communicator = group.device_communicator
    nccl = getattr(communicator, "pynccl_comm", None)
    if values.device.type == "cuda" and (nccl is None or nccl.disabled):
        group.broadcast(values, src=0)
    else:
        # the one that the layers have: torch's own on CUDA would be made only now, in memory that
        # vLLM has not counted, and would run beside it
        communicator.broadcast(values, src=0)
