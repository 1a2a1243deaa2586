"""What `rollout inspect` and `rollout report` of a large run on S3 cost: bytes, seconds, memory.

    python jobs/bench/inspect_s3.py --shards 1000 --prompts 512

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
# the kernel's count of a process: that of its resource usage starts with the parent's
_MEASURED = """
import atexit, sys
from pathlib import Path
from rollout.cli import main

def say():
    status = Path("/proc/self/status").read_text()
    print(*[line for line in status.splitlines() if "VmHWM" in line], file=sys.stderr)

atexit.register(say)
main()
"""


def cost_of(command: list[str]) -> str:
    """Run a command; say what it took."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *command], check=True, capture_output=True, text=True
    )
    wall, after = time.perf_counter() - start, os.times()
    used = sum(after[2:4]) - sum(before[2:4])
    return (
        f"{command[0]}: {wall:.1f} s, {used:.1f} s of the processor, "
        f"{int(done.stderr.split()[-2]) / 1024:.0f} MiB, load average {os.getloadavg()[0]:.1f}"
    )


@click.command()
@click.option("--shards", default=1000, show_default=True)
@click.option("--prompts", default=512, show_default=True, help="Of 8 rollouts each, in a shard.")
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
        access = [
            f"--storage-option={key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in options(endpoint).items()
        ]
        for _ in range(repeats):
            click.echo(cost_of(["inspect", url, *access]))
        click.echo(cost_of(["report", url, "-o", f"{folder}/report.html", *access]))


if __name__ == "__main__":
    main()
