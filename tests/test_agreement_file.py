"""The agreement report beside the data: what is saved is what `rollout inspect` shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.agreement import AgreementReport, RatioStats
from rollout.agreement_file import AGREEMENT_FILE, read_agreement, save_agreement, summary_of
from rollout.errors import DatasetError
from rollout.storage import Storage


def make_report(mean: float, nonfinite: int) -> AgreementReport:
    stats = RatioStats(
        label="ratio", tokens=7, mean=mean, quantiles=(0.5, 0.9, 1.0, 1.1, 1.25), k3=2e-7
    )
    return AgreementReport(
        rollouts=2,
        tokens=7,
        nonfinite_trainer=nonfinite,
        nonfinite_sampler=0,
        replayed=stats,
        unreplayed=stats,
        kept_mass=0.95,
        kept_mass_gap=0.0,
        by_position=(stats,),
        by_support=(),
    )


def test_a_saved_report_is_read_back_and_replaced(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    assert read_agreement(storage) is None
    save_agreement(tmp_path, make_report(0.5, 0), model="m", dtype="float32")
    save_agreement(tmp_path, make_report(1.0, 0), model="m", dtype="float32")
    found = read_agreement(storage)
    assert found is not None
    assert (found["replayed"]["mean"], found["largest_deviation"]) == (1.0, 0.5)
    assert summary_of(found) == (
        "of m, 7 tokens, mean ratio 1.00000 (1: they agree), largest |ratio - 1| of a token 0.5, "
        "k3 2e-07 nats, mean ratio without replay 1.00000, "
        "not finite: 0 of the trainer's, 0 of the sampler's"
    )


def test_what_is_not_finite_is_said(tmp_path: Path) -> None:
    save_agreement(tmp_path, make_report(float("nan"), 3), model="m", dtype="float32")
    found = read_agreement(Storage.open(tmp_path))
    assert found is not None
    assert found["replayed"]["mean"] is None
    said = summary_of(found)
    assert "ratio not finite" in said
    assert "|ratio - 1| of a token not finite" in said
    assert said.endswith("not finite: 3 of the trainer's, 0 of the sampler's")


@pytest.mark.parametrize("text", ["no json", "[1]"])
def test_a_damaged_report_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / AGREEMENT_FILE).write_text(text)
    with pytest.raises(DatasetError, match="_agreement"):
        read_agreement(Storage.open(tmp_path))
