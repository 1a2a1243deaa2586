"""Files on a local disk: whole or not there, for good once they are named, and nothing left."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import open_below

from rollout.local_files import (
    link_bytes,
    link_file,
    missing_folders,
    remove_empty,
    remove_stale,
    replace_bytes,
    scratch_file,
)

DATA = b"finished"


class Case:
    """A target, its scratch folder, a finished file, and three ways to put one into place."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.target = folder / "out" / "data" / "x"
        self.scratch = folder / "out" / "scratch"
        self.local = folder / "local"
        self.local.write_bytes(DATA)

    def link(self) -> None:
        assert link_bytes(DATA, self.target, self.scratch)

    def replace(self) -> None:
        replace_bytes(DATA, self.target, self.scratch)

    def move(self) -> None:
        link_file(self.local, self.target, self.scratch)

    def copy(self) -> None:
        self.forbid_links(errno.EXDEV)
        self.move()

    def forbid_links(self, code: int) -> None:
        """Let the finished file not be linked, as on another disk."""
        stock = os.link

        def link(source: Path, target: Path) -> None:
            if source == self.local:
                raise OSError(code, os.strerror(code))
            stock(source, target)

        self.monkeypatch.setattr(os, "link", link)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(tmp_path, monkeypatch)


WAYS: dict[str, Callable[[Case], None]] = {
    "link": Case.link,
    "replace": Case.replace,
    "move": Case.move,
    "copy": Case.copy,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_bytes_are_on_the_disk_before_their_name_and_the_name_before_the_end(
    case: Case, way: Callable[[Case], None]
) -> None:
    synced: list[tuple[str, int, bool]] = []
    stock = os.fsync

    def sync(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        what = "folder" if path == case.target.parent else "file"
        synced.append((what, 0 if path.is_dir() else path.stat().st_size, case.target.exists()))
        stock(file)

    case.monkeypatch.setattr(os, "fsync", sync)
    way(case)
    assert not open_below(case.local.parent)
    *files, last = synced
    assert set(files) == {("file", len(DATA), False)}
    assert len(files) == (2 if way is Case.copy else 1)  # the copy is another file
    assert last == ("folder", 0, True)
    assert case.target.read_bytes() == DATA
    if case.scratch.exists():
        assert list(case.scratch.iterdir()) == []


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_full_disk_keeps_no_half_of_a_file(case: Case, way: Callable[[Case], None]) -> None:
    """Each try would leave one more, on a disk that has no room."""

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    case.monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        way(case)
    assert not case.target.exists()
    if case.scratch.exists():
        assert list(case.scratch.iterdir()) == []


def test_a_target_that_is_a_folder_keeps_no_half_of_a_file(case: Case) -> None:
    case.target.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        case.replace()
    assert list(case.scratch.iterdir()) == []


def test_a_file_that_is_there_stays(case: Case) -> None:
    assert link_bytes(b"first", case.target, case.scratch)
    assert not link_bytes(DATA, case.target, case.scratch)
    for way in (Case.move, Case.copy):
        with pytest.raises(FileExistsError):
            way(case)
    assert case.target.read_bytes() == b"first"
    assert list(case.scratch.iterdir()) == []
    case.replace()
    assert case.target.read_bytes() == DATA


def test_a_repeated_call_finds_its_own_link(case: Case) -> None:
    case.move()
    case.move()
    assert os.path.samefile(case.target, case.local)


def test_what_is_no_reason_to_copy_is_an_error(case: Case) -> None:
    case.forbid_links(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        case.move()
    assert not case.target.exists()


def test_a_scratch_file_is_no_finished_one_and_its_folder_comes_back(case: Case) -> None:
    stock = Path.touch
    lost = [0]

    def touch(path: Path, *, exist_ok: bool = True) -> None:
        if not lost[0]:  # another process removes the folder in between
            lost[0] += 1
            path.parent.rmdir()
        stock(path, exist_ok=exist_ok)

    case.monkeypatch.setattr(Path, "touch", touch)
    path = scratch_file(case.scratch)
    assert (lost[0], path.suffix, path.parent) == (1, ".part", case.scratch)
    assert path.read_bytes() == b""
    case.monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(hex=path.stem))
    with pytest.raises(FileExistsError):  # never the file of somebody else
        scratch_file(case.scratch)


def test_stale_files_go_and_those_of_live_writers_stay(case: Case) -> None:
    old, new = scratch_file(case.scratch), scratch_file(case.scratch)
    hour = time.time() - 3600
    os.utime(old, (hour, hour))
    remove_stale(case.scratch, 3700)
    assert old.exists()
    remove_stale(case.scratch, 3500)
    assert list(case.scratch.iterdir()) == [new]
    os.utime(new, (hour, hour))
    remove_stale(case.scratch, 3500)
    assert not case.scratch.exists()
    remove_stale(case.scratch, 3500)


def test_folders_that_were_made_and_are_empty_are_removed(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    made = missing_folders(root)
    assert [path.name for path in made[1:]] == ["b", "a"]
    made[0].mkdir(parents=True)
    assert made[0].parent == root
    (tmp_path / "a" / "file").touch()
    remove_empty(made)
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "file"]
    assert missing_folders(None) == []
