"""An object store in memory that fails on demand, for fsspec as `fakestore://`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem


class ClientError(Exception):
    """Like botocore's: no OSError, with the server's answer attached."""

    def __init__(self, code: str) -> None:
        super().__init__(f"An error occurred ({code})")
        self.response = {"Error": {"Code": code}}


# the storage tells a client's errors by where their class comes from
ClientError.__module__ = "botocore.exceptions"


class FakeStore(AbstractFileSystem):  # type: ignore[misc]
    """Flat objects, conditional puts, and listings that stay stale until invalidated."""

    protocol = "fakestore"
    objects: ClassVar[dict[str, bytes]] = {}
    fail: ClassVar[Callable[[str, str], None] | None] = None
    """Called with the operation and the path before each one; raises to make it fail."""
    after_put: ClassVar[Callable[[str], None] | None] = None
    """Called after a put took effect; raises to lose its answer."""
    overwrites: ClassVar[bool] = False
    """Ignore the condition of a conditional put."""
    connections: ClassVar[int] = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._listings: dict[str, list[dict[str, Any]]] = {}
        type(self).connections += 1

    @classmethod
    def reset(cls) -> None:
        """Empty the store and let everything succeed."""
        cls.objects.clear()
        cls.fail = cls.after_put = None
        cls.overwrites = False
        cls.connections = 0
        cls.clear_instance_cache()

    def _enter(self, operation: str, path: str) -> str:
        path = self._strip_protocol(path)
        fail = type(self).fail
        if fail is not None:
            fail(operation, path)
        return path

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        path = self._enter("put", path)
        if mode == "create" and path in self.objects and not self.overwrites:
            raise ClientError("PreconditionFailed")
        self.objects[path] = bytes(value)
        after = type(self).after_put
        if after is not None:
            after(path)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        with open(lpath, "rb") as file:
            self.pipe_file(rpath, file.read())

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        path = self._enter("get", path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._enter("head", path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.objects[path]), "type": "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._enter("list", path)
        if path not in self._listings:
            inside = [name for name in self.objects if name.startswith(path + "/")]
            if not inside:
                raise FileNotFoundError(path)
            self._listings[path] = [
                {"name": name, "size": len(self.objects[name]), "type": "file"}
                if "/" not in name[len(path) + 1 :]
                else {"name": name.rsplit("/", 1)[0], "size": 0, "type": "directory"}
                for name in inside
            ]
        found = self._listings[path]
        return found if detail else [item["name"] for item in found]

    def invalidate_cache(self, path: str | None = None) -> None:
        self._listings.clear()

    def rm_file(self, path: str) -> None:
        path = self._enter("delete", path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        del self.objects[path]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> io.BytesIO:
        assert mode == "rb"
        assert options.get("cache_type") == "none"
        return io.BytesIO(self.cat_file(path))


class LockedStore(FakeStore):
    """Connects as soon as it is made, and to who has the key."""

    protocol = "lockedstore"
    KEY = "k3y-of-the-store"
    refusals: ClassVar[list[Exception]] = []
    """What the next connections end with."""

    def __init__(self, key: str = "", **options: Any) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        if key != self.KEY:
            raise PermissionError(f"{key!r} is no key")
        super().__init__(key=key, **options)


fsspec.register_implementation("fakestore", FakeStore, clobber=True)
fsspec.register_implementation("lockedstore", LockedStore, clobber=True)
