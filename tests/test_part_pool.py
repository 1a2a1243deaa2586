"""Parts come out the same whoever works on them, and a dead process costs nothing."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from synthetic import make_row

from rollout import part_pool
from rollout.errors import DatasetError, RolloutError
from rollout.part_pool import PartPool
from rollout.part_process import serve
from rollout.part_template import PartTemplate
from rollout.part_wire import pack_rows, receive, send, unpack_rows
from rollout.part_work import BadRow, write_verified
from rollout.rows import RolloutRow
from rollout.shard import ShardInfo
from rollout.spool import SpoolReader, SpoolWriter, StepBlock
from rollout.spool_entries import SpooledEntries

FINGERPRINT = "ab" * 32
KINDS = ("kept", "top", "none")


@pytest.fixture(params=[0, 1 << 40], ids=["process", "here"])
def pool(request: pytest.FixtureRequest) -> Iterator[PartPool]:
    made = PartPool(process_bytes=request.param)
    yield made
    made.close()


def spooled(rows: list[RolloutRow], folder: Path, segment_bytes: int = 4000) -> list[RolloutRow]:
    """Put the rows' entries into a spool, one token of each row a step, as sampling would."""
    writer, reader = SpoolWriter(folder, segment_bytes=segment_bytes), SpoolReader(folder)
    steps = max(row.token_ids.size for row in rows)
    where: list[list[int]] = [[] for _ in rows]
    for step in range(steps):
        active = [i for i, row in enumerate(rows) if step < row.token_ids.size]
        parts = []
        for i in active:
            row = rows[i]
            if row.support_offsets is None or row.support_entries is None:
                parts.append(np.zeros(0, np.uint64))
                continue
            parts.append(row.support_entries[slice(*row.support_offsets[step : step + 2].tolist())])
        counts = np.array([part.size for part in parts], np.int32)
        n = len(active)
        writer.append(
            StepBlock(
                step=step,
                need=int(counts.sum()),
                request_ids=[str(i) for i in active],
                positions=np.full(n, step, np.int32),
                sampled=np.zeros(n, np.int32),
                kinds=np.ones(n, np.int8),
                flags=np.zeros(n, np.int32),
                counts=counts,
                sampled_logprobs=np.zeros(n, np.float32),
                tail_mass=np.zeros(n, np.float32),
                draws=np.zeros((n, 0), np.uint64),
                entries=np.concatenate(parts),
            )
        )
        for found in reader.poll():
            found.segments.hold(found.segment, 8 * found.num_entries)
            starts = found.address + 8 * (np.cumsum(found.counts) - found.counts)
            for name, start in zip(found.request_ids, starts.tolist(), strict=True):
                where[int(name)].append(start)
    result = []
    for row, addresses in zip(rows, where, strict=True):
        if row.support_offsets is None:
            result.append(row)
            continue
        held = SpooledEntries(
            segments=reader.segments,
            addresses=np.array(addresses, np.int64),
            counts=np.diff(row.support_offsets).astype(np.int32),
        )
        result.append(dataclasses.replace(row, support_entries=None, stored_entries=held))
    return result


def sample_rows() -> list[RolloutRow]:
    rows = [
        make_row(f"{kind}{prompt}", sample, kind=kind, draws=2 * (kind == "top"), seed=sample)
        for kind in KINDS
        for prompt in range(3)
        for sample in range(2)
    ]
    rows[1] = dataclasses.replace(
        rows[1],
        text="ünïcöde\n",
        reward=0.5,
        advantage=-0.5,
        metadata='{"a": 1}',
        policy_step=7,
        stop_reason="\n\n",
    )
    return rows


@pytest.mark.parametrize("place", ["memory", "spool"])
def test_the_shard_is_the_one_written_without_a_pool(
    pool: PartPool, tmp_path: Path, place: str
) -> None:
    rows = sample_rows()
    info = write_verified(tmp_path / "plain.parquet", rows, FINGERPRINT, 4000)
    given = spooled(rows, tmp_path / "spool") if place == "spool" else rows
    assert sum(row.num_bytes for row in given) == sum(row.num_bytes for row in rows)
    for number in range(2):  # the second part of a process
        path = tmp_path / f"pool-{number}.parquet"
        with pool.part(given) as part:
            assert part.bad_rows == []
            assert part.write(path, given, FINGERPRINT, 4000) == info
        assert path.read_bytes() == (tmp_path / "plain.parquet").read_bytes()
    if place == "spool":  # the rows are as they were: they can be worked on again
        assert all(row.support_entries is None for row in given)


def test_bad_rows_are_named_and_the_others_written(pool: PartPool, tmp_path: Path) -> None:
    rows = sample_rows()
    rows[2] = dataclasses.replace(rows[2], sampled_logprobs=rows[2].sampled_logprobs + 1)
    with pool.part(rows) as part:
        (bad,) = part.bad_rows
        assert isinstance(bad, BadRow)
        assert (bad.index, bad.reason) == (2, "bad_numerics")
        assert "sampled_logprobs[0]" in bad.detail
        good = [row for row in reversed(rows) if row is not rows[2]]
        part.write(tmp_path / "shard.parquet", good, FINGERPRINT, 1 << 20)
    stored = pq.read_table(tmp_path / "shard.parquet")["rollout_id"].to_pylist()
    assert stored == [row.rollout_id for row in good]


