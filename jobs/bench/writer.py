"""How fast one process writes parts: entries out of the spool, checked, sorted, written, read back.

    python jobs/bench/writer.py --support 4000 --support 174 --support 8
    python jobs/bench/writer.py --support 4000 --profile

The parts hold kept supports (top_p .95) of normal logits that are rounded to bfloat16, ids
ascending, as the kernel leaves them in the spool: step after step, the rollouts of the part beside
each other. The work is what `rollout.part_process` does with a part, on one core. Printed are raw
megabytes for each second of processor time (the median of the repeats and the extremes), the file's
share of the raw bytes, and what each phase takes. Each file is decoded by polars and compared with
the rollouts once.
"""

from __future__ import annotations

import cProfile
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from random_model import SPREADS

from rollout import part_work, shard
from rollout.part_template import process_environment
from rollout.part_work import PartWork
from rollout.rows import RolloutRow
from rollout.schema.entries import pack_entries
from rollout.shard import ROW_GROUP_BYTES
from rollout.spool_folder import spool_parent

TESTS = Path(__file__).resolve().parents[2] / "tests"
VOCAB = 151_936
TOP_P = 0.95
TOKENS = 1024
# standard deviations from which on logits are made, by their spread: far below what is kept
BORDERS = {9.0: 2.5, 5.3: 2.0, 3.63: 0.5}
# raw bytes of a part: a narrow one takes longest to make
PART_BYTES = {8: 8 * 10**6, 174: 32 * 10**6, 4000: 64 * 10**6}

_NORMAL = statistics.NormalDist()


