"""Any number of ranks sees the same global batches, equally many on each, with whole groups."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.compute as pc
import pytest
from loader_cases import VOCAB, group, ids_of, open_loader, per_rollout, write
from synthetic import make_row

from rollout.batch import RolloutBatch
from rollout.errors import ConfigError, DatasetError
from rollout.rows import RolloutRow

WORLDS = [1, 2, 3, 4, 8]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """50 groups of four in five parts, in row groups of a few rollouts."""
    path = str(tmp_path_factory.mktemp("ranks") / "run")
    parts = [[row for i in range(n, n + 10) for row in group(i)] for n in range(0, 50, 10)]
    write(path, parts, row_group_bytes=2000)
    return path


def open_ranks(url: Any, world_size: int, **settings: Any) -> list[Any]:
    defaults = {"groups_per_step": 24, "splits": 24}
    return [
        open_loader(url, world_size=world_size, rank=rank, **{**defaults, **settings})
        for rank in range(world_size)
    ]


def read_ranks(url: Any, world_size: int, **settings: Any) -> list[list[RolloutBatch]]:
    return [list(loader) for loader in open_ranks(url, world_size, **settings)]


def global_batches(ranks: list[list[RolloutBatch]]) -> list[tuple[int, tuple[str, ...]]]:
    """Put the ranks' micro-batches, a round at a time, into the canonical order."""
    assert len({len(batches) for batches in ranks}) == 1
    rounds = zip(*ranks, strict=True)
    found = []
    for batches in rounds:
        assert len({(b.step, b.micro_batch, b.num_micro_batches) for b in batches}) == 1
        assert len({b.global_denominator for b in batches}) == 1
        found += [(batch.step, batch.rollout_ids) for batch in batches]
    return found


@pytest.mark.parametrize("remainder", ["drop", "pad", "repeat"])
def test_global_batches_are_the_same_for_every_world_size(url: str, remainder: str) -> None:
    want = None
    for world_size in WORLDS:
        ranks = read_ranks(url, world_size, remainder=remainder)
        found = global_batches(ranks)
        want = want or found
        assert found == want
        owners: dict[str, set[int]] = defaultdict(set)
        for rank, batches in enumerate(ranks):
            for i in ids_of(batches):
                owners[i.split(".")[0]].add(rank)
        if remainder != "repeat":
            # a group is never on two ranks
            assert all(len(found) == 1 for found in owners.values())
    assert want is not None
    counts = Counter(i for _, ids in want for i in ids)
    # 50 groups: two steps of 24, and two groups that fill no third
    assert max(step for step, _ in want) == (1 if remainder == "drop" else 2)
    assert counts.total() == {"drop": 48, "pad": 50, "repeat": 72}[remainder] * 4
    assert len(counts) == (48 if remainder == "drop" else 50) * 4
    steps: dict[str, set[int]] = defaultdict(set)
    for step, ids in want:
        for i in ids:
            steps[i.split(".")[0]].add(step)
    assert all(len(s) == 1 for g, s in steps.items() if counts[f"{g}.0"] == 1)


def test_batches_of_weight_zero_keep_ranks_in_step(url: str) -> None:
    loaders = open_ranks(url, 8)
    ranks = [list(loader) for loader in loaders]
    blank = [b for batches in ranks for b in batches if not b.rollout_ids]
    assert blank
    assert not any(b.loss_mask.any() for b in blank)
    assert {loader.report.blank_batches for loader in loaders} == {len(blank)}
    for step in range(3):
        batches = [b for rank in ranks for b in rank if b.step == step]
        assert {b.global_denominator for b in batches} == {
            float(sum(int(b.loss_mask.sum()) for b in batches))
        }