def test_a_full_disk_is_the_same_error(pool: PartPool, tmp_path: Path) -> None:
    rows = sample_rows()
    with pool.part(rows) as part, pytest.raises(FileNotFoundError, match="No such file"):
        part.write(tmp_path / "missing" / "shard.parquet", rows, FINGERPRINT, 1 << 20)
    with pool.part(rows) as part:
        part.write(tmp_path / "shard.parquet", rows, FINGERPRINT, 1 << 20)


def test_a_spool_that_is_gone_is_an_error(pool: PartPool, tmp_path: Path) -> None:
    rows = spooled(sample_rows(), tmp_path / "spool")
    for path in (tmp_path / "spool").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="No such file"), pool.part(rows):
        pass


def test_a_spool_that_is_cut_short_is_the_same_error(pool: PartPool, tmp_path: Path) -> None:
    rows = spooled(sample_rows(), tmp_path / "spool")
    for path in (tmp_path / "spool").iterdir():
        os.truncate(path, 8)
    with pytest.raises(OSError, match=r"^spool: a segment ends at byte \d+,"), pool.part(rows):
        pass


def answers(*requests: tuple[dict[str, Any], bytes]) -> list[dict[str, Any]]:
    """What a process that writes parts answers to these."""
    asked, answered = io.BytesIO(), io.BytesIO()
    for head, body in requests:
        send(asked, head, body)
    asked.seek(0)
    serve(asked, answered)
    answered.seek(0)
    return [receive(answered)[0] for _ in requests]


def test_a_process_tells_what_went_wrong_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [
        DatasetError("shard: damaged"),
        OSError(28, "No space left on device", "x"),
        OSError("cut short"),
        ZeroDivisionError("a bug"),
    ]

    def write(*_: object, **__: object) -> ShardInfo:
        raise errors.pop(0)

    monkeypatch.setattr("rollout.part_work.write_shard", write)
    load = {"do": "load"}, pack_rows(sample_rows()[:1]).to_pybytes()
    head = {"do": "write", "path": str(tmp_path / "x"), "order": [0], "fingerprint": FINGERPRINT}
    ask = head | {"row_group_bytes": 4000}, b""
    assert answers(load, ask, ask, ask, ask, ({"do": "drop"}, b""), ask) == [
        {"bad": []},
        {"dataset_error": "shard: damaged"},
        {"os_error": [28, "No space left on device", "x"]},
        {"os_error": ["cut short"]},
        {"error": "ZeroDivisionError: a bug"},
        {},
        {"error": "AssertionError: "},  # nothing is held any more
    ]


def test_a_message_that_ends_early_is_the_end() -> None:
    whole = io.BytesIO()
    send(whole, {"do": "load"}, b"body")
    data = whole.getvalue()
    assert receive(io.BytesIO(data)) == ({"do": "load"}, b"body")
    for length in range(len(data)):
        with pytest.raises(EOFError):
            receive(io.BytesIO(data[:length]))


def test_rows_travel_bit_for_bit(tmp_path: Path) -> None:
    rows = [*sample_rows(), make_row("wide", lengths=[1, 40_000, 1]), make_row("empty", lengths=[])]
    for field in dataclasses.fields(RolloutRow):
        if field.name != "stored_entries":
            assert any(getattr(row, field.name) is not None for row in rows), field.name
    for given in (rows, spooled(rows, tmp_path)):
        for found, row in zip(unpack_rows(pack_rows(given).to_pybytes()), rows, strict=True):
            if found.stored_entries is not None:
                found.support_entries = found.stored_entries.load()
                found.stored_entries = None
            for field in dataclasses.fields(RolloutRow):
                a, b = getattr(found, field.name), getattr(row, field.name)
                if isinstance(b, np.ndarray):
                    assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()), field.name
                else:
                    assert a == b, field.name


def test_processes_that_were_started_before_are_the_ones_that_work(tmp_path: Path) -> None:
    pool = PartPool(process_bytes=0)
    pool.start(2)
    pool.start(1)  # there are enough
    started = {process._process.pid for process in pool._all}
    rows = sample_rows()
    with pool.part(rows) as part, pool.part(rows) as other:
        for number, work in enumerate((part, other)):
            work.write(tmp_path / f"{number}.parquet", rows, FINGERPRINT, 4000)
    assert {process._process.pid for process in pool._all} == started
    assert len(started) == 2
    pool.close()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("when", ["idle", "loaded"])
