"""How fast the loader reads, against pyarrow, mosaicml-streaming and HF datasets.

    python jobs/bench/loader.py speed --peer-python /path/to/venv/bin/python
    python jobs/bench/loader.py speed --s3
    python jobs/bench/loader.py first-batch --shards 1000
    python jobs/bench/loader.py wide

`speed` writes kept supports as a model with a bf16 head makes them, and reads them in a process of
its own for each arm, pinned to one core; the arms take turns. Printed: support entries and tokens
for each second of processor time of all threads (the median of the repeats), the ratio to pyarrow's
in the same repeat, wall time, and the peak of resident memory above the process's start; then the
ratios of the loader to the peers, likewise. pyarrow's numbers are for the decoded table, the
loader's for its batches, those of mosaicml-streaming and datasets for what `loader_peers.py` makes
of their rows: the same batches (`made`), less (`packed`), or nothing (`unpacked`). They are no
dependencies of this project: install them elsewhere. Only the loader compares digests; page
checksums are verified by it, by pyarrow and where an arm says so.

`wide` reads a dataset of more than 2^31 entries: one shard, linked under many names.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from loader_peers import (
    GROUPS_PER_STEP,
    TOKEN_BUDGET,
    Counts,
    datasets_rows,
    made,
    mosaic_rows,
    packed,
    unpacked,
    write_mds,
)

TESTS = Path(__file__).resolve().parents[2] / "tests"
VOCAB = 151_936
WARM_BYTES = 3 * 2**29


def read_pyarrow(source: str, options: dict[str, Any]) -> Counts:
    """Decode the loader's columns of every row group, page checksums on."""
    import fsspec
    import pyarrow.parquet as pq

    from rollout.shard_reader import BASE_COLUMNS, OPTIONAL_COLUMNS

    columns = [*BASE_COLUMNS, *OPTIONAL_COLUMNS]
    fs, root = fsspec.core.url_to_fs(source, **options)
    yield 0, 0
    for name in sorted(fs.ls(f"{root}/data", detail=False)):
        file = name if not options else fs.open(name, cache_type="none")
        shard = pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=True)
        for index in range(shard.num_row_groups):
            table = shard.read_row_group(index, columns=columns, use_threads=False)
            yield (
                sum(len(c.values) for c in table["support_entries"].chunks),
                sum(len(c.values) for c in table["token_ids"].chunks),
            )


def read_loader(
    source: str, options: dict[str, Any], verify: Literal["digests", "pages"], epochs: int
) -> Counts:
    """Iterate packed batches; the last epoch counts."""
    from rollout.loader import RolloutLoader

    loader = RolloutLoader(
        source, vocab_size=VOCAB, groups_per_step=GROUPS_PER_STEP, token_budget=TOKEN_BUDGET,
        decode_threads=1,
        storage_options=options, verify=verify,
    )  # fmt: skip
    for _ in range(epochs - 1):
        for _batch in loader:
            pass
    yield 0, 0
    for batch in loader:
        yield batch.support_ids.shape[0], batch.num_scored


ARMS: dict[str, Callable[[str, dict[str, Any]], Counts]] = {
    "pyarrow": read_pyarrow,
    "loader, later epochs": lambda s, o: read_loader(s, o, "digests", 2),
    "loader, page checksums": lambda s, o: read_loader(s, o, "pages", 1),
    "loader, first epoch with digests": lambda s, o: read_loader(s, o, "digests", 1),
    "mosaicml streamed zstd, made": lambda s, o: made(mosaic_rows(f"{s}-mds-zstd", cached=False)),
    "mosaicml streamed zstd, packed": lambda s, o: packed(
        mosaic_rows(f"{s}-mds-zstd", cached=False)
    ),
    "mosaicml unpacked local, made": lambda s, o: made(mosaic_rows(f"{s}-mds", cached=True)),
    "HF numpy rows, made": lambda s, o: made(datasets_rows(s, o, "numpy")),
    "HF numpy rows, page checksums, made": lambda s, o: made(
        datasets_rows(s, o, "numpy", checked=True)
    ),
    "HF numpy rows, packed": lambda s, o: packed(datasets_rows(s, o, "numpy")),
    "HF numpy rows, unpacked": lambda s, o: unpacked(datasets_rows(s, o, "numpy")),
    "HF numpy rows, .shuffle(), packed": lambda s, o: packed(
        datasets_rows(s, o, "numpy", shuffled=True)
    ),
    "HF torch rows, made": lambda s, o: made(datasets_rows(s, o, "torch")),
    "HF Python rows, made": lambda s, o: made(datasets_rows(s, o, None)),
}


