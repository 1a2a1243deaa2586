"""A local folder of fetched row groups, bounded in bytes and shared by any number of processes."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid
from pathlib import Path
from typing import Final

from blake3 import blake3

from rollout.errors import ConfigError

_log = logging.getLogger(__name__)

_OWN_NAME: Final = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{32}\.part)?")
# what a process adds between two looks at the folder, as a part of the bound
_BLIND_PART: Final = 64
_STALE_SECONDS: Final = 3600


class RowGroupCache:
    """Row groups by their digest; what was not used for longest goes first.

    Files appear whole, and are compared with their digest whenever they are read. Other files in
    the folder are left alone.

    Args:
        folder: made where it is missing.
        max_bytes: most bytes of all files. Several processes may exceed it for a while, each by
            1/64 of it.

    Raises:
        ConfigError: the folder can't be made.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._room = 0
        self._lock = threading.Lock()
        self._writes = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"cache_folder {folder} can't be made: {reason}") from error

    def get(self, digest: str) -> bytes | None:
        """Return a row group, or None; a damaged one is removed."""
        path = self._folder / digest
        try:
            data = path.read_bytes()
            # the order of use is the order of these times
            os.utime(path)
        except FileNotFoundError:
            return None
        if blake3(data).hexdigest() == digest:
            return data
        path.unlink(missing_ok=True)
        return None

    def put(self, digest: str, data: bytes | memoryview) -> None:
        """Keep a row group, after making room for it; one larger than the bound is not kept."""
        with self._lock:
            if not self._writes or len(data) > self._max_bytes:
                return
            try:
                if len(data) > self._room:
                    self._make_room(len(data))
                self._room -= len(data)
                part = self._folder / f"{digest}.{uuid.uuid4().hex}.part"
                part.write_bytes(data)
                part.replace(self._folder / digest)
            except OSError as error:
                self._writes = False
                _log.warning("cache_folder %s: no longer written to: %s", self._folder, error)

    def _make_room(self, size: int) -> None:
        """Remove the files that were not used for longest until so many bytes fit."""
        found = []
        for entry in os.scandir(self._folder):
            if _OWN_NAME.fullmatch(entry.name):
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                found.append((status.st_mtime_ns, status.st_size, entry.path))
        found.sort()
        used = sum(length for _, length, _ in found)
        blind = max(size, self._max_bytes // _BLIND_PART)
        stale = time.time_ns() - _STALE_SECONDS * 10**9
        for changed, length, path in found:
            # what another process is writing now is counted and left alone
            part = path.endswith(".part")
            if part and changed > stale:
                continue
            if not part and used + blind <= self._max_bytes:
                continue
            Path(path).unlink(missing_ok=True)
            used -= length
        self._room = min(blind, self._max_bytes - used)
