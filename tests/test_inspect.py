"""`rollout inspect`: every number against plain Python over the rows that were written."""

from __future__ import annotations

import itertools
import random
import re
import statistics
import time
import uuid
from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import fsspec
import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from synthetic import make_record, make_rejection, make_row, plan

from rollout.cli import main
from rollout.dataset import DatasetWriter, read_dataset
from rollout.errors import DatasetError
from rollout.inspect import InspectReport, format_report, inspect_dataset
from rollout.rows import RolloutRow
from rollout.schema.records import DatasetRecord
from rollout.storage import Storage
from rollout.tally import Spread, Tally


def brute_percentile(values: list[float], percent: int) -> float:
    """The smallest value such that at least this share of the values is not above it."""
    return next(
        candidate
        for candidate in sorted(values)
        if Fraction(sum(v <= candidate for v in values), len(values)) >= Fraction(percent, 100)
    )


def assert_spread(spread: Spread | None, values: list[float]) -> None:
    assert spread is not None
    assert spread.count == len(values)
    assert spread.mean == pytest.approx(statistics.fmean(values), rel=1e-12, abs=1e-15)
    assert (spread.minimum, spread.maximum) == (min(values), max(values))
    for name, percent in (("p10", 10), ("median", 50), ("p90", 90), ("p99", 99)):
        assert getattr(spread, name) == brute_percentile(values, percent), name


def record_of_a_job(n: int = 4) -> DatasetRecord:
    """A dataset's record as a job writes it."""
    record = make_record(
        model={"weights_digest": "ab" * 32, "dtype": "bfloat16"}, sampling={"top_p": 0.95}
    )
    job = {"sampling": {"n": n}, "model": {"path": "models/m"}}
    return replace(record, provenance={"job": job, "model": {"name": "models/m"}})


def random_rows(prompt: str, count: int, rng: random.Random) -> list[RolloutRow]:
    rows = []
    for index in range(count):
        lengths = [rng.choice([1, 1, 1, 2, 3, 7, 40, 300]) for _ in range(rng.randint(1, 30))]
        kind = rng.choice(["kept", "kept", "kept", "top", "none"])
        rows.append(
            make_row(
                prompt,
                index,
                lengths=[5] * len(lengths) if kind == "top" else lengths,
                kind=kind,
                group_size=4,
                finish_reason=rng.choice(["stop", "stop", "length", None]),
                prompt_token_ids=np.arange(rng.randint(1, 50), dtype=np.int32),
                reward=rng.choice([None, 0.0, 0.25, 1.0, rng.random()]),
                tail_mass=np.array([rng.choice([0.0, 0.003, 0.4]) for _ in lengths], np.float32)
                if kind == "top"
                else None,
            )
        )
    return rows


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RolloutRow]]:
    """Two units in three parts with small row groups, and everything that can be missing.

    p00 to p05 complete, p06 with 2 of 4, p07 with 1 of 4 and 3 rejected, p08 planned only, p09
    planned and rejected whole, q0 and q1 rejected unplanned.
    """
    path = tmp_path_factory.mktemp("inspect") / "run"
    rng = random.Random(11)
    counts = {f"p{i:02d}": 4 for i in range(6)} | {"p06": 2, "p07": 1}
    rows = {prompt: random_rows(prompt, count, rng) for prompt, count in counts.items()}
    for row in rows["p01"]:
        row.reward = 0.5
    writer = DatasetWriter.open(Storage.open(path), record_of_a_job(), row_group_bytes=4_000)
    writer.append_plan(plan("u000000", "p00", "p01", "p02", "p03", "p04"))
    writer.append_plan(plan("u000001", "p05", "p06", "p07", "p08", "p09"))
    writer.engine = {"engine": "vllm", "engine_version": "0.32.0"}
    writer.commit_part("u000000", [*rows["p00"], *rows["p01"], *rows["p02"][:3]])
    writer.commit_part(
        "u000000",
        [rows["p02"][3], *rows["p03"], *rows["p04"]],
        [make_rejection("q0"), make_rejection("q1", reason="no_text", stage="read")],
    )
    writer.engine = {"engine": "vllm", "engine_version": "0.33.0"}
    writer.commit_part(
        "u000001",
        [*rows["p05"], *rows["p06"], *rows["p07"]],
        [make_rejection("p09"), *(make_rejection("p07", index) for index in (1, 2, 3))],
    )
    assert all(len(record.row_groups) > 1 for record in read_dataset(writer.storage).shards)
    return path, [row for group in rows.values() for row in group]


