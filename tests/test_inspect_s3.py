"""`rollout inspect` on a large run on S3: what it reads, and how much."""

from __future__ import annotations

import hashlib
import json
import statistics
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prepared_runs import complete_run
from s3_server import s3_server
from s3fs import S3FileSystem
from synthetic import make_record, make_row, realistic_rows

from rollout import shard_scan
from rollout.cli import main
from rollout.dataset import DatasetWriter, read_dataset
from rollout.inspect import inspect_dataset
from rollout.rows import PlanEntry
from rollout.schema import layout
from rollout.schema.records import CommitRecord
from rollout.shard import write_shard
from rollout.shard_scan import ShardScan
from rollout.sidecars import plan_bytes
from rollout.storage import Storage
from rollout.tallies import COLUMNS


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server("bucket") as url:
        yield url


def options(endpoint: str) -> dict[str, Any]:
    client = {"endpoint_url": endpoint, "region_name": "us-east-1"}
    return {"key": "testing", "secret": "testing", "client_kwargs": client}


@dataclass
class Traffic:
    """What was fetched."""

    calls: int = 0
    bytes: int = 0


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count every S3 call and the bytes of the objects that are fetched."""
    traffic = Traffic()
    original = S3FileSystem._call_s3

    async def call(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        out = await original(self, method, *args, **kwargs)
        traffic.calls += 1
        if method == "get_object":
            traffic.bytes += int(out["ContentLength"])
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3FileSystem, "_call_s3", call)
        yield traffic


def key_of(shard: int, prompt: int) -> str:
    """A key as those of a job are: 128 bits that no codec makes smaller."""
    return hashlib.sha256(f"{shard} {prompt}".encode()).hexdigest()[:32]


def upload_run(
    storage_url: str,
    endpoint: str,
    folder: Path,
    *,
    shards: int,
    groups: int,
    size: int,
    lengths: tuple[int, ...] = (1, 3),
) -> list[float]:
    """Upload a run of many shards with the same rows, all named as different prompts.

    Args:
        storage_url: where.
        endpoint: the server.
        folder: for local files.
        shards: parts, one a unit.
        groups: prompts of 8 samples a shard.
        size: bytes that each record says its shard has.
        lengths: support sizes of each rollout's tokens.

    Returns:
        The rewards of one shard.
    """
    fs = S3FileSystem(**options(endpoint))
    root = storage_url.removeprefix("s3://")
    record = make_record()
    rows = [
        make_row(f"p{g}", s, lengths=list(lengths), reward=(g * 8 + s) / 512, group_size=8)
        for g in range(groups)
        for s in range(8)
    ]
    info = write_shard(folder / "shard.parquet", rows, record.fingerprint)
    data = (folder / "shard.parquet").read_bytes()
    objects = {f"{root}/{layout.DATASET_FILE}": record.to_json()}
    entries = []
    for number in range(shards):
        unit = layout.unit_name(number)
        keys = [key_of(number, g) for g in range(groups)]
        name = layout.data_name(unit, 0, "ab12")
        commit = CommitRecord(
            unit=unit,
            part=0,
            attempt="ab12",
            file=name,
            size=size,
            sha256=info.sha256,
            rows=info.rows,
            tokens=info.tokens,
            entries=info.entries,
            max_token_id=info.max_token_id,
            prompt_keys=tuple(keys),
            prompt_rows=(8,) * groups,
            sample_indices=tuple(range(8)) * groups,
            row_groups=info.row_groups,
            footer_blake3=info.footer_blake3,
            rejected_file=None,
            rejected_rows=0,
            rejected_keys=(),
            engine={},
            created_at="2026-11-29T00:00:00.000+00:00",
        )
        objects[f"{root}/{name}"] = data
        objects[f"{root}/{layout.commit_name(unit, 0)}"] = commit.to_bytes()
        entries += [
            PlanEntry(prompt_key=key, prompt_id=f"{number}/{g}", unit=unit)
            for g, key in enumerate(keys)
        ]
    for number, start in enumerate(range(0, len(entries), 20_000)):
        objects[f"{root}/{layout.plan_name(number)}"] = plan_bytes(
            entries[start : start + 20_000], record.fingerprint
        )
    fs.pipe(objects)
    return [row.reward for row in rows if row.reward is not None]


def test_a_large_run_is_sampled_evenly_and_counted_exactly(endpoint: str, tmp_path: Path) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}/big [1] \u00e9"
    rewards = upload_run(url, endpoint, tmp_path, shards=120, groups=4, size=200_000_000)
    shard_bytes = (tmp_path / "shard.parquet").stat().st_size
    with counted() as traffic:
        report = inspect_dataset(url, options(endpoint))
    assert (report.rollouts_committed, report.prompts_complete) == (120 * 32, 120 * 4)
    assert report.data_bytes == 120 * 200_000_000
    assert report.shards_read == shard_scan.MAX_SHARDS
    assert report.rollouts_read == shard_scan.MAX_SHARDS * 32
    assert report.rewards is not None
    assert report.rewards.mean == pytest.approx(statistics.fmean(rewards), rel=1e-6)
    records = 120 * 900 + 20_000
    # shards this small are fetched whole: for the footer, and for the columns
    assert traffic.bytes < records + 2.5 * shard_scan.MAX_SHARDS * shard_bytes
    # a request for each record, without one for its size; two or three for a shard
    assert traffic.calls < 120 + 4 * shard_scan.MAX_SHARDS
    full = inspect_dataset(url, options(endpoint), full=True)
    assert (full.shards_read, full.rollouts_read) == (120, 120 * 32)


def test_the_budget_of_bytes_is_kept(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    upload_run(url, endpoint, tmp_path, shards=20, groups=4, size=200_000_000)
    monkeypatch.setattr(shard_scan, "MAX_BYTES", 400_000)
    report = inspect_dataset(url, options(endpoint))
    # a shard of this size costs little more than the 65,536 bytes of its footer's read
    assert 5 <= report.shards_read <= 6
    assert report.rollouts_committed == 20 * 32


def test_what_is_read_elsewhere_leaves_less_for_the_sample(endpoint: str, tmp_path: Path) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    upload_run(url, endpoint, tmp_path, shards=2, groups=64, size=200_000_000)
    with counted() as traffic:
        view = read_dataset(Storage.open(url, options(endpoint)))
        read = view.record_bytes + view.plan_bytes
    assert read + len(view.record.to_json()) == traffic.bytes
    for taken, left in ((read, 16_000_000), (32_000_000, 16_000_000), (40_000_000, 8_000_000)):
        assert shard_scan.sample_bytes(taken) == left
    assert shard_scan.sample_bytes(200_000_000) == 2_000_000


def test_one_token_of_a_large_run_costs_one_row_group(endpoint: str, tmp_path: Path) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    upload_run(url, endpoint, tmp_path, shards=20, groups=4, size=200_000_000)
    with counted() as traffic:
        args = ["inspect", url, "--prompt", "13/2", "--sample", "5", "--token", "1", "--json"]
        client = options(endpoint)["client_kwargs"]
        result = CliRunner().invoke(
            main,
            [
                *args,
                *("--storage-option", "key=testing", "--storage-option", "secret=testing"),
                *("--storage-option", f"client_kwargs={json.dumps(client)}"),
            ],
        )
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["tokens"][0]["support_size"] == 3
    shard_bytes = (tmp_path / "shard.parquet").stat().st_size
    assert traffic.bytes < 20 * 900 + 20_000 + 2 * shard_bytes


def test_the_environment_gives_the_options_too(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = complete_run(tmp_path)
    url = f"s3://bucket/{uuid.uuid4().hex}/run"
    S3FileSystem(**options(endpoint)).put(f"{run.path}/", f"{url}/", recursive=True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    result = CliRunner().invoke(main, ["inspect", url])
    assert result.exit_code == 0, result.output
    local = CliRunner().invoke(main, ["inspect", str(run.path)]).output
    # everything but the first line, and the line for polars
    assert result.output.splitlines()[1:-1] == local.splitlines()[1:-1]
    assert f'pl.scan_parquet("{url}/data/*.parquet")' in result.output


def test_what_a_shard_of_200_mb_costs(tmp_path: Path) -> None:
    """The planned bytes of a shard, by its footer: the columns that inspect reads, and no more."""
    writer = DatasetWriter.open(Storage.open(tmp_path), make_record())
    rows = realistic_rows(16, tokens=512)
    writer.append_plan(
        PlanEntry(prompt_key=key, prompt_id=key, unit="u000000")
        for key in dict.fromkeys(row.prompt_key for row in rows)
    )
    record = writer.commit_part("u000000", rows)
    assert record is not None
    view = read_dataset(Storage.open(tmp_path))
    cost = ShardScan(view, COLUMNS, full=True)._cost(record)
    # two bytes a token and the footer; the supports alone take hundreds of bytes a token
    assert cost < 65_536 + 4 * record.tokens
    assert record.size > 100 * record.tokens
