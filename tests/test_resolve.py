"""What a checkpoint's generation_config.json still decides: where a rollout ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import InputError
from rollout.resolve import inherited_stop_ids


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
