"""Resuming a loader: anywhere, again and again, and in a dataset that has grown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from loader_cases import (
    group,
    ids_of,
    open_loader,
    twelve_groups,
    write,
)

from rollout.errors import ConfigError, DatasetError


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "run [1] ü")
        return
    yield f"memory://{request.node.name}"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def local(tmp_path: Path) -> str:
    url = str(tmp_path / "run")
    twelve_groups(url)
    return url


def test_a_growing_dataset_does_not_move_a_running_epoch(local: str) -> None:
    before = ids_of(list(open_loader(local)))
    loader = open_loader(local)
    batches = iter(loader)
    first = next(batches)
    write(local, [group(i) for i in range(20, 25)])
    assert ids_of([first, *batches]) == before
    assert len(ids_of(list(loader))) == 48
    assert len(ids_of(list(open_loader(local)))) == 68


def test_resume_at_every_batch_of_two_epochs(url: str) -> None:
    twelve_groups(url)
    whole = open_loader(url)
    batches, states = [], [whole.state_dict()]
    for _ in range(2):
        for batch in whole:
            batches.append(batch.rollout_ids)
            states.append(whole.state_dict())
    assert len(batches) > 15
    for done, state in enumerate(states):
        resumed = open_loader(url)
        # a state is plain JSON: it lives in any trainer's checkpoint
        resumed.load_state_dict(json.loads(json.dumps(state)))
        rest = []
        while resumed.epoch < 2:
            rest += [batch.rollout_ids for batch in resumed]
        assert rest == batches[done:]


def test_resume_of_a_resume_in_a_dataset_that_has_grown(local: str) -> None:
    want = ids_of(list(open_loader(local)))
    got: list[str] = []
    state = None
    for count in (2, 1, 3, 1000):
        loader = open_loader(local)
        if state is not None:
            loader.load_state_dict(state)
        for batch, _ in zip(loader, range(count), strict=False):
            got += batch.rollout_ids
            state = loader.state_dict()
        write(local, [group(30 + count)])
    assert got == want


def test_an_epoch_given_up_starts_again(local: str) -> None:
    loader = open_loader(local)
    first = next(iter(loader)).rollout_ids
    assert next(iter(loader)).rollout_ids == first


@pytest.mark.parametrize(
    ("path", "value", "error", "message"),
    [
        (["version"], 9, ConfigError, "loader state has version 9, expected 2"),
        (["datasets", 0, "fingerprint"], "f", DatasetError, "with fingerprint f, expected"),
        (
            ["datasets", 0, "shards"],
            [["data/x", "0"]],
            DatasetError,
            "data/x of .* is gone",
        ),
        (["datasets"], [], ConfigError, "loader state is of 0 datasets, expected 1"),
        (["settings"], {}, ConfigError, "loader state has groups_per_step None, expected 3"),
        (["where"], "x", ConfigError, "loader state has where 'x', expected None"),
    ],
    ids=["version", "fingerprint", "shards", "datasets", "settings", "where"],
)
def test_a_state_that_does_not_fit_is_refused(
    local: str, path: list[Any], value: Any, error: type[Exception], message: str
) -> None:
    state: Any = open_loader(local).state_dict()
    inside = state
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(error, match=message):
        open_loader(local).load_state_dict(state)


def test_what_is_no_state_is_refused(local: str) -> None:
    state = open_loader(local).state_dict()
    for missing in ("datasets", "settings", "where", "epoch", "step", "done"):
        cut = {name: value for name, value in state.items() if name != missing}
        with pytest.raises(ConfigError, match=f"loader state has no {missing}, expected what"):
            open_loader(local).load_state_dict(cut)
    others: tuple[Any, ...] = (None, [], "state")
    for other in others:
        with pytest.raises(ConfigError, match=r"loader state is .* expected what state_dict"):
            open_loader(local).load_state_dict(other)


def test_a_state_after_the_first_batch_is_refused(local: str) -> None:
    loader = open_loader(local)
    state = loader.state_dict()
    next(iter(loader))
    with pytest.raises(RuntimeError, match="iterated already"):
        loader.load_state_dict(state)