def token_support(
    rng: np.random.Generator, spread: float
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Make one token's ids, ascending, and their logprobs as the kernel computes them.

    Of VOCAB normal logits only those above a border are made; the mass of the others is known.
    """
    border = BORDERS[spread]
    count = rng.binomial(VOCAB, 1 - _NORMAL.cdf(border))
    above = torch.from_numpy((1 - _NORMAL.cdf(border)) * rng.random(count))
    noise = -torch.special.ndtri(above).numpy() * spread
    logits = (noise.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    order = np.sort(logits)[::-1]
    mass = np.cumsum(np.exp(order.astype(np.float64)))
    below = VOCAB * math.exp(spread * spread / 2) * _NORMAL.cdf(border - spread)
    last = order[min(np.searchsorted(mass, TOP_P * (mass[-1] + below)), count - 1)]
    kept = logits[logits >= last]
    kept -= kept.max()
    ids = np.sort(rng.choice(VOCAB, kept.size, replace=False))
    return ids, np.minimum(kept - np.log(np.exp(kept).sum(dtype=np.float32)), np.float32(0))


def make_rows(support: int, num_bytes: int) -> list[RolloutRow]:
    """Make rollouts with so many bytes of entries."""
    rng = np.random.default_rng(support)
    rows: list[RolloutRow] = []
    made = 0
    while made < num_bytes:
        tokens = [token_support(rng, SPREADS[support]) for _ in range(TOKENS)]
        offsets = np.zeros(TOKENS + 1, np.int64)
        np.cumsum([ids.size for ids, _ in tokens], out=offsets[1:])
        ids = np.concatenate([ids for ids, _ in tokens])
        logprobs = np.concatenate([logprobs for _, logprobs in tokens])
        picked = offsets[:-1] + rng.integers(0, np.diff(offsets))
        number = len(rows)
        rows.append(
            RolloutRow(
                prompt_key=f"p{number // 8}",
                rollout_id=f"r{number}",
                group_id=f"g{number // 8}",
                prompt_id=f"{number // 8}",
                sample_index=number % 8,
                group_size=8,
                prompt_token_ids=rng.integers(0, VOCAB, 200).astype(np.int32),
                token_ids=ids[picked].astype(np.int32),
                sampled_logprobs=logprobs[picked],
                temperature=1.0,
                support_kind="kept",
                support_offsets=offsets,
                support_entries=pack_entries(ids, logprobs),
                finish_reason="length",
                text="word " * TOKENS,
            )
        )
        made += 8 * ids.size
    return rows


class Phases:
    """Time within functions, without that of the ones inside them that are counted too."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[list[Any]] = []

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Count a function, found where its callers look it up."""
        stock: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **named: Any) -> Any:
            self._running.append([phase, 0.0])
            start = time.perf_counter()
            try:
                return stock(*args, **named)
            finally:
                spent = time.perf_counter() - start
                _, inside = self._running.pop()
                self.seconds[phase] = self.seconds.get(phase, 0.0) + spent - inside
                if self._running:
                    self._running[-1][1] += spent

        setattr(owner, name, counted)


def one_part(rows: list[RolloutRow], path: Path) -> int:
    """Do what a writing process does with a part; return the file's size."""
    work = PartWork(rows)
    assert work.bad_rows == []
    return work.write(path, range(len(rows)), "ab" * 32, ROW_GROUP_BYTES).size


def compare(rows: list[RolloutRow], path: Path) -> None:
    """Compare a shard with the rollouts it was made of."""
    frame = pl.read_parquet(path)
    for row, found in zip(rows, frame["support_entries"], strict=True):
        assert row.support_offsets is not None
        assert row.support_entries is not None
        lengths = np.diff(row.support_offsets)
        order = np.lexsort((row.support_entries, np.repeat(np.arange(lengths.size), lengths)))
        assert np.array_equal(found.to_numpy(), row.support_entries[order])


def measure(support: int, num_bytes: int, repeats: int, profile: bool, folder: Path) -> None:
    """Write one part several times, and print how fast."""
    from test_part_pool import spooled

    rows = make_rows(support, num_bytes)
    raw = sum(row.num_bytes for row in rows)
    tokens = sum(row.token_ids.size for row in rows)
    stored = spooled(rows, folder / "spool", segment_bytes=64 * 2**20)
    path = folder / "part.parquet"
    size = one_part(stored, path)
    compare(rows, path)
    rates, phases = [], Phases()
    profiler = cProfile.Profile()
    for owner, name, phase in PHASES:
        phases.wrap(owner, name, phase)
    for _ in range(repeats):
        start = time.process_time()
        if profile:
            profiler.enable()
        one_part(stored, path)
        profiler.disable()
        rates.append(raw / 1e6 / (time.process_time() - start))
    mean = sum(row.num_entries for row in rows) / tokens
    print(
        f"support {mean:.0f}: {raw / 1e6:.1f} MB in {len(rows)} rollouts, "
        f"{statistics.median(rates):.0f} MB/s a core ({min(rates):.0f}-{max(rates):.0f}), "
        f"{100 * size / raw:.2f} % of the raw bytes"
    )
    for phase, seconds in phases.seconds.items():
        print(
            f"    {phase:<28} {1e9 * seconds / repeats / raw:6.2f} ns a byte x 1000".replace(
                " ns a byte x 1000", " ms a MB"
            )
        )
    if profile:
        profiler.print_stats("tottime")


PHASES: list[tuple[Any, str, str]] = [
    (part_work, "load_entries", "read from the spool"),
    (part_work, "check_row", "check"),
    (part_work, "canonical_order", "sort"),
    (part_work, "write_shard", "other columns, the rest"),
    (shard, "build_table", "build the table"),
    (shard, "encode_chunk", "encode entries"),
    (shard, "file_parts", "put the file together"),
    (shard, "_compare", "read back, compare"),
    (shard, "_digest", "digests"),
]


@click.command()
@click.option("--support", "supports", type=int, multiple=True, default=tuple(SPREADS))
@click.option("--repeats", default=5, show_default=True)
@click.option("--profile", is_flag=True, help="Print what cProfile counts too.")
@click.option("--folder", type=click.Path(path_type=Path), default=spool_parent())
def main(supports: tuple[int, ...], repeats: int, profile: bool, folder: Path) -> None:
    """Measure each mean support on one core."""
    environment = process_environment()
    if not environment.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)
    sys.path.insert(0, str(TESTS))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    for support in supports:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            measure(support, PART_BYTES[support], repeats, profile, Path(place))


if __name__ == "__main__":
    main()
