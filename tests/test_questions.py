"""Six questions about three runs, answered by `rollout inspect` given nothing but the folder."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from prepared_runs import TOKENS, PreparedRun, complete_run, damaged_run, half_run, word

from rollout.cli import main


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return complete_run(tmp_path_factory.mktemp("complete"))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return damaged_run(tmp_path_factory.mktemp("damaged"))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return half_run(tmp_path_factory.mktemp("half"))


def say(run: PreparedRun, *args: str) -> str:
    """What the command prints for people; it fits 100 columns but for the line of polars."""
    result = CliRunner().invoke(main, ["inspect", str(run.path), *args])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert all(len(line) <= 100 for line in lines if "scan_parquet" not in line)
    assert "\x1b" not in result.output
    return result.output


def ask(run: PreparedRun, *args: str) -> Any:
    return json.loads(CliRunner().invoke(main, ["inspect", str(run.path), *args, "--json"]).output)


def line(text: str, label: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(label))


def test_is_it_complete(complete: PreparedRun, damaged: PreparedRun, half: PreparedRun) -> None:
    assert line(say(complete), "status") == "status         complete"
    assert "80 of 80 committed, 0 rejected, 0 missing" in say(complete)
    assert ask(complete)["complete"] is True

    text = say(damaged)
    assert line(text, "status") == (
        "status         INCOMPLETE: 1 shard unreadable with 20 rollouts; 1 prompt and 1 rollout "
        "set aside"
    )
    assert "bad shard      data/u000002-00000-" in text
    assert "(20 rollouts): missing" in text
    found = ask(damaged)
    assert (found["complete"], found["rollouts_unreadable"]) == (False, 20)
    # 19 prompts of 4, one rollout set aside
    assert (found["rollouts_planned"], found["rollouts_committed"]) == (76, 75)

    assert line(say(half), "status") == "status         INCOMPLETE: 38 rollouts not sampled"
    assert "20 planned: 10 complete, 1 in part; 0 rejected" in say(half)
    assert ask(half)["rollouts_missing"] == 80 - 42


def test_which_rows_failed_and_why(
    complete: PreparedRun, damaged: PreparedRun, half: PreparedRun
) -> None:
    for run in (complete, half):
        assert ask(run)["rejected"] == []
        assert "rejected       " not in say(run)
    text = say(damaged)
    assert "task 04 whole (tasks.jsonl:5): prompt_too_long: 901 tokens, the model takes 512" in text
    assert (
        "task 07 sample 3 (tasks.jsonl:8): bad_numerics: token 17: NaN or infinite logits" in text
    )
    assert "reward         1 NaN or infinite" in text
    assert [(row["prompt_id"], row["sample_index"]) for row in ask(damaged)["rejected"]] == [
        ("task 04", None),
        ("task 07", 3),
    ]
    prompt = say(damaged, "--prompt", "task 07")
    assert "     3 rejected bad_numerics: token 17: NaN or infinite logits" in prompt
    assert "set aside  at render: prompt_too_long" in say(damaged, "--prompt", "task 04")
    # which sample has the NaN, and what was lost with the shard
    samples = ask(damaged, "--prompt", "task 00")["samples"]
    assert [one["nonfinite_reward"] for one in samples] == [False, True, False, False]
    assert [one["reward"] for one in samples] == [0.0, None, 0.5, 0.75]
    assert "NaN/inf!" in say(damaged, "--prompt", "task 00").splitlines()[-3]
    lost = ask(damaged, "--prompt", "task 11")["samples"]
    assert [sample["status"] for sample in lost] == ["unreadable"] * 4
    assert all("is missing" in sample["why"] for sample in lost)
    unfinished = ask(half, "--prompt", "task 10")["samples"]
    assert [sample["status"] for sample in unfinished] == ["committed"] * 2 + ["missing"] * 2


def test_which_weights_engine_and_settings(
    complete: PreparedRun, damaged: PreparedRun, half: PreparedRun
) -> None:
    for run in (complete, damaged, half):
        text = say(run)
        assert "(abababababab), bfloat16, vllm 0.32.0" in text
        assert "n 4, temperature 1.0, top_p 0.9, max_tokens 64, top 128, draws 0" in text
        found = ask(run)
        assert found["model"] == str(run.path.parent / "model")
        assert (found["model_digest"], found["engines"]) == ("ab" * 32, ["vllm 0.32.0"])
        assert found["sampling"] == {"n": 4, "temperature": 1.0, "top_p": 0.9, "max_tokens": 64}
        assert found["prompts_file"] == "tasks.jsonl"
        assert len(found["tokenizer_digest"]) == 64


def test_what_do_rewards_lengths_supports_and_tails_look_like(
    complete: PreparedRun, damaged: PreparedRun, half: PreparedRun
) -> None:
    for run in (complete, damaged, half):
        found = ask(run)
        # what is on the lost shard can't be known
        lost = {f"task {i}" for i in range(10, 15)} if found["bad_shards"] else set()
        rows = [row for row in run.rows if row.prompt_id not in lost]
        rewards = [row.reward for row in rows if row.reward is not None and row.reward >= 0]
        assert found["rewards"]["mean"] == pytest.approx(statistics.fmean(rewards))
        assert found["nonfinite_rewards"] == len(rows) - len(rewards)
        assert (found["tokens"]["minimum"], found["tokens"]["maximum"]) == (TOKENS, TOKENS)
        for support in found["supports"]:
            own = [row for row in rows if row.support_kind == support["kind"]]
            offsets = [row.support_offsets for row in own if row.support_offsets is not None]
            sizes = np.concatenate([np.diff(one) for one in offsets])
            assert support["sizes"]["mean"] == pytest.approx(float(sizes.mean()))
            assert support["singleton_share"] == pytest.approx(float((sizes == 1).mean()))
            if support["kind"] == "top":
                assert support["tail_mean"] == pytest.approx(0.1)


def test_sample_3_of_a_prompt_at_token_17(
    complete: PreparedRun, damaged: PreparedRun, half: PreparedRun
) -> None:
    for run in (complete, damaged, half):
        for prompt in ("task 01", "task 02"):
            asked = ("--prompt", prompt, "--sample", "3", "--token", "17")
            row = next(r for r in run.rows if (r.prompt_id, r.sample_index) == (prompt, 3))
            (token,) = ask(run, *asked)["tokens"]
            assert token["id"] == row.token_ids[17]
            assert token["text"] == word(int(row.token_ids[17]))
            assert token["logprob"] == float(row.sampled_logprobs[17])
            assert row.support_offsets is not None
            assert row.support_entries is not None
            entries = row.support_entries[slice(*row.support_offsets[17:19].tolist())]
            expected = sorted(
                (-float(np.uint32(int(e) >> 32).view(np.float32)), int(e) & 0xFFFFFFFF)
                for e in entries
            )
            assert [(-a["logprob"], a["id"]) for a in token["alternatives"]] == expected
            assert token["support_size"] == len(entries)
            assert token["tail_mass"] == pytest.approx(0.1 if prompt == "task 02" else 0)
            text = say(run, *asked)
            chosen = next(t for t in text.splitlines() if t.startswith("*"))
            assert chosen[1:].split()[1:3] == [str(token["id"]), f'"{word(token["id"])}"']
            share = math.exp(token["logprob"])
            assert chosen.count("#") == round(share * 40)
            assert "token 17 of 24" in text


def test_a_token_table_holds_every_token(complete: PreparedRun) -> None:
    row = next(r for r in complete.rows if (r.prompt_id, r.sample_index) == ("task 04", 2))
    text = say(complete, "--prompt", "task 04", "--sample", "2")
    table = text[text.index("   pos") :].splitlines()[1:]
    assert len(table) == TOKENS
    assert row.support_offsets is not None
    for position, (shown, size) in enumerate(
        zip(table, np.diff(row.support_offsets).tolist(), strict=True)
    ):
        token = int(row.token_ids[position])
        cells = shown.split()
        assert cells[:3] == [str(position), str(token), f'"{word(token)}"']
        assert float(cells[3]) == pytest.approx(row.sampled_logprobs[position], abs=5e-5)
        assert int(cells[4]) == size


def test_does_the_trainer_agree(complete: PreparedRun, half: PreparedRun) -> None:
    text = " ".join(say(complete).split())
    assert (
        "of models/m, 1,920 tokens, mean ratio 1.00001 (1: they agree), largest |ratio - 1| of a "
        "token 0.1, k3 3.1e-08 nats, mean ratio without replay 0.91230, not finite: 0 of the "
        "trainer's, 0 of the sampler's"
    ) in text
    assert ask(complete)["agreement"]["replayed"]["k3"] == 3.1e-8
    assert "trainer and sampler were not compared: `rollout agree --save` does it" in say(half)
    assert ask(half)["agreement"] is None


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--sample", "1"], 2, "--sample goes with --prompt, and --token with --sample"),
        (["--prompt", "task 01", "--token", "1"], 2, "--token with --sample"),
        (["--prompt", "nobody"], 7, "of a key; the ids begin with 'task 00'"),
        (["--prompt", "key-0123"], 7, "no prompt 'key-0123'"),
        (["--prompt", "task 01", "--sample", "9"], 7, "sample 9: not sampled"),
        (["--prompt", "task 07", "--sample", "3"], 7, "set aside at capture: bad_numerics"),
        (["--prompt", "task 04", "--sample", "0"], 7, "set aside at render: prompt_too_long"),
        (["--prompt", "task 11", "--sample", "0"], 7, "is missing"),
        (["--prompt", "task 01", "--sample", "1", "--token", "24"], 7, "24 tokens, 0 to 23, got"),
        (["--prompt", "task 01", "--tokenizer", "/nowhere"], 3, "no tokenizer.json in it"),
        (["--storage-option", "secret"], 2, "expected key=value"),
    ],
)
def test_what_can_not_be_shown_gets_one_sentence(
    damaged: PreparedRun, args: list[str], code: int, said: str
) -> None:
    result = CliRunner().invoke(main, ["inspect", str(damaged.path), *args])
    assert (result.exit_code, len(result.output.splitlines())) == (code, 1)
    assert said in result.output


def test_a_shard_short_of_rows_gets_one_sentence(tmp_path: Path) -> None:
    run = half_run(tmp_path)
    _, long, short = sorted((run.path / "data").iterdir())
    long.write_bytes(short.read_bytes())
    args = ["inspect", str(run.path), "--prompt", "task 09"]
    result = CliRunner().invoke(main, [*args, "--sample", "0"])
    said = "holds 2 rollouts, its commit record names 20: copy the dataset again"
    assert (result.exit_code, result.output) == (7, f"error: data/{long.name}: {said}\n")
    samples = ask(run, "--prompt", "task 09")["samples"]
    assert [sample["status"] for sample in samples] == ["unreadable"] * 4
    assert said in samples[0]["why"]


def test_a_prompt_is_found_by_the_start_of_its_key(complete: PreparedRun) -> None:
    assert ask(complete, "--prompt", "key-03-01")["prompt_id"] == "task 03"
    assert ask(complete, "--prompt", "key-03-0123456789")["prompt_id"] == "task 03"


def test_another_tokenizer_gives_no_wrong_text(tmp_path: Path) -> None:
    run = half_run(tmp_path)
    file = run.path.parent / "model" / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    text = say(run, "--prompt", "task 01", "--sample", "0")
    assert "is not the one that made the data" in text
    assert "w1" not in text
    file.unlink()
    text = say(run, "--prompt", "task 01", "--sample", "0")
    assert "--tokenizer names a folder" in " ".join(text.split())


def test_a_lost_table_of_rejections_gets_one_sentence(tmp_path: Path) -> None:
    run = damaged_run(tmp_path)
    next((run.path / "_rejected").iterdir()).unlink()
    result = CliRunner().invoke(main, ["inspect", str(run.path)])
    assert (result.exit_code, len(result.output.splitlines())) == (7, 1)
    assert re.search(r"_rejected/u00000[01]-00000-\w+\.parquet is missing", result.output)


@pytest.mark.parametrize(
    "args",
    [["report", "-o", "x.html"], ["export", "-o", "x"], ["join", "t.csv", "-o", "x"], ["verify"]],
    ids=lambda args: args[0],
)
def test_every_command_refuses_a_newer_format_and_what_is_no_run(
    half: PreparedRun, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("rollout_id,reward\na,1\n")
    newer = tmp_path / "a [b] *c? \u00fc"
    newer.mkdir()
    record = (half.path / "_dataset.json").read_text()
    text = record.replace('"format_version": 2', '"format_version": 3')
    (newer / "_dataset.json").write_text(text)
    before = sorted(path.name for path in tmp_path.iterdir())
    for path, said in (
        (newer, "format version 3, expected 2: install a newer rollout"),
        (tmp_path, "is not a dataset: there is no _dataset.json in it"),
    ):
        result = CliRunner().invoke(main, [args[0], str(path), *args[1:]])
        assert (result.exit_code, len(result.output.splitlines())) == (7, 1), result.output
        assert said in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_newer_format_and_no_run_get_one_sentence(tmp_path: Path) -> None:
    run = half_run(tmp_path / "a [b] *c? \u00fc")
    assert line(say(run), "dataset").endswith("run")
    record = run.path / "_dataset.json"
    record.write_text(record.read_text().replace('"format_version": 2', '"format_version": 3'))
    result = CliRunner().invoke(main, ["inspect", str(run.path)])
    assert (result.exit_code, len(result.output.splitlines())) == (7, 1)
    assert "format version 3, expected 2: install a newer rollout" in result.output
    result = CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert (result.exit_code, len(result.output.splitlines())) == (7, 1)
    assert "is not a dataset: there is no _dataset.json in it" in result.output
