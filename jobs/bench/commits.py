"""How soon after the last token a job's last commit comes, with writers of a given speed; no GPU.

    python jobs/bench/commits.py --entries 8 --rate 78
    python jobs/bench/commits.py --entries 174 --rate 117
    python jobs/bench/commits.py --entries 4000 --rate 145

The job is that of `capture.py`: requests of 192 to 576 tokens, 512 at once, each handed over when
its last token is sampled. Buffers, committer and dataset are the product's, but the writing of a
part sleeps as long as its bytes take at `--rate` (which `writer.py` measures; `capture.py` prints
the cores that writing keeps busy), and so does waiting for its disk. What is left is what the order
of the work costs. Printed beside the tail: that of writers who could share every byte among them.
"""

from __future__ import annotations

import heapq
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click

from rollout.committer import Committer
from rollout.config import OutputConfig
from rollout.dataset import DatasetWriter
from rollout.part_work import PartWork
from rollout.rows import RolloutRow
from rollout.run import LAST_ROUNDS
from rollout.storage import Storage
from rollout.units import UnitBuffers

TESTS = Path(__file__).resolve().parents[2] / "tests"
SAMPLES = 8
MAX_NUM_SEQS = 512
STORED_SHARE = 0.27  # bytes of a shard for each of its rollouts', at mean 4,000
LOAD_SHARE = 0.35  # of the time for a part: reading, sorting and checking; `writer.py`


class TimedRow(RolloutRow):
    """A small rollout that counts as a large one."""

    num_bytes = 0


class TimedParts:
    """Takes the place of the processes that work on parts."""

    def __init__(self, bytes_a_second: float, disk_bytes_a_second: float) -> None:
        self._rate, self._disk = bytes_a_second, disk_bytes_a_second
        self._unsynced: dict[int, int] = {}
        self._fsync = os.fsync

    def start(self, count: int) -> None:
        """Do nothing: there are no processes."""

    def close(self) -> None:
        """Do nothing."""

    @contextmanager
    def part(self, rows: Sequence[RolloutRow]) -> Iterator[Any]:
        """Sleep while a part is read and checked."""
        num_bytes = sum(row.num_bytes for row in rows)
        time.sleep(LOAD_SHARE * num_bytes / self._rate)
        yield mock.Mock(bad_rows=[], write=lambda *args: self._write(rows, num_bytes, *args))

    def _write(
        self, rows: Sequence[RolloutRow], num_bytes: int, path: Path, own: Any, *args: Any
    ) -> Any:
        order = [next(i for i, row in enumerate(rows) if row is one) for one in own]
        info = PartWork(rows).write(path, order, *args)
        time.sleep((1 - LOAD_SHARE) * num_bytes / self._rate)
        self._unsynced[path.stat().st_ino] = num_bytes
        return info

    def fsync(self, file: int) -> None:
        """Sleep while a shard goes to the disk, for which the first call for it waits."""
        num_bytes = self._unsynced.pop(os.fstat(file).st_ino, 0)
        time.sleep(STORED_SHARE * num_bytes / self._disk)
        self._fsync(file)


def ends(requests: int) -> list[tuple[float, int, int]]:
    """Return when each request ends, in seconds, its number, and how many are left then.

    A step takes 4 ms and 12.5 us for each request in it.
    """
    running: list[tuple[int, int]] = []
    found, begun, steps, now = [], 0, 0, 0.0
    while begun < requests or running:
        while begun < requests and len(running) < MAX_NUM_SEQS:
            heapq.heappush(running, (steps + length(begun), begun))
            begun += 1
        steps, now = steps + 1, now + 4e-3 + 12.5e-6 * len(running)
        while running and running[0][0] <= steps:
            _, request = heapq.heappop(running)
            found.append((now, request, len(running) + requests - begun))
    return found


def length(request: int) -> int:
    """Return the tokens of a request."""
    return 192 + request // SAMPLES * 37 % 385


def shared_tail(sizes: list[tuple[float, int]], bytes_a_second: float) -> float:
    """Return the seconds after the last end that writers need who share every byte.

    Args:
        sizes: when each rollout ends, and its bytes.
        bytes_a_second: of all writers together.
    """
    left, before = 0.0, 0.0
    for now, num_bytes in sizes:
        left = max(0.0, left - bytes_a_second * (now - before)) + num_bytes
        before = now
    return left / bytes_a_second


def run_job(
    rows: list[RolloutRow], found: list[tuple[float, int, int]], threads: int, parts: TimedParts
) -> tuple[float, int]:
    """Commit the rollouts as they end; return the seconds after the last one, and the parts."""
    from synthetic import make_record, plan

    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync", parts.fsync):
        output = OutputConfig(path=folder)
        writer = DatasetWriter.open(Storage.open(folder, {}), make_record())
        writer.append_plan(plan("u0", *dict.fromkeys(row.prompt_key for row in rows)))
        with mock.patch("rollout.committer.PartPool", return_value=parts):
            committer = Committer(writer, "prompts.jsonl", threads, part_bytes=output.shard_bytes)
        units = UnitBuffers(committer.commit, output, done=committer.finish)
        units.open("u0")
        for _ in rows:
            units.start("u0")
        units.close("u0")
        start = time.perf_counter()
        for end, request, left in found:
            time.sleep(max(0.0, end - (time.perf_counter() - start)))
            units.add("u0", rows[request])
            if left < LAST_ROUNDS * MAX_NUM_SEQS:
                units.hurry(threads)
        last = time.perf_counter()
        units.flush()
        committer.wait()
        tail = time.perf_counter() - last
        committer.close()
        assert committer.stats.rows == len(rows)
        return tail, committer.stats.parts


@click.command()
@click.option("--rate", default=145.0, show_default=True, help="MB/s that a writer takes.")
@click.option("--disk", default=1541.0, show_default=True, help="MB/s that the disk takes.")
@click.option("--threads", default=16, show_default=True, help="Writers.")
@click.option("--entries", default=4000.0, show_default=True, help="Mean support of a token.")
@click.option("--requests", default=768, show_default=True)
@click.option("--repeats", default=3, show_default=True)
def main(
    rate: float, disk: float, threads: int, entries: float, requests: int, repeats: int
) -> None:
    """Measure the tail of a job."""
    sys.path.insert(0, str(TESTS))
    from synthetic import make_row

    rows: list[RolloutRow] = []
    for request in range(requests):
        small = make_row(f"p{request // SAMPLES}", request % SAMPLES)
        fields = {name: getattr(small, name) for name in RolloutRow.__dataclass_fields__}
        row = TimedRow(**fields)
        row.num_bytes = int(8 * entries * length(request))
        rows.append(row)
    found = ends(requests)
    sizes = [(end, rows[request].num_bytes) for end, request, _ in found]
    tails, numbers = zip(
        *(
            run_job(rows, found, threads, TimedParts(1e6 * rate, 1e6 * disk))
            for _ in range(repeats)
        ),
        strict=True,
    )
    total = sum(num_bytes for _, num_bytes in sizes)
    print(
        f"{total / 1e9:.2f} GB in {found[-1][0]:.2f} s, {threads} writers of {rate:.0f} MB/s: last "
        f"commit {statistics.median(tails):.2f} s ({min(tails):.2f}-{max(tails):.2f}) after the "
        f"last token, {statistics.median(numbers):.0f} parts; shared to the byte "
        f"{shared_tail(sizes, 1e6 * rate * threads):.2f} s"
    )


if __name__ == "__main__":
    main()
