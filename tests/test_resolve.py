"""What a checkpoint's generation_config.json still decides, and what no fingerprint holds."""

import json
from pathlib import Path
from typing import Any

import pytest
from engine_jobs import make_job, write_prompts
from tiny_model import make_tiny_model

from rollout.errors import InputError
from rollout.resolve import inherited_stop_ids, other_reward, resolve_job
from rollout.schema.records import DatasetRecord


@pytest.mark.parametrize(
    ("value", "ids"), [(None, ()), (5, (5,)), ([5, 0], (5, 0)), ([], ())], ids=repr
)
def test_stop_ids(tmp_path: Path, value: Any, ids: tuple[int, ...]) -> None:
    assert inherited_stop_ids(tmp_path) == ()
    config = {"eos_token_id": value, "temperature": 0.1, "top_k": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert inherited_stop_ids(tmp_path) == ids


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "5",
        '{"eos_token_id": "</s>"}',
        '{"eos_token_id": true}',
        '{"eos_token_id": [1, null]}',
        '{"eos_token_id": [-1]}',
        '{"eos_token_id": 1.5}',
    ],
)
def test_stop_ids_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(InputError, match=r"generation_config\.json"):
        inherited_stop_ids(tmp_path)


def test_an_end_that_no_token_is_is_told_before_an_engine_starts(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", generation_config={"eos_token_id": [2, 320]})
    prompts = write_prompts(tmp_path / "p.jsonl", [{"id": "a", "prompt": "a"}])
    job = make_job(model, prompts, tmp_path / "out")
    said = "eos_token_id 320 is outside of the model's vocabulary of 320"
    with pytest.raises(InputError, match=said):
        resolve_job(job)
    # then nobody asks for it
    resolve_job(make_job(model, prompts, tmp_path / "out", sampling={"ignore_eos": True}))


def _scored_by(reward: tuple[str, str] | None) -> DatasetRecord:
    named = reward and dict(zip(("name", "digest"), reward, strict=True))
    return DatasetRecord(fingerprint="", fingerprint_inputs={}, provenance={"reward": named})


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (None, None, None),
        (("task.py:f", "1"), ("task.py:f", "1"), None),
        (("task.py:f", "1"), ("/home/me/task.py:f", "1"), None),
        (("task.py:f", "1"), ("task.py:g", "1"), "by task.py:f, new ones are by task.py:g: "),
        (("a.py:f", "1"), ("b.py:f", "2"), "by a.py:f, new ones are by b.py:f: "),
        (("a.py:f", "1"), ("a.py:f", "2"), "by a.py:f as it was then, new ones are by a.py:f: "),
        (None, ("a.py:f", "1"), "by no function, new ones are by a.py:f: "),
        (("a.py:f", "1"), None, "by a.py:f, new ones are by no function: "),
    ],
)
def test_another_reward_function(
    before: tuple[str, str] | None, after: tuple[str, str] | None, said: str | None
) -> None:
    found = other_reward(_scored_by(before), _scored_by(after))
    assert found is None if said is None else found is not None and said in found
