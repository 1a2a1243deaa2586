"""Values that a job may have."""

from typing import Any

import pytest
from pydantic import ValidationError

from rollout.config import JobConfig, SamplingConfig


def sampling(**values: Any) -> SamplingConfig:
    return SamplingConfig.model_validate({"max_tokens": 8} | values)


def refusal(**values: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        sampling(**values)
    return str(caught.value)


def test_unset_values_are_neutral() -> None:
    values = sampling().model_dump()
    assert values == {
        "max_tokens": 8,
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "allowed_token_ids": None,
        "bad_words": (),
        "seed": None,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
    }


@pytest.mark.parametrize("temperature", [0, 0.01, 0.6, 1, 2.0])
def test_temperatures_that_vllm_uses_as_they_are(temperature: float) -> None:
    assert sampling(temperature=temperature).temperature == temperature


@pytest.mark.parametrize(
    ("temperature", "message"),
    [
        (0.001, "temperature is 0.001, expected 0 or at least 0.01: vLLM would sample at 0.01"),
        (0.0099, "temperature is 0.0099, expected 0 or at least 0.01"),
        (2.5, "less than or equal to 2"),
        (-0.1, "greater than or equal to 0"),
        (float("nan"), "finite number"),
        (float("inf"), "finite number"),
    ],
)
def test_temperatures_that_vllm_would_change_or_refuse(temperature: float, message: str) -> None:
    assert message in refusal(temperature=temperature)


def test_off_has_one_spelling() -> None:
    assert sampling(top_k=-1) == sampling(top_k=0) == sampling()
    assert "greater than or equal to -1" in refusal(top_k=-2)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "top"),
        ({"top_k": -1, "top_p": 1, "min_p": 0}, "top"),
        ({"top_p": 0.95}, "kept"),
        ({"top_k": 20}, "kept"),
        ({"min_p": 0.1}, "kept"),
        ({"temperature": 0}, "kept"),
        ({"temperature": 0, "top_k": 5}, "kept"),
    ],
)
def test_kind_of_support_follows_from_the_sampling(values: dict[str, Any], kind: str) -> None:
    config = sampling(**values)
    assert config.support_kind(128) == kind
    assert config.support_kind(0) == ("none" if kind == "top" else kind)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1, expected 1.0: penalties depend"),
        ({"presence_penalty": 0.1}, "presence_penalty is 0.1, expected 0.0: penalties depend"),
        ({"frequency_penalty": -1}, "frequency_penalty is -1.0, expected 0.0: penalties depend"),
        ({"logit_bias": {5: -100.0}}, "logit_bias is set, expected null: replay could not undo it"),
        ({"n": 4, "temperature": 0}, "n is 4 at temperature 0, expected 1: all samples would be"),
        ({"min_tokens": 9}, "min_tokens is 9, expected at most max_tokens (8)"),
        ({"min_tokens": 2}, "min_tokens masks ids in an untruncated job, a hidden truncation"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids masks ids in an untruncated job"),
        ({"bad_words": ["x"]}, "bad_words masks ids in an untruncated job"),
        ({"allowed_token_ids": [], "top_k": 1}, "at least 1 item"),
        ({"bad_words": [""], "top_k": 1}, "at least 1 character"),
        ({"stop": [""]}, "at least 1 character"),
        ({"stop_token_ids": [-1]}, "greater than or equal to 0"),
        ({"stop_token_ids": [True]}, "got True, expected a number"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"n": 0}, "greater than or equal to 1"),
        ({"n": True}, "got True, expected a number"),
        ({"top_p": 0}, "greater than 0"),
        ({"top_p": 1.01}, "less than or equal to 1"),
        ({"top_p": float("nan")}, "finite number"),
        ({"min_p": float("nan")}, "finite number"),
        ({"repetition_penalty": float("nan")}, "finite number"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"seed": 2**63}, "less than"),
    ],
)
def test_what_cannot_be_captured_or_run_is_refused(values: dict[str, Any], message: str) -> None:
    assert message in refusal(**values)


@pytest.mark.parametrize(
    "mask", [{"min_tokens": 2}, {"allowed_token_ids": [1]}, {"bad_words": "x"}]
)
@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_masks_are_fine_where_the_support_is_recorded(
    mask: dict[str, Any], truncation: dict[str, Any]
) -> None:
    assert sampling(**mask, **truncation).support_kind(0) == "kept"


def test_masks_are_fine_in_greedy_rows() -> None:
    assert sampling(temperature=0, min_tokens=3).min_tokens == 3


def test_one_stop_string_is_a_list() -> None:
    assert sampling(stop="END").stop == ("END",)


def test_empty_logit_bias_is_neutral() -> None:
    assert sampling(logit_bias={}).logit_bias == {}


def test_sections_are_frozen_and_hide_storage_options() -> None:
    job = JobConfig.model_validate(
        {
            "model": {"path": "m"},
            "prompts": {"path": "p.jsonl", "storage_options": {"key": "hunter2"}},
            "sampling": {"max_tokens": 1},
            "output": {"path": "o", "storage_options": {"key": "hunter2"}},
        }
    )
    assert "hunter2" not in repr(job)
    with pytest.raises(ValidationError, match="frozen"):
        job.sampling.n = 3


def test_every_field_is_described() -> None:
    sections = [JobConfig, *(field.annotation for field in JobConfig.model_fields.values())]
    for section in sections:
        for name, field in getattr(section, "model_fields", {}).items():
            described = field.description or hasattr(field.annotation, "model_fields")
            assert described, f"{section}.{name}"
