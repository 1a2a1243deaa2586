"""The agreement report against dense float64, on the weights that sampled and on others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from fake_store import FakeStore, LockedStore
from replay_oracle import (
    PROMPTS,
    SAMPLES,
    TEMPERATURE,
    VOCAB,
    Sampled,
    make_model,
    masked_logprobs,
    sample,
)
from synthetic import make_record, make_row, plan
from transformers import Qwen3ForCausalLM

from rollout.agreement import AgreementReport, agree
from rollout.cli import main
from rollout.dataset import DatasetWriter
from rollout.errors import DatasetError, OutputError, TrainingError
from rollout.rows import RolloutRow
from rollout.storage import Storage


def write_rows(path: Path, rows: list[RolloutRow]) -> Path:
    writer = DatasetWriter.open(Storage.open(path), make_record())
    writer.append_plan(plan("u000000", *sorted({row.prompt_key for row in rows})))
    writer.commit_part("u000000", rows)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Sampled]]:
    root = tmp_path_factory.mktemp("agreement")
    model = make_model(root / "model")
    rollouts = [
        sample(model, f"p{prompt}", index, seed=prompt * SAMPLES + index)
        for prompt in range(PROMPTS)
        for index in range(SAMPLES)
    ]
    return root / "model", write_rows(root / "data", [i.row for i in rollouts]), rollouts


def expected_tokens(
    folder: Path, rollouts: list[Sampled]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ratios with and without replay, positions and support sizes, from the definition."""
    model = Qwen3ForCausalLM.from_pretrained(folder).double().eval()
    replayed, dense, positions, sizes = [], [], [], []
    for item in rollouts:
        row = item.row
        ids = torch.tensor([*row.prompt_token_ids.tolist(), *row.token_ids.tolist()])
        first = row.prompt_token_ids.size - 1
        with torch.no_grad():
            logits = model(ids[None]).logits[0, first:-1] / TEMPERATURE
        log_q = torch.from_numpy(row.sampled_logprobs).double()
        targets = ids[first + 1 :, None]
        log_p = masked_logprobs(logits, item.kept).gather(1, targets).squeeze(1)
        replayed.append((log_p - log_q).exp().numpy())
        dense.append((logits.log_softmax(-1).gather(1, targets).squeeze(1) - log_q).exp().numpy())
        positions.append(np.arange(row.token_ids.size))
        sizes.append(item.kept.sum(-1).numpy())
    return tuple(np.concatenate(part) for part in (replayed, dense, positions, sizes))


def test_on_the_weights_that_sampled_every_ratio_is_one(
    recorded: tuple[Path, Path, list[Sampled]],
) -> None:
    folder, data, rollouts = recorded
    report = agree(data, folder)
    _, dense, _, _ = expected_tokens(folder, rollouts)
    assert (report.rollouts, report.tokens) == (20, dense.size)
    assert report.largest_deviation < 1e-4
    assert abs(report.replayed.k3) < 1e-9
    assert report.first_token_mean == pytest.approx(1.0, abs=1e-4)
    assert report.unreplayed.mean == pytest.approx(dense.mean(), abs=1e-5)
    assert report.kept_mass == pytest.approx(dense.mean(), abs=1e-5)
    assert report.kept_mass_gap < 1e-4
    assert dense.mean() < 0.98
    report.check(1e-3)


def test_on_other_weights_it_measures_how_far_they_are(
    recorded: tuple[Path, Path, list[Sampled]], tmp_path: Path
) -> None:
    folder, data, rollouts = recorded
    model = Qwen3ForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(tmp_path)
    ratio, dense, positions, sizes = expected_tokens(tmp_path, rollouts)
    report = agree(data, tmp_path)
    assert report.replayed.mean == pytest.approx(ratio.mean(), abs=1e-5)
    assert report.replayed.quantiles == pytest.approx(
        np.quantile(ratio, [0, 0.01, 0.5, 0.99, 1]), abs=1e-4
    )
    assert report.replayed.k3 == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-3)
    assert report.replayed.k3 > 1e-3
    assert report.unreplayed.mean == pytest.approx(dense.mean(), abs=1e-5)
    assert report.largest_deviation == pytest.approx(np.abs(ratio - 1).max(), abs=1e-4)
    assert [item.label for item in report.by_position] == ["0", "1", "2-3", "4-7"]
    for item in (*report.by_position, *report.by_support):
        values = positions if item in report.by_position else sizes
        low, _, high = item.label.partition("-")
        chosen = ratio[(values >= int(low)) & (values <= int(high or low))]
        assert item.tokens == chosen.size
        assert item.mean == pytest.approx(chosen.mean(), abs=1e-5)
    for parts in (report.by_position, report.by_support):
        assert sum(item.tokens for item in parts) == ratio.size
    with pytest.raises(TrainingError, match="the weights do not agree with the data"):
        report.check(1e-3)


