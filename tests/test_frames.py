"""`rollout.frames` against the rows that were written, and other readers on the same files."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import numpy as np
import polars as pl
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from dataset_tools import new_storage
from prepared_runs import PreparedRun, complete_run
from s3_server import s3_server
from synthetic import make_record, make_row, plan

from rollout.dataset import DatasetWriter
from rollout.errors import DatasetError
from rollout.frames import (
    entry_id,
    entry_logprob,
    explode_support,
    explode_tokens,
    scan,
    support_sizes,
)
from rollout.rows import RolloutRow
from rollout.schema.columns import SCHEMA
from rollout.schema.entries import unpack_entries
from rollout.storage import Storage

KINDS = ("kept", "top", "none")


def some_rows() -> list[RolloutRow]:
    """Rows of all kinds, next to each other."""
    return [
        make_row(prompt, index, kind=kind, lengths=[1, 6, 2], draws=2, text=f"{prompt} \u00fc")
        for prompt, kind in (("p0", "kept"), ("p1", "none"), ("p2", "top"), ("p3", "kept"))
        for index in range(2)
    ]


def write(storage: Storage, rows: list[RolloutRow]) -> None:
    writer = DatasetWriter.open(storage, make_record(), row_group_bytes=300)
    writer.append_plan(plan("u000000", "p0", "p1", "p2", "p3"))
    writer.commit_part("u000000", rows[:3])
    writer.commit_part("u000000", rows[3:])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return complete_run(tmp_path_factory.mktemp("run [1] \u00e9"))


def by_key(rows: list[RolloutRow]) -> dict[tuple[str, int], RolloutRow]:
    return {(row.rollout_id, position): row for row in rows for position in range(3)}


def expected_tokens(rows: list[RolloutRow]) -> list[tuple[Any, ...]]:
    found = []
    for row in rows:
        for t in range(row.token_ids.size):
            size = None
            if row.support_offsets is not None:
                size = int(row.support_offsets[t + 1] - row.support_offsets[t])
            tail = 0.0 if row.support_kind == "kept" else None
            if row.tail_mass is not None:
                tail = float(row.tail_mass[t])
            token, logprob = int(row.token_ids[t]), float(row.sampled_logprobs[t])
            found.append((row.rollout_id, t, token, logprob, size, tail))
    return found


def expected_entries(rows: list[RolloutRow]) -> list[tuple[Any, ...]]:
    found = []
    for row in rows:
        if row.support_offsets is None or row.support_entries is None:
            continue
        for t in range(row.token_ids.size):
            own = np.sort(row.support_entries[row.support_offsets[t] : row.support_offsets[t + 1]])
            for one, logprob in zip(*unpack_entries(own), strict=True):
                sampled = int(one) == int(row.token_ids[t])
                found.append((row.rollout_id, t, int(one), float(logprob), sampled))
    return found


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_tokens_and_entries_equal_what_was_written(kind: str, tmp_path: Path) -> None:
    storage = new_storage(kind, tmp_path)
    rows = some_rows()
    write(storage, rows)
    path = str(storage.local_root or storage.url)
    frame = scan(path)
    assert isinstance(frame, pl.LazyFrame)
    assert frame.collect_schema().names() == SCHEMA.names
    assert frame.select("rollout_id").collect()["rollout_id"].to_list() == [
        row.rollout_id for row in rows
    ]
    tokens = explode_tokens(frame, keep=["rollout_id"]).collect()
    assert tokens.rows() == expected_tokens(rows)
    assert [str(t) for t in tokens.dtypes[1:]] == ["Int64", "Int32", "Float32", "Int64", "Float32"]
    entries = explode_support(frame, keep=["rollout_id"]).collect()
    assert entries.rows() == expected_entries(rows)
    assert set(explode_tokens(frame).collect_schema().names()) > {"prompt_id", "sample_index"}


def test_a_filter_comes_first_and_orphans_are_left_out(tmp_path: Path) -> None:
    rows = some_rows()
    write(Storage.open(tmp_path), rows)
    (tmp_path / "data" / "u000000-00007-aaaa.parquet").write_bytes(b"not parquet")
    only = scan(tmp_path).filter(pl.col("prompt_id") == "user p2")
    wanted = [row for row in rows if row.prompt_id == "user p2"]
    assert explode_support(only, keep=["rollout_id"]).collect().rows() == expected_entries(wanted)
    count = scan(tmp_path).select(support_sizes().list.sum().sum()).collect().item()
    assert count == len(expected_entries(rows))


def test_unpacking_inside_lists(tmp_path: Path) -> None:
    rows = some_rows()
    write(Storage.open(tmp_path), rows)
    frame = scan(tmp_path).select(
        ids=pl.col("draw_entries").list.eval(entry_id(pl.element())),
        logprobs=pl.col("draw_entries").list.eval(entry_logprob(pl.element())),
    )
    for (ids, logprobs), row in zip(frame.collect().rows(), rows, strict=True):
        assert row.draw_entries is not None
        expected_ids, expected_logprobs = unpack_entries(row.draw_entries)
        assert ids == expected_ids.tolist()
        assert logprobs == expected_logprobs.tolist()


def test_a_run_without_rollouts_has_the_schema(tmp_path: Path) -> None:
    DatasetWriter.open(Storage.open(tmp_path), make_record())
    frame = scan(tmp_path).collect()
    assert (len(frame), frame.columns) == (0, SCHEMA.names)
    assert len(explode_support(frame.lazy()).collect()) == 0
    with pytest.raises(DatasetError, match="is not a dataset"):
        scan(tmp_path / "nothing")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server("bucket") as url:
        yield url


def test_scan_on_s3(endpoint: str) -> None:
    client = {"endpoint_url": endpoint, "region_name": "us-east-1"}
    options = {"key": "testing", "secret": "testing", "client_kwargs": client}
    url = f"s3://bucket/{uuid.uuid4().hex}/run [7b] \u00e9"
    rows = some_rows()
    write(Storage.open(url, options), rows)
    frame = explode_support(scan(url, options), keep=["rollout_id"]).collect()
    assert frame.rows() == expected_entries(rows)


# what every reader is asked: rollouts, tokens, entries, and the sum of the rewards
def answer(run: PreparedRun) -> tuple[int, int, int, float]:
    return (
        len(run.rows),
        sum(row.token_ids.size for row in run.rows),
        sum(row.support_entries.size for row in run.rows if row.support_entries is not None),
        sum(row.reward for row in run.rows if row.reward is not None),
    )


def test_polars_opens_the_folder_unaided(run: PreparedRun) -> None:
    frame = pl.scan_parquet(run.path / "data", glob=False).select(
        pl.len().alias("rollouts"),
        pl.col("token_ids").list.len().sum().alias("tokens"),
        pl.col("support_entries").list.len().sum().alias("entries"),
        pl.col("reward").sum(),
    )
    assert frame.collect().row(0) == answer(run)


def test_pyarrow_opens_the_folder_unaided(run: PreparedRun) -> None:
    table = pads.dataset(run.path / "data").to_table()
    assert table.schema.equals(SCHEMA)
    found = table.to_pylist()
    assert answer(run) == (
        len(found),
        sum(len(row["token_ids"]) for row in found),
        sum(len(row["support_entries"] or []) for row in found),
        sum(row["reward"] for row in found),
    )
    files = sorted((run.path / "data").iterdir())
    assert sum(pq.read_metadata(file).num_rows for file in files) == len(found)


def test_duckdb_opens_the_files_unaided(run: PreparedRun) -> None:
    # a glob would take the brackets of the folder's name for a pattern
    files = [str(file) for file in sorted((run.path / "data").iterdir())]
    query = "SELECT count(*), sum(len(token_ids)), sum(len(support_entries)), sum(reward) FROM rows"
    with duckdb.connect() as connection:
        connection.register("rows", connection.read_parquet(files))
        assert connection.execute(query).fetchone() == answer(run)
        # unpacked by DuckDB alone
        ids = connection.execute(
            "SELECT DISTINCT (unnest(support_entries) & 4294967295)::INT FROM rows"
        ).fetchall()
    expected = {
        int(one)
        for row in run.rows
        if row.support_entries is not None
        for one in unpack_entries(row.support_entries)[0]
    }
    assert {one for (one,) in ids} == expected


_HUGGING_FACE = """
import json, sys, warnings
import datasets
rows = datasets.Dataset.from_parquet({files!r}, cache_dir={cache!r}, keep_in_memory=True)
print(json.dumps([
    len(rows),
    sum(map(len, rows[:]["token_ids"])),
    sum(len(one or []) for one in rows[:]["support_entries"]),
    sum(rows[:]["reward"]),
]))
"""

_RAY = """
import json, ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
         object_store_memory=100_000_000)
