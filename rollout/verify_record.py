"""Check that a commit record agrees with its name and with itself."""

from __future__ import annotations

from rollout.config import MOST_SAMPLES
from rollout.schema import layout
from rollout.schema.records import CommitRecord


def check_record(name: str, record: CommitRecord) -> str | None:
    """Say what is wrong with a record that could be parsed.

    Args:
        name: the record's file, relative to the dataset's folder.
        record: what it holds.

    Returns:
        A sentence, or None.
    """
    try:
        return _named(name, record) or _counted(record) or _laid_out(record)
    except (TypeError, ValueError, AttributeError) as error:
        return f"a field has the wrong type: {error}"


def _named(name: str, record: CommitRecord) -> str | None:
    if layout.commit_name(record.unit, record.part) != name:
        return f"it says that it is part {record.part} of unit {record.unit}"
    attempt = (record.unit, record.part, record.attempt)
    for found, expected in (
        (record.file, layout.data_name(*attempt)),
        (record.rejected_file, layout.rejected_name(*attempt)),
    ):
        if found not in (None, expected):
            return f"it names {found!r}, expected {expected!r}"
    return None


def _counted(record: CommitRecord) -> str | None:
    if (record.file is None) != (record.rows == 0):
        return f"{record.rows} rollouts, but the shard is {record.file}"
    if (record.rejected_file is None) != (record.rejected_rows == 0):
        return f"{record.rejected_rows} rejected rows, but their table is {record.rejected_file}"
    counted = len(record.prompt_rows), len(set(record.prompt_keys))
    if counted != (len(record.prompt_keys),) * 2 or min(record.prompt_rows, default=1) < 1:
        return "a prompt stands in it twice, or without rows"
    for what, count in (
        ("sample indices", len(record.sample_indices)),
        ("rows in its row groups", sum(group.rows for group in record.row_groups)),
        ("rows of its prompts", sum(record.prompt_rows)),
        ("different keys", len(set(record.keys))),
    ):
        if count != record.rows:
            return f"{record.rows} rollouts, but {count} {what}"
    if len(record.rejected_keys) != record.rejected_rows:
        return f"{record.rejected_rows} rejected rows, but {len(record.rejected_keys)} keys of them"
    indices = [*record.sample_indices, *(i for _, i in record.rejected_keys if i is not None)]
    if min(record.size, record.tokens, record.entries, *indices) < 0:
        return "a count or index is negative"
    if max(indices, default=0) >= MOST_SAMPLES:
        return f"it has a sample {max(indices)}, expected less than {MOST_SAMPLES} of a prompt"
    return None


def _laid_out(record: CommitRecord) -> str | None:
    end = 4 if record.row_groups else 0
    for index, part in enumerate(record.row_groups):
        if part.offset < end or part.size < 1 or part.rows < 1:
            return f"row group {index} is said to start at byte {part.offset}, expected {end}"
        end = part.offset + part.size
    if end > record.size:
        return f"its row groups end at byte {end} of {record.size}"
    return None
