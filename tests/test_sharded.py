"""The head and the losses under FSDP2, on two real CPU ranks, against one rank without it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_rank import main as run_rank
from torch import nn

from rollout.sharded import sum_gradients, whole_weight

Worlds = dict[int, dict[str, Any]]
RANK = Path(__file__).parent / "fsdp_rank.py"
LOSSES = pytest.mark.parametrize("loss", ["icepop", "reinforce"])
WAYS = pytest.mark.parametrize("way", ["gathered", "inside", "tied"])


# a rank whose thread of gloo is still dropping the tensor of a collective when the rank's work ends
SLOW_DROP = """
import runpy, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist

script, folder, rank, size = sys.argv[1:]
handed_over, dropping = Path(folder, "handed over"), threading.Event()
destroy = dist.destroy_process_group

class SlowToDrop:
    def __del__(self):
        print("dropped by", threading.current_thread().name)
        dropping.set()
        for _ in range(20_000):
            time.sleep(0.001)

def one_more_collective():
    tensor = torch.zeros(1)
    if rank == "0":
        tensor.marker = SlowToDrop()
        dist.all_reduce(tensor, async_op=True)
        del tensor
        handed_over.touch()
        assert dropping.wait(60)
    else:
        while not handed_over.exists():
            time.sleep(0.01)
        dist.all_reduce(tensor)
    destroy()

dist.destroy_process_group = one_more_collective
sys.argv[:] = [script, folder, rank, size]
sys.path.insert(0, str(Path(script).parent))
runpy.run_path(script, run_name="__main__")
"""


@contextmanager
def world_of_two(command: list[str | Path], folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a command as two ranks, and end them with the block."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *command, folder, str(rank), "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def outputs(ranks: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for ranks to end well; return what each printed."""
    found = []
    for rank in ranks:
        output, _ = rank.communicate(timeout=300)
        assert rank.returncode == 0, output
        found.append(output)
    return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """Run a world of one and a world of two; return what each wrote."""
    folder = tmp_path_factory.mktemp("fsdp")
    with world_of_two([RANK], folder) as ranks:
        run_rank(folder, 0, 1)
        outputs(ranks)
    return {size: json.loads((folder / f"facts{size}.json").read_text()) for size in (1, 2)}


@WAYS
@LOSSES
def test_two_ranks_have_the_gradients_of_one(worlds: Worlds, loss: str, way: str) -> None:
    want, got = (worlds[size][f"{loss} {way}"] for size in (1, 2))
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-12)
    assert len(want["grads"]) == (3 if way == "tied" else 4)
    for name, grad in want["grads"].items():
        assert np.abs(grad).max() > 1e-2, name
        np.testing.assert_allclose(got["grads"][name], grad, rtol=1e-11, atol=1e-14, err_msg=name)


def test_a_sharded_weight_is_refused_with_both_ways_out(worlds: Worlds) -> None:
    refusal = worlds[2]["refusal"]
    assert refusal.startswith("weight is a DTensor of placements (Shard(dim=0),)")
    assert "inside the forward of the module that fully_shard wraps" in refusal
    assert "rollout.sharded.whole_weight(weight)" in refusal


def test_a_rank_ends_well_whatever_its_threads_still_do(tmp_path: Path) -> None:
    with world_of_two(["-c", SLOW_DROP, RANK], tmp_path) as ranks:
        first, _ = outputs(ranks)
    # a thread that Python did not start, so that this is what it is meant to be
    assert "dropped by Dummy" in first


def test_a_plain_weight_is_whole() -> None:
    weight = torch.randn(3, 2)
    assert whole_weight(weight) is weight


def test_a_model_without_fsdp_has_no_mean_to_turn_off() -> None:
    with pytest.raises(ValueError, match="Linear holds no module of FSDP2, expected fully_shard"):
        sum_gradients(nn.Linear(2, 2))