found = ray.data.read_parquet({files!r}, override_num_blocks=1).take_all()
print(json.dumps([
    len(found),
    sum(len(row["token_ids"]) for row in found),
    sum(0 if row["support_entries"] is None else len(row["support_entries"]) for row in found),
    float(sum(row["reward"] for row in found)),
]))
ray.shutdown()
"""


def run_elsewhere(code: str, folder: Path) -> list[Any]:
    """Run code in a process of its own: these libraries warn, and start threads and processes."""
    env = {
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin:/bin",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert found.returncode == 0, found.stderr
    answer: list[Any] = json.loads(found.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("code", [_HUGGING_FACE, _RAY], ids=["huggingface", "ray"])
def test_other_libraries_open_the_files_unaided(code: str, tmp_path: Path) -> None:
    # datasets takes brackets in a path for a pattern, whatever it is told
    run = complete_run(tmp_path)
    files = [str(file) for file in sorted((run.path / "data").iterdir())]
    found = run_elsewhere(code.format(files=files, cache=str(tmp_path / "cache")), tmp_path)
    assert tuple(found) == answer(run)


def test_fsspec_needs_no_help(run: PreparedRun) -> None:
    fs = fsspec.filesystem("file")
    names = [item["name"] for item in fs.ls(str(run.path / "data"), detail=True)]
    assert len(names) == 4
    assert all(name.endswith(".parquet") for name in names)
