"""An engine that is as fast as the disk: made-up rollouts through the real spool.

Takes the place of vLLM and of the checkpoint in jobs whose prompts are token ids, so that a run
loads neither torch nor vLLM.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from rollout.config import JobConfig
from rollout.engine import Finished
from rollout.errors import EngineError
from rollout.prompts import Prompt
from rollout.schema.records import DatasetRecord, fingerprint_of
from rollout.spool import SpoolWriter, StepBlock

_HALF = np.log(np.float32(0.5))
_ENTRY_BITS = np.uint64(_HALF.view(np.uint32)) << np.uint64(32)


class FakeEngine:
    """Finishes `max_num_seqs` requests a step; each token's support is itself and its neighbour."""

    step_seconds = 0.0
    """How long a step takes."""
    log: Path | None = None
    """Where a line is added for each rollout that is returned."""
    dies_at: tuple[int, ...] = ()
    """Steps, over all engines of the process, at which it dies."""
    steps = 0
    started = 0
    max_num_seqs = 4

    def __init__(self, *_: Any, **arguments: Any) -> None:
        type(self).started += 1
        self.seed = arguments.get("seed")
        self.max_model_len = 64
        self._names = itertools.count()
        self._queue: dict[str, tuple[str, int]] = {}
        self._spool: SpoolWriter | None = None
        self._step = 0

    def start_capture(self, folder: str) -> None:
        self._spool = SpoolWriter(folder)

    def stop_capture(self) -> None:
        assert self._spool is not None
        self._spool.close()

    def flush_capture(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {"engine": "fake"}

    def add(self, request_id: str, prompt_token_ids: list[int], params: Any) -> str:
        internal = f"{request_id}-{self.seed}-{next(self._names)}"
        self._queue[internal] = (request_id, params.max_tokens)
        return internal

    @property
    def has_unfinished(self) -> bool:
        return bool(self._queue)

    def step(self) -> list[Finished]:
        cls = type(self)
        cls.steps += 1
        if cls.steps in cls.dies_at:
            raise EngineError(f"vLLM died: planted at step {cls.steps}")
        time.sleep(cls.step_seconds)
        names = list(itertools.islice(self._queue, self.max_num_seqs))
        lengths = [self._queue.pop(name)[1] for name in names]
        tokens = {
            name: np.frombuffer(os.urandom(4 * length), np.uint32).astype(np.int32) & 0xFFFF
            for name, length in zip(names, lengths, strict=True)
        }
        for position in range(max(lengths)):
            rows = [name for name in names if position < tokens[name].size]
            self._record(rows, position, np.array([tokens[n][position] for n in rows], np.int32))
        if cls.log is not None:
            with cls.log.open("a") as file:
                file.write("".join(f"{name}\n" for name in names))
        return [
            Finished(
                internal_id=name,
                token_ids=tokens[name].tolist(),
                text=None,
                finish_reason="length",
                stop_reason=None,
            )
            for name in names
        ]

    def abort(self, internal_ids: list[str]) -> None:
        for name in internal_ids:
            self._queue.pop(name, None)

    def wake(self) -> None:
        pass

    def close(self) -> None:
        if self._spool is not None:
            self._spool.close()

    def _record(self, names: list[str], position: int, sampled: Any) -> None:
        assert self._spool is not None
        n = len(names)
        ids = np.stack([sampled, sampled + 1], axis=1).astype(np.uint64)
        self._spool.append(
            StepBlock(
                step=self._step,
                need=2 * n,
                request_ids=names,
                positions=np.full(n, position, np.int32),
                sampled=sampled,
                kinds=np.ones(n, np.int8),
                flags=np.zeros(n, np.int32),
                counts=np.full(n, 2, np.int32),
                sampled_logprobs=np.full(n, _HALF, np.float32),
                tail_mass=np.zeros(n, np.float32),
                draws=np.zeros((n, 0), np.uint64),
                entries=(ids | _ENTRY_BITS).reshape(-1),
            )
        )
        self._step += 1


class _Renderer:
    truncated = 0
    has_tokenizer = False

    def render(self, prompt: Prompt, limit: int | None) -> list[int]:
        assert prompt.prompt_token_ids is not None
        return prompt.prompt_token_ids

    def decode(self, token_ids: list[int]) -> str | None:
        return None


def fake_job(prompts: Path, output: str | Path, /, **sections: Any) -> JobConfig:
    """A job for the fake engine."""
    return JobConfig.model_validate(
        {
            "model": {"path": "fake"},
            "prompts": {"path": str(prompts)},
            "sampling": {"max_tokens": 2, "top_p": 0.9} | sections.pop("sampling", {}),
            "output": {"path": str(output)} | sections.pop("output", {}),
            "engine": {"max_model_len": 64},
        }
        | sections
    )


def write_ids(path: Path, num_prompts: int) -> Path:
    """Write prompts of token ids, all different."""
    with path.open("w") as file:
        for i in range(num_prompts):
            ids = f"{i % 256}, {i // 256 % 256}, {i // 65536}"
            file.write(f'{{"id": "p{i}", "prompt_token_ids": [{ids}]}}\n')
    return path


def _resolve(config: JobConfig, reward: Callable[..., float] | None) -> Any:
    inputs = {"sampling": config.sampling.model_dump(mode="json", include={"temperature"})}
    return SimpleNamespace(
        config=config,
        files=None,
        renderer=_Renderer(),
        reward=None if reward is None else SimpleNamespace(function=reward, name="reward"),
        stop_ids=(),
        record=DatasetRecord(
            fingerprint=fingerprint_of(inputs),
            fingerprint_inputs=inputs,
            provenance={"reward": reward and {"name": f"task.py:{reward.__name__}", "digest": ""}},
        ),
    )


@contextmanager
def fake_engine(
    engine: type[FakeEngine] = FakeEngine, *, reward: Callable[..., float] | None = None
) -> Iterator[type[FakeEngine]]:
    """Let every job run on a fake engine, and call this reward function."""

    class Fresh(engine):  # type: ignore[misc, valid-type]
        """Counts of its own."""

    def params(config: Any, **_: Any) -> Any:
        return SimpleNamespace(max_tokens=config.max_tokens)

    with (
        mock.patch("rollout.engine_start.Engine", Fresh),
        mock.patch("rollout.pipeline.resolve_job", lambda config: _resolve(config, reward)),
        mock.patch("rollout.window.sampling_params", params),
    ):
        yield Fresh
