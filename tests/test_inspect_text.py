"""What the overview of `rollout inspect` says of a report, and that it fits a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic import make_record, make_rejection, make_row, plan

from rollout.dataset import DatasetWriter
from rollout.inspect import InspectReport, format_report, inspect_dataset
from rollout.inspect_text import settings_of
from rollout.shard_scan import BadShard
from rollout.storage import Storage
from rollout.tally import Spread


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> InspectReport:
    path = tmp_path_factory.mktemp("inspect") / "run"
    writer = DatasetWriter.open(Storage.open(path), make_record())
    writer.append_plan(plan("u000000", "a", "b", "c"))
    rows = [make_row(prompt, i, reward=i / 4) for prompt in "abc" for i in range(4)]
    writer.commit_part("u000000", rows, [make_rejection("q")])
    return inspect_dataset(path)


def test_the_report_fits_100_columns_whatever_it_holds(report: InspectReport) -> None:
    huge = Spread(
        count=1,
        mean=1e12,
        minimum=-1e9,
        p10=0,
        median=123_456_789,
        p90=1e10,
        p99=1e11,
        maximum=1e13,
    )
    wide = replace(
        report,
        url="s3://bucket/" + "x" * 200,
        model="m" * 150,
        tokens=huge,
        rewards=huge,
        finish_reasons=tuple((f"reason {i}" * 5, 10**9) for i in range(9)),
        rejections=(("sample", "r" * 200, 10**9),),
    )
    lines = format_report(wide).splitlines()
    assert max(len(line) for line in lines[:-1]) <= 100
    assert lines[0].startswith("dataset        s3://bucket/xxx")
    assert "..." in lines[0]


def test_what_the_report_says_of_a_sample_and_of_settings(report: InspectReport) -> None:
    assert report.rollouts_read == report.rollouts_committed == 12
    part = replace(report, rollouts_read=9, shards_read=1)
    assert "read           9 rollouts of 1 shard, evenly spread;" in format_report(part)
    assert "evenly spread" not in format_report(report)
    # what is unreadable is no sample
    bad = (BadShard(file="data/x.parquet", rows=3, problem="missing"),)
    assert "evenly spread" not in format_report(replace(part, bad_shards=bad))
    neutral = {"top_p": 1.0, "top_k": 0, "min_tokens": 0, "stop": [], "ignore_eos": False}
    said = settings_of(replace(report, sampling={"n": 2, "temperature": 0.7} | neutral))
    assert said == "n 2, temperature 0.7"
    text = format_report(replace(report, rollouts_without_reward=1))
    assert "; 1 rollout without a reward" in text


def test_characters_of_two_columns_are_counted_as_two(report: InspectReport) -> None:
    item = make_rejection("key", prompt_id="\u6f22" * 200)
    wide = replace(
        report,
        url="out/" + "\u6f22" * 90,
        model="e\u0301" * 40,
        sampling={"stop": ["\u3002" * 60, "\u6f22" * 30]},
        rejected=(item,),
    )
    lines = format_report(wide).splitlines()[:-1]
    shown = [line for line in lines if "\u6f22" in line or "\u3002" in line]
    assert len(shown) >= 4
    for line in shown:
        two = sum(char in "\u6f22\u3002" for char in line)
        assert len(line) + two <= 100
    # as many as there is room for: an accent of its own takes none
    assert len(shown[0]) + shown[0].count("\u6f22") >= 97
    (made_by,) = (line for line in lines if line.startswith("made by"))
    assert "e\u0301" * 40 in made_by