@pytest.fixture(scope="module")
def report(written: tuple[Path, list[RolloutRow]]) -> InspectReport:
    return inspect_dataset(written[0])


def test_counts_and_completeness(report: InspectReport, written: tuple[Path, object]) -> None:
    assert (report.prompts_planned, report.prompts_complete) == (10, 6)
    assert (report.prompts_started, report.prompts_rejected) == (2, 3)
    # 9 planned prompts that are not set aside, 4 rollouts each
    assert report.rollouts_planned == 36
    assert report.rollouts_committed == 6 * 4 + 2 + 1
    assert report.rollouts_rejected == 3
    assert report.rollouts_missing == 2 + 4
    assert report.rejections == (
        ("capture", "support_capacity", 3),
        ("render", "prompt_too_long", 2),
        ("read", "no_text", 1),
    )
    files = list((written[0] / "data").iterdir())
    assert report.parts == len(files) == 3
    assert report.data_bytes == sum(file.stat().st_size for file in files)
    assert report.orphans == 0


def test_numbers_equal_plain_python(
    report: InspectReport, written: tuple[Path, list[RolloutRow]]
) -> None:
    rows = written[1]
    assert_spread(report.tokens, [len(row.token_ids) for row in rows])
    assert_spread(report.prompt_tokens, [len(row.prompt_token_ids) for row in rows])
    assert report.total_tokens == sum(len(row.token_ids) for row in rows)
    assert report.total_entries == sum(
        len(row.support_entries) for row in rows if row.support_entries is not None
    )
    assert dict(report.finish_reasons) == Counter(row.finish_reason for row in rows)
    counts = [count for _, count in report.finish_reasons]
    assert counts == sorted(counts, reverse=True)

    rewards = [float(np.float32(row.reward)) for row in rows if row.reward is not None]
    assert_spread(report.rewards, rewards)
    assert report.rollouts_without_reward == len(rows) - len(rewards) > 0
    groups = defaultdict(list)
    for row in rows:
        if row.reward is not None:
            groups[row.prompt_key].append(np.float32(row.reward))
    compared = [group for group in groups.values() if len(group) > 1]
    assert report.groups_with_rewards == len(compared)
    assert report.groups_even == sum(len(set(group)) == 1 for group in compared) >= 1


def test_supports_by_kind_equal_plain_python(
    report: InspectReport, written: tuple[Path, list[RolloutRow]]
) -> None:
    assert [item.kind for item in report.supports] == ["kept", "none", "top"]
    for item in report.supports:
        rows = [row for row in written[1] if row.support_kind == item.kind]
        assert item.rollouts == len(rows) > 0
        assert item.tokens == sum(len(row.token_ids) for row in rows)
        sizes: list[float] = []
        tails: list[float] = []
        for row in rows:
            if row.support_offsets is not None:
                bounds = row.support_offsets.tolist()
                sizes += [end - start for start, end in itertools.pairwise(bounds)]
            if row.tail_mass is not None:
                tails += [float(tail) for tail in row.tail_mass]
        if item.kind == "none":
            assert (item.sizes, item.singleton_share) == (None, None)
        else:
            assert_spread(item.sizes, sizes)
            assert item.singleton_share == sum(size == 1 for size in sizes) / len(sizes)
        if item.kind == "top":
            assert item.tail_mean == pytest.approx(statistics.fmean(tails), rel=1e-12)
            assert item.tail_maximum == max(tails)
            assert item.tail_above_1_percent == sum(t > 0.01 for t in tails) / len(tails)
        else:
            assert item.tail_mean is item.tail_maximum is item.tail_above_1_percent is None


def test_provenance(report: InspectReport, written: tuple[Path, object]) -> None:
    record = record_of_a_job()
    assert report.fingerprint == record.fingerprint
    assert (report.model, report.model_digest) == ("models/m", "ab" * 32)
    assert (report.dtype, report.engines) == ("bfloat16", ("vllm 0.32.0", "vllm 0.33.0"))
    text = format_report(report)
    for expected in (
        f"dataset        {written[0]}",
        "models/m (abababababab), bfloat16, vllm 0.32.0 + vllm 0.33.0",
        "10 planned: 6 complete, 2 in part; 3 rejected",
        "27 of 36 committed, 3 rejected, 6 missing",
        "rejected       3 at capture: support_capacity",
    ):
        assert expected in text
    assert max(map(len, text.splitlines()[:-1])) <= 100
    assert text.isascii()


