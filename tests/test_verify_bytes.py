"""A flipped byte anywhere, and shards that were swapped: named, and no row of them is yielded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from loader_cases import group, open_loader, shard_path, write
from synthetic import make_row

from rollout import verify_shard
from rollout.cli import main
from rollout.dataset import read_dataset
from rollout.errors import DatasetError
from rollout.storage import Storage
from rollout.verify import verify_dataset


def read_into(seen: list[str], path: Path) -> None:
    """Note the rollouts that the loader yields, until it raises."""
    for batch in open_loader(str(path), groups_per_step=1):
        seen += batch.rollout_ids


def test_shards_of_one_size_that_were_swapped(tmp_path: Path) -> None:
    # the sizes say nothing here
    path = tmp_path / "run"
    parts = [
        [make_row(f"p{i}", j, vocab=99, lengths=[1, 3], reward=j) for j in (0, 1)]
        for i in range(16)
    ]
    write(str(path), parts)
    by_size: dict[int, list[Path]] = {}
    for file in sorted((path / "data").iterdir()):
        by_size.setdefault(file.stat().st_size, []).append(file)
    first, second, *_ = max(by_size.values(), key=len)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    assert [fault.file for fault in verify_dataset(Storage.open(path)).faults] == [
        f"data/{file.name}" for file in (first, second)
    ]
    seen: list[str] = []
    with pytest.raises(DatasetError, match="changed after it was committed"):
        read_into(seen, path)
    swapped = {f"p{int(file.name.split('-')[1])}" for file in (first, second)}
    assert not swapped & {rollout_id.split(".")[0] for rollout_id in seen}


class Flipper:
    """A shard of two row groups, of which one bit at a time is wrong."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run"
        write(str(self.path), [[*group(0, 2), *group(1, 2)]], row_group_bytes=300)
        (self.record,) = read_dataset(Storage.open(self.path)).shards
        assert len(self.record.row_groups) == 2
        self.file = shard_path(str(self.path))
        self.size = self.file.stat().st_size

    def where(self, position: int) -> int | None:
        """The row group that a byte is in."""
        for index, part in enumerate(self.record.row_groups):
            if part.offset <= position < part.offset + part.size:
                return index
        return None

    def flip(self, position: int) -> None:
        """Flip one bit of a byte; twice is never."""
        with self.file.open("r+b") as file:
            file.seek(position)
            value = file.read(1)[0]
            file.seek(position)
            file.write(bytes([value ^ (1 << position % 8)]))


def test_every_flipped_byte_is_named(tmp_path: Path) -> None:
    # all bytes of the shard, page headers, data, footer and magic
    shard = Flipper(tmp_path)
    storage = Storage.open(shard.path)
    for position in range(shard.size):
        shard.flip(position)
        with pytest.raises(DatasetError) as caught:
            verify_shard.check_bytes(storage, shard.record)
        shard.flip(position)
        index = shard.where(position)
        place = f"in row group {index} (bytes"
        if index is None:
            place = "outside of its row groups" if position < 4 else "in the footer (bytes"
        assert place in str(caught.value)
    assert verify_dataset(storage).faults == []


def test_a_shard_that_shrinks_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Flipper(tmp_path)
    os.truncate(shard.file, shard.size - 5)
    monkeypatch.setattr(Storage, "size", lambda _storage, _name: shard.size)
    with pytest.raises(DatasetError, match=f"ends at byte {shard.size - 5}, expected more"):
        verify_shard.check_bytes(Storage.open(shard.path), shard.record)


def test_a_flipped_byte_through_the_command(tmp_path: Path) -> None:
    shard = Flipper(tmp_path)
    for position in (0, shard.record.row_groups[1].offset + 9, shard.size - 5):
        shard.flip(position)
        result = CliRunner().invoke(main, ["verify", str(shard.path)])
        shard.flip(position)
        assert result.exit_code == 11
        assert f"DAMAGED data/{shard.file.name}: other bytes than were committed" in result.output
        assert f"error: {shard.path}: damaged: data/{shard.file.name}" in result.output


def test_the_loader_yields_no_row_that_a_flipped_byte_may_concern(tmp_path: Path) -> None:
    # each row group is one prompt's; every byte would take too long: 30 in each, and its ends
    shard = Flipper(tmp_path)
    groups = [{f"p{index}.{i}" for i in range(2)} for index in range(2)]
    parts = [(part.offset, part.size) for part in shard.record.row_groups]
    for index, (start, size) in enumerate([*parts, (sum(parts[1]), shard.size - sum(parts[1]))]):
        offsets = {*range(0, size, size // 30), size - 1}
        for position in sorted(start + offset for offset in offsets):
            shard.flip(position)
            seen: list[str] = []
            with pytest.raises(DatasetError, match=r"damaged|changed after it was committed"):
                read_into(seen, shard.path)
            shard.flip(position)
            # in the footer: no row at all
            assert set(seen) <= (groups[1 - index] if index < 2 else set())
