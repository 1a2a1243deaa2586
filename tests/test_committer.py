"""Parts of one unit: written side by side, committed one after the other."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from synthetic import make_record, make_row, plan
from waiting import wait_for

from rollout.commits import iter_commits
from rollout.committer import Committer
from rollout.dataset import DatasetWriter
from rollout.early_shard import written_early
from rollout.errors import DatasetError, OutputError, RolloutError
from rollout.part_pool import PartPool
from rollout.part_queue import MadePart, PartQueue, QueuedPart
from rollout.part_work import write_verified
from rollout.rows import RolloutRow
from rollout.shard import write_shard
from rollout.storage import Storage

SECONDS = 30.0


class Case:
    """A committer over a dataset that plans a to d for u0; `on_write` sees each shard's rows."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.storage = Storage.open(str(folder / "out"), {})
        self.writer = DatasetWriter.open(self.storage, make_record(), scratch=folder / "scratch")
        self.writer.append_plan(plan("u0", "a", "b", "c", "d"))
        self.scratch = folder / "scratch"
        self.done: list[tuple[str, int]] = []
        self.committer = Committer(
            self.writer,
            "prompts.jsonl",
            2,
            on_done=lambda unit: self.done.append((unit, self.committer.stats.parts)),
            **({"part_bytes": 2**20} | options),
        )
        self.on_write: Any = lambda prompts: None

        def write(path: Path, rows: list[RolloutRow], *args: Any, **named: Any) -> Any:
            self.on_write("".join(row.prompt_key for row in rows))
            return write_shard(path, rows, *args, **named)

        monkeypatch.setattr("rollout.part_work.write_shard", write)

    def commit(self, *parts: str) -> None:
        """Hand over parts, named by their prompts, and the unit's end; wait for all."""
        for prompts in parts:
            self.committer.commit("u0", [make_row(prompt) for prompt in prompts], [])
        self.committer.finish("u0")
        self.committer.wait()

    def stored(self) -> list[str]:
        """The prompts of each part, by number, as its shard holds them."""
        records = sorted((record for record, _ in iter_commits(self.storage)), key=lambda r: r.part)
        assert [record.part for record in records] == list(range(len(records)))
        root = Path(self.storage.url.removeprefix("file://"))
        return [
            "".join(
                name.removeprefix("user ")
                for name in pl.read_parquet(root / str(record.file))["prompt_id"]
            )
            for record in records
        ]


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    made = Case(tmp_path, monkeypatch)
    yield made
    made.committer.close()


def test_a_part_is_written_while_the_one_before_is(case: Case) -> None:
    second_written = threading.Event()
    writes: list[str] = []

    def on_write(prompts: str) -> None:
        writes.append(prompts)
        if prompts == "ab":
            assert second_written.wait(SECONDS), "the second part waits for the first"
        else:
            second_written.set()

    case.on_write = on_write
    case.commit("ab", "cd")
    assert case.stored() == ["ab", "cd"]
    assert sorted(writes) == ["ab", "cd"]  # what was written early was not written again
    assert case.done == [("u0", 2)]
    assert not any(case.scratch.iterdir())


def test_no_part_waits_for_a_slow_one_before_it(case: Case) -> None:
    """There are two threads: all other parts are written by the one that is not held up."""
    others = threading.Semaphore(0)

    def on_write(prompts: str) -> None:
        if prompts == "a":
            for _ in "bcd":
                assert others.acquire(timeout=SECONDS), "a part waits for the first"
        else:
            others.release()

    case.on_write = on_write
    case.commit("a", "b", "c", "d")
    assert case.stored() == ["a", "b", "c", "d"]
    assert case.done == [("u0", 4)]
    assert not any(case.scratch.iterdir())


def test_what_comes_after_a_failed_part_is_committed_where_nothing_can_be_kept(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its turn, the shard being there or not; the unit does not count as done."""
    stock = DatasetWriter.commit_part

    def commit_part(self: DatasetWriter, unit: str, rows: list[RolloutRow], *args: Any) -> Any:
        if rows[0].prompt_key == "a":
            raise OutputError("the disk is gone")
        return stock(self, unit, rows, *args)

    monkeypatch.setattr(DatasetWriter, "commit_part", commit_part)
    with pytest.raises(OutputError, match="the disk is gone"):
        case.commit("a", "b", "c")
    assert case.stored() == ["b", "c"]
    assert case.done == []
    assert not any(case.scratch.iterdir())


@pytest.mark.parametrize("local", [True, False])
def test_a_shard_is_on_the_disk_before_its_turn(
    local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the commits of a unit would wait for it one after the other; an upload needs none."""
    synced: list[Path] = []
    monkeypatch.setattr("rollout.early_shard.sync_file", synced.append)
    url = str(tmp_path / "out") if local else f"memory://{tmp_path.name}"
    writer = DatasetWriter.open(Storage.open(url, {}), make_record(), scratch=tmp_path / "scratch")
    with written_early(writer, [make_row("a")], write_verified, again=write_verified):
        assert synced == (list((tmp_path / "scratch").iterdir()) if local else [])


def test_shards_that_wait_for_a_slow_part_take_so_much_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = make_row().num_bytes
    case = Case(tmp_path, monkeypatch, part_bytes=2 * size)  # two such for each of two threads
    prompts = [f"p{number:02}" for number in range(30)]
    case.writer.append_plan(plan("u0", *prompts))
    there: list[int] = []

    def on_write(prompts: str) -> None:
        there.append(len(list(case.scratch.iterdir())))
        if prompts == "p00":
            # the other thread has written all that it may, and waits for this one
            wait_for(lambda: len(there) == 8)
            time.sleep(0.2)
            assert len(there) == 8

    case.on_write = on_write
    for prompt in prompts:
        case.committer.commit("u0", [make_row(prompt)], [])
    case.committer.wait()
    assert case.stored() == prompts
    assert max(there) in (8, 9)  # one that is committed has an empty file for it
    case.committer.close()


def test_a_disk_that_is_nearly_full_holds_one_shard_of_a_unit_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DatasetWriter, "free_bytes", lambda _: 3 * make_row().num_bytes)
    case = Case(tmp_path, monkeypatch)
    there: list[int] = []
    case.on_write = lambda _: there.append(len(list(case.scratch.iterdir())))
    case.commit("a", "b", "c", "d")
    assert case.stored() == ["a", "b", "c", "d"]
    assert there == [1, 1, 1, 1]
    case.committer.close()


