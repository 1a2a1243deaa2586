"""Prove that a storage does what a dataset needs of it, before anything expensive starts."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Protocol

from rollout.errors import DatasetError, OutputError
from rollout.local_files import remove_empty


class Writable(Protocol):
    """What is proved of a `rollout.storage.Storage`."""

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Create a file unless there is one."""

    def read_bytes(self, name: str) -> bytes:
        """Read one file whole."""

    def delete(self, name: str) -> None:
        """Delete a file."""


def prove_writable(url: str, storage: Writable, *, made: list[Path]) -> None:
    """Write a file, read it back, create it twice and delete it.

    Args:
        url: where it is, for messages.
        storage: tries each call once.
        made: folders that do not exist yet, removed again.

    Raises:
        OutputError: the first step that fails, and why.
    """
    name = f"_probe-{uuid.uuid4().hex}"
    first, second = uuid.uuid4().bytes, uuid.uuid4().bytes
    try:
        if not storage.create_exclusive(name, first):
            raise OutputError(f"output {url}: a new file is said to exist")
        if storage.read_bytes(name) != first:
            raise OutputError(f"output {url}: a file reads back with other bytes")
        if storage.create_exclusive(name, second) or storage.read_bytes(name) != first:
            raise OutputError(
                f"output {url}: creating a file that exists overwrites it: "
                "use a storage with conditional writes"
            )
        storage.delete(name)
    except (FileNotFoundError, DatasetError) as error:
        raise OutputError(f"output {url}: can't read what was written: {error}") from error
    finally:
        remove_empty(made)
