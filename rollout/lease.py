"""Leases on units, so that processes which share an output don't do the same work.

A lease saves work and nothing else: who commits what is decided by the commit records alone, so a
lease that is lost, late or taken by two costs a unit generated twice and never a wrong dataset.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollout.errors import RolloutError
from rollout.schema.layout import check_unit, lease_name
from rollout.storage import Storage

_log = logging.getLogger(__name__)

LEASE_SECONDS: Final = 120.0
_RENEWALS: Final = 4  # in the time of a lease, so that some may fail


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Who works on a unit, and until when."""

    owner: str
    expires_at: float
    """Seconds since the epoch, by the owner's clock."""
    process: str = ""
    """The owner's process, as `process_name` names it."""

    def over(self, now: float) -> bool:
        """Whether nobody works under it any more.

        Args:
            now: seconds since the epoch.
        """
        return self.expires_at <= now or has_died(self.process)


class Leases:
    """The leases of one process; may be used from several threads."""

    def __init__(
        self,
        storage: Storage,
        *,
        seconds: float = LEASE_SECONDS,
        owner: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Start with none.

        Args:
            storage: the dataset's.
            seconds: how long a lease holds after it is taken or renewed; more than clocks differ.
            owner: who this is, for others to read; default: host, process and a random word.
            clock: seconds since the epoch.
        """
        self._storage = storage
        self.seconds = seconds
        """How long a lease holds."""
        self._clock = clock
        self.owner = owner or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        """Who this is."""
        self._held: dict[str, float] = {}
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> frozenset[str]:
        """The units whose lease this process took and has not released."""
        return frozenset(self._held)

    def acquire(self, unit: str) -> bool:
        """Take a unit's lease if it is free or has expired.

        Returns:
            Whether this process holds it now.

        Raises:
            DatasetError: the storage can't be read.
            OutputError: the storage can't be written.
        """
        check_unit(unit)
        with self._lock:
            now = self._clock()
            other = self.holder(unit)
            if other is not None and other.owner != self.owner:
                if not other.over(now):
                    return False
                _log.info("unit %s: taking over from %s", unit, other.owner)
                self._storage.delete(lease_name(unit))
            elif other is not None:
                self._write(unit, now)
                return True
            if not self._storage.create_exclusive(lease_name(unit), self._lease(now)):
                return False
            self._held[unit] = now
            return True

    def is_free(self, unit: str) -> bool:
        """Whether nobody works on a unit, this process included.

        Raises:
            DatasetError: the storage can't be read.
        """
        found = self.holder(unit)
        return found is None or found.over(self._clock())

    def renew(self) -> None:
        """Extend the leases that are past a third of their time; call it now and then.

        A lease that another process took meanwhile is dropped from `held`.
        """
        for unit in list(self._held):
            with self._lock:
                now = self._clock()
                since = self._held.get(unit)
                if since is None or now - since < self.seconds / 3:
                    continue
                other = self.holder(unit)
                if other is not None and other.owner != self.owner:
                    del self._held[unit]
                else:
                    self._write(unit, now)

    def release(self, unit: str) -> None:
        """Give a lease back; one that is not held any more is left alone.

        What can't be given back expires: an output that is out for so long is no error here.
        """
        try:
            self._give_back(unit)
        except RolloutError as error:
            _log.warning("unit %s: its lease is left to expire: %s", unit, error)

    def start_renewing(self) -> None:
        """Renew from a thread until `close`: the job may be busy for longer than a lease holds."""
        self._thread = threading.Thread(target=self._renew, name="rollout-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and give every lease back; what can't be given back expires."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        for unit in list(self._held):
            try:
                self._give_back(unit)
            except RolloutError as error:
                _log.warning("unit %s: its lease is left to expire: %s", unit, error)
                return

    def _renew(self) -> None:
        while not self._ended.wait(self.seconds / _RENEWALS):
            try:
                self.renew()
            except RolloutError as error:
                # others may take the units: work done twice, nothing lost
                _log.warning("leases can't be renewed: %s", error)

    def holder(self, unit: str) -> Lease | None:
        """Read who holds a unit's lease, expired or not; None where nobody does.

        Raises:
            DatasetError: the storage can't be read, which says nothing of the lease.
        """
        try:
            data = self._storage.read_bytes(lease_name(unit))
        except FileNotFoundError:
            return None
        try:
            raw = json.loads(data)
            return Lease(
                owner=str(raw["owner"]),
                expires_at=float(raw["expires_at"]),
                process=str(raw.get("process", "")),
            )
        except (ValueError, KeyError, TypeError):
            # not readable as a lease: treated as one that expired long ago
            return Lease(owner="unknown", expires_at=0.0)

    def _give_back(self, unit: str) -> None:
        with self._lock:
            self._held.pop(unit, None)
            other = self.holder(unit)
            if other is not None and other.owner == self.owner:
                self._storage.delete(lease_name(unit))

    def _write(self, unit: str, now: float) -> None:
        self._storage.write_bytes(lease_name(unit), self._lease(now))
        self._held[unit] = now

    def _lease(self, now: float) -> bytes:
        lease: dict[str, Any] = {
            "owner": self.owner,
            "expires_at": now + self.seconds,
            "process": process_name(),
        }
        return json.dumps(lease).encode()


def process_name(pid: int | None = None) -> str:
    """Name a process of this machine, differently from every other one ever.

    Args:
        pid: its id; default: this process.

    Returns:
        Boot, process namespace, id and start time; empty where the system does not tell, and for a
        process that has ended and is not waited for yet.
    """
    pid = os.getpid() if pid is None else pid
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # the name of a program may hold anything, so count from behind its bracket
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        started = state[19]
        if state[0] in "ZX":
            return ""
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {pid} {started}"
    except (OSError, IndexError):
        return ""


def has_died(process: str) -> bool:
    """Whether a process is known to have ended: only one of this boot and namespace can be."""
    words = process.split(" ")
    if len(words) != 4 or not words[2].isdigit():
        return False
    own = process_name().split(" ")
    return own[:2] == words[:2] and process_name(int(words[2])) != process
