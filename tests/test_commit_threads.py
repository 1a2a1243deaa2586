"""How many parts a job writes side by side, and when they get smaller."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fake_engine import fake_engine, fake_job, write_ids

from rollout.committer import Committer
from rollout.pipeline import generate
from rollout.units import UnitBuffers


@pytest.mark.parametrize(
    ("cores", "stated", "threads"),
    [(1, None, 4), (8, None, 4), (12, None, 8), (64, None, 16), (64, 40, 40), (64, 1, 1)],
)
def test_they_go_by_the_cores_of_the_job_and_not_of_the_host(
    cores: int, stated: int | None, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    seen: list[int] = []
    stock = Committer.__init__

    def init(self: Committer, writer: Any, prompts_path: str, number: int, **options: Any) -> None:
        seen.append(number)
        stock(self, writer, prompts_path, number, **options)

    monkeypatch.setattr(Committer, "__init__", init)
    prompts = write_ids(tmp_path / "p.jsonl", 2)
    output = {} if stated is None else {"commit_threads": stated}
    with fake_engine():
        generate(fake_job(prompts, tmp_path / "out", output=output), show_progress=False)
    assert seen == [threads]


def test_parts_get_smaller_once_the_engine_has_room_for_more_than_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    stock = UnitBuffers.hurry

    def hurry(self: UnitBuffers, parts: int) -> None:
        left.append(self._in_flight.total())
        stock(self, parts)

    monkeypatch.setattr(UnitBuffers, "hurry", hurry)
    # the engine takes four at once, and three times as many wait for it; each step ends four
    prompts = write_ids(tmp_path / "p.jsonl", 18)
    with fake_engine():
        generate(fake_job(prompts, tmp_path / "out"), show_progress=False)
    assert left == [2, 0]
