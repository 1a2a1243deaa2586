"""The ranks of a tensor-parallel engine that record nothing take the tokens of the one that does.

In stock vLLM every rank truncates and draws the whole batch by itself, and all come to the same
tokens. The capture draws by another way than vLLM does, and where it has no room for a step, vLLM
draws it; so what the recording rank has drawn is sent to the others in every step, whoever drew it.
Source: vllm/v1/worker/gpu/model_runner.py of 0.32 and 0.33.
"""

from __future__ import annotations

from typing import Any

import torch

from rollout.capture.batch import OnDrawn
from rollout.capture.v2_hooks import has_function, hook


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
        """Whether the other rank sends its tokens: while it records."""
        self._in_step = False
        self.can_follow = has_function(sampler, "gumbel_sample")
        """Whether the sampler draws by a function that is known here."""
        self._stock_runner_sample = runner.sample
        if self.can_follow:
            runner.sample = self._runner_sample
            self._stock_draw = hook(self, sampler, "gumbel_sample", "_draw")
            if has_function(sampler, "apply_top_k_top_p"):
                self._stock_truncate = hook(self, sampler, "apply_top_k_top_p", "_truncate")

    def _runner_sample(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM's warm-up calls the sampler alone
        self._in_step = True
        try:
            return self._stock_runner_sample(*args, **kwargs)
        finally:
            self._in_step = False

    def _truncate(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Leave logits [N, V] as they are, for nothing is drawn of them."""
        if self.following and self._in_step:
            return logits
        return self._stock_truncate(logits, *args, **kwargs)

    def _draw(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the tokens of N rows: what the other rank has drawn."""
        if not (self.following and self._in_step):
            return self._stock_draw(logits, *args, **kwargs)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        self._receive(tokens)
        return tokens
