"""An engine of two ranks: one records what both have drawn."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine_jobs import commit_files, make_job, read_commit_file, read_rows, write_prompts
from tiny_model import make_tiny_model

from rollout.agreement import agree
from rollout.pipeline import generate

pytestmark = pytest.mark.engine

KINDS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 20, "temperature": 0.7},
    {},
    {"temperature": 0.0, "n": 1},
]


def test_one_of_two_ranks_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # ranks would each ask for a memory node of their own
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = make_tiny_model(tmp_path / "model", vocab_size=512, logit_scale=1.0)
    rows = [{"id": str(i), "prompt": f"p{i}", "sampling": KINDS[i % 4]} for i in range(16)]
    job = make_job(
        model,
        write_prompts(tmp_path / "p.jsonl", rows),
        tmp_path / "out",
        sampling={"n": 4, "max_tokens": 12, "ignore_eos": True},
        capture={"top": 32},
        engine={"tensor_parallel_size": 2},
    )
    summary = generate(job, show_progress=False)
    assert (summary.rollouts_committed, summary.rollouts_failed) == (12 * 4 + 4, 0)
    # ranks that did not draw the same tokens would go on from different ones
    report = agree(tmp_path / "out", model)
    assert report.tokens == summary.tokens == 52 * 12
    assert report.largest_deviation < 1e-4
    kinds = {"kept": 0, "top": 0}
    for row in read_rows(tmp_path / "out"):
        kept = {end - start for start, end in pairwise(row["support_offsets"])}
        if row["temperature"] == 0.7:
            assert 20 in kept <= {20, 21}  # equal logits at the border
        elif row["support_kind"] == "top":
            assert kept == {32}
        kinds[row["support_kind"]] += 1
    assert kinds == {"kept": 36, "top": 16}
    facts = read_commit_file(commit_files(tmp_path / "out")[0])["engine"]
    assert facts["tokens_drawn_by"] == facts["truncated_by"] == "engine"
