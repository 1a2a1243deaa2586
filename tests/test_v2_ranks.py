"""What ranks of the V2 runner that record nothing sample, and what they are sent."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import v2_fakes
from v2_fakes import CUT, UNCUT, Drawing, Runner, decode

from rollout.capture.request import KEPT, SKIP
from rollout.capture.v2_follower import V2Follower


class Following:
    """A rank that is sent a token for all of its rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("gumbel_sample", "apply_top_k_top_p"):
            monkeypatch.setattr(v2_fakes, name, getattr(v2_fakes, name))  # put back in the end
        self.runner = Runner()
        self.received: list[int] = []
        self.masked: list[bool] = []
        self.follower = V2Follower(self.runner, self._receive)
        self.runner.add("a", 2, 1, KEPT, top_k=5)
        self.runner.add("b", 5, 1, SKIP)

    def _receive(self, tokens: torch.Tensor) -> None:
        assert tokens.dtype == torch.int64
        self.received.append(len(tokens))
        tokens.copy_(torch.arange(len(tokens)) + 20)

    def step(self, computed: int, names: str = "ab") -> list[int]:
        slots = {"a": 2, "b": 5}
        rows = [decode(name, slots[name], computed) for name in names]
        tokens, logits = self.runner.step(rows)
        self.masked.append(bool((logits[:, 0] == -torch.inf).all()))
        drawn: list[int] = tokens.tolist()
        return drawn


def test_a_rank_that_follows_neither_truncates_nor_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Following(monkeypatch)
    assert case.step(1) == [CUT, CUT]
    case.follower.following = True
    assert [case.step(2), case.step(3)] == [[20, 21], [20, 21]]
    # vLLM's warm-up, which the other rank does not send
    assert case.runner.sampler.sample(torch.zeros(2, 4))[0].tolist() == [CUT, CUT]
    # a step without a request of ours: b's slot is cut as well once it asks for it
    case.runner.add("b", 5, 1, SKIP, top_k=5)
    assert case.step(4, "b") == [CUT]
    assert case.step(5, "a") == [20]
    case.follower.following = False
    assert case.step(6) == [CUT, CUT]
    assert case.received == [2, 2, 1]
    assert case.masked == [True, False, False, True, False, True]


@pytest.mark.parametrize("name", ["use_flashinfer", "use_xpu_sampler"])
def test_a_rank_that_follows_draws_by_no_fused_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = Runner.__init__

    def init(self: Runner) -> None:
        stock(self)
        setattr(self.sampler, name, True)

    monkeypatch.setattr(Runner, "__init__", init)
    assert getattr(Following(monkeypatch).runner.sampler, name) is False


def test_a_step_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Following(monkeypatch)
    case.follower.following = True

    def fail() -> None:
        raise RuntimeError("no memory")

    case.runner.sampler.between = fail
    with pytest.raises(RuntimeError, match="no memory"):
        case.step(1)
    case.runner.sampler.between = lambda: None
    assert case.runner.sampler.sample(torch.zeros(2, 4))[0].tolist() == [CUT, CUT]
    assert not case.received


def test_an_engine_that_is_gone_leaves_vllm_its_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Following(monkeypatch)
    case.follower.following = True
    gone = weakref.ref(case.runner)
    del case
    gc.collect()
    assert gone() is None
    assert v2_fakes.gumbel_sample(torch.zeros(2, 4)).tolist() == [UNCUT, UNCUT]


@pytest.mark.parametrize("truncates", [True, False])
@pytest.mark.parametrize(
    ("drawn", "kinds", "tokens", "sends"),
    [
        (3, (KEPT, KEPT), 3, True),  # by the capture
        (None, (KEPT, KEPT), CUT, True),  # it had no room
        (3, (SKIP, KEPT), CUT, True),  # one is not a request of ours
        (3, (SKIP, SKIP), CUT, False),
    ],
)
def test_what_was_drawn_is_sent_whoever_drew_it(
    monkeypatch: pytest.MonkeyPatch,
    truncates: bool,
    drawn: int | None,
    kinds: tuple[int, int],
    tokens: int,
    sends: bool,
) -> None:
    case = Drawing(monkeypatch, drawn=drawn, truncates=truncates)
    sent: list[list[int]] = []
    case.adapter.on_drawn = lambda found: sent.append(found.tolist())
    case.runner.add("a", 0, 1, kinds[0], top_k=5)
    case.runner.add("b", 4, 1, kinds[1], top_k=5)
    rows = decode("a", 0, 1), decode("b", 4, 1)
    assert case.tokens(*rows) == [tokens, tokens]
    case.runner.sampler.sample(torch.zeros(2, 4))  # nobody waits for these
    assert sent == ([[tokens, tokens]] if sends else [])
    # another rank knows what is in a batch, and not whether it is recorded
    case.adapter.on_step = None
    assert case.tokens(*rows) == [CUT, CUT]
    assert sent[1:] == ([[CUT, CUT]] if sends else [])


@pytest.mark.engine
def test_two_ranks_of_the_v2_runner_go_on_from_the_same_tokens() -> None:
    script = Path(__file__).with_name("v2_ranks_on_cpu.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rollouts on two ranks" in done.stdout
