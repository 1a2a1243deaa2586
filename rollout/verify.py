"""`rollout verify`: is every byte, row and record of a dataset as it was committed, and all there?

One row group is in memory at a time, and a few bytes for each prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rollout.commits import commit_names, find_record, parse_commit, read_ahead
from rollout.errors import DamagedError, DatasetError, IncompleteError
from rollout.key_table import Column
from rollout.ledger import Ledger
from rollout.rows import RolloutRow
from rollout.schema import layout
from rollout.schema.records import CommitRecord, DatasetRecord, fingerprint_of
from rollout.sidecars import read_plan, read_rejected
from rollout.storage import Storage
from rollout.verify_record import check_record
from rollout.verify_shard import check_bytes, checked_rows

VERIFY_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One file that is not what it should be."""

    file: str
    """Relative to the dataset's folder."""
    problem: str


@dataclass(kw_only=True, slots=True)
class VerifyReport:
    """What a check of a dataset came to."""

    url: str
    rows_checked: bool
    """Whether the rows were decoded; else only bytes were compared."""
    parts: int = 0
    shards: int = 0
    rollouts: int = 0
    tokens: int = 0
    entries: int = 0
    prompts_planned: int = 0
    prompts_rejected: int = 0
    rollouts_failed: int = 0
    rollouts_missing: int = 0
    """Of the planned prompts, those neither committed nor set aside."""
    leftovers: int = 0
    """Files that no record names: of a running or a killed job; a further run removes them."""
    faults: list[Fault] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {"verify_version": VERIFY_VERSION} | asdict(self)

    def text(self) -> str:
        """Return lines for people, one for each fault."""
        done = "every row checked" if self.rows_checked else "bytes compared, rows not decoded"
        lines = [
            f"{self.url}: {done}",
            f"{self.shards} shard{'s' * (self.shards != 1)}, {self.rollouts} rollouts, "
            f"{self.tokens} tokens, {self.entries} support entries",
            f"{self.prompts_planned} prompts planned, {self.prompts_rejected} rejected, "
            f"{self.rollouts_failed} rollouts failed, {self.rollouts_missing} missing",
        ]
        if self.leftovers:
            lines.append(f"{self.leftovers} files that no record names: a further run removes them")
        lines += [f"DAMAGED {fault.file}: {fault.problem}" for fault in self.faults]
        return "\n".join(lines if self.faults else [*lines, "no damage"])

    def check(self) -> None:
        """Raise where the dataset is not whole.

        Raises:
            DamagedError: a file is damaged or missing.
            IncompleteError: all files are whole, but rollouts are missing.
        """
        if self.faults:
            names = ", ".join(fault.file for fault in self.faults[:3])
            more = f" and {len(self.faults) - 3} more" if len(self.faults) > 3 else ""
            raise DamagedError(f"{self.url}: damaged: {names}{more}: copy the dataset again")
        if self.rollouts_missing:
            raise IncompleteError(
                f"{self.url}: {self.rollouts_missing} rollouts are missing: run the job again"
            )


def verify_dataset(storage: Storage, *, rows: bool = True) -> VerifyReport:
    """Check a dataset completely.

    Args:
        storage: its folder.
        rows: decode the rows too, which takes longer than to compare bytes.

    Raises:
        DatasetError: not a dataset, of a newer format, or the storage can't be read.
    """
    record = find_record(storage)
    if record is None:
        raise DatasetError(
            f"{storage.url} is not a dataset: there is no {layout.DATASET_FILE} in it"
        )
    return _Verification(storage, record, rows).run()


