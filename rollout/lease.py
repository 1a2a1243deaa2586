"""Leases on units, so that processes which share an output don't do the same work.

A lease saves work and nothing else: who commits what is decided by the commit records alone, so a
lease that is lost, late or taken by two costs a unit generated twice and never a wrong dataset.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rollout.schema.layout import check_unit, lease_name
from rollout.storage import Storage

LEASE_SECONDS: Final = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Who works on a unit, and until when."""

    owner: str
    expires_at: float
    """Seconds since the epoch, by the owner's clock."""


class Leases:
    """The leases of one process."""

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
        self._seconds = seconds
        self._clock = clock
        self.owner = owner or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        """Who this is."""
        self._held: dict[str, float] = {}

    @property
    def held(self) -> frozenset[str]:
        """The units whose lease this process took and has not released."""
        return frozenset(self._held)

    def acquire(self, unit: str) -> bool:
        """Take a unit's lease if it is free or has expired.

        Returns:
            Whether this process holds it now.

        Raises:
            OutputError: the storage can't be written.
        """
        check_unit(unit)
        now = self._clock()
        other = self.holder(unit)
        if other is not None and other.owner != self.owner:
            if other.expires_at > now:
                return False
            self._storage.delete(lease_name(unit))
        elif other is not None:
            self._write(unit, now)
            return True
        if not self._storage.create_exclusive(lease_name(unit), self._lease(now)):
            return False
        self._held[unit] = now
        return True

    def renew(self) -> None:
        """Extend the leases that are past a third of their time; call it now and then.

        A lease that another process took meanwhile is dropped from `held`.
        """
        now = self._clock()
        for unit, since in list(self._held.items()):
            if now - since < self._seconds / 3:
                continue
            other = self.holder(unit)
            if other is not None and other.owner != self.owner:
                del self._held[unit]
            else:
                self._write(unit, now)

    def release(self, unit: str) -> None:
        """Give a lease back; one that is not held any more is left alone."""
        self._held.pop(unit, None)
        other = self.holder(unit)
        if other is not None and other.owner == self.owner:
            self._storage.delete(lease_name(unit))

    def holder(self, unit: str) -> Lease | None:
        """Read who holds a unit's lease, expired or not; None where nobody does."""
        try:
            raw = json.loads(self._storage.read_bytes(lease_name(unit)))
            return Lease(owner=str(raw["owner"]), expires_at=float(raw["expires_at"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            # not readable as a lease: treated as one that expired long ago
            return Lease(owner="unknown", expires_at=0.0)

    def _write(self, unit: str, now: float) -> None:
        self._storage.write_bytes(lease_name(unit), self._lease(now))
        self._held[unit] = now

    def _lease(self, now: float) -> bytes:
        return json.dumps({"owner": self.owner, "expires_at": now + self._seconds}).encode()