def test_the_remainder_is_logged_and_counted(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        (loader,) = open_ranks(url, 1, remainder="drop")
        list(loader)
        assert loader.report.excluded == {"remainder": 8}
        (loader,) = open_ranks(url, 1, remainder="repeat")
        list(loader)
        assert loader.report.repeated == 88
        (loader,) = open_ranks(url, 1)
        list(loader)
    assert "remainder 'drop': 2 groups left out, 0 repeated, the last step lacks 0" in caplog.text
    assert "remainder 'repeat': 0 groups left out, 22 repeated" in caplog.text
    assert "remainder 'pad': 0 groups left out, 0 repeated, the last step lacks 22" in caplog.text


def test_advantages_do_not_depend_on_the_ranks(url: str) -> None:
    want: dict[str, Any] = {}
    for world_size in (1, 8):
        for batches in read_ranks(url, world_size):
            for batch in batches:
                for key, fields in (per_rollout(batch) if batch.rollout_ids else {}).items():
                    assert want.setdefault(key, fields) == fields
    assert len(want) == 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"splits": 8, "world_size": 3, "rank": 0}, "splits is 8, .*multiple of the world size 3"),
        ({"splits": 7}, "groups_per_step is 24, expected a multiple of the 7 splits"),
        ({"world_size": 5, "rank": 0, "splits": 0}, "groups_per_step is 24, .* the 5 splits"),
        ({"world_size": 2}, "world_size is 2 and rank is None, expected both or neither"),
        ({"world_size": 2, "rank": 2}, "rank is 2, expected 0 to below the world_size 2"),
        ({"remainder": "cut"}, "remainder is 'cut', expected one of drop, pad, repeat"),
        ({"groups_per_step": 72, "remainder": "drop"}, "50 groups fill no step of .* 72"),
    ],
    ids=["ranks", "groups", "unset", "half", "rank", "remainder", "no step"],
)
def test_what_can_not_be_shared_is_refused(
    url: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_loader(url, **{"groups_per_step": 24, "splits": 24, **settings})


def test_a_launcher_without_a_process_group_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"launcher started 8 ranks .* initialise it first"):
        open_loader(url)


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_in_a_gloo_group(url: str, tmp_path: Path, world_size: int) -> None:
    settings = {"groups_per_step": 24, "splits": 24}
    command = [sys.executable, str(Path(__file__).parent / "loader_rank.py"), url]
    processes = [
        subprocess.Popen(
            [*command, str(tmp_path / "store"), str(rank), str(world_size), json.dumps(settings)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            results.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    alone = open_loader(url, **settings)
    assert {result["steps"] for result in results} == {alone.num_steps} == {3}
    for epoch in range(2):
        want = [[b.step, list(b.rollout_ids)] for b in alone]
        ranks = [result["epochs"][epoch] for result in results]
        assert [[b[0], b[2]] for batches in zip(*ranks, strict=True) for b in batches] == want


def stepwise(loaders: list[Any], rounds: int) -> list[tuple[int, tuple[str, ...]]]:
    """Let every rank take some batches."""
    return global_batches([list(itertools.islice(loader, rounds)) for loader in loaders])


def test_a_state_is_taken_up_by_another_number_of_ranks(url: str) -> None:
    want = global_batches(read_ranks(url, 1))
    got: list[tuple[int, tuple[str, ...]]] = []
    state = None
    # rounds of 1, 8, 2, 4 and 3 ranks; a resume of a resume of a resume
    for world_size, rounds in ((1, 8), (8, 2), (2, 4), (4, 6), (8, 1), (4, 4), (1, 1000)):
        loaders = open_ranks(url, world_size)
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
        got += stepwise(loaders, rounds)
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert got == want


def test_a_position_that_ranks_can_not_take_up_is_refused(url: str) -> None:
    (loader,) = open_ranks(url, 1)
    next(iter(loader))
    for other in open_ranks(url, 2):
        with pytest.raises(ConfigError, match=r"after 1 micro-batches .* multiple of .* size 2"):
            other.load_state_dict(loader.state_dict())


def test_unset_splits_are_taken_from_the_state(url: str) -> None:
    first = open_loader(url, groups_per_step=24, world_size=4, rank=0)
    assert first.config.splits == 4
    resumed = open_loader(url, groups_per_step=24, world_size=2, rank=0)
    resumed.load_state_dict(first.state_dict())
    assert resumed.config.splits == 4
    with pytest.raises(ConfigError, match="splits is 4, expected a multiple of the world size 3"):
        open_loader(url, groups_per_step=24, world_size=3, rank=0).load_state_dict(
            first.state_dict()
        )
    with pytest.raises(ConfigError, match="loader state has splits 4, expected 2"):
        open_loader(url, groups_per_step=24, splits=2).load_state_dict(first.state_dict())


def u21_rows(shard: int, count: int) -> list[RolloutRow]:
    """Groups of five rollouts and one of what is left; two of five end by length."""
    return [
        make_row(
            f"s{shard}g{i // 5}", i % 5, lengths=[1, 3], vocab=VOCAB, reward=float(i % 3),
            finish_reason="length" if i % 5 in (1, 3) else "stop", group_size=5,
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("counts", [[100, 100, 100, 100, 7], [50]], ids=["five", "one"])
def test_u21_shard_counts_that_do_not_divide_the_world_size(
    tmp_path: Path, counts: list[int]
) -> None:
    rows = [u21_rows(i, count) for i, count in enumerate(counts)]
    write(str(tmp_path), rows, row_group_bytes=3000)
    stopped = {r.rollout_id for part in rows for r in part if r.finish_reason == "stop"}
    wheres = [pl.col("finish_reason") == "stop", pc.field("finish_reason") == "stop"]
    for remainder in ("pad", "drop") if len(counts) > 1 else ("pad",):
        want = None
        for world_size in WORLDS:
            loaders = open_ranks(
                str(tmp_path),
                world_size,
                remainder=remainder,
                where=wheres[world_size % 2],
                token_budget=400,
            )
            found = global_batches([list(loader) for loader in loaders])
            want = want or found
            assert found == want
            ids = [i for _, batch in found for i in batch]
            assert len(set(ids)) == len(ids)
            assert set(ids) <= stopped
            assert (set(ids) == stopped) == (remainder == "pad")
            excluded = {loader.report.excluded["not_selected"] for loader in loaders}
            assert excluded == {sum(counts) - len(stopped)}


def test_left_out_rollouts_still_count_for_their_group(tmp_path: Path) -> None:
    write(str(tmp_path), [u21_rows(0, 5)])
    where = pl.col("finish_reason") == "stop"
    (batch,) = open_loader(str(tmp_path), where=where, groups_per_step=1, token_budget=1000)
    # rewards 0, 1, 2, 0, 1 have the mean 0.8
    got = {key: fields["advantages"][0] for key, fields in per_rollout(batch).items()}
    want = {"s0g0.0": -0.8, "s0g0.2": 1.2, "s0g0.4": 0.2}
    assert got == pytest.approx(want)


def test_a_filter_that_keeps_nothing_or_is_none_is_refused_up_front(url: str) -> None:
    with pytest.raises(DatasetError, match=r"where .*reward.* keeps none of its rollouts"):
        open_loader(url, where=pl.col("reward") > 99)
    for where in (pl.col("no_such") > 1, pc.field("no_such") > 1, pl.col("reward") + 1):
        with pytest.raises(ConfigError, match=r"where .* can't be evaluated on the scalar columns"):
            open_loader(url, where=where)
    with pytest.raises(ConfigError, match="columns has 'no_such', expected some of"):
        open_loader(url, columns=("no_such",))


def test_columns_that_were_asked_for_come_along(url: str) -> None:
    loader = open_loader(url, columns=("reward", "finish_reason"), token_budget=1000)
    batch = next(iter(loader))
    assert batch.columns["finish_reason"] == ("stop",) * len(batch.rollout_ids)
    # without supports there is nothing but the sampled token
    assert batch.support_ids.shape[0] == 0
    assert not batch.support_valid.any()
    whole = {k: v for b in open_loader(url, token_budget=1000) for k, v in per_rollout(b).items()}
    for key, fields in per_rollout(batch).items():
        assert fields["logprobs"] == whole[key]["logprobs"]
        assert fields["advantages"] == whole[key]["advantages"]


def test_datasets_mixed_by_weight(url: str, tmp_path: Path) -> None:
    write(str(tmp_path), [[row for i in range(100, 110) for row in group(i)]])
    paths = [url, str(tmp_path)]
    plain = open_loader(paths, groups_per_step=12, splits=2)
    assert Counter(ids_of(plain)) == Counter(f"p{i}.{k}" for i in [*range(50), *range(100, 110)]
                                             for k in range(4))  # fmt: skip
    mixed = open_loader(paths, groups_per_step=12, splits=2, weights=(2.0, 1.0))
    assert mixed.num_steps == 5
    steps: dict[int, Counter[bool]] = defaultdict(Counter)
    for batch in mixed:
        steps[batch.step].update(int(i.split(".")[0][1:]) >= 100 for i in batch.rollout_ids)
    assert all(found == {False: 32, True: 16} for found in steps.values())
    resumed = open_loader(paths, groups_per_step=12, splits=2, weights=(2.0, 1.0))
    resumed.load_state_dict(mixed.state_dict())
    assert ids_of(resumed) == ids_of(mixed)
    with pytest.raises(ConfigError, match="got 2 weights for 1 datasets"):
        open_loader(url, weights=(1.0, 2.0))
    with pytest.raises(ConfigError, match=r"weights are .*, expected finite numbers above 0"):
        open_loader(paths, weights=(1.0, 0.0))
