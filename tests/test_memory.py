"""U23: what a job holds of its prompts is a few bytes each, and the first rollout comes at once.

`python jobs/bench/memory.py 10000 1000000` measures the whole at full size.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_engine import fake_engine, fake_job, write_ids
from synthetic import make_record

from rollout import key_table
from rollout.config import PromptsConfig, SamplingConfig
from rollout.dataset import DatasetWriter, read_dataset
from rollout.pipeline import generate
from rollout.prompts import read_lots
from rollout.storage import Storage
from rollout.work import Missing, WorkStats, missing_work

BENCH = Path(__file__).parent.parent / "jobs/bench/memory.py"
BYTES_A_PROMPT = 64


def test_u23_plan_keys_and_commits_take_few_bytes_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # exact, of Python's and numpy's memory, without the engine and what it needs
    monkeypatch.setattr(key_table, "_pages", np.zeros)
    config = fake_job(write_ids(tmp_path / "p.jsonl", 8000), tmp_path / "out", sampling={"n": 3})
    writer = DatasetWriter.open(Storage.open(tmp_path / "out"), make_record())
    held: dict[int, int] = {}
    tracemalloc.start()
    try:
        for item in missing_work(config, writer, WorkStats(), lot_prompts=500):
            if isinstance(item, Missing):
                # finished in another order than asked
                writer.ledger.cover([(item.prompt.key, index) for index in (2, 0, 1)])
                if writer.ledger.num_covered in (3_000, 22_500):
                    held[writer.ledger.num_covered // 3] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    (few, before), (many, after) = held.items()
    # 26 bytes each and the rest of a lot; 4 more come in pieces of 2**16 prompts, none in between.
    # A number or a text kept of every prompt would take 32 or 81.
    assert after - before <= 34 * (many - few) + 2**16


def test_u23_the_process_does_not_grow_and_starts_at_once() -> None:
    found = [
        json.loads(
            subprocess.run(
                [sys.executable, str(BENCH), "--one", size], check=True, capture_output=True
            ).stdout
        )
        for size in ("5000", "20000")
    ]
    growth = (found[1]["peak_mib"] - found[0]["peak_mib"]) * 2**20
    # the allocator keeps some megabytes of what it once needed, however long the job
    assert growth <= BYTES_A_PROMPT * 15_000 + 20 * 2**20
    # of the processor, which no other test can slow down
    first = [one["first_step_cpu_seconds"] for one in found]
    assert first[1] <= 1.5 * first[0] + 0.2


def test_u23_a_resumed_job_keeps_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "_pages", np.zeros)
    prompts = 1000
    config = fake_job(
        write_ids(tmp_path / "p.jsonl", prompts),
        tmp_path / "out",
        sampling={"n": 4, "max_tokens": 1},
        output={"unit_prompts": 50},
    )
    with fake_engine() as engine:
        engine.max_num_seqs = 64
        generate(config, show_progress=False)
    storage = Storage.open(tmp_path / "out")
    view = read_dataset(storage)
    assert len(view.commits) == 20
    tracemalloc.start()
    try:
        writer = DatasetWriter.open(storage, view.record)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert writer.ledger.num_covered == 4 * prompts
    # the first pieces of the tables; the keys of the records alone would take 800 kB
    assert held <= BYTES_A_PROMPT * prompts + 2**19


def test_u23_one_large_row_group_of_prompts_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    texts = [f"prompt {i} " + "x y z " * 50 for i in range(60_000)]
    pq.write_table(pa.table({"prompt": texts}), path, compression="none", use_dictionary=False)
    assert pq.read_metadata(path).num_row_groups == 1
    tracemalloc.start()
    try:
        lots = read_lots(PromptsConfig(path=str(path)), SamplingConfig(max_tokens=1), 100)
        assert len(next(lots)) == 100
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    lots.close()  # type: ignore[attr-defined]
    # the file holds 20 MB; its reader's buffers are Python's
    assert path.stat().st_size > 18 * 2**20
    assert peak < 6 * 2**20