def test_the_printed_table_holds_the_numbers(report: InspectReport) -> None:
    assert report.tokens is not None
    assert report.rewards is not None
    lines = format_report(report).splitlines()
    cells = next(line for line in lines if line.startswith("tokens ")).split()[1:]
    spread = report.tokens
    assert [float(cell) for cell in cells] == [
        round(spread.mean, 1),
        *(spread.minimum, spread.p10, spread.median, spread.p90, spread.p99, spread.maximum),
    ]
    cells = next(line for line in lines if line.startswith("reward ")).split()[1:]
    assert float(cells[0]) == pytest.approx(report.rewards.mean, abs=5e-4)
    assert float(cells[3]) == pytest.approx(report.rewards.median, abs=5e-4)


@pytest.mark.parametrize("folder", ["run", "a [b] *c?", "ünï {1,2} code"])
def test_the_polars_line_opens_the_data(tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder
    writer = DatasetWriter.open(Storage.open(path), make_record())
    writer.append_plan(plan("u000000", "p0"))
    writer.commit_part("u000000", [make_row("p0", index) for index in range(3)])
    line = inspect_dataset(path).polars_line
    assert line is not None
    match = re.fullmatch(r'pl\.scan_parquet\("([^"]+)"(, glob=False)?\)', line)
    assert match is not None
    frame = pl.scan_parquet(match[1], glob=match[2] is None).collect()
    assert sorted(frame["rollout_id"]) == ["p0.0", "p0.1", "p0.2"]


def test_memory_storage_is_read_and_opened_through_fsspec() -> None:
    url = f"memory://inspect-{uuid.uuid4().hex}/run"
    writer = DatasetWriter.open(Storage.open(url), make_record())
    writer.append_plan(plan("u000000", "p0"))
    rows = [make_row("p0", index, lengths=[1, 9, 2], reward=float(index)) for index in range(4)]
    writer.commit_part("u000000", rows)
    report = inspect_dataset(url)
    assert (report.rollouts_committed, report.prompts_complete) == (4, 1)
    assert_spread(report.rewards, [0.0, 1.0, 2.0, 3.0])
    assert_spread(report.supports[0].sizes, [1.0, 9.0, 2.0] * 4)
    pattern = f"{url}/data/*.parquet"
    assert report.polars_line == (
        f'pl.concat(pl.read_parquet(f.open()) for f in fsspec.open_files("{pattern}"))'
    )
    frame = pl.concat(pl.read_parquet(f.open()) for f in fsspec.open_files(pattern))
    assert frame["reward"].to_list() == [0.0, 1.0, 2.0, 3.0]


def test_an_object_store_is_opened_by_polars_itself() -> None:
    from rollout.inspect import _polars_line

    class Bucket(Storage):
        def __init__(self) -> None:
            self.url = "s3://bucket/run"

        @property
        def local_root(self) -> Path | None:
            return None

    assert _polars_line(Bucket(), "s3://bucket/run") == (
        'pl.scan_parquet("s3://bucket/run/data/*.parquet")'
    )


def test_a_dataset_without_rollouts(tmp_path: Path) -> None:
    writer = DatasetWriter.open(Storage.open(tmp_path), record_of_a_job(n=8))
    empty = inspect_dataset(tmp_path)
    assert (empty.prompts_planned, empty.rollouts_planned, empty.rollouts_committed) == (0, 0, 0)
    assert (empty.tokens, empty.rewards, empty.polars_line) == (None, None, None)
    assert empty.engines == ()
    assert "no rollouts yet" in format_report(empty)
    assert "no data to open yet" in format_report(empty)

    writer.append_plan(plan("u000000", "p0", "p1"))
    planned = inspect_dataset(tmp_path)
    assert (planned.prompts_planned, planned.prompts_complete) == (2, 0)
    assert (planned.rollouts_planned, planned.rollouts_missing) == (16, 16)

    writer.commit_part("u000000", [], [make_rejection("p1")])
    refused = inspect_dataset(tmp_path)
    assert (refused.rollouts_planned, refused.rollouts_missing, refused.parts) == (8, 8, 0)
    assert "rejected       1 at render: prompt_too_long" in format_report(refused)


def test_rollouts_of_a_raised_and_a_lowered_n(tmp_path: Path) -> None:
    writer = DatasetWriter.open(Storage.open(tmp_path), record_of_a_job(n=2))
    writer.append_plan(plan("u000000", "p0", "p1"))
    writer.commit_part("u000000", [make_row("p0", index, group_size=2) for index in range(2)])
    writer.commit_part("u000000", [make_row("p0", 2, group_size=5)])
    report = inspect_dataset(tmp_path)
    # p0 asks for 5 by now, p1 for the job's 2
    assert (report.rollouts_planned, report.rollouts_missing) == (7, 4)
    writer.commit_part("u000000", [make_row("p1", index, group_size=1) for index in range(3)])
    report = inspect_dataset(tmp_path)
    assert (report.rollouts_planned, report.rollouts_missing) == (8, 2)
    assert (report.prompts_complete, report.prompts_started) == (1, 1)


def test_an_orphan_is_told_and_not_counted(tmp_path: Path) -> None:
    writer = DatasetWriter.open(Storage.open(tmp_path), make_record())
    writer.append_plan(plan("u000000", "p0"))
    record = writer.commit_part("u000000", [make_row("p0", 0)])
    assert record is not None
    assert record.file is not None
    shard = tmp_path / record.file
    (shard.parent / "u000000-00001-abcd.parquet").write_bytes(shard.read_bytes())
    report = inspect_dataset(tmp_path)
    assert (report.orphans, report.rollouts_committed) == (1, 1)
    assert report.tokens is not None
    assert report.tokens.count == 1
    assert "1 file in data/ without a commit record" in format_report(report)


def test_what_can_not_be_read_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"is not a dataset: there is no _dataset\.json in it"):
        inspect_dataset(tmp_path)
    writer = DatasetWriter.open(Storage.open(tmp_path / "run"), make_record())
    writer.append_plan(plan("u000000", "p0"))
    record = writer.commit_part("u000000", [make_row("p0", 0)])
    assert record is not None
    assert record.file is not None
    data = (tmp_path / "run" / record.file).read_bytes()
    (tmp_path / "run" / record.file).write_bytes(data[: len(data) // 2])
    (bad,) = inspect_dataset(tmp_path / "run").bad_shards
    assert (bad.file, bad.rows) == (record.file, 1)
    assert "not a readable parquet file" in bad.problem
    (tmp_path / "run" / record.file).unlink()
    found = inspect_dataset(tmp_path / "run")
    assert [bad.problem for bad in found.bad_shards] == ["missing"]
    assert (found.complete, found.unreadable, found.rollouts_read) == (False, 1, 0)
    result = CliRunner().invoke(main, ["inspect", str(tmp_path / "nothing")])
    assert result.exit_code == DatasetError.exit_code
    assert "is not a dataset" in result.output


def test_groups_and_times_of_a_run(tmp_path: Path) -> None:
    writer = DatasetWriter.open(Storage.open(tmp_path), record_of_a_job())
    writer.append_plan(plan("u000000", "a", "b"))
    writer.append_plan(plan("u000001", "c"))
    rewards: dict[str, list[float | None]] = {
        "a": [0.5, float("nan"), None],
        "b": [0.5, 0.5, float("inf")],
        "c": [0.0, 1.0],
    }
    rows = {
        name: [make_row(name, i, reward=value) for i, value in enumerate(values)]
        for name, values in rewards.items()
    }
    first = writer.commit_part("u000001", rows["c"])
    time.sleep(0.01)
    last = writer.commit_part("u000000", [*rows["a"], *rows["b"]])
    assert first is not None
    assert last is not None
    report = inspect_dataset(tmp_path)
    assert (report.first_commit, report.last_commit) == (first.created_at, last.created_at)
    assert (report.groups_with_rewards, report.groups_even) == (2, 1)
    assert (report.rollouts_without_reward, report.nonfinite_rewards) == (1, 2)


def test_tally_equals_brute_force_over_many_small_lots() -> None:
    rng = random.Random(2)
    for size in (1, 2, 30, 199, 1000):
        values = [rng.choice([0.0, 1.0, rng.random() * 50]) for _ in range(size)]
        tally = Tally()
        rest = list(values)
        while rest:
            lot, rest = rest[:7], rest[7:]
            tally.add(pl.Series(lot, dtype=pl.Float64))
        assert_spread(tally.spread(), values)
        assert tally.share_of(1) == values.count(1.0) / size


def test_an_empty_tally_has_no_spread() -> None:
    tally = Tally()
    tally.add(pl.Series([], dtype=pl.Int64))
    assert tally.spread() is None
    assert tally.share_of(1) is None
