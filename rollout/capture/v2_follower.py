"""The ranks of a tensor-parallel engine that record nothing take the tokens of the one that does.

In stock vLLM every rank truncates and draws the whole batch by itself, and all come to the same
tokens. The capture draws by another way than vLLM does, and where it has no room for a step, vLLM
draws it; so what the recording rank has drawn is sent to the others, whoever drew it. That is done
in every step with a request of ours, which all ranks know from the batch: what they are told of a
recording's start and end may come to them between different steps.
Source: vllm/v1/worker/gpu/model_runner.py of 0.32 and 0.33.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollout.capture.batch import OnDrawn
from rollout.capture.request import has_ours, kind_and_seed
from rollout.capture.v2_hooks import has_function, hook, switch_fused_off


class V2Follower:
    """Leaves out what a sampler does for its tokens, and takes those of another rank."""

    def __init__(self, runner: Any, receive: OnDrawn) -> None:
        """Hook the runner and its sampler; call it after the weights are loaded.

        Args:
            runner: vLLM's V2 GPUModelRunner.
            receive: fills a tensor with the tokens of the rank that records.
        """
        sampler = runner.sampler
        self._receive = receive
        self.following = False
        """Whether the other rank sends its tokens."""
        self._batch: Any = None
        self._kinds = np.zeros(runner.max_num_reqs, np.int8)
        self.can_follow = has_function(sampler, "gumbel_sample")
        """Whether the sampler draws by a function that is known here."""
        if not self.can_follow:
            return
        switch_fused_off(sampler)
        self._stock_draw = hook(self, sampler, "gumbel_sample", "_draw")
        if has_function(sampler, "apply_top_k_top_p"):
            self._stock_truncate = hook(self, sampler, "apply_top_k_top_p", "_truncate")
        self._stock_add_request = sampler.add_request
        self._stock_runner_sample = runner.sample
        sampler.add_request = self._add_request
        runner.sample = self._runner_sample

    def _add_request(self, index: int, *args: Any, **kwargs: Any) -> Any:
        params = kwargs.get("sampling_params", args[-1] if args else None)
        self._kinds[index], _ = kind_and_seed(params)
        return self._stock_add_request(index, *args, **kwargs)

    def _runner_sample(self, hidden_states: Any, input_batch: Any, *args: Any, **kw: Any) -> Any:
        self._batch = input_batch
        try:
            return self._stock_runner_sample(hidden_states, input_batch, *args, **kw)
        finally:
            self._batch = None

    def _follows_now(self) -> bool:
        return self.following and has_ours(self._kinds, self._batch)

    def _truncate(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Leave logits [N, V] as they are, for nothing is drawn of them."""
        return logits if self._follows_now() else self._stock_truncate(logits, *args, **kwargs)

    def _draw(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the tokens of N rows: what the other rank has drawn."""
        if not self._follows_now():
            return self._stock_draw(logits, *args, **kwargs)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        self._receive(tokens)
        return tokens
