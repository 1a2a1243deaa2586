"""What people reported of other tools, run on the real engine; each test is named by its report."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_jobs import (
    commit_files,
    make_job,
    read_commit_file,
    read_rejected,
    read_rows,
    seen_logits,
    unpack,
    write_prompts,
)
from test_generate_exact import check_against_sampler, check_replay
from tiny_model import byte_tokenizer, make_tiny_model, reference_model

from rollout.errors import ConfigError, InputError
from rollout.loader import RolloutLoader
from rollout.pipeline import generate

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def prompts_file(folder: Path, count: int, **extra: Any) -> Path:
    rows = [{"prompt": f"prompt number {i}"} | extra for i in range(count)]
    return write_prompts(folder / "prompts.jsonl", rows)


class Float32Head(torch.nn.Module):
    """A bfloat16 model whose head multiplies in float32: what the engine's own could be."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        hidden = self.model.model(ids).last_hidden_state.float()
        return SimpleNamespace(logits=hidden @ self.model.lm_head.weight.float().T)


def dense_logprobs(model: torch.nn.Module, row: dict[str, Any]) -> torch.Tensor:
    """[T, V] full-vocabulary logprobs of a row's completion at its own temperature."""
    ids = row["prompt_token_ids"] + row["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    first = len(row["prompt_token_ids"]) - 1
    scaled = logits[first : first + len(row["token_ids"])] / row["temperature"]
    return torch.log_softmax(scaled, -1)


def test_u01_ratios_are_one_and_the_unreplayed_ratio_is_the_kept_mass(
    model: Path, tmp_path: Path
) -> None:
    kinds = [{"top_p": 1.0}, {"top_p": 0.8}, {"min_p": 0.1}]
    rows = [{"prompt": f"prompt {i}", "sampling": kinds[i % 3], "id": str(i)} for i in range(24)]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    job = make_job(model, prompts, tmp_path / "out", sampling={"n": 2, "max_tokens": 24})
    generate(job, show_progress=False)
    stored = read_rows(tmp_path / "out")
    reference = reference_model(model)
    truncated = [row for row in stored if row["support_kind"] == "kept"]
    assert len(truncated) == 32
    check_replay(truncated, reference)
    untruncated = [row for row in stored if row["support_kind"] == "top"]
    assert len(untruncated) == 16
    for row in untruncated:
        log_p = dense_logprobs(reference, row)
        picked = log_p[range(len(row["token_ids"])), row["token_ids"]]
        log_q = torch.tensor(row["sampled_logprobs"])
        assert float((picked - log_q).abs().max()) < 1e-3


def test_u02_generation_config_changes_nothing(tmp_path: Path) -> None:
    model = make_tiny_model(
        tmp_path / "model",
        generation_config={
            "repetition_penalty": 1.3,
            "top_k": 5,
            "top_p": 0.5,
            "temperature": 0.3,
            "eos_token_id": [258, 17],
        },
    )
    prompts = prompts_file(tmp_path, 8)
    job = make_job(model, prompts, tmp_path / "out", sampling={"max_tokens": 32, "top_p": 0.99})
    with seen_logits() as seen:
        generate(job, show_progress=False)
    rows = read_rows(tmp_path / "out")
    check_against_sampler(rows, seen)
    check_replay(rows, reference_model(model))  # a penalty of 1.3 would show
    widths = np.concatenate([np.diff(row["support_offsets"]) for row in rows])
    assert (widths > 5).mean() > 0.5
    record = json.loads((tmp_path / "out" / "_dataset.json").read_text())
    sampling = record["provenance"]["job"]["sampling"]
    assert (sampling["temperature"], sampling["top_k"], sampling["repetition_penalty"]) == (1, 0, 1)
    assert record["provenance"]["inherited"] == {"eos_token_ids": [258, 17]}
    for row in rows:
        assert not {258, 17} & set(row["token_ids"][:-1]), "an inherited end did not end it"
    with pytest.raises(ConfigError, match=r"repetition_penalty is 1\.1, expected 1\.0"):
        make_job(
            model, prompts, tmp_path / "b", sampling={"max_tokens": 4, "repetition_penalty": 1.1}
        )


def test_u03_wide_rows_are_stored_whole(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", logit_scale=0.3, vocab_size=2048)
    kinds = [{"temperature": 2.0, "top_p": 0.999}, {"min_p": 0.02}]
    rows = [{"prompt": f"p{i}", "sampling": kinds[i % 2], "id": str(i)} for i in range(8)]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with seen_logits() as seen:
        generate(make_job(model, prompts, tmp_path / "out"), show_progress=False)
    stored = read_rows(tmp_path / "out")
    check_against_sampler(stored, seen)
    widths = np.concatenate([np.diff(row["support_offsets"]) for row in stored])
    assert widths.max() > 1900, "rows near the width of the vocabulary were meant"


def test_u03_an_untruncated_run_does_not_grow_with_the_vocabulary(tmp_path: Path) -> None:
    sizes = {}
    for vocab in (512, 4096):
        model = make_tiny_model(tmp_path / f"m{vocab}", vocab_size=vocab)
        out = tmp_path / f"out{vocab}"
        job = make_job(model, prompts_file(tmp_path, 4), out, capture={"top": 16})
        generate(job, show_progress=False)
        (shard,) = (out / "data").glob("*.parquet")
        rows = read_rows(out)
        assert {row["support_kind"] for row in rows} == {"top"}
        assert all(set(np.diff(row["support_offsets"])) == {16} for row in rows)
        sizes[vocab] = shard.stat().st_size / sum(len(row["token_ids"]) for row in rows)
    assert sizes[4096] < 1.5 * sizes[512]


def test_u05_ids_beyond_the_tokenizer_are_kept(tmp_path: Path) -> None:
    model = make_tiny_model(
        tmp_path / "model", vocab_size=520, head_bias=dict.fromkeys(range(500, 520), 0.6)
    )
    prompts = prompts_file(tmp_path, 16)
    job = make_job(
        model,
        prompts,
        tmp_path / "out",
        sampling={"n": 4, "temperature": 1.5, "top_p": 0.98, "max_tokens": 32},
        engine={"max_num_seqs": 32},
    )
    with seen_logits() as seen:
        generate(job, show_progress=False)
    rows = read_rows(tmp_path / "out")
    check_against_sampler(rows, seen)
    drawn = {token for row in rows for token in row["token_ids"]}
    assert drawn & set(range(500, 520))
    (commit,) = commit_files(tmp_path / "out")
    assert read_commit_file(commit)["max_token_id"] >= 500
    assert all(isinstance(row["text"], str) for row in rows)


def test_u06_stored_logprobs_are_after_temperature(model: Path, tmp_path: Path) -> None:
    temperatures = [0.0, 0.6, 1.0, 2.0]
    rows = [
        {"prompt": f"prompt {i}", "id": str(i), "sampling": {"temperature": temperatures[i % 4]}}
        for i in range(12)
    ]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    job = make_job(model, prompts, tmp_path / "out", capture={"top": 0})
    generate(job, show_progress=False)
    reference = reference_model(model)
    stored = read_rows(tmp_path / "out")
    assert sorted({row["temperature"] for row in stored}) == [
        float(np.float32(t)) for t in temperatures
    ]
    for row in stored:
        if row["temperature"] == 0.0:
            assert set(row["sampled_logprobs"]) == {0.0}
            assert row["support_offsets"] == list(range(len(row["token_ids"]) + 1))
            continue
        assert row["support_kind"] == "none"
        assert row["support_entries"] is None
        log_p = dense_logprobs(reference, row)
        picked = log_p[range(len(row["token_ids"])), row["token_ids"]].numpy()
        np.testing.assert_allclose(row["sampled_logprobs"], picked, atol=1e-4)
    with pytest.raises(ConfigError, match=r"temperature is 0\.001"):
        make_job(model, prompts, tmp_path / "b", sampling={"temperature": 0.001})


def test_u07_stored_ids_need_no_tokenizer(model: Path, tmp_path: Path) -> None:
    prompts = prompts_file(tmp_path, 50)
    (tmp_path / "reward.py").write_text("def r(prompt, text, ids):\n    return ids[0] % 5\n")
    job = make_job(
        model,
        prompts,
        tmp_path / "out",
        sampling={"temperature": 1.3, "max_tokens": 7, "n": 4},
        reward=f"{tmp_path / 'reward.py'}:r",
    )
    with seen_logits() as seen:
        generate(job, show_progress=False)
    tokenizer = byte_tokenizer()
    rows = read_rows(tmp_path / "out")
    by_request = {key[0][: key[0].rindex("-") + 1]: key[0] for key in seen.rows}
    changed = 0
    for row in rows:
        internal = by_request[row["request"]]
        sampled = [seen.sampled[internal, i] for i in range(len(row["token_ids"]))]
        assert row["token_ids"] == sampled
        assert row["text"] == tokenizer.decode(row["token_ids"], skip_special_tokens=True)
        changed += tokenizer(row["text"])["input_ids"] != row["token_ids"]
    assert len(rows) == 200
    assert changed > 0, "no rollout shows the difference: the test is empty"
    loader = RolloutLoader(tmp_path / "out", vocab_size=320, groups_per_step=8, token_budget=400)
    loaded = []
    for batch in loader:
        edges = batch.cu_seqlens.tolist()
        ids = batch.input_ids.tolist()
        loaded += [tuple(ids[start:end]) for start, end in itertools.pairwise(edges)]
    stored = [tuple(row["prompt_token_ids"] + row["token_ids"]) for row in rows]
    assert Counter(loaded) == Counter(stored)


def test_u08_head_and_logits_dtype_are_recorded(tmp_path: Path) -> None:
    # layers that add nothing: engine and reference agree up to the head, whose rounding is tested
    model = make_tiny_model(tmp_path / "model", dtype=torch.bfloat16, tied=True, body_scale=0.0)
    prompts = prompts_file(tmp_path, 32)
    reference = Float32Head(reference_model(model, torch.bfloat16))
    facts, gaps = {}, {}
    for name, overrides in {"default": {}, "float32": {"head_dtype": "float32"}}.items():
        out = tmp_path / name
        engine = {"hf_overrides": overrides} if overrides else {}
        job = make_job(
            model,
            prompts,
            out,
            model={"dtype": "bfloat16"},
            capture={"top": 0},
            sampling={"max_tokens": 8},
            engine=engine,
        )
        generate(job, show_progress=False)
        (commit,) = commit_files(out)
        facts[name] = read_commit_file(commit)["engine"]
        differences = [
            np.abs(
                dense_logprobs(reference, row)[
                    range(len(row["token_ids"])), row["token_ids"]
                ].numpy()
                - row["sampled_logprobs"]
            )
            for row in read_rows(out)
        ]
        gaps[name] = float(np.concatenate(differences).mean())
    assert facts["default"]["tied_embeddings"] is True
    assert facts["default"]["logits_dtype"] == "bfloat16"
    assert facts["float32"]["logits_dtype"] == "float32"
    assert facts["default"]["model_dtype"] == facts["float32"]["model_dtype"] == "bfloat16"
    assert gaps["float32"] < 0.1 * gaps["default"], gaps


def test_u09_long_prompts_are_set_aside(model: Path, tmp_path: Path) -> None:
    lengths = [0, 1, 63, 64, 65, 5000]
    good = [{"id": f"good {i}", "prompt": f"good prompt {i}"} for i in range(100)]
    odd = [{"id": f"odd {n}", "prompt_token_ids": [65] * n} for n in lengths]
    prompts = write_prompts(tmp_path / "p.jsonl", good[:50] + odd + good[50:])
    job = make_job(
        model,
        prompts,
        tmp_path / "out",
        sampling={"max_tokens": 4, "top_p": 0.9},
        engine={"max_model_len": 64, "max_num_seqs": 32},
    )
    with seen_logits() as seen:
        summary = generate(job, show_progress=False)
    rows = read_rows(tmp_path / "out")
    check_against_sampler(rows, seen)
    tokenizer = byte_tokenizer()
    prompt_of = {row["prompt_id"]: row["prompt_token_ids"] for row in rows}
    assert prompt_of.keys() == {row["id"] for row in good} | {"odd 1", "odd 63"}
    for row in good:
        assert prompt_of[str(row["id"])] == tokenizer(row["prompt"])["input_ids"]
    rejected = {row["prompt_id"]: row for row in read_rejected(tmp_path / "out")}
    assert {key: row["reason"] for key, row in rejected.items()} == {
        "odd 0": "empty_prompt",
        "odd 64": "prompt_too_long",
        "odd 65": "prompt_too_long",
        "odd 5000": "prompt_too_long",
    }
    assert rejected["odd 5000"]["num_prompt_tokens"] == 5000
    assert rejected["odd 64"]["line"] == 54
    assert summary.prompts_read == 106 == len(rows) + summary.prompts_rejected
    assert summary.reconciles
    # a second run finds everything done, rejects again, and records no rejection twice
    again = generate(job, show_progress=False)
    assert (again.rollouts_committed, again.rollouts_skipped) == (0, 102)
    assert len(read_rejected(tmp_path / "out")) == 4


def test_u09_the_policy_is_the_users(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(
        tmp_path / "p.jsonl", [{"id": "long", "prompt_token_ids": list(range(1, 101))}]
    )
    sections: dict[str, Any] = {
        "sampling": {"max_tokens": 4, "top_p": 0.9, "ignore_eos": True},
        "engine": {"max_model_len": 64},
    }
    failing = make_job(
        model, prompts, tmp_path / "fail", prompts={"long_prompts": "fail"}, **dict(sections)
    )
    with pytest.raises(InputError, match="line 1: got 100 tokens, expected at most 63"):
        generate(failing, show_progress=False)
    truncating = make_job(
        model, prompts, tmp_path / "left", prompts={"long_prompts": "truncate_left"}, **sections
    )
    generate(truncating, show_progress=False)
    (row,) = read_rows(tmp_path / "left")
    assert row["prompt_token_ids"] == list(range(41, 101))
    assert len(row["token_ids"]) == 4


def test_unpack_reads_the_packed_form() -> None:
    ids, logprobs = unpack([8, (0xBF800000 << 32) | 151_935])
    assert ids.tolist() == [8, 151_935]
    assert logprobs.tolist() == [0.0, -1.0]
