"""Resident memory of an epoch whose window of row groups is larger than the budget."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from loader_cases import write
from synthetic import make_row

from rollout.schema.entries import pack_entries

TOKENS, WIDTH = 512, 256
MIB = 2**20

READ = """
import hashlib, json, sys
from pathlib import Path
from rollout.loader import RolloutLoader

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

loader = RolloutLoader(
    sys.argv[1], vocab_size=256, groups_per_step=2, token_budget=1050,
    prefetch_bytes=int(sys.argv[2]), decode_threads=1,
)
ids, entries, before = hashlib.sha256(), 0, peak()
for batch in loader:
    ids.update(" ".join(batch.rollout_ids).encode())
    entries += batch.support_ids.shape[0]
print(json.dumps({"grown": peak() - before, "entries": entries, "ids": ids.hexdigest()}))
"""


def read(path: Path, prefetch_bytes: int) -> dict[str, int]:
    """Iterate an epoch in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path), str(prefetch_bytes)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_memory_is_bounded_by_the_budget(tmp_path: Path) -> None:
    # 120 groups of one rollout of 1 MiB: six row groups of 20 MiB, which one window mixes
    rng = np.random.default_rng(0)
    # row groups are held as they are stored: bits that no codec makes smaller
    logits = rng.normal(size=(TOKENS, WIDTH))
    logprobs = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    row = dataclasses.replace(
        make_row(lengths=[1] * TOKENS, vocab=WIDTH, reward=0.0),
        token_ids=np.zeros(TOKENS, np.int32),
        sampled_logprobs=logprobs[:, 0].copy(),
        support_offsets=np.arange(TOKENS + 1, dtype=np.int64) * WIDTH,
        support_entries=np.concatenate([pack_entries(np.arange(WIDTH), own) for own in logprobs]),
    )
    rows = [
        dataclasses.replace(row, prompt_key=f"p{i}", group_id=f"g{i}", rollout_id=f"r{i}")
        for i in range(120)
    ]
    write(str(tmp_path), [rows[:60], rows[60:]], row_group_bytes=20 * MIB + MIB // 2)
    stored = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
    assert stored > 40 * MIB
    roomy, tight = read(tmp_path, 2**30), read(tmp_path, 15 * MIB)
    assert roomy["entries"] == tight["entries"] == 120 * TOKENS * WIDTH
    assert roomy["ids"] == tight["ids"]
    # what both need beside the row groups is the same
    assert roomy["grown"] - tight["grown"] > 20 * MIB
    assert tight["grown"] < 80 * MIB
