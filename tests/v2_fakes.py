"""Stand-ins for vLLM's V2 runner and for the sampler's module, which is this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout.capture import v2
from rollout.capture.batch import BatchRows
from rollout.capture.request import extra_args
from rollout.capture.v2 import V2Adapter

SLOTS = 8
VOCAB = 40

# what the stand-ins draw: of logits as they are, and of those that vLLM has truncated
UNCUT, CUT = 7, 6


@dataclass(kw_only=True, slots=True)
class Scheduled:
    """A request in one step."""

    name: str
    slot: int
    computed: int
    tokens: int
    prefill: int


def decode(name: str, slot: int, computed: int) -> Scheduled:
    return Scheduled(name=name, slot=slot, computed=computed, tokens=1, prefill=1)


def gumbel_sample(logits: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
    """Stands in for vLLM's own draws; the hook looks for it beside the sampler's class."""
    return torch.where(logits[:, 0] == -torch.inf, CUT, UNCUT)


def apply_top_k_top_p(
    logits: torch.Tensor,
    k: torch.Tensor | None,
    p: torch.Tensor | None,
    has_topp_only_rows: bool,
) -> torch.Tensor:
    """Stands in for vLLM's truncation: masks one id in another tensor."""
    if k is None and p is None:
        return logits
    assert has_topp_only_rows == (k is None)
    return logits.clone().index_fill_(1, torch.tensor([0]), -torch.inf)


class Sampler:
    """Stands in for vLLM's sampler."""

    def __init__(self) -> None:
        seeds = SimpleNamespace(
            np=np.arange(100, 100 + SLOTS, dtype=np.int64), gpu=torch.zeros(SLOTS)
        )
        self.sampling_states = SimpleNamespace(
            seeds=seeds,
            vocab_size=VOCAB,
            top_k=SimpleNamespace(np=np.full(SLOTS, VOCAB, np.int32)),
            top_p=SimpleNamespace(np=np.ones(SLOTS, np.float32)),
        )
        self.use_fp64_gumbel = False
        self.slots = np.zeros(0, np.intp)
        self.between: Callable[[], None] = lambda: None
        """Called once the logits are truncated."""

    def add_request(self, *_: object) -> None: ...

    def sample(
        self, logits: torch.Tensor, return_logprobs: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states, slots = self.sampling_states, self.slots
        top_k, top_p = (torch.from_numpy(s.np[slots]) for s in (states.top_k, states.top_p))
        k = top_k if (top_k != VOCAB).any() else None
        p = top_p if (top_p != 1.0).any() else None
        logits = apply_top_k_top_p(logits, k, p, has_topp_only_rows=k is None)
        self.between()
        return gumbel_sample(logits, apply_temperature=False), logits


class Runner:
    """Stands in for vLLM's runner."""

    def __init__(self) -> None:
        self.max_num_reqs = SLOTS
        self.rejection_sampler = None
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.zeros(SLOTS, np.int32)))
        self.sampler = Sampler()
        self.wanted: dict[str, tuple[int, int, int]] = {}

    def sample(self, hidden_states: torch.Tensor, batch: Any) -> Any:
        self.sampler.slots = batch.idx_mapping_np
        return self.sampler.sample(logits=hidden_states)

    def add(
        self, name: str, slot: int, prompt: int, kind: int, top_k: int = VOCAB, top_p: float = 1.0
    ) -> None:
        """Tell the sampler of a request."""
        seed = 1000 + len(self.wanted)
        self.wanted[name] = (prompt, kind, seed)
        self.req_states.prompt_len.np[slot] = prompt
        self.sampler.sampling_states.top_k.np[slot] = top_k
        self.sampler.sampling_states.top_p.np[slot] = top_p
        self.sampler.add_request(slot, prompt, SimpleNamespace(extra_args=extra_args(kind, seed)))

    def step(self, rows: list[Scheduled]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step; return what the sampler does."""
        batch = SimpleNamespace(
            req_ids=[row.name for row in rows],
            num_tokens=sum(row.tokens for row in rows),
            idx_mapping_np=np.array([row.slot for row in rows], np.intp),
            num_computed_tokens_np=np.array([row.computed for row in rows], np.int32),
            num_scheduled_tokens=np.array([row.tokens for row in rows], np.int32),
            prefill_len_np=np.array([row.prefill for row in rows], np.int32),
        )
        result: tuple[torch.Tensor, torch.Tensor] = self.sample(torch.zeros(len(rows), 4), batch)
        return result


class Drawing:
    """What an adapter whose capture draws was called with."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, drawn: int | None = 3, truncates: bool = False
    ) -> None:
        monkeypatch.setattr(v2, "find_noise", lambda _sampler: object())
        for name in {"gumbel_sample", "apply_top_k_top_p"} & globals().keys():
            monkeypatch.setitem(globals(), name, globals()[name])  # put back in the end
        self.runner = Runner()
        self.adapter = V2Adapter(self.runner)
        self.adapter.truncates = truncates
        self.recorded: list[BatchRows] = []
        self.drawn: list[BatchRows] = []
        self.logits: list[torch.Tensor] = []
        """What the capture drew of."""
        self.adapter.on_step = lambda _logits, _sampled, rows: self.recorded.append(rows)

        def on_draw(logits: torch.Tensor, rows: BatchRows) -> torch.Tensor | None:
            self.drawn.append(rows)
            self.logits.append(logits)
            return None if drawn is None else torch.full((len(logits),), drawn)

        self.adapter.on_draw = on_draw

    def tokens(self, *rows: Scheduled) -> list[int]:
        """Run a step; return the tokens that vLLM gets."""
        tokens: list[int] = self.runner.step(list(rows))[0].tolist()
        return tokens