def test_a_killed_process_is_started_again(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = PartPool(process_bytes=0)
    rows = spooled(sample_rows(), tmp_path / "spool")
    info = write_verified(tmp_path / "plain.parquet", sample_rows(), FINGERPRINT, 4000)
    with pool.part(rows):
        pass
    (process,) = pool._all
    if when == "idle":
        kill(process._process.pid)
    with pool.part(rows) as part:
        if when == "loaded":
            kill(process._process.pid)
        assert part.write(tmp_path / "pool.parquet", rows, FINGERPRINT, 4000) == info
    assert "ended with code -9; again" in caplog.text
    pool.close()


def test_a_process_that_keeps_dying_stops_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: PartTemplate) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import sys; sys.stdin.buffer.read(1); sys.exit(7)"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(PartTemplate, "start", start)
    pool = PartPool(process_bytes=0)
    with pytest.raises(RolloutError, match="end with code 7"), pool.part(sample_rows()):
        pass
    pool.close()


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ({"dataset_error": "shard: damaged"}, DatasetError, "^shard: damaged$"),
        ({"error": "KeyError: 7"}, RolloutError, "^a part could not be written: KeyError: 7$"),
    ],
)
def test_what_a_process_answers_is_raised(
    monkeypatch: pytest.MonkeyPatch,
    answer: dict[str, str],
    error: type[RolloutError],
    message: str,
) -> None:
    pool = PartPool(process_bytes=0)
    monkeypatch.setattr(part_pool, "receive", lambda _: (answer, b""))
    with pytest.raises(error, match=message), pool.part(sample_rows()):
        pass
    monkeypatch.undo()
    pool.close()


def test_a_part_that_was_written_does_not_fail_by_what_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PartPool(process_bytes=0)
    rows = sample_rows()
    with pool.part(rows) as part:
        assert isinstance(part, part_pool._ProcessPart)
        first = part._process._process.pid
        info = part.write(tmp_path / "one", rows, FINGERPRINT, 1 << 20)
        monkeypatch.setattr(part_pool, "receive", lambda _: ({"error": "MemoryError: "}, b""))
    monkeypatch.undo()
    with pool.part(rows) as part:  # by one that holds nothing of it
        assert isinstance(part, part_pool._ProcessPart)
        assert part._process._process.pid != first
        assert part.write(tmp_path / "two", rows, FINGERPRINT, 1 << 20) == info
    pool.close()


def test_the_processes_end_with_the_job() -> None:
    script = (
        "import sys, os, signal; sys.path.insert(0, sys.argv[1])\n"
        "from test_part_pool import PartPool, sample_rows\n"
        "pool = PartPool(process_bytes=0)\n"
        "with pool.part(sample_rows()):\n"
        "    print(pool._all[0]._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    child = Path("/proc", done.stdout.strip(), "stat")
    deadline = time.monotonic() + 30
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "a process outlives the job"
        time.sleep(0.02)


def test_processes_are_copies_of_one_with_one_thread() -> None:
    """Of several threads only the one that asks is copied, with the locks that the others hold."""
    template = PartTemplate()
    copies = [template.start() for _ in range(3)]
    assert template._process is not None
    first = template._process.pid
    assert len(list(Path(f"/proc/{first}/task").iterdir())) == 1
    for copy in copies:
        stat = Path(f"/proc/{copy.pid}/stat").read_text()
        assert int(stat.rpartition(")")[2].split()[1]) == first
    os.kill(first, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(template.start)
        time.sleep(0.1)  # for it to wait for the answer
        kill(first)  # its copies go on, and another one makes more
        copies.append(asked.result())
    assert template._process.pid != first
    assert copies[-1].pid not in (0, first)
    for copy in copies:
        copy.stdin.close()
        assert copy.stdout.read() == b""  # it ends with its input
        copy.stdout.close()
    assert [copy.wait() for copy in copies] == [-9, -9, -9, 0]  # those of the first are lost
    kill(template._process.pid)
    assert copies[0].wait() == -9
    template.close()


def test_signals_and_output_and_cores_are_the_jobs() -> None:
    template = PartTemplate()
    copy = template.start()
    assert template._process is not None
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    for pid in (template._process.pid, copy.pid):
        files = Path(f"/proc/{pid}/fd")
        assert os.path.samefile(files / "1", files / "2")  # what is printed is no result
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(nice + 5, 19)
        for number in (signal.SIGINT, signal.SIGTERM):  # to the whole group
            os.kill(pid, number)
    copy.stdin.close()
    assert copy.stdout.read() == b""
    copy.stdout.close()
    assert copy.wait() == 0
    template.close()


def test_small_parts_go_to_a_process_that_idles_and_start_none(tmp_path: Path) -> None:
    row = make_row(lengths=[part_pool.IDLE_PROCESS_BYTES // 8])
    pool = PartPool()
    try:
        with pool.part([row]) as part:
            assert isinstance(part, part_pool._LocalPart)
        pool.start(1)
        with pool.part([row]) as part, pool.part([row]) as other:
            assert isinstance(part, part_pool._ProcessPart)
            assert isinstance(other, part_pool._LocalPart)
            one = part.write(tmp_path / "one", [row], FINGERPRINT, 1 << 20)
            assert other.write(tmp_path / "other", [row], FINGERPRINT, 1 << 20) == one
        with pool.part([make_row(lengths=[9])]) as part:
            assert isinstance(part, part_pool._LocalPart)
    finally:
        pool.close()
