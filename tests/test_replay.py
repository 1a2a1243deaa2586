"""The replay trainer: its numbers against float64, exact resume, checkpoints, metrics, refusals."""

from __future__ import annotations

import io
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from replay_oracle import PROMPTS, SAMPLES, VOCAB, Sampled, expected_line, make_model, sample
from safetensors.torch import load_file
from synthetic import make_record, plan
from transformers import Qwen3ForCausalLM

from rollout.cli import main
from rollout.config import ModelConfig
from rollout.dataset import DatasetWriter
from rollout.errors import ConfigError, DatasetError, InputError, RolloutError, TrainingError
from rollout.jobfile import check_section
from rollout.model_files import resolve_model
from rollout.replay import ReplaySummary, Trainer, replay
from rollout.replay_checkpoint import newest_checkpoint
from rollout.replay_config import ReplayConfig
from rollout.rows import RolloutRow
from rollout.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A model, and a dataset that it sampled."""

    model: Path
    data: Path
    rollouts: list[Sampled]


def write_dataset(path: Path, model: Path, rows: list[RolloutRow], /, **inputs: Any) -> Path:
    """Commit rows as sampled by a checkpoint."""
    files = resolve_model(ModelConfig(path=str(model)))
    named = {
        "model": {"weights_digest": files.weights_digest},
        "tokenizer": {"tokenizer_digest": files.tokenizer_digest},
    }
    writer = DatasetWriter.open(Storage.open(path), make_record(**(named | inputs)))
    writer.append_plan(plan("u000000", *sorted({row.prompt_key for row in rows})))
    writer.commit_part("u000000", rows)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    root = tmp_path_factory.mktemp("replay")
    model = make_model(root / "model")
    (root / "model" / "tokenizer.json").write_text('{"stands": "for a tokenizer"}')
    (root / "model" / "notes.json").write_text("{}")
    rollouts = [
        sample(model, f"p{prompt}", index, seed=prompt * SAMPLES + index)
        for prompt in range(PROMPTS)
        for index in range(SAMPLES)
    ]
    data = write_dataset(root / "data", root / "model", [item.row for item in rollouts])
    return Recorded(model=root / "model", data=data, rollouts=rollouts)


def config_of(recorded: Recorded, output: Path, /, **sections: Any) -> ReplayConfig:
    data: dict[str, Any] = {
        "model": {"path": str(recorded.model)} | sections.pop("model", {}),
        "data": {"path": str(recorded.data), "groups_per_step": PROMPTS, "token_budget": 25}
        | sections.pop("data", {}),
        "loss": {"loss": "icepop", "centering": "exact"},
        "optimizer": {"learning_rate": 0.01},
        "output": {"path": str(output)} | sections.pop("output", {}),
    }
    return check_section(ReplayConfig, data | sections)


def train(config: ReplayConfig) -> ReplaySummary:
    return replay(config, stream=io.StringIO())


def metrics_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("budget", [25, 4096], ids=["many-micro-batches", "one-micro-batch"])
def test_steps_equal_dense_float64(recorded: Recorded, tmp_path: Path, budget: int) -> None:
    train(config_of(recorded, tmp_path / "out", data={"token_budget": budget}, epochs=2))
    model_q = Qwen3ForCausalLM.from_pretrained(recorded.model).double().eval()
    model = Qwen3ForCausalLM.from_pretrained(recorded.model).double().eval()
    before = expected_line(model, recorded.rollouts, model_q)
    torch.autograd.backward(before.loss)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0).step()
    with torch.no_grad():
        after = expected_line(model, recorded.rollouts, model_q)

    first, second = metrics_of(tmp_path / "out")
    assert first["loss"] == pytest.approx(before.loss.item(), abs=1e-6)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert first["tokens"] == sum(item.row.token_ids.size for item in recorded.rollouts)
    # AdamW's first step is the sign of the gradient, so float32 noise in tiny gradients shows
    assert second["loss"] == pytest.approx(after.loss.item(), abs=2e-3)
    assert second["k3"] == pytest.approx(after.k3, rel=0.05)
    assert after.k3 > 1e-3


def test_the_whole_vocabulary_gives_the_ratio_without_replay(
    recorded: Recorded, tmp_path: Path
) -> None:
    train(config_of(recorded, tmp_path, normaliser="vocabulary"))
    model = Qwen3ForCausalLM.from_pretrained(recorded.model).double().eval()
    with torch.no_grad():
        expected = expected_line(model, recorded.rollouts, model)
    (line,) = metrics_of(tmp_path)
    assert line["ratio_mean"] == pytest.approx(expected.dense_ratio, abs=2e-5)
    assert expected.dense_ratio < 0.98


def test_bfloat16_computes_nearly_the_same_and_keeps_float32_weights(
    recorded: Recorded, tmp_path: Path
) -> None:
    summary = train(config_of(recorded, tmp_path, model={"compute_dtype": "bfloat16"}))
    model = Qwen3ForCausalLM.from_pretrained(recorded.model).double().eval()
    expected = expected_line(model, recorded.rollouts, model)
    (line,) = metrics_of(tmp_path)
    # 8 bits of mantissa: a ratio of unchanged weights is off by about 1e-2, and so is the loss
    assert line["ratio_mean"] == pytest.approx(1.0, abs=0.02)
    assert 1e-6 < line["k3"] < 1e-2
    assert line["loss"] == pytest.approx(expected.loss.item(), abs=0.02)
    tensors = load_file(summary.checkpoint / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


@pytest.mark.parametrize("stop", [1, 4], ids=["in-the-first-epoch", "in-the-second-epoch"])
def test_resume_goes_on_bit_for_bit(recorded: Recorded, tmp_path: Path, stop: int) -> None:
    sections: dict[str, Any] = {"data": {"groups_per_step": 2}, "epochs": 3}
    whole = train(config_of(recorded, tmp_path / "whole", **sections))
    assert whole.steps == len(whole.losses) == 9
    first = train(config_of(recorded, tmp_path / "parts", max_steps=stop, **sections))
    second = train(config_of(recorded, tmp_path / "parts", **sections))
    assert first.losses + second.losses == whole.losses
    assert len(set(whole.losses)) == 9
    for name in ("model.safetensors", "trainer/optimizer.safetensors"):
        one = load_file(whole.checkpoint / name)
        other = load_file(second.checkpoint / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name
    steps = metrics_of(tmp_path / "parts")
    assert [line["step"] for line in steps] == list(range(1, 10))
    # a run that is done does nothing
    again = train(config_of(recorded, tmp_path / "parts", **sections))
    assert (again.steps, again.losses, again.checkpoint) == (9, (), second.checkpoint)


def test_a_run_that_died_repeats_the_steps_after_its_checkpoint(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, Any] = {"data": {"groups_per_step": 2}, "epochs": 2}
    whole = train(config_of(recorded, tmp_path / "whole", **sections))
    sections["output"] = {"checkpoint_steps": 2}
    stock = Trainer._train

    def die(self: Trainer, batches: Any) -> dict[str, float]:
        if self.step == 3:
            raise KeyboardInterrupt
        return stock(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train", die)
        with pytest.raises(KeyboardInterrupt):
            train(config_of(recorded, tmp_path / "died", **sections))
    newest = newest_checkpoint(tmp_path / "died")
    assert newest is not None
    assert newest.name == "step-000002"
    rest = train(config_of(recorded, tmp_path / "died", **sections))
    assert rest.losses == whole.losses[2:]
    lines = metrics_of(tmp_path / "died")
    assert [line["loss"] for line in lines] == list(whole.losses)


def test_a_checkpoint_is_a_model_that_goes_on(recorded: Recorded, tmp_path: Path) -> None:
    summary = train(config_of(recorded, tmp_path / "one"))
    folder = summary.checkpoint
    tokenizer = (recorded.model / "tokenizer.json").read_bytes()
    assert (folder / "tokenizer.json").read_bytes() == tokenizer
    assert not (folder / "notes.json").exists()
    assert not list(tmp_path.glob("**/.*partial"))
    model = Qwen3ForCausalLM.from_pretrained(folder)
    old = Qwen3ForCausalLM.from_pretrained(recorded.model)
    # AdamW's first step moves every weight with a gradient by the learning rate
    moved = (model.lm_head.weight - old.lm_head.weight).abs().max().item()
    assert moved == pytest.approx(0.01, rel=0.05)
    # its ancestor's rollouts are taken by name; the moments go on where asked to
    child = Recorded(model=folder, data=recorded.data, rollouts=recorded.rollouts)
    fresh = train(config_of(child, tmp_path / "fresh"))
    kept = train(config_of(child, tmp_path / "kept", model={"keep_moments": True}))
    both = train(config_of(recorded, tmp_path / "both", epochs=2, data={"shuffle": False}))
    plain = train(config_of(recorded, tmp_path / "plain", data={"shuffle": False}))
    assert plain.losses == both.losses[:1]

    def moments(path: Path) -> torch.Tensor:
        return load_file(path / "trainer/optimizer.safetensors")["lm_head.weight/step"]

    assert moments(fresh.checkpoint).item() == 1
    assert moments(kept.checkpoint).item() == 2


def test_tensorboard_gets_the_same_numbers(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sections: dict[str, Any] = {"data": {"groups_per_step": 2}, "epochs": 2}
    train(config_of(recorded, tmp_path / "out", max_steps=4, **sections))
    train(config_of(recorded, tmp_path / "out", **sections))
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    lines = metrics_of(tmp_path / "out")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "k3", "ratio_mean", "tokens_per_second"):
        seen = {event.step: event.value for event in events.Scalars(f"replay/{name}")}
        # TensorBoard keeps float32
        expected = {line["step"]: pytest.approx(line[name], rel=1e-6) for line in lines}
        assert seen == expected
    # nothing of it where it is not installed
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    train(config_of(recorded, tmp_path / "plain"))
    assert not (tmp_path / "plain" / "tensorboard").exists()


def test_evaluation_samples_with_the_weights_just_saved(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, str]] = []

    def run(command: list[str], **_: Any) -> Any:
        assert command[3:6] == ["generate", "--config", "eval.yaml"]
        values = dict(item.split("=", 1) for item in command[6:] if item != "--set")
        asked.append(values)
        write_dataset(
            Path(values["output.path"]),
            Path(values["model.path"]),
            [item.row for item in recorded.rollouts],
        )
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr("rollout.replay.subprocess.run", run)
    train(
        config_of(
            recorded,
            tmp_path,
            epochs=2,
            output={"checkpoint_steps": 1},
            evaluation={"job": "eval.yaml"},
        )
    )
    folders = [Path(values["model.path"]).name for values in asked]
    assert folders == ["step-000000", "step-000001", "step-000002"]
    rewards = [float(item.row.reward or 0.0) for item in recorded.rollouts]
    lines = [line for line in metrics_of(tmp_path) if "reward" in line]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0]["reward"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-6)


def _changed(recorded: Recorded, **fields: Any) -> list[RolloutRow]:
    """Copies of the rollouts with other values."""
    return [
        RolloutRow(
            **{name: getattr(item.row, name) for name in RolloutRow.__slots__}
            | {"prompt_token_ids": item.row.prompt_token_ids.copy()}
            | fields
        )
        for item in recorded.rollouts
    ]


REFUSED: dict[str, tuple[type[RolloutError], str]] = {
    "other-tokenizer": (DatasetError, "was sampled with tokenizer beef, model .* its ids mean"),
    "other-weights": (DatasetError, "was sampled by weights 0ff .*none of them these"),
    "wider-vocabulary": (DatasetError, r"holds token id 60, expected below .* vocab_size 48"),
    "no-rewards": (DatasetError, "none of 20 rollouts has a reward, expected one"),
    "no-advantages": (DatasetError, "none of 20 rollouts has an advantage, expected one"),
    "equal-rewards": (DatasetError, "all advantages of 20 rollouts are zero: the rewards"),
    "zero-advantages": (DatasetError, "all advantages of 20 rollouts are zero, expected some"),
    "head-bias": (InputError, "its LM head has a bias, expected none"),
    "soft-cap": (InputError, "final_logit_softcapping 30.0, expected 0.0"),
    "not-a-dataset": (DatasetError, "is not a dataset"),
    "not-a-model": (InputError, "no config.json in it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_broken_input_is_refused_by_name_before_the_first_step(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    rows, inputs, model, data = _changed(recorded), {}, recorded.model, tmp_path / "data"
    settings: dict[str, Any] = {}
    if case == "other-tokenizer":
        inputs = {"tokenizer": {"tokenizer_digest": "beef"}}
    elif case == "other-weights":
        inputs = {"model": {"weights_digest": "0ff"}}
    elif case == "wider-vocabulary":
        rows[3].prompt_token_ids[0] = 60
    elif case == "no-rewards":
        rows = _changed(recorded, reward=None)
    elif case == "equal-rewards":
        rows = _changed(recorded, reward=0.5)
    elif case in ("no-advantages", "zero-advantages"):
        settings = {"advantage": "column"}
        rows = _changed(recorded, advantage=None if case[0] == "n" else 0.0)
    elif case == "head-bias":
        stock = Qwen3ForCausalLM.from_pretrained

        def with_bias(*args: Any, **kwargs: Any) -> Any:
            loaded = stock(*args, **kwargs)
            loaded.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB))
            return loaded

        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", with_bias)
    elif case == "soft-cap":
        model = tmp_path / "capped"
        make_model(model, final_logit_softcapping=30.0)
        (model / "tokenizer.json").write_bytes((recorded.model / "tokenizer.json").read_bytes())
    elif case == "not-a-model":
        model = tmp_path
    if case != "not-a-dataset":
        write_dataset(data, recorded.model if case == "not-a-model" else model, rows, **inputs)
    kind, message = REFUSED[case]
    broken = Recorded(model=model, data=data, rollouts=[])
    with pytest.raises(kind, match=message):
        train(config_of(broken, tmp_path / "out", data=settings))
    assert not (tmp_path / "out").exists()


def test_rollouts_of_other_weights_are_taken_where_asked_for(
    recorded: Recorded, tmp_path: Path
) -> None:
    rows = [item.row for item in recorded.rollouts]
    data = write_dataset(tmp_path / "data", recorded.model, rows, model={"weights_digest": "0ff"})
    other = Recorded(model=recorded.model, data=data, rollouts=recorded.rollouts)
    summary = train(config_of(other, tmp_path / "out", data={"other_weights": True}))
    assert summary.losses == train(config_of(recorded, tmp_path / "same")).losses


def test_a_gradient_that_is_not_finite_ends_the_run(recorded: Recorded, tmp_path: Path) -> None:
    rows = _changed(recorded, advantage=3e38)
    data = write_dataset(tmp_path / "data", recorded.model, rows)
    wild = Recorded(model=recorded.model, data=data, rollouts=recorded.rollouts)
    with pytest.raises(TrainingError, match=r"step 1: loss .*expected finite ones"):
        train(config_of(wild, tmp_path / "out", data={"advantage": "column"}))


def test_a_dataset_is_no_output(recorded: Recorded) -> None:
    before = sorted(recorded.data.iterdir())
    with pytest.raises(RolloutError, match="is a dataset: choose another folder"):
        train(config_of(recorded, recorded.data))
    assert sorted(recorded.data.iterdir()) == before


def test_other_settings_do_not_go_on(recorded: Recorded, tmp_path: Path) -> None:
    train(config_of(recorded, tmp_path))
    with pytest.raises(ConfigError, match=r"was trained with optimizer .*output\.path another"):
        train(config_of(recorded, tmp_path, epochs=2, optimizer={"learning_rate": 0.02}))


def test_the_command_trains_and_names_what_is_wrong(recorded: Recorded, tmp_path: Path) -> None:
    file = tmp_path / "replay.yaml"
    file.write_text(
        f"""
model: {{path: {recorded.model}}}
data: {{path: {recorded.data}, groups_per_step: 5, token_budget: 4096}}
loss: {{loss: icepop, centering: exact}}
optimizer: {{learning_rate: 1e-2}}
output: {{path: {tmp_path / "out"}}}
"""
    )
    result = CliRunner().invoke(main, ["replay", "--config", str(file)])
    assert result.exit_code == 0, result.output
    step, summary = result.output.splitlines()
    assert step.startswith("step 1  loss ")
    assert summary.endswith(f"checkpoint {tmp_path / 'out' / 'step-000001'}")
    for override, message in (
        ("loss.centring=exact", "loss.centring: unknown key; did you mean `centering`?"),
        ("loss.ratio_low=9", "ratio_low is 9.0 and ratio_high is 5.0"),
        ("model.compute_dtype=float16", "model.compute_dtype: got 'float16', expected"),
    ):
        result = CliRunner().invoke(main, ["replay", "--config", str(file), "--set", override])
        assert result.exit_code == ConfigError.exit_code
        assert message in result.output
