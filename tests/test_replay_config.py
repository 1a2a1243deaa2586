"""The replay file's loss section against the loss's own settings."""

from __future__ import annotations

from dataclasses import fields

from rollout.loss_types import LossConfig
from rollout.replay_config import LossSection


def test_the_loss_section_is_the_losss_own_settings() -> None:
    own = {field.name: field.default for field in fields(LossConfig)}
    del own["check_values"]
    section = {name: field.default for name, field in LossSection.model_fields.items()}
    assert section.keys() == own.keys()
    # what YAML makes of `centering: off`
    assert LossSection.model_validate({"loss": "ipo", "centering": False}).centering == "off"
    assert {k: v for k, v in section.items() if k != "loss"} == {
        k: v for k, v in own.items() if k != "loss"
    }
