"""Whoever reads a shard that is not the one of its record says which, and writes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from prepared_runs import complete_run

from rollout.cli import main
from rollout.dataset import read_dataset
from rollout.errors import DatasetError
from rollout.full_rows import read_full_rows
from rollout.replay import mean_reward
from rollout.replay_data import check_advantages
from rollout.storage import Storage

Damage = Callable[[Path], str]


def _flip_page(path: Path) -> str:
    """Change the last byte of the rewards, of the tokens and of the supports."""
    shard = min((path / "data").iterdir())
    group = pq.read_metadata(shard).row_group(0)
    data = bytearray(shard.read_bytes())
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema.split(".")[0] in ("reward", "token_ids", "support_entries"):
            data[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    shard.write_bytes(data)
    return f"data/{shard.name}: damaged, copy the dataset again: "


def _cut(path: Path) -> str:
    shard = min((path / "data").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    return f"data/{shard.name}: shard: not a readable parquet file: "


def _swap(path: Path) -> str:
    """Let two whole shards with as many rows take each other's place."""
    first, second = sorted((path / "data").iterdir())[:2]
    first.rename(path / "x")
    second.rename(first)
    (path / "x").rename(second)
    return f"data/{first.name}: its row groups are not where its commit record says: "


def _other_bytes(path: Path) -> str:
    """Damage the footer where Parquet's reader does not look."""
    shard = min((path / "data").iterdir())
    data = shard.read_bytes()
    assert data.count(b"parquet-cpp-arrow") == 1
    shard.write_bytes(data.replace(b"parquet-cpp-arrow", b"parquet-cpp-arrov"))
    return f"data/{shard.name} other bytes than were committed in the footer"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete_run(tmp_path_factory.mktemp("pristine")).path


@pytest.fixture
def dataset(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "run"))


@pytest.fixture
def values(pristine: Path, tmp_path: Path) -> Path:
    rows = pl.read_parquet(f"{pristine}/data/*.parquet", columns=["rollout_id"])
    rows.with_columns(reward=pl.lit(1.0)).write_parquet(tmp_path / "values.parquet")
    return tmp_path / "values.parquet"


def refused(*args: object) -> str:
    """Run a command that has to end with a sentence about the dataset."""
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 7
    return result.output


@pytest.mark.parametrize("damage", [_flip_page, _cut, _swap], ids=lambda made: made.__name__)
def test_readers_name_the_shard(dataset: Path, tmp_path: Path, damage: Damage) -> None:
    expected = damage(dataset)
    view = read_dataset(Storage.open(dataset))
    for read in (
        lambda: check_advantages(view, "center"),
        lambda: mean_reward(dataset),
        lambda: list(read_full_rows(view, view.shards[0], ["rollout_id", "token_ids"])),
    ):
        with pytest.raises(DatasetError) as found:
            read()
        assert expected in str(found.value)
    prompt = pl.read_parquet(f"{dataset}/_plan/*.parquet")["prompt_id"][0]
    assert expected in refused("inspect", dataset, "--prompt", prompt, "--sample", 0)
    for form in ("jsonl", "huggingface"):
        new = tmp_path / form
        assert expected in refused("export", dataset, "-o", new, "--format", form, "--supports")
        assert not new.exists()


@pytest.mark.parametrize(
    "damage", [_flip_page, _cut, _swap, _other_bytes], ids=lambda made: made.__name__
)
def test_a_join_vouches_for_no_byte_that_was_not_committed(
    dataset: Path, values: Path, tmp_path: Path, damage: Damage
) -> None:
    shard = damage(dataset).split(":")[0].split()[0]
    assert f": {shard} " in refused("join", dataset, values, "-o", tmp_path / "new")
    assert read_dataset(Storage.open(tmp_path / "new")).shards == ()


def test_a_join_without_the_plan_is_refused(dataset: Path, values: Path, tmp_path: Path) -> None:
    max((dataset / "_plan").iterdir()).unlink()
    said = refused("join", dataset, values, "-o", tmp_path / "new")
    assert "the plan lacks prompts of unit u0" in said
