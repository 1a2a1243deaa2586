"""One long request beside many short ones: what they left in the spool does not pile up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, fake_engine, fake_job

from rollout.assemble import Assembler
from rollout.engine import Finished
from rollout.pipeline import generate
from rollout.spool import SpoolWriter, StepBlock
from rollout.spool_entries import HeldSegments
from rollout.storage import Storage
from rollout.verify import verify_dataset

LONG, WIDE = 400, 512  # tokens of the long request, entries of a short one's token


class TokenByToken(FakeEngine):
    """Samples one token of each running request a step, into small segments."""

    max_num_seqs = 2

    def start_capture(self, folder: str) -> None:
        self._spool = SpoolWriter(folder, segment_bytes=4096)
        self._at: dict[str, int] = {}

    def step(self) -> list[Finished]:
        running = list(self._queue)[: self.max_num_seqs]
        widths = [2 if self._queue[name][1] == LONG else WIDE for name in running]
        ids = np.concatenate([np.arange(width, dtype=np.uint64) for width in widths])
        logprobs = np.repeat(-np.log(np.array(widths, np.float32)), widths)
        n = len(running)
        assert self._spool is not None
        self._spool.append(
            StepBlock(
                step=self._step,
                need=ids.size,
                request_ids=running,
                positions=np.array([self._at.get(name, 0) for name in running], np.int32),
                sampled=np.ones(n, np.int32),
                kinds=np.ones(n, np.int8),
                flags=np.zeros(n, np.int32),
                counts=np.array(widths, np.int32),
                sampled_logprobs=-np.log(np.array(widths, np.float32)),
                tail_mass=np.zeros(n, np.float32),
                draws=np.zeros((n, 0), np.uint64),
                entries=logprobs.view(np.uint32).astype(np.uint64) << np.uint64(32) | ids,
            )
        )
        self._step += 1
        done = []
        for name in running:
            self._at[name] = self._at.get(name, 0) + 1
            if self._at[name] == self._queue[name][1]:
                tokens = [1] * self._queue.pop(name)[1]
                done.append(
                    Finished(
                        internal_id=name,
                        token_ids=tokens,
                        text=None,
                        finish_reason="length",
                        stop_reason=None,
                    )
                )
        return done


@pytest.mark.parametrize("compacts", [True, False])
def test_a_long_request_does_not_hold_the_others_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compacts: bool
) -> None:
    calls: list[int] = []
    stock = Assembler.compact

    def compact(self: Assembler, segments: HeldSegments) -> None:
        calls.append(segments.num_bytes)
        if not compacts:
            raise OSError(28, "No space left on device")
        stock(self, segments)

    monkeypatch.setattr(Assembler, "compact", compact)
    rows: list[dict[str, Any]] = [
        {"id": "long", "prompt_token_ids": [1], "sampling": {"max_tokens": LONG}},
        *({"id": f"{i}", "prompt_token_ids": [2, i % 250, i // 250]} for i in range(LONG // 2)),
    ]
    source = tmp_path / "p.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = fake_job(
        source,
        tmp_path / "out",
        output={"unit_prompts": 8},
        capture={"spool_bytes": 2**20},
        engine={"max_model_len": 1000},
    )
    with fake_engine(TokenByToken):
        summary = generate(config, show_progress=False)
    assert summary.rollouts_committed == len(rows)
    assert verify_dataset(Storage.open(tmp_path / "out")).faults == []
    assert calls
    # without it everything sampled beside the long one is held to its end, and nothing admitted
    assert (summary.seconds_held == 0.0) == compacts