def test_temperature_left_out_shows_in_the_first_token(
    recorded: tuple[Path, Path, list[Sampled]], tmp_path: Path
) -> None:
    folder, _, rollouts = recorded
    rows = [
        RolloutRow(
            **{name: getattr(item.row, name) for name in RolloutRow.__slots__}
            | {"temperature": 1.0}
        )
        for item in rollouts
    ]
    report = agree(write_rows(tmp_path / "data", rows), folder)
    assert abs(report.first_token_mean - 1.0) > 0.01
    assert report.largest_deviation > 0.05


def test_what_is_not_finite_is_counted_and_never_averaged(
    recorded: tuple[Path, Path, list[Sampled]], tmp_path: Path
) -> None:
    folder, data, rollouts = recorded
    model = Qwen3ForCausalLM.from_pretrained(folder)
    bad = int(rollouts[0].row.token_ids[0])
    with torch.no_grad():
        model.lm_head.weight[bad] = torch.nan
    model.save_pretrained(tmp_path)
    # rows of one id never read the weight: their logprob is 0 whatever it is
    touched = sum(int((item.kept[:, bad] & (item.kept.sum(-1) > 1)).sum()) for item in rollouts)
    report = _unchecked(data, tmp_path)
    assert report.nonfinite_trainer == touched > 0
    assert report.nonfinite_sampler == 0
    assert report.replayed.tokens == report.tokens - touched
    assert report.replayed.mean == pytest.approx(1.0, abs=1e-5)
    assert report.largest_deviation == float("inf")
    with pytest.raises(TrainingError, match="a ratio is inf from 1"):
        report.check(1.0)


def _unchecked(data: Path, folder: Path) -> AgreementReport:
    """Measure a model that training would refuse."""
    from rollout.agreement import measure_agreement
    from rollout.dataset_view import read_dataset
    from rollout.replay_model import ReplayModel

    model = ReplayModel(model=Qwen3ForCausalLM.from_pretrained(folder), compute_dtype=torch.float32)
    return measure_agreement(model, read_dataset(Storage.open(data)))


def test_untruncated_rows_are_named_and_take_no_part_in_the_kept_mass(
    recorded: tuple[Path, Path, list[Sampled]], tmp_path: Path
) -> None:
    folder, _, rollouts = recorded
    top = make_row("q", 0, kind="top", vocab=VOCAB, reward=None)
    top.prompt_token_ids %= VOCAB
    rows = [item.row for item in rollouts[:3]]
    report = agree(write_rows(tmp_path / "data", [*rows, top]), folder)
    assert report.by_support[-1].label == "not an exact support"
    assert report.by_support[-1].tokens == top.token_ids.size
    assert report.unreplayed.tokens == sum(row.token_ids.size for row in rows)
    assert agree(tmp_path / "data", folder, max_rollouts=3).rollouts == 3


def test_a_damaged_shard_is_named(
    recorded: tuple[Path, Path, list[Sampled]], tmp_path: Path
) -> None:
    model, data, _ = recorded
    (shard,) = Path(shutil.copytree(data, tmp_path / "data"), "data").iterdir()
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DatasetError, match=f"data/{shard.name}: damaged, copy the dataset again"):
        agree(tmp_path / "data", model)


def test_the_command_takes_the_options_of_a_storage(
    recorded: tuple[Path, Path, list[Sampled]],
) -> None:
    folder, data, _ = recorded
    FakeStore.reset()
    for file in data.rglob("*"):
        if file.is_file():
            LockedStore.objects[f"bucket/run/{file.relative_to(data)}"] = file.read_bytes()
    url = "lockedstore://bucket/run"
    arguments = ["agree", "--model", str(folder), "--save", "--max-rollouts", "2", url]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, "is no key" in result.output) == (OutputError.exit_code, True)
    options = ["--storage-option", f"key={LockedStore.KEY}"]
    result = CliRunner().invoke(main, [*arguments, *options])
    assert result.exit_code == 0, result.output
    shown = CliRunner().invoke(main, ["inspect", url, "--json", *options])
    assert json.loads(shown.output)["agreement"]["rollouts"] == 2


def test_the_command_prints_the_table_and_fails_beyond_the_tolerance(
    recorded: tuple[Path, Path, list[Sampled]], tmp_path: Path
) -> None:
    folder, data, _ = recorded
    arguments = ["agree", "--model", str(folder), str(data), "--tolerance"]
    result = CliRunner().invoke(main, [*arguments, "1e-3"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) < 100
    assert lines[0].startswith("20 rollouts, ")
    assert any(line.startswith("ratio without replay") for line in lines)
    result = CliRunner().invoke(main, [*arguments, "1e-12"])
    assert result.exit_code == TrainingError.exit_code
    assert "error: the weights do not agree with the data: a ratio is " in result.output
    make_model(tmp_path, **{}).save_pretrained(tmp_path)
    narrow = Qwen3ForCausalLM.from_pretrained(tmp_path)
    narrow.resize_token_embeddings(16)
    narrow.save_pretrained(tmp_path)
    with pytest.raises(DatasetError, match="expected below the model's vocab_size 16"):
        agree(data, tmp_path)
