"""The adapter for vLLM's V2 model runner.

The V2 sampler's `sample` always returns the processed logits, and they are the masked tensor that
the token was drawn from unless a fused sampler ran; those are switched off here. Everything about
the rows comes from the runner's host mirrors, so that nothing waits for the device. The capture
draws the tokens in the sampler's place, by the sampler's noise: the same tokens, without the
sampler's own pass over the vocabulary.
Source: vllm/v1/worker/gpu/sample/sampler.py and vllm/v1/worker/gpu/model_runner.py of 0.26 to 0.33.
"""

from __future__ import annotations

import importlib
import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout.capture.batch import BatchRows, OnDraw, OnStep, RowNoise
from rollout.capture.request import GREEDY, KEPT, NONE, SKIP, TOP, kind_and_seed
from rollout.errors import EngineError
from rollout.kernels.launch import choose_impl

_log = logging.getLogger(__name__)
_FUSED = ("use_flashinfer", "use_xpu_sampler")  # the second exists since 0.31
_TRIED_ROWS = 32  # of which `check_draw` compares the tokens


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
        self._batch: Any = None
        self._taken = False  # by on_draw
        slots = self._slots = runner.max_num_reqs
        self._kinds = np.zeros(slots, np.int8)
        self._seeds = np.zeros(slots, np.int64)
        # what the rows of the step before were, and whether each of them sampled
        self._last: _Requests | None = None
        self.logits_dtype: str | None = None
        self._fused = [name for name in _FUSED if hasattr(sampler, name)]
        for name in self._fused:
            setattr(sampler, name, False)
        self.add_noise = _find_noise(sampler)
        """What the sampler draws by, see `TokenDraw`; null if it is not known."""
        if self.add_noise is not None:
            module: Any = sys.modules[type(sampler).__module__]
            # the hook of an earlier engine of this process goes
            stock = getattr(module.gumbel_sample, "stock", module.gumbel_sample)
            self._stock_draw = stock

            # the module outlives the engine, whose weights must not stay with it
            reference = weakref.ref(self)

            def gumbel_sample(*args: Any, **kwargs: Any) -> torch.Tensor:
                adapter = reference()
                drawn: torch.Tensor = (stock if adapter is None else adapter._draw)(*args, **kwargs)
                return drawn

            gumbel_sample.stock = stock  # type: ignore[attr-defined]
            module.gumbel_sample = gumbel_sample
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
            self._batch = None

    def _sample(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = kwargs["logits"] if "logits" in kwargs else args[0]
        self._taken = False
        sampled, masked = self._stock_sample(*args, **kwargs)
        # vLLM's warm-up calls the sampler without a batch of requests
        if self.on_step is not None and self._batch is not None:
            if self.logits_dtype is None:
                self.logits_dtype = str(logits.dtype).removeprefix("torch.")
            # a fused sampler would have drawn from logits without the mask: no silent wrong capture
            for name in self._fused:
                assert not getattr(self._sampler, name)
            if not self._taken:
                self.on_step(masked, sampled, self._rows(self._batch))
        return sampled, masked

    def _draw(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draw the tokens of masked logits [N, V] in place of vLLM's `gumbel_sample`."""
        if self.on_draw is not None and self.on_step is not None and self._batch is not None:
            rows = self._rows(self._batch)
            if rows.noise is not None:
                self._taken = True
                drawn = self.on_draw(logits, rows)
                if drawn is not None:
                    return drawn
        sampled: torch.Tensor = self._stock_draw(logits, *args, **kwargs)
        return sampled

    def check_draw(self, try_draw: Callable[[torch.Tensor, BatchRows], torch.Tensor]) -> bool:
        """Compare the capture's tokens with vLLM's on random logits.

        Args:
            try_draw: draws the tokens of masked logits [N, V] and N rows.

        Returns:
            Whether they are the same.
        """
        if self.add_noise is None:
            return False
        # as many rows at a time as there may be, so that every kind comes
        steps = [self._compare(try_draw, first) for first in range(0, _TRIED_ROWS, self._slots)]
        others = sum(steps)
        if others:
            _log.warning(
                "vLLM draws the tokens: the capture drew others of the same logits (%d of %d rows)",
                others,
                _TRIED_ROWS,
            )
        return not others

    def _compare(
        self, try_draw: Callable[[torch.Tensor, BatchRows], torch.Tensor], first: int
    ) -> int:
        """Draw one step of random logits twice; return the rows with different tokens."""
        states = self._sampler.sampling_states
        device = states.seeds.gpu.device
        number = np.arange(first, min(first + self._slots, _TRIED_ROWS))
        rows, vocab_size = len(number), states.vocab_size
        kinds = np.array([KEPT, TOP, KEPT, GREEDY, KEPT, NONE], np.int8)[number % 6]
        generator = torch.Generator(device).manual_seed(first)
        logits = torch.randn(rows, vocab_size, generator=generator, device=device)
        # from some ids to all of them
        kept = torch.from_numpy((number + 2.0) / _TRIED_ROWS).to(device)[:, None]
        dropped = torch.rand(rows, vocab_size, generator=generator, device=device) > kept
        dropped[:, :2] = False
        dropped &= torch.from_numpy(kinds == KEPT).to(device)[:, None]
        logits.masked_fill_(dropped, -torch.inf)
        seeds = np.random.default_rng(first).integers(-(2**63), 2**63, rows, np.int64)
        positions = number.astype(np.int64) * 1001
        theirs = self._stock_draw(
            logits,
            torch.arange(rows, device=device),
            torch.from_numpy((kinds != GREEDY).astype(np.float32)).to(device),
            torch.from_numpy(seeds).to(device),
            torch.from_numpy(positions).to(device),
            apply_temperature=False,
            is_drafting=False,
        )
        batch = BatchRows(
            request_ids=[""] * rows,
            positions=np.zeros(rows, np.int32),
            kinds=kinds,
            seeds=seeds,
            noise=RowNoise(seeds=seeds, lead=positions, untruncated=True),
        )
        return int((try_draw(logits, batch) != theirs).sum())

    def _rows(self, batch: Any) -> BatchRows:
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
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Requests:
    """The requests of a step: what stays the same while none comes or goes."""

    ids: list[str]
    kinds: npt.NDArray[np.int8]
    seeds: npt.NDArray[np.int64]
    prompt_lengths: npt.NDArray[np.int32]
    noise: RowNoise | None


def _find_noise(sampler: Any) -> Any:
    """Return the noise of a sampler's draws, or null if it is not known."""
    module = sys.modules[type(sampler).__module__]
    if not hasattr(module, "gumbel_sample") or getattr(sampler, "use_fp64_gumbel", False):
        return None
    if choose_impl(sampler.sampling_states.seeds.gpu, None) == "reference":
        return None  # the noise is a kernel's
    try:
        return importlib.import_module("rollout.capture.v2_noise").add_noise
    except ImportError as error:
        _log.info("vLLM draws the tokens: %s", error)
        return None
