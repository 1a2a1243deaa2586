"""The adapter for vLLM's V2 model runner.

The V2 sampler's `sample` always returns the processed logits, and they are the masked tensor that
the token was drawn from unless a fused sampler ran; those are switched off here. Everything about
the rows comes from the runner's host mirrors, so that nothing waits for the device.
Source: vllm/v1/worker/gpu/sample/sampler.py and vllm/v1/worker/gpu/model_runner.py of 0.26 to 0.33.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout.capture.batch import BatchRows, OnStep
from rollout.capture.request import SKIP, kind_and_seed
from rollout.errors import EngineError

_FUSED = ("use_flashinfer", "use_xpu_sampler")  # the second exists since 0.31


class V2Adapter:
    """Calls back with each sampling step's masked logits, sampled ids and rows."""

    def __init__(self, runner: Any) -> None:
        """Hook the runner and its sampler; call it after the weights are loaded.

        Args:
            runner: vLLM's V2 GPUModelRunner.

        Raises:
            EngineError: the runner samples in a way that can't be followed.
        """
        sampler = runner.sampler
        if sampler is None or runner.rejection_sampler is not None:
            raise EngineError("the V2 runner has no plain sampler: speculative decoding or pooling")
        self._runner = runner
        self._sampler = sampler
        self.on_step: OnStep | None = None
        """Called in each step; null while nothing is recorded."""
        self._batch: Any = None
        slots = runner.max_num_reqs
        self._kinds = np.zeros(slots, np.int8)
        self._seeds = np.zeros(slots, np.int64)
        # what the rows of the step before were, and whether each of them sampled
        self._last: _Requests | None = None
        self.logits_dtype: str | None = None
        self._fused = [name for name in _FUSED if hasattr(sampler, name)]
        for name in self._fused:
            setattr(sampler, name, False)
        self._stock_add_request = sampler.add_request
        self._stock_sample = sampler.sample
        self._stock_runner_sample = runner.sample
        sampler.add_request = self._add_request
        sampler.sample = self._sample
        runner.sample = self._runner_sample

    def _add_request(self, index: int, *args: Any, **kwargs: Any) -> Any:
        # (index, params) since 0.31, (index, prompt length, params) before
        params = kwargs.get("sampling_params", args[-1] if args else None)
        self._kinds[index], self._seeds[index] = kind_and_seed(params)
        return self._stock_add_request(index, *args, **kwargs)

    def _runner_sample(self, hidden_states: Any, input_batch: Any, *args: Any, **kw: Any) -> Any:
        self._batch = input_batch
        if self.on_step is None:
            self._last = None
        try:
            return self._stock_runner_sample(hidden_states, input_batch, *args, **kw)
        finally:
            self._batch = None

    def _sample(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = kwargs["logits"] if "logits" in kwargs else args[0]
        sampled, masked = self._stock_sample(*args, **kwargs)
        # vLLM's warm-up calls the sampler without a batch of requests
        if self.on_step is not None and self._batch is not None:
            if self.logits_dtype is None:
                self.logits_dtype = str(logits.dtype).removeprefix("torch.")
            # a fused sampler would have drawn from logits without the mask: no silent wrong capture
            for name in self._fused:
                assert not getattr(self._sampler, name)
            self.on_step(masked, sampled, self._rows(self._batch))
        return sampled, masked

    def _rows(self, batch: Any) -> BatchRows:
        request_ids = batch.req_ids  # a list of this step's own
        lengths = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        last = self._last
        # requests that all sampled in the step before do so again with a token each, in most steps:
        # then nothing is looked up
        if last is None or batch.num_tokens != len(request_ids) or request_ids != last.ids:
            slots = batch.idx_mapping_np
            kinds = self._kinds[slots]
            # a prefill that goes on samples nothing
            unfinished = lengths < batch.prefill_len_np
            np.putmask(kinds, unfinished, SKIP)
            last = _Requests(
                ids=request_ids,
                kinds=kinds,
                seeds=self._seeds[slots],
                prompt_lengths=self._runner.req_states.prompt_len.np[slots],
            )
            self._last = None if unfinished.any() else last
        positions = lengths - last.prompt_lengths
        return BatchRows(
            request_ids=request_ids,
            positions=positions.astype(np.int32, copy=False),
            kinds=last.kinds,
            seeds=last.seeds,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Requests:
    """The requests of a step: what stays the same while none comes or goes."""

    ids: list[str]
    kinds: npt.NDArray[np.int8]
    seeds: npt.NDArray[np.int64]
    prompt_lengths: npt.NDArray[np.int32]