class _Verification:
    """One check of one dataset."""

    def __init__(self, storage: Storage, record: DatasetRecord, rows: bool) -> None:
        self._storage = storage
        self._record = record
        self._rows = rows
        self._ledger = Ledger()
        self._asked = Column()
        self._failed: dict[int, int] = {}  # samples set aside, as bits
        self._report = VerifyReport(url=storage.url, rows_checked=rows)
        self._plan_whole = True

    def run(self) -> VerifyReport:
        """Check one thing after the other."""
        if fingerprint_of(self._record.fingerprint_inputs) != self._record.fingerprint:
            self._fault(layout.DATASET_FILE, "its fingerprint is not that of its inputs")
        self._check_plan()
        # before the records: what a running job commits meanwhile is no leftover
        there = {
            f"{folder}/{base}"
            for folder in (layout.DATA_FOLDER, layout.REJECTED_FOLDER)
            for base in self._storage.list(folder)
        }
        for name, commit in self._commits():
            self._check_part(name, commit)
            there -= {str(commit.file), str(commit.rejected_file)}
        self._report.leftovers = len(there)
        self._count()
        return self._report

    def _fault(self, file: str, problem: object) -> None:
        self._report.faults.append(Fault(file=file, problem=" ".join(str(problem).split())))

    def _check_plan(self) -> None:
        numbers = [layout.parse_plan(base) for base in self._storage.list(layout.PLAN_FOLDER)]
        highest = max((number for number in numbers if number is not None), default=-1)
        names = [layout.plan_name(number) for number in range(highest + 1)]
        for name, data in read_ahead(self._storage, names):
            try:
                if isinstance(data, Exception):
                    raise data
                entries = read_plan(data, name)  # every column, also those that no count needs
            except FileNotFoundError:
                self._plan_whole = False
                self._fault(name, "is missing although later ones exist")
            except DatasetError as error:
                self._plan_whole = False
                self._fault(name, error)
            else:
                self._ledger.plan(
                    [entry.prompt_key for entry in entries], [entry.unit for entry in entries]
                )
        self._report.prompts_planned = self._ledger.num_planned

    def _commits(self) -> Iterator[tuple[str, CommitRecord]]:
        """Yield the records that can be read and agree with themselves."""
        for name, data in read_ahead(self._storage, commit_names(self._storage)):
            self._report.parts += 1
            try:
                if isinstance(data, Exception):
                    raise data
                commit = parse_commit(self._storage, name, data)
            except FileNotFoundError:
                self._fault(name, "is missing although later parts exist")
                continue
            except DatasetError as error:
                self._fault(name, error)
                continue
            problem = check_record(name, commit)
            if problem is not None:
                self._fault(name, problem)
                continue
            yield name, commit

    def _check_part(self, name: str, commit: CommitRecord) -> None:
        repeated = self._ledger.cover(commit.keys)
        if repeated:
            self._fault(name, f"{repeated} of its rollouts are in an earlier record too")
        units = self._ledger.units_of(commit.row_prompts)
        strangers = sum(unit != commit.unit for unit in units)
        if strangers and self._plan_whole:
            self._fault(name, f"{strangers} of its rollouts are not planned for {commit.unit}")
        if commit.file is not None:
            self._report.shards += 1
            try:
                self._check_shard(commit)
            except DatasetError as error:
                self._fault(commit.file, error)
            except FileNotFoundError:
                self._fault(commit.file, "went missing meanwhile")
        self._check_rejected(commit)

    def _check_shard(self, commit: CommitRecord) -> None:
        check_bytes(self._storage, commit)
        if self._rows:
            for rows in checked_rows(self._storage, commit, self._record.fingerprint):
                self._note_sizes(rows)
        self._report.rollouts += commit.rows
        self._report.tokens += commit.tokens
        self._report.entries += commit.entries

    def _note_sizes(self, rows: Iterable[RolloutRow]) -> None:
        listed = list(rows)
        numbers = self._ledger.numbers([row.prompt_key for row in listed])
        for row, number in zip(listed, numbers, strict=True):
            self._asked[number] = max(self._asked[number], row.group_size)

    def _check_rejected(self, commit: CommitRecord) -> None:
        if commit.rejected_file is not None:
            try:
                data = self._storage.read_bytes(commit.rejected_file)
                keys = tuple(item.key for item in read_rejected(data, commit.rejected_file))
            except FileNotFoundError:
                self._fault(commit.rejected_file, "is missing")
            except DatasetError as error:
                self._fault(commit.rejected_file, error)
            else:
                if keys != commit.rejected_keys:
                    self._fault(commit.rejected_file, "holds other rows than its record names")
        self._ledger.set_aside(commit.rejected_keys)
        numbers = self._ledger.numbers([key for key, _ in commit.rejected_keys])
        for number, (_, sample) in zip(numbers, commit.rejected_keys, strict=True):
            if sample is not None:
                self._failed[number] = self._failed.get(number, 0) | 1 << sample

    def _count(self) -> None:
        """Count what is missing of what was planned."""
        ledger, report = self._ledger, self._report
        asked = self._record.samples_asked
        usual = 1 if asked is None else asked
        for number in range(len(ledger.keys)):
            there = ledger.num_samples(number)
            if ledger.is_set_aside(number) and not there:
                report.prompts_rejected += 1
                continue
            failed = self._failed.get(number, 0)
            left = sum(
                not ledger.covers(number, sample)
                for sample in range(failed.bit_length())
                if failed >> sample & 1
            )
            report.rollouts_failed += left
            if ledger.unit_of(number) is not None:
                # n may have been lowered between two runs
                wanted = max(self._asked[number] or usual, there + left)
                report.rollouts_missing += wanted - there - left
