"""The only place where files are touched through fsspec: local, memory, or an object store.

What a dataset needs of a storage: whole objects written in one go, a file created only if it does
not exist, fresh listings, and no renames. Local files are finished under another name and linked
into place; object stores are asked for a conditional put.
"""

from __future__ import annotations

import io
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import fsspec
import tenacity
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from rollout.errors import DatasetError, OutputError
from rollout.local_files import (
    link_bytes,
    link_file,
    missing_folders,
    remove_stale,
    replace_bytes,
)
from rollout.redact import public_url
from rollout.schema.layout import SCRATCH_FOLDER
from rollout.storage_errors import explain, is_storage_error, repeat, says_exists
from rollout.storage_probe import prove_writable

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_ErrorClass = type[OutputError] | type[DatasetError]
RETRY_SECONDS: Final = 300.0

# protocols whose create-only put is decided by the server, not by a look before the write
_CONDITIONAL_PUT: Final = frozenset({"s3", "s3a", "gs", "gcs"})
_MEMORY_LOCK: Final = threading.RLock()
_STALE_SCRATCH_SECONDS: Final = 3600.0


class Storage:
    """One folder on any fsspec storage; names are relative to it and use `/`.

    Use `Storage.open`. Options may hold secrets: they are never shown, logged or written.
    """

    def __init__(self, url: str, options: dict[str, Any], retry_seconds: float) -> None:
        self._options = options
        self._retry_seconds = retry_seconds
        self._full_url = url
        self.given_up = threading.Event()
        """Once set, no call waits to be tried again."""
        self._answered = False
        self._connect(fresh=False)
        self.url = public_url(url)
        """Where it is, for messages."""

    @classmethod
    def open(
        cls,
        url: str | Path,
        options: dict[str, Any] | None = None,
        *,
        retry_seconds: float = RETRY_SECONDS,
    ) -> Storage:
        """Open a folder; nothing is read or written.

        Args:
            url: a local path or a URL; brackets, spaces and unicode are plain characters.
            options: keyword arguments of the fsspec filesystem.
            retry_seconds: how long a failing call is repeated.

        Raises:
            OutputError: no such protocol, its package is not installed, or it takes no connection.
        """
        try:
            return cls(str(url), dict(options or {}), retry_seconds)
        except Exception as error:
            wrong = isinstance(error, (ImportError, ValueError, TypeError))
            if not wrong and not is_storage_error(error):
                raise
            raise OutputError(
                f"storage {public_url(str(url))!r}: {explain(error, dict(options or {}))}"
            ) from error

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # a worker process connects anew: connections and locks do not survive the way
        return type(self), (self._full_url, self._options, self._retry_seconds)

    @property
    def local_root(self) -> Path | None:
        """The folder itself, when it is on this machine's file system."""
        return Path(self._root) if isinstance(self._fs, LocalFileSystem) else None

    @property
    def exclusive(self) -> bool:
        """Whether `create_exclusive` holds between processes."""
        return self.local_root is not None or bool(_CONDITIONAL_PUT & set(self._protocols()))

    @property
    def outlives_process(self) -> bool:
        """Whether what is written is there after this process has ended."""
        return not self._in_memory()

    @property
    def identity(self) -> str:
        """Where it is, spelled the same however a job names it, and without secrets."""
        root = self.local_root
        return self.url if root is None else str(root.resolve())

    def scratch_folder(self) -> Path:
        """A local folder for unfinished files, which may not exist yet.

        On local storage it is on the same file system as the data, so that finished files are
        linked and not copied.
        """
        root = self.local_root
        if root is None:
            return Path(tempfile.gettempdir())
        return root / SCRATCH_FOLDER

    def arrow_filesystem(self) -> tuple[Any, str]:
        """Give pyarrow this storage: its filesystem, and the folder's path on it."""
        from pyarrow.fs import FSSpecHandler, PyFileSystem

        return PyFileSystem(FSSpecHandler(self._fs)), self._root

    def read_bytes(self, name: str) -> bytes:
        """Read one file whole.

        Raises:
            FileNotFoundError: there is none.
            DatasetError: it can't be read.
        """
        return self._read(name)

    def read_range(self, name: str, start: int, size: int) -> bytes:
        """Read consecutive bytes of a file in one request; fewer where it ends earlier.

        Raises:
            FileNotFoundError: there is none.
            DatasetError: it can't be read.
        """
        return self._read(name, start=start, end=start + size)

    def read_many(self, names: Sequence[str]) -> Sequence[bytes | BaseException]:
        """Ask once for small files, side by side; an error stands in its file's place."""
        paths = [self._path(name) for name in names]
        with self._guard():
            # from the first byte on: reading whole files asks an object store for sizes first
            found: Sequence[bytes | BaseException] = self._fs.cat_ranges(paths, 0, None)
        return found

    def local_or_stream(self, name: str) -> str | IO[bytes]:
        """Give a reader the file's local path, or a stream that fetches only what is asked for.

        Raises:
            FileNotFoundError: there is none.
            DatasetError: it can't be opened.
        """
        if self.local_root is not None:
            path = self._path(name)
            if not os.path.isfile(path):
                raise FileNotFoundError(path)
            return path
        if self._in_memory():
            # memory:// hands every reader the same object, position included
            return io.BytesIO(self.read_bytes(name))

        def stream() -> IO[bytes]:
            file: IO[bytes] = self._fs.open(self._path(name), "rb", cache_type="none")
            return file

        return self._call("open", name, stream, DatasetError)

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Create a file unless there is one; nobody ever sees a part of it.

        On an object store the data should be the caller's alone (hold a random word): a put whose
        answer got lost is repeated, and is told from another writer's by what the file holds.

        Returns:
            Whether this call created it.

        Raises:
            OutputError: it can't be written.
        """
        if self.local_root is not None:
            target = Path(self._path(name))
            scratch = self.scratch_folder()
            return self._call(
                "create", name, lambda: link_bytes(data, target, scratch), OutputError
            )
        return self._call("create", name, lambda: self._put_if_absent(name, data), OutputError)

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file in one put, replacing what is there.

        Raises:
            OutputError: it can't be written.
        """

        def write() -> None:
            if self.local_root is None:
                with self._guard():
                    self._fs.pipe_file(self._path(name), data)
                return
            replace_bytes(data, Path(self._path(name)), self.scratch_folder())

        self._call("write", name, write, OutputError)

    def put_file(self, local: Path, name: str) -> None:
        """Upload a finished local file in one put, under a name that is in no use.

        On local storage the file is linked when it can be: don't write to it afterwards.

        Raises:
            OutputError: it can't be written, or arrived with another size.
        """
        size = local.stat().st_size

        def put() -> None:
            if self.local_root is not None:
                link_file(local, Path(self._path(name)), self.scratch_folder())
            elif self._in_memory():
                with self._guard():
                    self._fs.pipe_file(self._path(name), local.read_bytes())
            else:
                self._fs.put_file(str(local), self._path(name))
                self._fs.invalidate_cache()
            if (got := int(self._fs.info(self._path(name))["size"])) != size:
                raise OSError(f"{got} bytes arrived, expected {size}")

        self._call("write", name, put, OutputError)

    def list(self, folder: str) -> list[str]:
        """Name the files directly in a folder, sorted; see `sizes`."""
        return sorted(self.sizes(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """Name the files directly in a folder with their bytes; none where there is no folder.

        Raises:
            DatasetError: it can't be listed.
        """

        def listed() -> dict[str, int]:
            # another process may have written since the listing was cached
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return {}
            files = (item for item in found if item["type"] == "file")
            names = {str(item["name"]).rsplit("/", 1)[-1]: item["size"] for item in files}
            return {name: int(size or 0) for name, size in names.items() if name}

        return self._call("list", folder, listed, DatasetError)

    def size(self, name: str) -> int | None:
        """Ask for a file's bytes, past any cache; None where there is no file.

        Raises:
            DatasetError: the storage does not answer.
        """

        def look() -> int | None:
            self._fs.invalidate_cache()
            try:
                return int(self._fs.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

        return self._call("look for", name, look, DatasetError)

    def delete(self, name: str) -> None:
        """Delete a file; one that is gone already is fine.

        Raises:
            OutputError: it can't be deleted.
        """

        def remove() -> None:
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                return
            finally:
                self._fs.invalidate_cache()

        self._call("delete", name, remove, OutputError)

    def probe(self) -> None:
        """Prove that a dataset can be written here: write, read back, create twice, delete.

        Run it before anything expensive starts; it does not retry and leaves nothing behind.

        Raises:
            OutputError: the first step that fails, and why.
        """
        prove_writable(
            self.url,
            Storage(self._full_url, self._options, 0.0),
            made=missing_folders(self.local_root),
        )
        if not self.exclusive and not self._in_memory():
            _log.warning(
                "output %s: its storage can't promise exclusive writes, use one process only",
                self.url,
            )

    def remove_stale_scratch(self) -> None:
        """Remove what killed writers left in the scratch folder of a local storage."""
        if self.local_root is not None:
            remove_stale(self.local_root / SCRATCH_FOLDER, _STALE_SCRATCH_SECONDS)

    def _connect(self, *, fresh: bool) -> None:
        self._fs, root = fsspec.core.url_to_fs(
            self._full_url, **self._options, **({"skip_instance_cache": True} if fresh else {})
        )
        self._root = root.rstrip("/")
        self._connect_anew = False

    def _protocols(self) -> tuple[str, ...]:
        protocol = self._fs.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    def _guard(self) -> AbstractContextManager[object]:
        # memory:// is one store per process, and its create looks before it writes
        return _MEMORY_LOCK if self._in_memory() else nullcontext()

    def _in_memory(self) -> bool:
        return isinstance(self._fs, MemoryFileSystem)

    def _path(self, name: str) -> str:
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"name {name!r}: expected one inside the folder")
        return f"{self._root}/{name}" if name else self._root

    def _read(self, name: str, **limits: int) -> bytes:
        def read() -> bytes:
            with self._guard():
                return bytes(self._fs.cat_file(self._path(name), **limits))

        return self._call("read", name, read, DatasetError)

    def _put_if_absent(self, name: str, data: bytes) -> bool:
        with self._guard():
            try:
                self._fs.pipe_file(self._path(name), data, mode="create")
            except Exception as error:
                if not says_exists(error):
                    raise
                if self._in_memory():
                    return False
                # a put that arrived before its answer got lost finds itself
                return bool(self._fs.cat_file(self._path(name)) == data)
            return True

    def _call(
        self,
        what: str,
        name: str,
        function: Callable[[], _Result],
        error_class: _ErrorClass,
    ) -> _Result:
        """Run one storage call, repeat it while that may help, and say what failed."""

        def before_sleep(state: tenacity.RetryCallState) -> None:
            reason = explain(state.outcome.exception() if state.outcome else None, self._options)
            _log.warning("storage %s: can't %s %s, trying again: %s", self.url, what, name, reason)
            # picks up credentials that were renewed meanwhile
            self._connect_anew = self.local_root is None and not self._in_memory()

        def attempt() -> _Result:
            if self._connect_anew:
                self._connect(fresh=True)
            result = function()
            self._answered = True
            return result

        try:
            return repeat(attempt, self._retry_seconds, self.given_up, before_sleep, self._answered)
        except Exception as error:
            missing = isinstance(error, FileNotFoundError) and error_class is DatasetError
            if missing or not is_storage_error(error):
                raise
            message = f"storage {self.url}: can't {what} {name}: {explain(error, self._options)}"
            raise error_class(message) from error
