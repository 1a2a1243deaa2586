"""Engines that die, and jobs in which too much fails, on the fake engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, fake_engine, fake_job, write_ids

from rollout.config import JobConfig
from rollout.dataset import DatasetView, read_dataset
from rollout.errors import EngineError, TooManyFailedError
from rollout.pipeline import generate
from rollout.storage import Storage
from rollout.summary import Summary


@pytest.fixture
def engine() -> Iterator[type[FakeEngine]]:
    with fake_engine() as found:
        yield found


def job(folder: Path, prompts: int = 40, **sections: Any) -> JobConfig:
    source = write_ids(folder / "prompts.jsonl", prompts)
    return fake_job(source, folder / "out", sampling={"n": 2}, **sections)


def run(config: JobConfig) -> Summary:
    return generate(config, show_progress=False)


def view_of(folder: Path) -> DatasetView:
    return read_dataset(Storage.open(str(folder / "out")))


def test_a_dead_engine_is_replaced_and_its_batch_named(
    engine: type[FakeEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.dies_at = (5, 9)
    engine.log = tmp_path / "log"
    seeds = []
    stock = engine.start_capture

    def noted(self: FakeEngine, folder: str) -> None:
        seeds.append(self.seed)
        stock(self, folder)

    engine.start_capture = noted  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        summary = run(job(tmp_path))
    assert (summary.rollouts_committed, summary.rollouts_failed) == (80, 0)
    assert summary.reconciles
    assert len(view_of(tmp_path).covered) == 80
    # what had ended was not sampled again
    assert len(engine.log.read_text().splitlines()) == 80
    first, second = summary.engine_deaths
    assert first.startswith("vLLM died: planted at step 5; 12 rollouts in flight: p8#0, p8#1, p9#0")
    assert "planted at step 9" in second
    assert "engine died   vLLM died: planted at step 5" in summary.table()
    assert f"the engine died, 1 of 3 restarts used: {first}" in caplog.text
    # an engine with the seed of the dead one would draw what that one drew
    assert len(set(seeds)) == 3


def test_an_engine_that_dies_too_often_ends_the_job_with_what_was_finished(
    engine: type[FakeEngine], tmp_path: Path
) -> None:
    engine.dies_at = (4, 6, 8)
    engine.log = tmp_path / "log"
    config = job(tmp_path, failures={"engine_restarts": 2})
    with pytest.raises(EngineError, match=r"died 3 times, failures.engine_restarts allows 2") as e:
        run(config)
    assert e.value.exit_code == 5
    returned = len(engine.log.read_text().splitlines())
    # steps 1-3, 5 and 7, four rollouts each
    assert returned == len(view_of(tmp_path).covered) == 20
    engine.dies_at = ()
    assert run(config).rollouts_committed == 60
    assert len(engine.log.read_text().splitlines()) == 80


def test_no_restart_may_be_asked_for(engine: type[FakeEngine], tmp_path: Path) -> None:
    engine.dies_at = (1,)
    with pytest.raises(EngineError, match="died 1 times"):
        run(job(tmp_path, failures={"engine_restarts": 0}))
    assert engine.started == 1


def test_an_engine_that_does_not_come_back_is_counted_too(
    engine: type[FakeEngine], tmp_path: Path
) -> None:
    engine.dies_at = (2,)
    stock = engine.start_capture

    def start_capture(self: FakeEngine, folder: str) -> None:
        if engine.started in (2, 3):
            raise EngineError("vLLM died: planted at its start")
        stock(self, folder)

    engine.start_capture = start_capture  # type: ignore[method-assign]
    summary = run(job(tmp_path))
    assert summary.rollouts_committed == 80
    assert [death.split(";")[0] for death in summary.engine_deaths] == [
        "vLLM died: planted at step 2",
        "vLLM died: planted at its start",
        "vLLM died: planted at its start",
    ]
    assert {death.split(";")[1].split(":")[0] for death in summary.engine_deaths} == {
        " 12 rollouts in flight"
    }


class Unlucky(FakeEngine):
    """Refuses every third request."""

    share = 3
    asked = 0

    def add(self, request_id: str, prompt_token_ids: list[int], params: Any) -> str:
        from rollout.engine import RequestError

        type(self).asked += 1
        if type(self).asked % self.share == 0:
            raise RequestError("planted")
        return super().add(request_id, prompt_token_ids, params)


def test_a_share_of_failures_above_the_limit_stops_the_job(tmp_path: Path) -> None:
    with fake_engine(Unlucky) as engine:
        config = job(tmp_path, 200, failures={"max_failed_share": 0.3})
        with pytest.raises(
            TooManyFailedError, match=r"of \d+ rollouts failed \(request_refused\)"
        ) as e:
            run(config)
        assert e.value.exit_code == 10
        assert engine.steps < 100 / 4  # long before the end
    view = view_of(tmp_path)
    assert len(view.rejected) > 0
    assert len(view.covered) > 0
    # with a higher limit the same output is completed, and a failure that was made good is none
    with fake_engine(Unlucky):
        failed = run(job(tmp_path, 200, failures={"max_failed_share": 0.5}))
    assert failed.reconciles
    assert failed.rollouts_failed == len(view_of(tmp_path).rejected) > 0
    with fake_engine():
        assert run(config).rollouts_failed == 0
    view = view_of(tmp_path)
    assert (len(view.covered), view.rejected) == (400, ())
    assert sum(record.rejected_rows for record in view.commits) > 0


def test_the_share_counts_at_the_end_of_a_small_job(tmp_path: Path) -> None:
    with fake_engine(Unlucky):
        few = run(job(tmp_path, 6, failures={"max_failed_share": 0.3}))
    assert (few.rollouts_failed, few.rollouts_asked, few.too_many_failed) == (4, 12, True)
    assert not Summary(rollouts_failed=4, rollouts_asked=12, max_failed_share=0.34).too_many_failed
