"""Heads that the replay trainer refuses by their values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from replay_oracle import make_model
from transformers import Qwen3ForCausalLM

from rollout.errors import InputError
from rollout.replay_model import check_head


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
