"""What goes into the spool comes out, once, in order, and never half."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spool_blocks import assert_same, random_block

from rollout.errors import EngineError
from rollout.spool import SpoolReader, SpoolWriter, StepBlock, StoredStep

SHAPES = [(0, 0), (1, 0), (0, 3), (5, 3), (1, 3), (64, 0), (7, 1), (0, 0), (33, 3)]


def blocks(count: int = len(SHAPES), seed: int = 0) -> list[StepBlock]:
    rng = np.random.default_rng(seed)
    shapes = [SHAPES[i % len(SHAPES)] for i in range(count)]
    return [
        random_block(rng, rows=rows, draws=draws, step=i) for i, (rows, draws) in enumerate(shapes)
    ]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize("segment_bytes", [1, 1000, 5000, 2**20])
def test_blocks_come_back_bit_for_bit(tmp_path: Path, segment_bytes: int) -> None:
    writer = SpoolWriter(tmp_path, segment_bytes)
    expected = blocks(60)
    sizes = [writer.append(block) for block in expected]
    writer.close()
    assert sum(path.stat().st_size for path in segments(tmp_path)) == sum(sizes)
    assert all(size % 8 == 0 for size in sizes)
    if segment_bytes == 1:
        assert len(segments(tmp_path)) == 60
    reader = SpoolReader(tmp_path)
    assert reader.num_bytes() == sum(sizes)
    for block, other in zip(reader.poll(), expected, strict=True):
        assert_same(block, other)
    assert len(segments(tmp_path)) == 1  # the last stays: more may follow
    assert reader.num_bytes() == 0
    assert list(reader.poll()) == []


def test_reading_beside_writing(tmp_path: Path) -> None:
    writer, reader = SpoolWriter(tmp_path, 3000), SpoolReader(tmp_path)
    assert list(reader.poll()) == []
    expected = iter(blocks(40))
    for i, block in enumerate(blocks(40)):
        writer.append(block)
        if i % 3 == 0:
            for found in reader.poll():
                assert_same(found, next(expected))
        assert len(segments(tmp_path)) <= 8
    for found in reader.poll():
        assert_same(found, next(expected))
    assert next(expected, None) is None


def test_a_reader_that_stops_in_the_middle_goes_on_there(tmp_path: Path) -> None:
    writer, reader = SpoolWriter(tmp_path, 2000), SpoolReader(tmp_path)
    for block in blocks(20):
        writer.append(block)
    found = []
    while True:
        first = next(reader.poll(), None)
        if first is None:
            break
        found.append(first.step)
    assert found == list(range(20))


def test_no_block_comes_early_and_none_is_lost(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    writer = SpoolWriter(source)
    expected = blocks(9)
    ends = np.cumsum([writer.append(block) for block in expected]).tolist()
    content = segments(source)[0].read_bytes()
    target.mkdir()
    reader = SpoolReader(target)
    found: list[StoredStep] = []
    with (target / segments(source)[0].name).open("wb", buffering=0) as file:
        for length in range(len(content)):
            found += reader.poll()
            assert len(found) == sum(end <= length for end in ends), length
            file.write(content[length : length + 1])
        found += reader.poll()
    for block, other in zip(found, expected, strict=True):
        assert_same(block, other)


def test_every_flipped_byte_before_the_entries_is_noticed(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    first, second = (random_block(rng, rows=4, draws=2, step=i) for i in range(2))
    writer = SpoolWriter(tmp_path)
    start = writer.append(first)
    size = writer.append(second)
    (path,) = segments(tmp_path)
    content = path.read_bytes()
    entries = 8 * second.entries.size
    names = len("\n".join(second.request_ids).encode())
    padding = -(names + 4 * 25) % 8  # of rows with 24 + 1 bytes beside their draws
    unused = {start + i for i in range(60, 64)}  # of the header's own checksum
    for at in range(start, start + size - entries - padding):
        if at in unused:
            continue
        damaged = bytearray(content)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        poll = SpoolReader(tmp_path).poll()
        assert_same(next(poll), first)
        with pytest.raises(EngineError, match=rf"spool .*byte {start}\b.*damaged"):
            next(poll)


def test_a_segment_that_ends_in_the_middle_is_noticed(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, 1)
    for block in blocks(3, seed=1):
        writer.append(block)
    first = segments(tmp_path)[0]
    os.truncate(first, first.stat().st_size - 8)
    os.truncate(first, max(first.stat().st_size, 1))
    with pytest.raises(EngineError, match="the block at byte 0 is cut short"):
        list(SpoolReader(tmp_path).poll())
    assert first.exists()


def test_nothing_follows_a_block_that_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = SpoolWriter(tmp_path), SpoolReader(tmp_path)
    first, second, third = blocks(9)[3:6]
    writer.append(first)
    real = os.writev
    calls: list[int] = []

    def full(file: int, parts: list[memoryview]) -> int:
        calls.append(1)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(file, [parts[0][:10]])

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        writer.append(second)
    monkeypatch.setattr(os, "writev", real)
    with pytest.raises(OSError, match="a block was cut short, nothing can follow it"):
        writer.append(third)
    (found,) = reader.poll()
    assert_same(found, first)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev

    def seven_bytes(file: int, parts: list[memoryview]) -> int:
        return real(file, [memoryview(b"".join(parts))[:7]])

    monkeypatch.setattr(os, "writev", seven_bytes)
    writer = SpoolWriter(tmp_path)
    expected = blocks(9)
    for block in expected:
        writer.append(block)
    for found, other in zip(SpoolReader(tmp_path).poll(), expected, strict=True):
        assert_same(found, other)


def test_blocks_that_would_be_read_as_something_else_are_refused(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path)
    good = random_block(np.random.default_rng(0), rows=3)
    wrongs: tuple[dict[str, Any], ...] = (
        {"request_ids": ["a", "b\nc", "d"]},
        {"request_ids": ["a", "b"]},
        {"positions": good.positions.astype(np.int64)},
        {"kinds": good.kinds[:2]},
        {"entries": good.entries.view(np.int64)},
        {"draws": np.zeros((4, 0), np.uint64)},
    )
    for wrong in wrongs:
        with pytest.raises(ValueError, match="expected"):
            writer.append(dataclasses.replace(good, **wrong))
    writer.append(good)
    (found,) = SpoolReader(tmp_path).poll()
    assert_same(found, good)


def test_arrays_need_not_be_contiguous(tmp_path: Path) -> None:
    good = random_block(np.random.default_rng(0), rows=6, draws=2)
    names = ("positions", "sampled", "draws", "entries", "sampled_logprobs")
    spread: dict[str, Any] = {n: np.repeat(getattr(good, n), 2, axis=0)[::2] for n in names}
    strided = dataclasses.replace(good, **spread)
    SpoolWriter(tmp_path).append(strided)
    (found,) = SpoolReader(tmp_path).poll()
    assert_same(found, good)


def test_one_writer_a_folder(tmp_path: Path) -> None:
    SpoolWriter(tmp_path)
    with pytest.raises(FileExistsError):
        SpoolWriter(tmp_path)


_WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from test_spool import blocks
from rollout.spool import SpoolWriter
writer = SpoolWriter(sys.argv[2], segment_bytes=20_000)
for block in blocks(400, seed=5):
    writer.append(block)
writer.close()
"""


def test_two_processes(tmp_path: Path) -> None:
    reader = SpoolReader(tmp_path)
    expected = blocks(400, seed=5)
    found = 0
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(Path(__file__).parent), str(tmp_path)]
    )
    finished = False
    while not finished:
        finished = process.poll() is not None  # before the last look, or its blocks are missed
        for block in reader.poll():
            assert_same(block, expected[found])
            found += 1
    assert process.returncode == 0
    assert found == 400
    assert len(segments(tmp_path)) == 1
