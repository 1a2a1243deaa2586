"""The loader inside torch's DataLoader and torchdata's StatefulDataLoader, with workers."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_cases import group, open_loader, write
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from rollout.batch import RolloutBatch
from rollout.loader import RolloutLoader

# more workers than cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create . worker:UserWarning")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("workers") / "run")
    parts = [[row for i in range(n, n + 6) for row in group(i)] for n in range(0, 18, 6)]
    write(path, parts, row_group_bytes=2000)
    return path


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Import the loader once for all workers that are started by a fork server."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["rollout.loader"])


def in_workers(
    cls: Any, loader: RolloutLoader, workers: int, *, start: str = "forkserver", **options: Any
) -> Any:
    if workers:
        options = {"multiprocessing_context": start, "persistent_workers": True, **options}
    return cls(loader, batch_size=None, num_workers=workers, **options)


def seen(batches: Any) -> list[tuple[int, int, int, tuple[str, ...], float]]:
    return [
        (b.epoch, b.step, b.micro_batch, b.rollout_ids, float(b.advantages.double().sum()))
        for b in batches
    ]


def two_epochs(url: str) -> list[RolloutBatch]:
    loader = open_loader(url, groups_per_step=6, splits=6)
    return [*loader, *loader]


@pytest.mark.parametrize("workers", [0, 1, 3, 4])
def test_workers_give_the_same_batches_in_the_same_order(url: str, workers: int) -> None:
    want = two_epochs(url)
    loader = open_loader(url, groups_per_step=6, splits=6)
    data = in_workers(DataLoader, loader, workers, start="spawn" if workers == 3 else "forkserver")
    got = [*data, *data]
    assert seen(got) == seen(want)
    assert torch.equal(got[5].support_ids, want[5].support_ids)
    assert len({b.epoch for b in got}) == 2
    # the state after any batch is that of a loader without workers, whatever was prefetched
    alone = open_loader(url, groups_per_step=6, splits=6)
    for batch, _ in zip(got, alone, strict=False):
        assert loader.state_dict(batch) == alone.state_dict()
    if workers:
        with pytest.raises(RuntimeError, match=r"worker processes: give .* state_dict\(batch\)"):
            loader.state_dict()


def test_a_rank_of_two_with_two_workers_resumes_from_a_batch(url: str) -> None:
    settings = {"groups_per_step": 6, "splits": 6, "world_size": 2, "rank": 1}
    whole = open_loader(url, **settings)
    want = seen([*whole, *whole])
    first = open_loader(url, **settings)
    begun = list(itertools.islice(first, 4))
    resumed = open_loader(url, **settings)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(begun[-1]))))
    data = in_workers(DataLoader, resumed, 2)
    assert seen(begun) + seen([*data, *data]) == want


# torchdata 0.11 calls what torch 2.13 deprecates
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader_resumes(url: str, workers: int) -> None:
    want = seen(two_epochs(url))
    data = in_workers(StatefulDataLoader, open_loader(url, groups_per_step=6, splits=6), workers)
    got = seen(itertools.islice(data, 4))
    state = data.state_dict()
    again = in_workers(StatefulDataLoader, open_loader(url, groups_per_step=6, splits=6), workers)
    again.load_state_dict(state)
    rest = seen([*again, *again])
    assert got + rest == want


def test_workers_started_anew_for_an_epoch_are_refused_unless_told(url: str) -> None:
    loader = open_loader(url, groups_per_step=6, splits=6)
    data = in_workers(DataLoader, loader, 1, persistent_workers=False)
    first = seen(data)
    with pytest.raises(RuntimeError, match=r"started anew for epoch 0, .* call set_epoch"):
        list(data)
    loader.set_epoch(1)
    assert first + seen(data) == seen(two_epochs(url))


def test_a_forked_worker_is_refused(url: str) -> None:
    loader = open_loader(url)
    data = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=r"forked into a worker.*'spawn'"):
        next(iter(data))


def test_one_process_state_follows_what_was_handed_out(url: str, tmp_path: Path) -> None:
    loader = open_loader(url, groups_per_step=6)
    for batch in loader:
        assert loader.state_dict() == loader.state_dict(batch)
    assert loader.state_dict()["epoch"] == 1