def peak_mib() -> float:
    """Return the highest resident memory of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def warm_memory() -> None:
    """Touch more memory than any arm needs, give it back, and forget the peak.

    A virtual machine's host takes idle memory away: the first arm to touch it again, or the one
    that needs most, would pay for all.
    """
    # in huge pages, as numpy takes large arrays
    np.ones(WARM_BYTES, np.uint8)
    Path("/proc/self/clear_refs").write_text("5")


def write_dataset(path: str, rollouts: int, shards: int, copies: int) -> None:
    """Write realistic kept supports in so many shards, and link each under further names."""
    sys.path.insert(0, str(TESTS))
    from synthetic import make_record, plan, realistic_rows

    from rollout.dataset import DatasetWriter
    from rollout.storage import Storage

    rows = realistic_rows(rollouts)
    for index, row in enumerate(rows):
        row.reward = float(index % 3)
    writer = DatasetWriter.open(Storage.open(path), make_record())
    writer.append_plan(plan("u000000", *dict.fromkeys(row.prompt_key for row in rows)))
    for part in range(shards):
        first, last = (n * rollouts // shards for n in (part, part + 1))
        writer.commit_part("u000000", rows[first:last])
    for part in range(shards, shards * copies):
        link_part(path, part % shards, part)


def link_part(path: str, source: int, part: int) -> None:
    """Commit a link to the shard of one part as another part of other prompts."""
    import dataclasses

    from rollout.commits import read_commit
    from rollout.schema import layout
    from rollout.storage import Storage

    storage = Storage.open(path)
    record = read_commit(storage, layout.commit_name("u000000", source))
    name = layout.data_name("u000000", part, record.attempt)
    os.link(Path(path, str(record.file)), Path(path, name))
    keys = tuple(f"{key}.{part}" for key in record.prompt_keys)
    linked = dataclasses.replace(record, part=part, file=name, prompt_keys=keys)
    storage.create_exclusive(layout.commit_name("u000000", part), linked.to_bytes())


@click.group()
def main() -> None:
    """Benchmarks of the loader."""


@main.command(hidden=True)
@click.argument("name")
@click.argument("source")
@click.argument("options")
def arm(name: str, source: str, options: str) -> None:
    """Run one arm and print its numbers as JSON."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pieces = ARMS[name](source, json.loads(options))
    # imports, and what opens the dataset, are not timed
    entries, tokens = next(pieces)
    warm_memory()
    before, cpu, wall = peak_mib(), time.process_time(), time.perf_counter()
    for piece in pieces:
        entries, tokens = entries + piece[0], tokens + piece[1]
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(json.dumps({"entries": entries, "tokens": tokens, "cpu": cpu, "wall": wall,
                      "mib": peak_mib() - before}))  # fmt: skip


@main.command(hidden=True)
@click.argument("path")
def mds(path: str) -> None:
    """Write the MDS copies."""
    write_mds(path)


@main.command()
@click.option("--rollouts", default=192, show_default=True)
@click.option("--copies", default=6, show_default=True, help="Times that each shard is read.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--peer-python", default=None, help="Interpreter with mosaicml-streaming, datasets.")
@click.option("--s3", is_flag=True, help="Read through an S3 server on loopback.")
@click.option("--only", multiple=True, help="Arms beside pyarrow whose names begin so.")
def speed(
    rollouts: int, copies: int, repeats: int, peer_python: str | None, s3: bool,
    only: tuple[str, ...],
) -> None:  # fmt: skip
    """Compare the arms."""
    for name in list(ARMS):
        if only and not name.startswith(("pyarrow", *only)):
            del ARMS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/run"
        write_dataset(path, rollouts, 3, copies)
        if peer_python and any(name.startswith("mosaic") for name in ARMS):
            subprocess.run([peer_python, __file__, "mds", path], check=True)
        if not s3:
            _compare(path, {}, repeats, peer_python)
            return
        sys.path.insert(0, str(TESTS))
        import fsspec
        from s3_server import s3_server

        with s3_server("bench") as endpoint:
            options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": endpoint}}
            os.environ |= {
                "AWS_ACCESS_KEY_ID": "k",
                "AWS_SECRET_ACCESS_KEY": "s",
                "AWS_DEFAULT_REGION": "us-east-1",
                "S3_ENDPOINT_URL": endpoint,
            }
            fs = fsspec.filesystem("s3", **options)
            for found in Path(folder).iterdir():
                fs.put(f"{found}/", f"bench/{found.name}/", recursive=True)
            _compare("s3://bench/run", options, repeats, peer_python)


