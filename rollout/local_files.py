"""Put finished files into place on a local file system, so that nobody sees half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rollout.schema.layout import SCRATCH_FOLDER

_TRIES: Final = 100


def scratch_file(folder: Path) -> Path:
    """Make an empty file for unfinished data, and its folder where it is missing.

    Its name does not end like that of a finished file, so that no glob picks it up.
    """
    for _ in range(_TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            path = folder / f"{uuid.uuid4().hex}.part"
            path.touch(exist_ok=False)
        except FileNotFoundError:
            # another process removed the empty folder in between
            continue
        return path
    raise FileNotFoundError(f"{folder}: removed as often as it was made")


def sync_file(path: Path) -> None:
    """Return once a file's data is on the disk; it takes no time where it is there already."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def link_bytes(data: bytes, target: Path, scratch: Path) -> bool:
    """Create a file with these bytes unless there is one.

    Args:
        data: all of the file.
        target: where; its folders are made.
        scratch: a folder on the same file system.

    Returns:
        Whether this call created it.
    """
    with _finished(data, scratch) as finished:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            # fails where a file exists, in one step
            os.link(finished, target)
        except FileExistsError:
            return False
    _sync_folder(target.parent)
    return True


def replace_bytes(data: bytes, target: Path, scratch: Path) -> None:
    """Write a file with these bytes, in place of the one that may be there.

    Args:
        data: all of the file.
        target: where; its folders are made.
        scratch: a folder on the same file system.
    """
    with _finished(data, scratch) as finished:
        target.parent.mkdir(parents=True, exist_ok=True)
        finished.replace(target)
    _sync_folder(target.parent)


def link_file(local: Path, target: Path, scratch: Path) -> None:
    """Give a finished file its name, without a copy when it is on the same file system.

    Args:
        local: the file; not to be written to afterwards.
        target: where; its folders are made.
        scratch: a folder on the target's file system.

    Raises:
        FileExistsError: there is another file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sync_file(local)
    try:
        os.link(local, target)
    except FileExistsError:
        # a repeated call finds its own link
        if not os.path.samefile(local, target):
            raise
    except OSError as error:
        # on another file system, or owned by somebody whose files may not be linked
        if error.errno not in (errno.EXDEV, errno.EPERM):
            raise
        _copy_and_link(local, target, scratch)
    _sync_folder(target.parent)


def remove_stale(folder: Path, seconds: float) -> None:
    """Remove the files in a folder that nobody wrote to for so long, then the folder if empty."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            if path.stat().st_mtime < time.time() - seconds:
                path.unlink()
    # fails while it holds a live writer's file
    with contextlib.suppress(OSError):
        folder.rmdir()


def _copy_and_link(local: Path, target: Path, scratch: Path) -> None:
    copy = scratch_file(scratch)
    try:
        shutil.copyfile(local, copy)
        sync_file(copy)
        os.link(copy, target)
    finally:
        copy.unlink(missing_ok=True)


@contextlib.contextmanager
def _finished(data: bytes, scratch: Path) -> Iterator[Path]:
    """Make a complete file with these bytes, on the disk for good; under this name it goes."""
    path = scratch_file(scratch)
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def missing_folders(root: Path | None) -> list[Path]:
    """List what writing below a folder would create, deepest first: scratch, folder, parents.

    Args:
        root: a dataset's folder; None for a storage that has none.
    """
    if root is None:
        return []
    return [path for path in (root / SCRATCH_FOLDER, root, *root.parents) if not path.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Remove folders that are empty; others, and such as are gone, stay as they are."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
