"""What a dataset's plan and records say of every prompt, in some 20 bytes each."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final

from rollout.key_table import Column, KeyTable

_SET_ASIDE: Final = 1
_SET_ASIDE_SINCE: Final = 2


class Ledger:
    """The unit of each prompt, its committed samples, and whether it was set aside.

    Prompts go by their number in `keys`; may be used from several threads.
    """

    def __init__(self) -> None:
        """Start with nothing planned."""
        self.keys = KeyTable()
        """Every key that was seen; also those that have no unit."""
        self.units: list[str] = []
        """Names of the units, in order of first appearance."""
        self.num_planned = 0
        """Prompts that have a unit."""
        self.num_covered = 0
        """Rollouts that are committed."""
        self._lock = threading.RLock()
        self._unit_numbers: dict[str, int] = {}
        self._unit = Column()  # 1 + index into units; 0 without one
        self._first_missing = Column()  # samples below it are committed
        self._beyond: dict[int, int] = {}  # committed samples from there on, as bits
        self._flags = Column()
        self._samples_set_aside: set[tuple[int, int]] = set()

    def numbers(self, keys: Sequence[str]) -> list[int]:
        """Number keys, also new ones."""
        with self._lock:
            numbers: list[int] = self.keys.add(keys).tolist()
            return numbers

    def plan(self, keys: Sequence[str], units: Sequence[str]) -> int:
        """Give prompts their units; one that has a unit keeps it.

        Returns:
            How many had none.
        """
        new = 0
        with self._lock:
            for number, unit in zip(self.numbers(keys), units, strict=True):
                if self._unit[number] == 0:
                    if unit not in self._unit_numbers:
                        self.units.append(unit)
                        self._unit_numbers[unit] = len(self.units)
                    self._unit[number] = self._unit_numbers[unit]
                    new += 1
            self.num_planned += new
        return new

    def unit_of(self, number: int) -> str | None:
        """Return a prompt's unit; None if it has none."""
        index = self._unit[number]
        return self.units[index - 1] if index else None

    def units_of(self, keys: Sequence[str]) -> list[str | None]:
        """Return the units of prompts by key; None where there is none."""
        with self._lock:
            found: list[int] = self.keys.find(keys).tolist()
        return [None if number < 0 else self.unit_of(number) for number in found]

    def cover(self, keys: Sequence[tuple[str, int]]) -> int:
        """Note committed rollouts.

        Args:
            keys: (prompt_key, sample_index) of each.

        Returns:
            How many were noted before.
        """
        repeated = 0
        with self._lock:
            for number, (_, sample) in zip(
                self.numbers([key for key, _ in keys]), keys, strict=True
            ):
                repeated += not self._cover(number, sample)
            self.num_covered += len(keys) - repeated
        return repeated

    def covers(self, number: int, sample: int) -> bool:
        """Whether a rollout is committed."""
        with self._lock:
            first = self._first_missing[number]
            return sample < first or bool(self._beyond.get(number, 0) >> (sample - first) & 1)

    def num_samples(self, number: int) -> int:
        """Count a prompt's committed rollouts."""
        with self._lock:
            return self._first_missing[number] + self._beyond.get(number, 0).bit_count()

    def missing(self, number: int, samples: int) -> list[int]:
        """List which of a prompt's first samples are not committed."""
        with self._lock:
            first = self._first_missing[number]
            beyond = self._beyond.get(number, 0)
            return [i for i in range(first, samples) if not beyond >> (i - first) & 1]

    def set_aside(self, keys: Iterable[tuple[str, int | None]], *, since: bool = False) -> None:
        """Note what is recorded as set aside.

        Args:
            keys: prompt_key, and sample_index or None for the whole prompt.
            since: whether another writer recorded it while this one was at work.
        """
        listed = list(keys)
        with self._lock:
            for number, (_, sample) in zip(
                self.numbers([key for key, _ in listed]), listed, strict=True
            ):
                if sample is None:
                    flag = _SET_ASIDE | (_SET_ASIDE_SINCE if since else 0)
                    self._flags[number] = self._flags[number] | flag
                elif since:
                    self._samples_set_aside.add((number, sample))

    def is_set_aside(self, number: int) -> bool:
        """Whether a whole prompt is recorded as set aside."""
        return bool(self._flags[number] & _SET_ASIDE)

    def set_aside_since(self, number: int, sample: int | None = None) -> bool:
        """Whether another writer set aside a rollout, or a whole prompt, while this one worked."""
        if sample is None:
            return bool(self._flags[number] & _SET_ASIDE_SINCE)
        return (number, sample) in self._samples_set_aside

    def _cover(self, number: int, sample: int) -> bool:
        first = self._first_missing[number]
        if sample < first:
            return False
        beyond = self._beyond.pop(number, 0)
        bit = 1 << (sample - first)
        known = bool(beyond & bit)
        beyond |= bit
        # the samples that follow without a hole
        run = ((beyond + 1) & ~beyond).bit_length() - 1
        if run:
            self._first_missing[number] = first + run
            beyond >>= run
        if beyond:
            self._beyond[number] = beyond
        return not known
