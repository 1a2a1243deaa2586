"""The replay file: its loss section against the loss's own settings, and what it is called."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from click.testing import CliRunner

from rollout.cli import main
from rollout.errors import ConfigError
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


def test_a_file_that_is_not_there_is_called_by_what_it_would_be(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["replay", "--config", str(tmp_path / "no.yaml")])
    said = f"error: replay file {tmp_path / 'no.yaml'}: No such file or directory\n"
    assert (result.exit_code, result.output) == (ConfigError.exit_code, said)
