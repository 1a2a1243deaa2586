"""Peak memory of a job and its time to the first rollout, by the number of prompts.

    python jobs/bench/memory.py 10000 100000 1000000

Each size runs in a process of its own on the tests' stand-in for the engine, which is as fast as
the disk, so that what is measured is the job itself.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SAMPLES = 1
TESTS = Path(__file__).resolve().parents[2] / "tests"


def measure(num_prompts: int, folder: Path) -> dict[str, float]:
    """Run one job in this process.

    Args:
        num_prompts: rows of the prompts file.
        folder: for prompts and output.
    """
    sys.path.insert(0, str(TESTS))
    from fake_engine import fake_engine, fake_job, write_ids

    from rollout.pipeline import generate

    prompts = write_ids(folder / "prompts.jsonl", num_prompts)
    config = fake_job(prompts, folder / "out", sampling={"n": SAMPLES, "max_tokens": 1})
    first: list[tuple[float, float]] = []
    with fake_engine() as engine:
        stock = engine.step

        def step(self: object) -> object:
            if not first:
                first.append((time.monotonic(), time.process_time()))
            return stock(self)  # type: ignore[arg-type]

        engine.max_num_seqs = 64
        engine.step = step  # type: ignore[method-assign, assignment]
        start, started = time.monotonic(), time.process_time()
        summary = generate(config, show_progress=False)
    assert summary.rollouts_committed == SAMPLES * num_prompts
    return {
        "prompts": num_prompts,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "first_step_seconds": first[0][0] - start,
        "first_step_cpu_seconds": first[0][1] - started,
        "seconds": time.monotonic() - start,
    }


def main() -> None:
    """Measure the sizes given, one line of JSON each."""
    if sys.argv[1:2] == ["--one"]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(int(sys.argv[2]), Path(folder))))
        return
    for size in sys.argv[1:] or ["1000", "10000"]:
        command = [sys.executable, __file__, "--one", size]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        print(found.stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
