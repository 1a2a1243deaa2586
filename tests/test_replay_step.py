"""The quickstart's replay step against dense float64 logits, a mask and autograd."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from quickstart_scripts import load_script
from replay_oracle import PROMPTS, SAMPLES, VOCAB, Sampled, expected_line, make_model, sample
from synthetic import make_record, make_row, plan
from transformers import Qwen3ForCausalLM

from rollout.dataset import DatasetWriter
from rollout.rows import RolloutRow
from rollout.storage import Storage

replay = load_script("replay_step")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Sampled]]:
    root = tmp_path_factory.mktemp("replay")
    model = make_model(root / "model")
    rollouts = [
        sample(model, f"p{prompt}", index, seed=prompt * SAMPLES + index)
        for prompt in range(PROMPTS)
        for index in range(SAMPLES)
    ]
    writer = DatasetWriter.open(Storage.open(root / "data set"), make_record())
    writer.append_plan(plan("u000000", *(f"p{prompt}" for prompt in range(PROMPTS))))
    writer.commit_part("u000000", [item.row for item in rollouts])
    return root / "data set", root / "model", rollouts


def run_step(data: Path, model: Path, *arguments: str) -> tuple[list[str], dict[str, list[str]]]:
    result = CliRunner().invoke(
        replay.main,
        ["--path", str(data), "--model", str(model), "--learning-rate", "0.01", *arguments],
    )
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) < 100
    return lines, {line.split()[0]: line.split()[1:] for line in lines[2:]}


@pytest.mark.parametrize("budget", ["4096", "25"], ids=["one-micro-batch", "many-micro-batches"])
def test_the_table_equals_dense_float64(
    recorded: tuple[Path, Path, list[Sampled]], budget: str
) -> None:
    data, folder, rollouts = recorded
    lines, table = run_step(data, folder, "--token-budget", budget)
    assert lines[0].startswith("one icepop step with exact score centering: 20 rollouts")
    assert lines[0].endswith(" 1 micro-batch") == (budget == "4096")

    model_q = Qwen3ForCausalLM.from_pretrained(folder).double().eval()
    model = Qwen3ForCausalLM.from_pretrained(folder).double().eval()
    before = expected_line(model, rollouts, model_q)
    torch.autograd.backward(before.loss)
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    norm = torch.stack(squares).sum().sqrt().item()
    tokens = sum(item.row.token_ids.size for item in rollouts)

    loss, grad_norm, ratio, k3, kept, _, of, dense = table["before"]
    assert float(loss) == pytest.approx(before.loss.item(), abs=1.1e-4)
    assert float(grad_norm) == pytest.approx(norm, abs=1e-4, rel=1e-3)
    assert float(ratio) == pytest.approx(1.0, abs=1e-5)
    assert before.ratio == pytest.approx(1.0, abs=1e-12)
    assert abs(float(k3)) < 1e-9
    assert kept == of == str(tokens)
    # the mass that top_p kept, from dense logits
    assert float(dense) == pytest.approx(before.dense_ratio, abs=2e-5)
    assert 0.85 < before.dense_ratio < 0.98

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0).step()
    with torch.no_grad():
        after = expected_line(model, rollouts, model_q)
    # AdamW's first step is the sign of the gradient, so float32 noise in tiny gradients shows
    loss, ratio, k3, _, _, _, dense = table["after"]
    assert float(loss) == pytest.approx(after.loss.item(), abs=2e-3)
    assert float(ratio) == pytest.approx(after.ratio, abs=5e-3)
    assert float(k3) == pytest.approx(after.k3, rel=0.05)
    assert float(dense) == pytest.approx(after.dense_ratio, abs=5e-3)
    assert after.k3 > 1e-3


def test_untruncated_rollouts_and_missing_inputs_get_one_sentence(
    tmp_path: Path, recorded: tuple[Path, Path, list[Sampled]]
) -> None:
    _, model, _ = recorded
    writer = DatasetWriter.open(Storage.open(tmp_path / "top"), make_record())
    writer.append_plan(plan("u000000", "p0"))
    rows = [make_row("p0", i, kind="top", vocab=VOCAB, reward=float(i)) for i in range(2)]
    writer.commit_part("u000000", [_small_ids(row) for row in rows])
    for arguments, message in (
        ((str(tmp_path / "top"), str(model)), "expected kept supports only"),
        ((str(tmp_path / "nothing"), str(model)), "is not a dataset"),
        ((str(tmp_path / "top"), str(tmp_path)), f"model {tmp_path}: no config.json in it"),
    ):
        result = CliRunner().invoke(replay.main, ["--path", arguments[0], "--model", arguments[1]])
        assert result.exit_code == 1
        assert result.output.startswith("Error: ")
        assert message in result.output


def _small_ids(row: RolloutRow) -> RolloutRow:
    row.prompt_token_ids %= VOCAB
    return row
