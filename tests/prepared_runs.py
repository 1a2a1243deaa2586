"""Three runs as a person finds them: complete, damaged, and half-finished.

Every run plans 20 prompts of 4 samples in four units of five prompts, `task 00` to `task 19`, with
24 tokens a sample and rewards k / 4 for sample k.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from synthetic import make_record, make_rejection, make_row
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rollout.dataset import DatasetWriter
from rollout.model_files import tokenizer_digest
from rollout.rows import PlanEntry, RolloutRow
from rollout.schema.records import DatasetRecord
from rollout.storage import Storage

VOCAB = 500
TOKENS = 24
PROMPTS = 20
SAMPLES = 4


@dataclass(frozen=True)
class PreparedRun:
    """A run on local storage."""

    path: Path
    rows: list[RolloutRow]
    """Every row that was committed, those of a removed shard included."""


def word(token_id: int) -> str:
    """The text of a token of the prepared runs' tokenizer."""
    return f"w{token_id}\u00e9"


def make_model(folder: Path) -> Path:
    """A checkpoint's folder with nothing but a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word(i): i for i in range(VOCAB)}
    Tokenizer(WordLevel(vocabulary, unk_token=word(0))).save(str(folder / "tokenizer.json"))
    return folder


def make_job_record(model: Path) -> DatasetRecord:
    """A record as a job with this model writes it."""
    job = {
        "model": {"path": str(model)},
        "prompts": {"path": "tasks.jsonl"},
        "sampling": {"n": SAMPLES, "temperature": 1.0, "top_p": 0.9, "max_tokens": 64},
        "capture": {"top": 128, "draws": 0},
    }
    record = make_record(
        model={"weights_digest": "ab" * 32, "dtype": "bfloat16"},
        sampling={"temperature": 1.0, "top_p": 0.9},
        tokenizer={"tokenizer_digest": tokenizer_digest(model), "template_digest": "cd" * 32},
    )
    return replace(record, provenance={"job": job, "model": {"name": str(model)}})


def make_rows(prompt: int, **fields: Any) -> list[RolloutRow]:
    """The samples of a prompt; every third prompt is untruncated (kind top)."""
    rng = np.random.default_rng(prompt)
    rows = []
    for sample in range(SAMPLES):
        kind = "top" if prompt % 3 == 2 else "kept"
        lengths = [8] * TOKENS if kind == "top" else rng.choice([1, 1, 2, 9, 60], TOKENS).tolist()
        rows.append(
            make_row(
                f"key-{prompt:02d}-0123456789",
                sample,
                lengths=lengths,
                kind=kind,
                vocab=VOCAB,
                prompt_id=f"task {prompt:02d}",
                group_size=SAMPLES,
                finish_reason="length" if sample == 0 else "stop",
                reward=sample / 4,
                text=f"answer {sample}",
                **fields,
            )
        )
    return rows


def plan_of(prompt: int) -> PlanEntry:
    """The plan of one prompt."""
    key = f"key-{prompt:02d}-0123456789"
    unit = f"u{prompt // 5:06d}"
    return PlanEntry(prompt_key=key, prompt_id=f"task {prompt:02d}", unit=unit)


def _writer(folder: Path) -> tuple[Path, DatasetWriter]:
    path = folder / "run"
    record = make_job_record(make_model(folder / "model"))
    writer = DatasetWriter.open(Storage.open(path), record, row_group_bytes=20_000)
    writer.engine = {"engine": "vllm", "engine_version": "0.32.0"}
    writer.append_plan(plan_of(prompt) for prompt in range(PROMPTS))
    return path, writer


def complete_run(folder: Path) -> PreparedRun:
    """Everything is there, and trainer and sampler were compared."""
    path, writer = _writer(folder)
    rows = []
    for unit in range(4):
        own = [row for prompt in range(5 * unit, 5 * unit + 5) for row in make_rows(prompt)]
        writer.commit_part(f"u{unit:06d}", own)
        rows += own
    stats = {"tokens": 1920, "mean": 1.0000123, "quantiles": [0.9, 1, 1, 1, 1.1], "k3": 3.1e-8}
    report = {
        "model": "models/m",
        "tokens": 1920,
        "largest_deviation": 0.1,
        "nonfinite_trainer": 0,
        "nonfinite_sampler": 0,
        "replayed": {"label": "ratio"} | stats,
        "unreplayed": {"label": "ratio without replay"} | stats | {"mean": 0.9123},
        "by_position": [{"label": "0"} | stats],
        "by_support": [],
    }
    (path / "_agreement.json").write_text(json.dumps(report))
    return PreparedRun(path=path, rows=rows)


def damaged_run(folder: Path) -> PreparedRun:
    """A twentieth is set aside, one shard is lost, one reward is NaN.

    `task 04` is rejected whole; `task 07` lacks sample 3, whose logits were NaN; the shard of unit
    2 is gone; sample 1 of `task 00` has reward NaN.
    """
    path, writer = _writer(folder)
    rows = []
    for unit in range(4):
        own = [row for prompt in range(5 * unit, 5 * unit + 5) for row in make_rows(prompt)]
        rejected = []
        if unit == 0:
            own = [row for row in own if row.prompt_id != "task 04"]
            own[1].reward = float("nan")
            rejected = [
                make_rejection(
                    "key-04-0123456789",
                    prompt_id="task 04",
                    file="tasks.jsonl",
                    line=5,
                    detail="901 tokens, the model takes 512",
                    num_prompt_tokens=901,
                )
            ]
        if unit == 1:
            own = [row for row in own if row.prompt_id != "task 07" or row.sample_index != 3]
            rejected = [
                make_rejection(
                    "key-07-0123456789",
                    3,
                    prompt_id="task 07",
                    file="tasks.jsonl",
                    line=8,
                    reason="bad_numerics",
                    detail="token 17: NaN or infinite logits",
                )
            ]
        record = writer.commit_part(f"u{unit:06d}", own, rejected)
        assert record is not None
        assert record.file is not None
        if unit == 2:
            (path / record.file).unlink()
        rows += own
    return PreparedRun(path=path, rows=rows)


def half_run(folder: Path) -> PreparedRun:
    """Two of four units, and two samples of `task 10`."""
    path, writer = _writer(folder)
    rows = []
    for unit in range(2):
        own = [row for prompt in range(5 * unit, 5 * unit + 5) for row in make_rows(prompt)]
        writer.commit_part(f"u{unit:06d}", own)
        rows += own
    part = make_rows(10)[:2]
    writer.commit_part("u000002", part)
    return PreparedRun(path=path, rows=rows + part)
