"""The adapter for vLLM's V1 model runner.

With the engine argument logprobs_mode="processed_logits" the V1 sampler's `sample` returns the very
tensor that the token was drawn from, masked, without a copy, though no request asks for logprobs;
the same setting keeps fused samplers that would bypass the mask switched off.
Source: vllm/v1/sample/sampler.py and vllm/v1/worker/gpu_model_runner.py of 0.26 to 0.33.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollout.capture.batch import BatchRows, OnDraw, OnStep
from rollout.capture.request import SKIP, kind_and_seed
from rollout.errors import EngineError


class V1Adapter:
    """Calls back with each sampling step's masked logits, sampled ids and rows."""

    def __init__(self, runner: Any) -> None:
        """Hook the runner's sampler.

        Args:
            runner: vLLM's GPUModelRunner or CPUModelRunner.

        Raises:
            EngineError: the sampler would not return the masked logits.
        """
        self._runner = runner
        self.on_step: OnStep | None = None
        """Called in each step; null while nothing is recorded."""
        self.on_draw: OnDraw | None = None
        """Never called: the V1 sampler's noise is no function of the id, so vLLM draws."""
        self.truncates = False
        """Never: only what draws may truncate."""
        self.add_noise = None
        self._known: dict[str, tuple[int, int]] = {}
        self.logits_dtype: str | None = None
        sampler = runner.sampler
        if sampler.logprobs_mode != "processed_logits":
            raise EngineError(
                f"the sampler's logprobs_mode is {sampler.logprobs_mode!r}, "
                "expected 'processed_logits'"
            )
        self._stock_sample = sampler.sample
        sampler.sample = self._sample
        self._dtype_hook = sampler.register_forward_pre_hook(self._see_dtype, with_kwargs=True)

    def check_draw(self, _try_draw: object) -> bool:
        """Return that the capture does not draw the tokens."""
        return False

    def check_cut(self, _try_draw: object) -> bool:
        """Return that it does not truncate either."""
        return False

    def _see_dtype(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        logits = kwargs["logits"] if "logits" in kwargs else args[0]
        self.logits_dtype = str(logits.dtype).removeprefix("torch.")

    def _sample(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled, masked = self._stock_sample(*args, **kwargs)
        if self.on_step is None:
            return sampled, masked
        # a batch of greedy rows only comes back without: then nothing was masked
        logits = masked if masked is not None else args[0]
        self.on_step(logits, sampled, self._rows())
        return sampled, masked

    def _rows(self) -> BatchRows:
        batch = self._runner.input_batch
        n = batch.num_reqs
        request_ids = list(batch.req_ids[:n])  # the runner changes its own list after the step
        positions = batch.num_tokens_no_spec[:n] - batch.num_prompt_tokens[:n]
        discarded = self._runner.discard_request_mask.np[:n]
        known = [self._kind_and_seed(request_id) for request_id in request_ids]
        kinds = np.array([kind for kind, _ in known], np.int8)
        kinds[discarded] = SKIP
        return BatchRows(
            request_ids=request_ids,
            positions=positions.astype(np.int32),
            kinds=kinds,
            seeds=np.array([seed for _, seed in known], np.int64),
        )

    def _kind_and_seed(self, request_id: str) -> tuple[int, int]:
        found = self._known.get(request_id)
        if found is None:
            if len(self._known) > 65536:  # ids never come back: forget those that are gone
                live = self._runner.requests
                self._known = {k: v for k, v in self._known.items() if k in live}
            params = self._runner.requests[request_id].sampling_params
            found = self._known[request_id] = kind_and_seed(params)
        return found