def _compare(source: str, options: dict[str, Any], repeats: int, peer_python: str | None) -> None:
    commands = {}
    for name in ARMS:
        peer = name.startswith(("mosaic", "HF"))
        if (peer and not peer_python) or (options and "local" in name):
            continue
        python = peer_python if peer and peer_python else sys.executable
        commands[name] = [python, __file__, "arm", name, source, json.dumps(options)]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name}: {done.stderr.strip()}")
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
    rates = {name: [r["entries"] / r["cpu"] for r in found] for name, found in results.items()}
    for name, found in results.items():
        ratios = [own / base for own, base in zip(rates[name], rates["pyarrow"], strict=True)]
        tokens = statistics.median(r["tokens"] / r["cpu"] for r in found)
        print(
            f"{name:<36} {statistics.median(rates[name]) / 1e6:6.1f} M entries/s "
            f"{tokens / 1e3:5.0f} k tokens/s of a core  "
            f"{statistics.median(ratios):5.2f} of pyarrow ({min(ratios):.2f} to {max(ratios):.2f}) "
            f" wall {statistics.median(r['wall'] for r in found):6.2f} s"
            f"  peak +{max(r['mib'] for r in found):.0f} MiB",
            flush=True,
        )
    for other in [name for name in rates if name.endswith("made")]:
        for name in [name for name in rates if name.startswith("loader")]:
            ratios = [own / base for own, base in zip(rates[name], rates[other], strict=True)]
            print(f"{name} over {other}: {statistics.median(ratios):.2f} "
                  f"({min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip


@main.command("first-batch")
@click.option("--shards", default=1000, show_default=True)
def first_batch(shards: int) -> None:
    """Time from the constructor to the first batch."""
    from rollout.loader import RolloutLoader

    with tempfile.TemporaryDirectory() as folder:
        _many_shards(folder, shards, tokens=128)
        for _ in range(3):
            start, cpu = time.perf_counter(), time.process_time()
            loader = RolloutLoader(folder, vocab_size=VOCAB, groups_per_step=8, token_budget=16_384)
            made = time.perf_counter()
            batches = iter(loader)
            batch = next(batches)
            end = time.perf_counter()
            print(
                f"{shards} shards, {loader.num_groups} groups: {end - start:.3f} s, "
                f"{made - start:.3f} of it in the constructor, {time.process_time() - cpu:.3f} s "
                f"of processor time; {batch.num_scored} tokens"
            )


@main.command()
@click.option("--shards", default=130, show_default=True)
@click.option("--prefetch-mib", default=512, show_default=True)
def wide(shards: int, prefetch_mib: int) -> None:
    """Read more than 2^31 entries, and print the peak of resident memory."""
    from rollout.loader import RolloutLoader

    with tempfile.TemporaryDirectory() as folder:
        # in a process of its own, whose memory does not count here
        subprocess.run([sys.executable, __file__, "links", folder, str(shards)], check=True)
        loader = RolloutLoader(
            folder, vocab_size=VOCAB, groups_per_step=8, token_budget=16_384,
            prefetch_bytes=prefetch_mib * 2**20,
        )  # fmt: skip
        start, entries = time.perf_counter(), 0
        for batch in loader:
            entries += batch.support_ids.shape[0]
        print(f"{entries} entries ({entries / 2**31:.3f} of 2^31) in "
              f"{time.perf_counter() - start:.0f} s, peak {peak_mib():.0f} MiB")  # fmt: skip
        assert entries > 2**31


@main.command(hidden=True)
@click.argument("folder")
@click.argument("shards", type=int)
def links(folder: str, shards: int) -> None:
    """Write the dataset of `wide`."""
    _many_shards(folder, shards, tokens=2048, width=512, samples=16)


def _many_shards(
    folder: str, shards: int, *, tokens: int, width: int = 8, samples: int = 8
) -> None:
    """Write one part with a group, and commit links to its file under other names."""
    sys.path.insert(0, str(TESTS))
    import dataclasses

    from synthetic import make_record, make_row, plan

    from rollout.dataset import DatasetWriter
    from rollout.storage import Storage

    storage = Storage.open(folder)
    writer = DatasetWriter.open(storage, make_record())
    writer.append_plan(plan("u000000", "p"))
    row = make_row("p", lengths=[width] * tokens)
    writer.commit_part(
        "u000000",
        [dataclasses.replace(row, sample_index=i, rollout_id=f"p.{i}", reward=float(i))
         for i in range(samples)],
    )  # fmt: skip
    for part in range(1, shards):
        link_part(folder, 0, part)


if __name__ == "__main__":
    main()
