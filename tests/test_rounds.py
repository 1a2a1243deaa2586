"""Rounds of generate and replay on the real engine, and the proof after each reload."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
import torch
from quickstart_scripts import load_script
from tiny_model import make_tiny_model, reference_model

from rollout.agreement import agree
from rollout.engine import Engine
from rollout.engine_start import KeptEngine
from rollout.errors import TrainingError
from rollout.jobfile import load_job
from rollout.pipeline import generate

pytestmark = pytest.mark.engine

JOBS = Path(__file__).resolve().parents[1] / "jobs" / "reverse_text"
SMALL = ("engine.max_num_seqs=16", "engine.kv_cache_memory_bytes=67108864", "sampling.n=4")


def load_rounds() -> ModuleType:
    """Import jobs/reverse_text/rounds.py; jobs are no package."""
    spec = importlib.util.spec_from_file_location("reverse_text_rounds", JOBS / "rounds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


rounds = load_rounds()


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model and tokenizer before training."""
    quickstart = load_script("make_model")
    folder = tmp_path_factory.mktemp("rounds") / "model"
    torch.manual_seed(0)
    tokenizer = quickstart.make_tokenizer()
    quickstart.make_model(tokenizer, quickstart.Recipe()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def kept() -> Iterator[KeptEngine]:
    engine = KeptEngine(0)
    yield engine
    engine.close()


@pytest.fixture
def reloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders that an engine reloaded its weights from."""
    seen: list[str] = []
    stock = Engine.reload_weights

    def reload(self: Engine, folder: str) -> None:
        seen.append(folder)
        stock(self, folder)

    monkeypatch.setattr(Engine, "reload_weights", reload)
    return seen


def plan_of(model: Path, output: Path, **settings: Any) -> Any:
    values: dict[str, Any] = {
        "model": model,
        "output": output,
        "rounds": 2,
        "prompts": 4,
        "held_out": 6,
        "generate": SMALL,
        "replay": ("optimizer.learning_rate=1e-2", "data.groups_per_step=2", "epochs=1"),
    }
    return rounds.Plan(**(values | settings))


def test_each_round_samples_with_new_weights_and_proves_it(
    untrained: Path, tmp_path: Path, kept: KeptEngine, reloads: list[str]
) -> None:
    output = tmp_path / "run"
    records = list(rounds.run_rounds(plan_of(untrained, output), kept))
    assert [record.round for record in records] == [0, 1, 2]
    lines = [json.loads(line) for line in (output / "rounds.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines] == [record.reward for record in records]
    # one engine, reloaded after each round of training
    assert [Path(folder).parts[-3] for folder in reloads] == ["round-00", "round-01"]
    for number, record in enumerate(records):
        folder = output / f"round-{number:02d}"
        frame = pl.read_parquet(f"{folder}/held_out/data/*.parquet")
        assert record.reward == pytest.approx(frame["reward"].mean(), abs=1e-6)
        assert frame["policy_step"].unique().to_list() == [number]
        assert frame.height == 6
        assert record.largest_deviation < 1e-3
        assert record.agreement_k3 < 1e-6
    # the weights did move, and another policy's rollouts show it
    new = output / "round-01" / "train"
    old_data = output / "round-00" / "held_out"
    moved = agree(old_data, next(new.glob("step-*")))
    assert moved.largest_deviation > 0.05
    prover = rounds.Prover(compute_dtype="float32", tolerance=1e3, k3_tolerance=1e-3)
    with pytest.raises(TrainingError, match="the weights do not agree with the data: k3 is"):
        prover.prove(old_data, next(new.glob("step-*")))
    assert prover.prove(old_data, untrained).replayed.k3 < 1e-6
    report = agree(output / "round-00" / "data", untrained)
    assert report.largest_deviation < 1e-3
    assert report.replayed.k3 < 1e-6
    assert report.unreplayed.mean == pytest.approx(report.kept_mass, abs=1e-4)
    assert report.kept_mass_gap < 1e-3
    assert report.kept_mass < 0.999


def test_a_reload_that_does_nothing_ends_the_run(
    untrained: Path, tmp_path: Path, kept: KeptEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "reload_weights", lambda self, folder: None)
    seen = rounds.run_rounds(plan_of(untrained, tmp_path / "run"), kept)
    assert next(seen).round == 0
    with pytest.raises(TrainingError, match="the weights do not agree with the data: a ratio is"):
        next(seen)


def test_stale_and_single_datasets(
    untrained: Path, tmp_path: Path, kept: KeptEngine, reloads: list[str]
) -> None:
    output = tmp_path / "run"
    plan = plan_of(untrained, output, reload_every=2, rounds=3, keep_checkpoints=False)
    list(rounds.run_rounds(plan, kept))
    sampled = {
        number: json.loads((output / f"round-0{number}/data/_dataset.json").read_text())
        for number in range(3)
    }
    digests = [
        sampled[number]["fingerprint_inputs"]["model"]["weights_digest"] for number in range(3)
    ]
    assert digests[0] == digests[1] != digests[2]
    # to measure, to sample with the old weights, to measure, ...
    assert len(reloads) == 4
    # those of the first round are of no use once the second is done
    left = sorted(path.parts[-3] for path in output.glob("round-*/train/step-*"))
    assert left == ["round-01", "round-02"]
    once = tmp_path / "once"
    list(rounds.run_rounds(plan_of(untrained, once, sample_every=0), kept))
    assert [path.parent.name for path in sorted(once.glob("round-*/data"))] == ["round-00"]


def test_tied_weights_get_a_new_engine(
    tmp_path: Path, kept: KeptEngine, reloads: list[str]
) -> None:
    """VLLM's CPU build reloads all but the tied output weight."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "xyz"}\n')
    for seed in (0, 1):
        model = make_tiny_model(tmp_path / f"model-{seed}", tied=True, seed=seed)
        assert reference_model(model).config.tie_word_embeddings
        output = tmp_path / f"data-{seed}"
        names = [f"model.path={model}", f"prompts.path={prompts}", f"output.path={output}"]
        job = load_job(JOBS / "generate.yaml", [*SMALL, *names, "reward=null"])
        generate(job, show_progress=False, kept=kept)
        assert agree(output, model).largest_deviation < 1e-3
    assert reloads == []
