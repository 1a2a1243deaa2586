"""Prompts files that were made to do harm: one reason for each row, and no trace elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
from click.testing import CliRunner
from fake_engine import fake_engine, fake_job

from rollout.cli import main
from rollout.dataset import read_dataset
from rollout.pipeline import generate
from rollout.storage import Storage

METADATA: list[Any] = [
    None, True, False, 0, -1, 2**63, 1.5, 1e308, "", "\0", "\u2028", "../x", [], [None, [1]],
    {}, {"a": {"b": [1, "2", None]}}, {"": ""}, {"__class__": "os.system"},
]  # fmt: skip
HOSTILE: dict[str, tuple[str, str]] = {
    "deep lists": ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "deep objects": ('{"prompt": ' + '{"a":' * 50_000 + "1" + "}" * 50_000 + "}", "nested too"),
    "nul bytes": ("\0\0\0", "Expecting value"),
    "nul in the json": ('{"prompt_token_ids": [1]\0}', "delimiter"),
    "no object": ("[1, 2]", "got an array"),
    "a long number": ('{"prompt_token_ids": [' + "9" * 5000 + "]}", "digits"),
}


def test_hostile_rows_have_one_reason_each_and_harm_nobody(tmp_path: Path) -> None:
    good = [
        json.dumps({"prompt_token_ids": [i], "id": f"../../{i}/\n\0", "meta": value})
        for i, value in enumerate(METADATA)
    ]
    source = tmp_path / "p.jsonl"
    source.write_text("\n".join([*good, *(text for text, _ in HOSTILE.values())]))
    with fake_engine():
        summary = generate(fake_job(source, tmp_path / "out"), show_progress=False)
    assert (summary.rollouts_committed, summary.prompts_rejected) == (len(good), len(HOSTILE))
    view = read_dataset(Storage.open(tmp_path / "out"))
    rejected = sorted(view.rejected, key=lambda one: one.line or 0)
    for (name, (_, detail)), one in zip(HOSTILE.items(), rejected, strict=True):
        assert detail in one.detail, name
        assert one.reason == "unreadable_row"
        assert len(one.detail) <= 500
    rows = pl.read_parquet(f"{tmp_path}/out/data/*.parquet")
    kept = {
        row[0]: json.loads(row[1])["meta"] for row in rows.select("prompt_id", "metadata").rows()
    }
    assert kept == {f"../../{i}/\n\0": value for i, value in enumerate(METADATA)}
    assert {path.name for path in tmp_path.iterdir()} == {"p.jsonl", "out"}
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {
        "_commit", "_dataset.json", "_lease", "_plan", "_rejected", "_scratch", "data",
    }  # fmt: skip
    assert CliRunner().invoke(main, ["verify", str(tmp_path / "out")]).exit_code == 0
