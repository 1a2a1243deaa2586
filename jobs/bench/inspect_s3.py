"""What `rollout inspect` of a large run on S3 costs: requests, bytes, seconds.

    python jobs/bench/inspect_s3.py --shards 1000 --prompts 64

The server is moto on loopback. Records say that each shard has 200 MB; what lies there is small, as
all records are read and of the shards only a sample within a budget, which a small run does not use
up. Beside the wall clock stand the seconds of the processor, which other work on the machine does
not stretch as much.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

TESTS = Path(__file__).resolve().parents[2] / "tests"


def seconds_of(command: list[str]) -> tuple[float, float]:
    """Run a command; return the seconds it took, and those of the processor."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, os.times()
    used = after.children_user + after.children_system
    return wall, used - before.children_user - before.children_system


@click.command()
@click.option("--shards", default=1000, show_default=True)
@click.option("--prompts", default=64, show_default=True, help="Of 8 rollouts each, in a shard.")
@click.option("--repeats", default=3, show_default=True)
def main(shards: int, prompts: int, repeats: int) -> None:
    """Upload a run and look at it."""
    sys.path.insert(0, str(TESTS))
    from s3_server import s3_server
    from test_inspect_s3 import counted, options, upload_run

    from rollout.inspect import inspect_dataset

    with s3_server("bucket") as endpoint, tempfile.TemporaryDirectory() as folder:
        url = "s3://bucket/run"
        size = 200_000_000
        upload_run(url, endpoint, Path(folder), shards=shards, groups=prompts, size=size)
        with counted() as traffic:
            report = inspect_dataset(url, options(endpoint))
        click.echo(
            f"{shards} shards, {report.rollouts_committed} rollouts: {traffic.calls} requests, "
            f"{traffic.bytes / 1e6:.1f} MB"
        )
        command = [str(Path(sys.executable).parent / "rollout"), "inspect", url]
        for key, value in options(endpoint).items():
            text = value if isinstance(value, str) else json.dumps(value)
            command += ["--storage-option", f"{key}={text}"]
        for _ in range(repeats):
            wall, used = seconds_of(command)
            load = os.getloadavg()[0]
            click.echo(f"{wall:.1f} s, {used:.1f} s of the processor, load average {load:.1f}")


if __name__ == "__main__":
    main()
