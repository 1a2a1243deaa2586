"""An output slower than the engine: fewer admissions, then failures by name, never a hang."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_jobs import make_job, read_rejected, read_rows, write_prompts
from tiny_model import make_tiny_model

from rollout import host_memory
from rollout.config import JobConfig
from rollout.dataset import DatasetWriter
from rollout.engine import Engine
from rollout.engine_start import LazyEngine
from rollout.errors import ConfigError
from rollout.pipeline import generate
from rollout.rows import RolloutRow
from rollout.run import Run

pytestmark = pytest.mark.engine

MIB = 2**20


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("m"), vocab_size=2048, logit_scale=0.3)


def wide_job(
    model: Path, folder: Path, *, prompts: int, max_tokens: int, budget: int | None
) -> JobConfig:
    """Rows of about 2,000 entries: 16 kB a token."""
    rows = [{"id": f"p{i:02}", "prompt": f"p{i}"} for i in range(prompts)]
    return make_job(
        model,
        write_prompts(folder / "p.jsonl", rows),
        folder / "out",
        sampling={"top_p": 0.999, "max_tokens": max_tokens, "ignore_eos": True},
        capture={"spool_bytes": budget},
        output={"shard_bytes": MIB, "unit_prompts": 4, "commit_threads": 1},
        engine={"max_num_seqs": 4},
    )


def test_a_slow_output_admits_fewer_and_loses_nothing(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    commit, room = DatasetWriter.commit_part, Run._room

    def slow(self: DatasetWriter, unit: str, rows: Sequence[RolloutRow], *rest: Any) -> Any:
        assert held.wait(60)  # slower than any engine, on a busy machine too
        return commit(self, unit, rows, *rest)

    def noticed(self: Run) -> int:
        allowed = room(self)
        if not allowed:
            held.set()
        return allowed

    monkeypatch.setattr(DatasetWriter, "commit_part", slow)
    monkeypatch.setattr(Run, "_room", noticed)
    # 12 rollouts in flight hold 3 MiB at most, all of them 10 MiB
    job = wide_job(wide_model, tmp_path, prompts=40, max_tokens=16, budget=4 * MIB)
    summary = generate(job, show_progress=False)
    assert summary.rollouts_failed == 0
    assert summary.seconds_held > 0.0
    assert len(read_rows(tmp_path / "out")) == 40


def test_a_host_without_room_is_told_before_an_engine_starts(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "free_bytes", lambda _: 5 * MIB)
    job = wide_job(wide_model, tmp_path, prompts=1, max_tokens=1, budget=None)
    monkeypatch.setattr(LazyEngine, "get", lambda _: pytest.fail("an engine was started"))
    with pytest.raises(ConfigError, match=f"has room for {5 * MIB} bytes"):
        generate(job, show_progress=False)


def test_an_output_that_stands_still_fails_the_widest_by_name(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    stock = DatasetWriter.commit_part

    def stuck(self: DatasetWriter, unit: str, rows: Sequence[RolloutRow], *rest: Any) -> Any:
        assert released.wait(60)
        return stock(self, unit, rows, *rest)

    monkeypatch.setattr(DatasetWriter, "commit_part", stuck)
    # the storage comes back once the job has had to drop something
    abort = Engine.abort

    def noticed(self: Engine, internal_ids: list[str]) -> None:
        abort(self, internal_ids)
        released.set()

    monkeypatch.setattr(Engine, "abort", noticed)
    # 12 rollouts in flight would hold 22 MiB
    job = wide_job(wide_model, tmp_path, prompts=24, max_tokens=120, budget=MIB)
    summary = generate(job, show_progress=False)
    failed = read_rejected(tmp_path / "out")
    assert summary.reconciles
    assert summary.reasons["spool_full"] == summary.rollouts_failed == len(failed) > 0
    assert {row["reason"] for row in failed} == {"spool_full"}
    assert "capture.spool_bytes (1048576)" in failed[0]["detail"]
    assert len(read_rows(tmp_path / "out")) == 24 - len(failed)
