"""How many parts a job writes side by side, and when they get smaller."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fake_engine import fake_engine, fake_job, write_ids

from rollout.committer import Committer
from rollout.part_pool import PartPool
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


def test_parts_get_smaller_once_less_is_left_than_twice_what_the_engine_takes(
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
    assert left == [6, 2, 0]


class _Template:
    """Takes a while for the first process, and less for others."""

    def __init__(self) -> None:
        self.started = 0
        self._lock = threading.Lock()
        self.seconds = 1.0

    def start(self) -> Any:
        with self._lock:
            self.started += 1
            time.sleep(self.seconds)
            self.seconds = 0.01
        return mock.Mock()

    def close(self) -> None:
        pass


def test_a_rate_that_rises_starts_no_more_processes_than_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = _Template()
    monkeypatch.setattr("rollout.part_pool.PartTemplate", lambda: template)
    pool, seconds = PartPool(), []
    with ThreadPoolExecutor(8) as threads:

        def start(count: int) -> None:
            begun = time.monotonic()
            pool.start(count)
            seconds.append(time.monotonic() - begun)

        for count in (1, 2, 3, 5, 8):
            threads.submit(start, count)
            time.sleep(0.02)
    assert template.started == 8
    assert len(seconds) == 5
    # others go on with the parts while one of them starts processes
    assert sorted(seconds)[-2] < 0.5 < sorted(seconds)[-1]
    pool.start(4)
    assert template.started == 8
    pool.start(9)
    assert template.started == 9


def test_a_start_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    template = _Template()
    template.seconds = 0
    monkeypatch.setattr("rollout.part_pool.PartTemplate", lambda: template)
    pool = PartPool()
    with (
        mock.patch.object(template, "start", side_effect=OSError("no more processes")),
        pytest.raises(OSError, match="no more processes"),
    ):
        pool.start(2)
    pool.start(2)
    assert template.started == 2
