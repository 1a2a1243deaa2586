"""Heads that the replay trainer refuses by their values, and devices that are not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_oracle import make_model
from transformers import Qwen3ForCausalLM

from rollout.errors import ConfigError, InputError
from rollout.replay_model import check_head, check_installed, load_model


def test_a_head_that_does_more_than_a_product_is_found_by_its_values(tmp_path: Path) -> None:
    make_model(tmp_path)
    model = Qwen3ForCausalLM.from_pretrained(tmp_path)
    check_head(model, "plain")
    stock = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 30.0 * torch.tanh(stock(hidden) / 30.0)
    with pytest.raises(InputError, match="the head does more than one product"):
        check_head(model, "capped")
    model.lm_head.forward = lambda hidden: stock(hidden) * torch.nan
    with pytest.raises(InputError, match="or weights are not finite"):
        check_head(model, "nan")


def test_a_device_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments: dict[str, Any] = {"revision": None, "compute_dtype": "float32"}
    with pytest.raises(ConfigError, match="torch finds no CUDA device: expected cpu or auto"):
        load_model(tmp_path, **arguments, device="cuda")
    assert load_model(tmp_path, **arguments, device="auto").device == torch.device("cpu")


@pytest.mark.parametrize("missing", ["transformers", "safetensors"])
def test_a_package_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    check_installed()
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else found(name)
    )
    with pytest.raises(ConfigError, match=f"package {missing}: pip install transformers"):
        check_installed()
