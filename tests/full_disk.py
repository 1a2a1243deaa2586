"""A job whose output lies on a disk that fills up: `unshare -rm python full_disk.py FOLDER`.

Its own namespace of mounts lets it have a small disk of its own, and one that grows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
from fake_engine import fake_engine, fake_job, write_ids

from rollout.dataset import read_dataset
from rollout.errors import OutputError
from rollout.pipeline import generate
from rollout.storage import Storage
from rollout.verify import verify_dataset

PROMPTS = 48


def main(folder: Path) -> None:
    """Fill the disk, look at what is there, make it larger, and go on."""
    out = folder / "out"
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "small", str(out)], check=True)
    section = {"unit_prompts": 8, "pending_path": str(folder / "kept"), "retry_seconds": 0.5}
    config = fake_job(write_ids(folder / "p.jsonl", PROMPTS), out, output=section)
    found: dict[str, object] = {"error": None}
    with fake_engine() as engine:
        engine.log = folder / "sampled.txt"
        try:
            generate(config, show_progress=False)
        except OutputError as error:
            found["error"] = str(error)
        found["committed"] = len(read_dataset(Storage.open(str(out))).covered)
        found["damaged"] = [str(fault) for fault in verify_dataset(Storage.open(str(out))).faults]
        # also those that no record names yet
        found["rows"] = [pq.read_table(path).num_rows for path in (out / "data").iterdir()]
        subprocess.run(["mount", "-o", "remount,size=16m", str(out)], check=True)
        generate(config, show_progress=False)
        report = verify_dataset(Storage.open(str(out)))
        found["in_all"] = report.rollouts
        found["leftovers"] = report.leftovers
        found["faults"] = [str(fault) for fault in report.faults]
        found["sampled"] = len(engine.log.read_text().splitlines())
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
