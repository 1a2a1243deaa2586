"""What is checked of a dataset before the first training step.

A mistake here costs a whole run and shows as a curve that does not rise: each is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc

from rollout.dataset_view import DatasetView
from rollout.errors import DatasetError
from rollout.full_rows import read_tables
from rollout.model_files import ModelFiles

_SHOWN = 12  # characters of a digest in a message


def check_origin(
    view: DatasetView, files: ModelFiles, ancestors: Collection[str], *, other_weights: bool
) -> None:
    """Refuse a dataset of another tokenizer or of weights that training did not pass through.

    Args:
        view: the dataset.
        files: the checkpoint that training starts from.
        ancestors: digests of the weights that it was trained from.
        other_weights: take the rollouts of any weights.

    Raises:
        DatasetError: naming both sides.
    """
    url, inputs = view.storage.url, view.record.fingerprint_inputs
    sampler = inputs.get("tokenizer")
    digest = sampler.get("tokenizer_digest") if isinstance(sampler, dict) else None
    if digest is not None and digest != files.tokenizer_digest:
        raise DatasetError(
            f"dataset {url} was sampled with tokenizer {digest[:_SHOWN]}, model {files.name} has "
            f"{files.tokenizer_digest[:_SHOWN]}, expected the same: its ids mean other text"
        )
    model = inputs.get("model")
    weights = model.get("weights_digest") if isinstance(model, dict) else None
    if weights is None or weights in {files.weights_digest, *ancestors} or other_weights:
        return
    recorded = view.record.provenance.get("model")
    named = recorded.get("name") if isinstance(recorded, dict) else None
    raise DatasetError(
        f"dataset {url} was sampled by weights {weights[:_SHOWN]} (model {named}), model "
        f"{files.name} has {files.weights_digest[:_SHOWN]} and {len(ancestors)} ancestors, none of "
        "them these: train the model that sampled, or set data.other_weights: true"
    )


def check_advantages(view: DatasetView, advantage: str) -> None:
    """Refuse a dataset from which every step would be zero.

    Args:
        view: the dataset.
        advantage: the loader's rule: `column` reads that column, others compare rewards in groups.

    Raises:
        DatasetError: no row has a value, all advantages are zero, or a shard is missing or damaged.
    """
    name = "advantage" if advantage == "column" else "reward"
    columns = ["group_id", name]
    tables = [table for record in view.shards for table in read_tables(view, record, columns)]
    url, num_rows = view.storage.url, sum(table.num_rows for table in tables)
    if not num_rows:
        raise DatasetError(f"dataset {url} holds no rollouts: nothing was committed yet")
    table = pa.concat_tables(tables)
    table = table.filter(pc.is_valid(table[name]))
    if not table.num_rows:
        raise DatasetError(
            f"dataset {url}: none of {num_rows} rollouts has {'an' if name[0] == 'a' else 'a'} "
            f"{name}, expected one: name a reward function in the job, or join a column"
        )
    if name == "advantage":
        zero = not pc.any(pc.not_equal(table[name], 0.0)).as_py()
    else:
        groups = table.group_by("group_id").aggregate([(name, "min"), (name, "max")])
        zero = not pc.any(pc.not_equal(groups[f"{name}_min"], groups[f"{name}_max"])).as_py()
    if zero:
        why = "" if name == "advantage" else ": the rewards of every group are all the same"
        raise DatasetError(
            f"dataset {url}: all advantages of {table.num_rows} rollouts are zero{why}, expected "
            "some that differ: nothing could be learned from it"
        )


def check_vocabulary(view: DatasetView, vocab_size: int) -> None:
    """Refuse ids that the trainer's output weight has no row for.

    Args:
        view: the dataset.
        vocab_size: rows of the output weight.

    Raises:
        DatasetError: naming the largest id.
    """
    largest = max((record.max_token_id for record in view.shards), default=-1)
    if largest >= vocab_size:
        raise DatasetError(
            f"dataset {view.storage.url} holds token id {largest}, expected below the trainer's "
            f"vocab_size {vocab_size}: the sampler's vocabulary is wider than the trainer's"
        )
