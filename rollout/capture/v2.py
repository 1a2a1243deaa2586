"""The adapter for vLLM's V2 model runner.

The V2 sampler's `sample` always returns the processed logits, and they are the masked tensor that
the token was drawn from unless a fused sampler ran; those are switched off here. Everything about
the rows comes from the runner's host mirrors, so that nothing waits for the device. The capture
draws the tokens in the sampler's place, by the sampler's noise: the same tokens, without the
sampler's own pass over the vocabulary. In such steps it also truncates in its place.
Source: vllm/v1/worker/gpu/sample/sampler.py and vllm/v1/worker/gpu/model_runner.py of 0.26 to 0.33.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout.capture.batch import BatchRows, OnDraw, OnDrawn, OnStep, RowCut, RowNoise
from rollout.capture.request import KEPT, SKIP, has_ours, kind_and_seed
from rollout.capture.v2_check import TRIED_ROWS, TryDraw, compare_draws
from rollout.capture.v2_hooks import find_noise, has_cuts, hook, switch_fused_off
from rollout.errors import EngineError

_log = logging.getLogger(__name__)


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
        self.on_draw: OnDraw | None = None
        """Called in its place in steps whose tokens are drawn there; null if none are."""
        self.on_drawn: OnDrawn | None = None
        """Called with the tokens of each step in which a row is ours, once they are drawn."""
        self.truncates = False
        """Whether KEPT rows are truncated there too, see `RowNoise.cut`; only if `check_cut`."""
        self._batch: Any = None
        # what lives no longer than a step: its rows, whether on_draw has it, whether vLLM is to
        # mask its logits, and with what vLLM would have truncated them where they are not masked
        self._rows_now: BatchRows | None = None
        self._taken = False
        self._needs_mask = False
        self._put_off: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        slots = self._slots = runner.max_num_reqs
        self._kinds = np.zeros(slots, np.int8)
        self._seeds = np.zeros(slots, np.int64)
        # what the rows of the step before were, and whether each of them sampled
        self._last: _Requests | None = None
        self.logits_dtype: str | None = None
        self._fused = switch_fused_off(sampler)
        self.add_noise = find_noise(sampler)
        """What the sampler draws by, see `TokenDraw`; null if it is not known."""
        self._stock_truncate: Callable[..., torch.Tensor] | None = None
        if self.add_noise is not None:
            self._stock_draw = hook(self, sampler, "gumbel_sample", "_draw")
            if has_cuts(sampler):
                self._stock_truncate = hook(self, sampler, "apply_top_k_top_p", "_truncate")
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
        self._last = None  # one that comes back may have another slot and another seed
        return self._stock_add_request(index, *args, **kwargs)

    def _runner_sample(self, hidden_states: Any, input_batch: Any, *args: Any, **kw: Any) -> Any:
        self._batch = input_batch
        if self.on_step is None:
            self._last = None
        try:
            return self._stock_runner_sample(hidden_states, input_batch, *args, **kw)
        finally:
            self._batch = self._rows_now = self._put_off = None

    def _sample(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = kwargs["logits"] if "logits" in kwargs else args[0]
        self._taken = False
        # vLLM makes both of what it has masked; requests of a job ask for neither
        masks = getattr(self._sampler, "return_sampling_mask", False)
        self._needs_mask = bool(kwargs.get("return_logprobs") or masks)
        sampled, masked = self._stock_sample(*args, **kwargs)
        assert self._put_off is None, "the tokens were drawn from logits that nobody had masked"
        # vLLM's warm-up calls the sampler without a batch of requests
        if self.on_step is not None and self._batch is not None:
            if self.logits_dtype is None:
                self.logits_dtype = str(logits.dtype).removeprefix("torch.")
            # a fused sampler would have drawn from logits without the mask: no silent wrong capture
            for name in self._fused:
                assert not getattr(self._sampler, name)
            if not self._taken:
                self.on_step(masked, sampled, self._rows())
        return sampled, masked

    def _truncate(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Mask logits [N, V] in place of vLLM's `apply_top_k_top_p`, or leave that to `_draw`."""
        noise = self._noise_now()
        if noise is not None and noise.cut is not None:
            self._put_off = (args, kwargs)
            return logits
        assert self._stock_truncate is not None
        return self._stock_truncate(logits, *args, **kwargs)

    def _draw(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draw the tokens of logits [N, V] in place of vLLM's `gumbel_sample`."""
        tokens = self._drawn(logits, *args, **kwargs)
        # whether it is recorded does not matter: other ranks are told of that at another time
        if self.on_drawn is not None and has_ours(self._kinds, self._batch):
            assert tokens.shape == (len(logits),), f"{tuple(tokens.shape)} tokens"
            assert tokens.dtype == torch.int64
            self.on_drawn(tokens)
        return tokens

    def _drawn(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the tokens of logits, which are masked except where `_truncate` put that off."""
        put_off, self._put_off = self._put_off, None
        noise = self._noise_now()
        if noise is not None:
            # masked logits are not cut again: what top-p had kept of them would lose more
            assert (noise.cut is None) == (put_off is None), "not truncated once"
            self._taken = True
            assert self.on_draw is not None
            drawn = self.on_draw(logits, self._rows())
            if drawn is not None:
                return drawn
        if put_off is not None:
            assert self._stock_truncate is not None
            logits = self._stock_truncate(logits, *put_off[0], **put_off[1])
        return self._stock_draw(logits, *args, **kwargs)

    def check_draw(self, try_draw: TryDraw) -> bool:
        """Compare the capture's tokens with vLLM's on random masked logits.

        Args:
            try_draw: draws the capture's tokens.

        Returns:
            Whether they are the same.
        """
        return self.add_noise is not None and self._agrees(try_draw, "draws the tokens", cut=False)

    def check_cut(self, try_draw: TryDraw) -> bool:
        """Compare them on random logits that the capture truncates, and a sort for vLLM.

        Args:
            try_draw: draws the capture's tokens.

        Returns:
            Whether they are the same; false where vLLM can't be kept from truncating.
        """
        return self._stock_truncate is not None and self._agrees(try_draw, "truncates", cut=True)

    def _agrees(self, try_draw: TryDraw, vllm_does: str, *, cut: bool) -> bool:
        states = self._sampler.sampling_states
        others = compare_draws(
            try_draw,
            self._stock_draw,
            vocab_size=states.vocab_size,
            device=states.seeds.gpu.device,
            rows_at_once=self._slots,
            cut=cut,
        )
        if others:
            _log.warning(
                "vLLM %s: the capture drew other tokens of the same logits (%d of %d rows)",
                vllm_does,
                others,
                TRIED_ROWS,
            )
        return not others

    def _noise_now(self) -> RowNoise | None:
        """Return by what the capture draws this step; null if vLLM draws it."""
        if self.on_draw is None or self.on_step is None or self._batch is None:
            return None
        if self._needs_mask:
            return None
        return self._rows().noise

    def _rows(self) -> BatchRows:
        """Return the rows of this step; they are asked for up to four times."""
        if self._rows_now is None:
            self._rows_now = self._find_rows(self._batch)
        return self._rows_now

    def _find_rows(self, batch: Any) -> BatchRows:
        request_ids = batch.req_ids  # a list of this step's own
        lengths = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        last = self._last
        # requests that all sampled in the step before do so again with a token each, in most steps:
        # then nothing is looked up
        if last is None or batch.num_tokens != len(request_ids) or request_ids != last.ids:
            slots = batch.idx_mapping_np
            kinds = self._kinds[slots]
            ours = kinds.all()  # SKIP is 0
            # a prefill that goes on samples nothing
            unfinished = lengths < batch.prefill_len_np
            np.putmask(kinds, unfinished, SKIP)
            last = _Requests(
                ids=request_ids,
                kinds=kinds,
                seeds=self._seeds[slots],
                prompt_lengths=self._runner.req_states.prompt_len.np[slots],
                noise=self._noise(slots, kinds) if ours else None,
            )
            self._last = None if unfinished.any() else last
        positions = lengths - last.prompt_lengths
        return BatchRows(
            request_ids=last.ids,
            positions=positions.astype(np.int32, copy=False),
            kinds=last.kinds,
            seeds=last.seeds,
            noise=last.noise,
        )

    def _noise(self, slots: npt.NDArray[np.intp], kinds: npt.NDArray[np.int8]) -> RowNoise | None:
        """Return by what the capture draws the tokens of N rows; null if it does not."""
        if self.on_draw is None:
            return None
        # the sampler goes by the index of the token before in the prompt and the output
        lead = self._runner.req_states.prompt_len.np[slots].astype(np.int64) - 1
        return RowNoise(
            seeds=self._sampler.sampling_states.seeds.np[slots],
            lead=lead,
            untruncated=bool((kinds > KEPT).any()),
            cut=self._row_cut(slots, kinds) if self.truncates else None,
        )

    def _row_cut(self, slots: npt.NDArray[np.intp], kinds: npt.NDArray[np.int8]) -> RowCut | None:
        """Return how the capture truncates N rows; null if it has none to truncate."""
        states = self._sampler.sampling_states
        top_k = states.top_k.np[slots].astype(np.int32, copy=False)
        top_p = states.top_p.np[slots].astype(np.float32, copy=False)
        # other kinds need none: TOP and NONE are of requests without either, a greedy token is the
        # first that any cut keeps, and the token of a SKIP row is dropped
        if not ((top_k < states.vocab_size) | (top_p < 1.0))[kinds == KEPT].any():
            return None
        return RowCut(top_k=top_k, top_p=top_p)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Requests:
    """The requests of a step: what stays the same while none comes or goes."""

    ids: list[str]
    kinds: npt.NDArray[np.int8]
    seeds: npt.NDArray[np.int64]
    prompt_lengths: npt.NDArray[np.int32]
    noise: RowNoise | None
