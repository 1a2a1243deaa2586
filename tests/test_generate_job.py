"""A job from its file to its dataset on the real engine: resume, failures, outputs, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml
from click.testing import CliRunner
from engine_jobs import (
    make_job,
    memory_rows,
    read_rejected,
    read_rows,
    seen_logits,
    write_prompts,
)
from test_generate_exact import check_against_sampler
from tiny_model import make_tiny_model

from rollout.cli import main
from rollout.errors import EngineError, OutputError
from rollout.pipeline import generate

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def keys_of(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return sorted((row["prompt_id"], row["sample_index"]) for row in rows)


def test_running_again_generates_only_what_is_missing(model: Path, tmp_path: Path) -> None:
    rows = [{"id": f"p{i}", "prompt": f"prompt {i}"} for i in range(6)]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    # eight tokens each: an end at once would make samples equal by chance
    sampling = {"top_p": 0.9, "n": 2, "max_tokens": 8, "ignore_eos": True}
    first = generate(
        make_job(model, prompts, tmp_path / "out", sampling=sampling), show_progress=False
    )
    before = {(row["prompt_id"], row["sample_index"]): row for row in read_rows(tmp_path / "out")}
    assert (first.rollouts_committed, len(before)) == (12, 12)

    # n grows, prompts are reordered and appended, a throughput knob changes
    more = [{"id": "new", "prompt": "another"}, *reversed(rows)]
    write_prompts(prompts, more)
    job = make_job(
        model,
        prompts,
        tmp_path / "out",
        sampling=sampling | {"n": 3},
        engine={"max_num_seqs": 3},
    )
    second = generate(job, show_progress=False)
    stored = read_rows(tmp_path / "out")
    assert second.rollouts_skipped == 12
    assert second.rollouts_committed == 6 + 3
    assert keys_of(stored) == sorted((str(r["id"]), i) for r in more for i in range(3))
    for row in stored:
        old = before.get((row["prompt_id"], row["sample_index"]))
        assert old is None or old["token_ids"] == row["token_ids"]
    # without a seed each run draws afresh: the third sample is no copy of the first
    third = {row["prompt_id"]: row["token_ids"] for row in stored if row["sample_index"] == 2}
    assert all(before[key, 0]["token_ids"] != third[key] for key in ("p0", "p1", "p2"))


def test_a_finished_job_starts_no_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "a"}])
    job = make_job(model, prompts, tmp_path / "out", sampling={"top_p": 0.9})
    generate(job, show_progress=False)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("rollout.engine_start.Engine", refuse)
    again = generate(job, show_progress=False)
    assert (again.rollouts_skipped, again.rollouts_committed) == (1, 0)


def test_what_changes_the_distribution_is_refused_with_key_old_and_new(
    model: Path, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "a"}])
    generate(
        make_job(model, prompts, tmp_path / "out", sampling={"top_p": 0.9}), show_progress=False
    )
    other = make_job(model, prompts, tmp_path / "out", sampling={"top_p": 0.8})
    with pytest.raises(OutputError, match=r"`sampling.top_p` is 0\.9 there and 0\.8 now"):
        generate(other, show_progress=False)
    assert len(read_rows(tmp_path / "out")) == 1


def test_a_seed_repeats_the_samples(model: Path, tmp_path: Path) -> None:
    rows = [{"id": f"p{i}", "prompt": f"prompt {i}"} for i in range(4)]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    sampling = {"top_p": 0.9, "n": 2, "seed": 7}
    found = []
    for name, lanes in (("a", 16), ("b", 3)):
        job = make_job(
            model, prompts, tmp_path / name, sampling=sampling, engine={"max_num_seqs": lanes}
        )
        generate(job, show_progress=False)
        found.append(
            {
                (r["prompt_id"], r["sample_index"]): r["token_ids"]
                for r in read_rows(tmp_path / name)
            }
        )
    assert found[0] == found[1]
    assert found[0]["p0", 0] != found[0]["p0", 1]


def test_draws_and_tail_are_stored_beside_the_support(model: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "kept", "prompt": "a", "sampling": {"top_p": 0.9}},
        {"id": "top", "prompt": "a"},
    ]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    job = make_job(
        model, prompts, tmp_path / "out", capture={"top": 8, "draws": 5}, sampling={"n": 8}
    )
    with seen_logits() as seen:
        generate(job, show_progress=False)
    by_request = {key[0][: key[0].rindex("-") + 1]: key[0] for key in seen.rows}
    for row in read_rows(tmp_path / "out"):
        internal, tokens = by_request[row["request"]], len(row["token_ids"])
        draws = np.array(row["draw_entries"], np.uint64).reshape(tokens, 5)
        for position in range(tokens):
            log_q = seen.rows[internal, position].double().log_softmax(-1).numpy()
            ids = (draws[position] & np.uint64(0xFFFFFFFF)).astype(int)
            logprobs = (draws[position] >> np.uint64(32)).astype(np.uint32).view(np.float32)
            np.testing.assert_allclose(logprobs, log_q[ids], rtol=1e-6, atol=1e-6)
            if row["prompt_id"] == "top":
                tail = np.sort(np.exp(log_q))[:-8].sum()
                np.testing.assert_allclose(row["tail_mass"][position], tail, rtol=1e-5)
            else:
                assert row["tail_mass"][position] == 0.0


def test_memory_output(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"id": "a", "prompt": "a"}])
    url = f"memory://{tmp_path.name}"
    job = make_job(model, prompts, url, sampling={"top_p": 0.9, "n": 3})
    generate(job, show_progress=False)
    assert keys_of(memory_rows(url)) == [("a", 0), ("a", 1), ("a", 2)]


def test_a_small_capacity_fails_the_rows_past_it_and_no_other(model: Path, tmp_path: Path) -> None:
    rows = [{"id": f"p{i}", "prompt": f"prompt {i}"} for i in range(12)]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    job = make_job(
        model,
        prompts,
        tmp_path / "out",
        sampling={"top_p": 0.95, "max_tokens": 16},
        capture={"support_capacity": 400},
        engine={"max_num_seqs": 12},
    )
    with seen_logits() as seen:
        summary = generate(job, show_progress=False)
    stored, failed = read_rows(tmp_path / "out"), read_rejected(tmp_path / "out")
    check_against_sampler(stored, seen)
    assert summary.rollouts_failed == len(failed) > 0
    assert len(stored) == 12 - len(failed) > 0
    assert summary.reconciles
    assert summary.largest_step > 400
    for row in failed:
        assert (row["stage"], row["reason"]) == ("capture", "support_overflow")
        assert "support_capacity is 400; raise capture.support_capacity to" in row["detail"]
    # raised, the same output is completed
    enough = job.model_copy(
        update={"capture": job.capture.model_copy(update={"support_capacity": 2**18})}
    )
    assert generate(enough, show_progress=False).rollouts_committed == len(failed)
    assert keys_of(read_rows(tmp_path / "out")) == sorted((f"p{i}", 0) for i in range(12))


def test_nan_logits_fail_the_rollout(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", head_bias={300: float("nan")})
    prompts = write_prompts(tmp_path / "p.jsonl", [{"id": "a", "prompt": "a"}])
    job = make_job(model, prompts, tmp_path / "out", sampling={"top_p": 0.9, "n": 3})
    summary = generate(job, show_progress=False)
    assert summary.reasons == {"bad_numerics": 3}
    assert read_rows(tmp_path / "out") == []
    assert {row["reason"] for row in read_rejected(tmp_path / "out")} == {"bad_numerics"}


def test_an_engine_that_dies_loses_nothing_that_was_finished(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollout.engine import Engine

    lengths = [2, 2, 40, 40]
    rows = [
        {"id": f"p{i}", "prompt": "x", "sampling": {"max_tokens": n}} for i, n in enumerate(lengths)
    ]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    job = make_job(model, prompts, tmp_path / "out", sampling={"top_p": 0.9, "ignore_eos": True})
    stock, steps = Engine.step, []

    def step(self: Engine) -> Any:
        steps.append(0)
        if len(steps) > 10:
            raise EngineError("vLLM died: planted")
        return stock(self)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", step)
        with pytest.raises(EngineError, match="planted"):
            generate(job, show_progress=False)
    assert keys_of(read_rows(tmp_path / "out")) == [("p0", 0), ("p1", 0)]
    generate(job, show_progress=False)
    assert keys_of(read_rows(tmp_path / "out")) == [(f"p{i}", 0) for i in range(4)]


def job_file(folder: Path, model: Path, /, **sections: Any) -> Path:
    prompts = write_prompts(folder / "prompts.jsonl", [{"prompt": "a"}])
    data: dict[str, Any] = {
        "model": {"path": str(model)},
        "prompts": {"path": str(prompts)},
        "sampling": {"max_tokens": 4, "top_p": 0.9},
        "output": {"path": str(folder / "out")},
        "engine": {"enforce_eager": True, "kv_cache_memory_bytes": 2**26, "max_model_len": 64},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(data | sections))
    return path


@pytest.mark.parametrize(
    ("sections", "overrides", "code", "message"),
    [
        ({"prompts": {"path": "absent.jsonl"}}, [], 3, "prompts absent.jsonl can't be read"),
        ({"model": {"path": "./absent"}}, [], 3, "model ./absent: no such folder"),
        ({"modle": {}}, [], 2, "modle: unknown key; did you mean `model`?"),
        ({}, ["sampling.temperture=0.7"], 2, "did you mean `temperature`?"),
        ({}, ["sampling.max_tokens=many"], 2, "sampling.max_tokens: got 'many'"),
        ({}, ["sampling.logit_bias={1: 2.0}"], 2, "replay could not undo it"),
        ({}, ["sampling.top_p=1.0", "sampling.min_tokens=2"], 2, "a hidden truncation"),
        (
            {},
            ["sampling.stop_token_ids=[5, 320]"],
            2,
            "sampling.stop_token_ids: token id 320 is outside of the model's vocabulary of 320",
        ),
        ({}, ["sampling.allowed_token_ids=[999]"], 2, "sampling.allowed_token_ids: token id 999"),
        ({}, ["engine.worker_cls=x.Y"], 2, "engine.worker_cls: decided by the job"),
        ({}, ["engine.max_num_seq=4"], 2, "did you mean `max_num_seqs`?"),
        (
            {},
            ["engine.max_num_seqs=many"],
            2,
            "engine.max_num_seqs: got 'many', expected int or null",
        ),
        ({}, ["engine.tensor_parallel_size=64"], 2, "must be divisible by tensor parallel size"),
        ({}, ["engine.speculative_config={method: ngram}"], 2, "speculative decoding"),
        (
            {},
            ["engine.prefill_context_parallel_size=2"],
            2,
            "context parallelism can't be captured",
        ),
        ({}, ["reward=absent.py:f"], 3, "reward absent.py:f"),
    ],
)
def test_bad_input_is_one_line_one_code_and_leaves_nothing(
    sections: dict[str, Any],
    overrides: list[str],
    code: int,
    message: str,
    model: Path,
    tmp_path: Path,
) -> None:
    path = job_file(tmp_path, model, **sections)
    for dry_run in ([], ["--dry-run"]):
        arguments = ["generate", "--config", str(path), *dry_run]
        for override in overrides:
            arguments += ["--set", override]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == code, result.output
        assert message in result.stderr
        assert result.stderr.startswith("error: ")
        assert len(result.stderr.splitlines()) == 1
        assert not (tmp_path / "out").exists()


def test_an_output_of_another_run_is_refused_before_the_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job_file(tmp_path, model)
    assert CliRunner().invoke(main, ["generate", "--config", str(path)]).exit_code == 0
    before = sorted(p.name for p in (tmp_path / "out").rglob("*"))
    monkeypatch.setattr("rollout.engine_start.Engine", None)
    result = CliRunner().invoke(
        main, ["generate", "--config", str(path), "--set", "sampling.temperature=0.5"]
    )
    assert result.exit_code == 4
    assert "`sampling.temperature` is 1.0 there and 0.5 now" in result.stderr
    assert sorted(p.name for p in (tmp_path / "out").rglob("*")) == before


def test_a_dry_run_shows_everything_and_writes_nothing(model: Path, tmp_path: Path) -> None:
    path = job_file(tmp_path, model)
    result = CliRunner().invoke(main, ["generate", "--config", str(path), "--dry-run"])
    assert result.exit_code == 0, result.output
    shown = yaml.safe_load(result.stdout)
    assert shown["job"]["sampling"]["top_p"] == 0.9
    assert shown["support recorded"] == "kept"
    assert shown["engine arguments"]["logprobs_mode"] == "processed_logits"
    assert shown["first prompts"] == [{"line": 1, "token_ids": [64], "text": "a"}]
    assert not (tmp_path / "out").exists()


def test_a_stop_id_that_the_model_lacks_rejects_the_row_that_names_it(
    model: Path, tmp_path: Path
) -> None:
    path = job_file(tmp_path, model)
    own = {"prompt": "a", "sampling": {"stop_token_ids": [319, 320]}}
    write_prompts(tmp_path / "prompts.jsonl", [{"prompt": "a"}, own])
    command = ["generate", "--config", str(path), "--set", "sampling.stop_token_ids=[319]"]
    dry = CliRunner().invoke(main, [*command, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    kept, rejected = yaml.safe_load(dry.stdout)["first prompts"]
    assert kept["token_ids"] == [64]
    detail = "sampling.stop_token_ids: token id 320 is outside of the model's vocabulary of 320"
    assert rejected == {"line": 2, "rejected": f"bad_token_id: {detail}"}
    result = CliRunner().invoke(main, [*command, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["rollouts_committed"], found["reasons"]) == (1, {"bad_token_id": 1})


def test_generate_prints_a_table_and_a_line_of_polars_that_works(
    model: Path, tmp_path: Path
) -> None:
    path = job_file(tmp_path, model)
    result = CliRunner().invoke(main, ["generate", "--config", str(path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rollouts_committed"] == 1
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    (line,) = [text for text in shown.stdout.splitlines() if "pl.scan_parquet" in text]
    expression = line[line.index("pl.scan_parquet") :].strip()
    url = expression.split('"')[1]
    assert pl.scan_parquet(url).select(pl.len()).collect().item() == 1


def test_prompts_that_are_all_unusable_are_no_success(model: Path, tmp_path: Path) -> None:
    path = job_file(tmp_path, model)
    (tmp_path / "prompts.jsonl").write_text('{"text": "no prompt"}\nnot json\n')
    result = CliRunner().invoke(main, ["generate", "--config", str(path)])
    assert result.exit_code == 6
    assert "none of 2 prompts could be used" in result.stderr
    reasons = {row["reason"] for row in read_rejected(tmp_path / "out")}
    assert reasons == {"bad_row", "unreadable_row"}