@pytest.mark.parametrize("when", ["entering", "leaving"])
def test_a_part_that_could_not_be_made_ends_the_job(
    when: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = PartPool.part

    @contextlib.contextmanager
    def part(self: PartPool, rows: list[RolloutRow]) -> Iterator[Any]:
        fails = rows[0].prompt_key == "b"
        if fails and when == "entering":
            raise RolloutError("processes end")
        with stock(self, rows) as work:
            yield work
        if fails:
            raise RolloutError("processes end")

    monkeypatch.setattr(PartPool, "part", part)
    with pytest.raises(RolloutError, match="processes end"):
        case.commit("a", "b", "c")
    assert case.stored() == ["a", "c"]
    assert case.done == []
    assert not any(case.scratch.iterdir())


def test_the_end_of_a_unit_waits_for_no_parts_of_others(case: Case) -> None:
    case.writer.append_plan(plan("u1", *"klmnop"))
    written: list[str] = []

    def on_write(prompts: str) -> None:
        if prompts != "a":
            wait_for(lambda: ("u0", 1) in case.done)
        written.append(prompts)

    case.on_write = on_write
    case.committer.commit("u0", [make_row("a")], [])
    for prompt in "klmnop":
        case.committer.commit("u1", [make_row(prompt)], [])
    case.committer.finish("u0")
    case.committer.wait()
    assert sorted(written) == list("aklmnop")


def test_no_process_is_held_by_a_part_that_waits(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"now": 0}
    stock = PartPool.part

    @contextlib.contextmanager
    def part(self: PartPool, rows: list[RolloutRow]) -> Iterator[Any]:
        held["now"] += 1
        with stock(self, rows) as work:
            yield work
        held["now"] -= 1

    monkeypatch.setattr(PartPool, "part", part)
    others: list[str] = []

    def on_write(prompts: str) -> None:
        if prompts != "a":
            others.append(prompts)
            return
        wait_for(lambda: len(others) == 3 and held["now"] == 1)

    case.on_write = on_write
    case.commit("a", "b", "c", "d")
    assert case.stored() == ["a", "b", "c", "d"]


def test_a_shard_is_written_again_by_a_process_that_has_its_rows(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that wrote it works on another part by then."""
    case.committer._parts = PartPool(process_bytes=1)
    stock = DatasetWriter.commit_part

    def commit_part(self: DatasetWriter, unit: str, rows: list[RolloutRow], *args: Any) -> Any:
        if self is case.writer and len(rows) == 2:
            other = DatasetWriter.open(case.storage, make_record(), scratch=case.scratch)
            other.commit_part("u0", [make_row(rows[1].prompt_key)])
        return stock(self, unit, rows, *args)

    monkeypatch.setattr(DatasetWriter, "commit_part", commit_part)
    case.commit("ab", "cd")
    assert case.stored() == ["b", "a", "d", "c"]
    assert case.committer.stats.covered == 2


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOENT])
def test_a_shard_on_another_disk_is_written_again(
    code: int, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(self: Path, target: Path) -> Path:
        raise OSError(code, os.strerror(code))

    written: list[str] = []
    case.on_write = written.append
    monkeypatch.setattr(Path, "replace", replace)
    case.commit("a")
    assert case.stored() == ["a"]
    assert written == ["a", "a"]
    assert not any(case.scratch.iterdir())


def queued(unit: str, num_bytes: int = 1) -> QueuedPart:
    return QueuedPart(unit=unit, num_bytes=num_bytes)


def has_room(queue: PartQueue, part: QueuedPart, *, expected: bool = True) -> bool:
    """Whether a part may be made now."""
    thread = threading.Thread(target=queue.wait_for_room, args=[part], daemon=True)
    thread.start()
    thread.join(timeout=SECONDS if expected else 0.1)
    return not thread.is_alive()


def test_a_queue_gives_each_part_in_turn_to_one_thread() -> None:
    queue = PartQueue(9)
    made = MadePart(write=write_verified)
    first, second, other = queued("u0"), queued("u0"), queued("u1")
    for part in (first, second, other):
        queue.add(part)
        assert queue.take(part.unit) is None
    queue.put_made(second, made)
    assert queue.take("u0") is None
    queue.put_made(other, made)
    assert queue.take("u1") == (other, made)
    queue.put_made(first, made)
    assert queue.take("u0") == (first, made)
    assert queue.take("u0") is None
    queue.remove(first)
    assert queue.take("u0") == (second, made)
    queue.remove(second)
    assert queue.take("u0") is None


def test_a_part_whose_turn_it_is_needs_no_room() -> None:
    queue, made = PartQueue(5), MadePart(write=write_verified)
    parts = [queued("u0", 4) for _ in range(3)]
    for part in parts:
        queue.add(part)
    assert has_room(queue, parts[1])
    queue.put_made(parts[1], made)
    assert not has_room(queue, parts[2], expected=False)
    assert has_room(queue, parts[0])
    queue.put_made(parts[0], made)
    for part in parts[:2]:
        assert queue.take("u0") == (part, made)
        queue.remove(part)


def test_room_comes_back() -> None:
    queue, made = PartQueue(5), MadePart(write=write_verified)
    for _ in range(4):
        first, second, third = (queued("u0", 2) for _ in range(3))
        for part in (first, second, third):
            queue.add(part)
        assert has_room(queue, third)
        assert has_room(queue, second)
        assert has_room(queue, first)
        for part in (first, second, third):
            queue.put_made(part, made)
            assert queue.take("u0") == (part, made)
            queue.remove(part)


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_a_queue_without_room_gives_every_part_its_turn(most: int) -> None:
    """Whatever the order in which threads come to parts of several units."""
    rng = random.Random(most)
    queue, made = PartQueue(most), MadePart(write=write_verified)
    parts = [queued(f"u{rng.randrange(3)}") for _ in range(300)]
    done: list[QueuedPart] = []

    def run(part: QueuedPart) -> None:
        queue.wait_for_room(part)
        time.sleep(rng.random() * 1e-3)
        queue.put_made(part, made)
        while (first := queue.take(part.unit)) is not None:
            done.append(first[0])
            queue.remove(first[0])

    with ThreadPoolExecutor(4) as pool:
        for part in parts:
            queue.add(part)
            pool.submit(run, part)
    for unit in ("u0", "u1", "u2"):
        assert [p for p in done if p.unit == unit] == [p for p in parts if p.unit == unit]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), DatasetError("shard: damaged")])
def test_a_disk_that_does_not_take_a_shard_early_is_tried_at_its_turn(
    case: Case, error: Exception
) -> None:
    failed = threading.Event()

    def on_write(prompts: str) -> None:
        if prompts == "a":
            assert failed.wait(SECONDS)
        elif not failed.is_set():
            failed.set()
            raise error

    case.on_write = on_write
    case.commit("a", "b")
    assert case.stored() == ["a", "b"]
    assert not any(case.scratch.iterdir())


def test_without_a_folder_for_it_nothing_is_written_early(case: Case, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    scratch = tmp_path / "file" / "folder"
    writer = DatasetWriter.open(case.storage, make_record(), scratch=scratch)

    def again(*_: Any) -> Any: ...

    with written_early(writer, [make_row("a")], write_verified, again=again) as write:
        assert write is again


def test_a_part_that_waits_holds_no_memory(case: Case) -> None:
    """What writes it has its entries."""

    class Work:
        def write(self, *args: Any) -> Any:
            return write_verified(*args)

    work = Work()
    gone = weakref.ref(work)
    with written_early(case.writer, [make_row("a")], work.write, again=write_verified):
        del work
        gc.collect()
        assert gone() is None


def test_rollouts_that_finished_in_another_order_are_written_once(case: Case) -> None:
    """The shard's order is not theirs: one that was written in theirs would be of no use."""
    writes: list[str] = []
    case.on_write = writes.append
    rows = [make_row("a", 1), make_row("b"), make_row("a", 0)]
    with written_early(case.writer, rows, write_verified, again=write_verified) as write:
        case.writer.commit_part("u0", rows, [], write)
    assert case.stored() == ["aab"]
    assert writes == ["aab"]


def test_rollouts_that_another_writer_commits_meanwhile_are_left_out(case: Case) -> None:
    """The shard that was written early holds one of them, so it is not the one committed."""
    early = threading.Event()

    def on_write(prompts: str) -> None:
        if prompts == "a":
            assert early.wait(SECONDS)
            other = DatasetWriter.open(case.storage, make_record(), scratch=case.scratch)
            other.commit_part("u0", [make_row("c")])
        elif prompts == "bc":
            early.set()

    case.on_write = on_write
    case.commit("a", "bc")
    assert case.stored() == ["c", "a", "b"]
    assert case.committer.stats.covered == 1
    assert not any(case.scratch.iterdir())
