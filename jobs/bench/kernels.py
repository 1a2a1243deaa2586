"""Time the capture kernels against the bytes that they cannot avoid, and check what they wrote.

    python jobs/bench/kernels.py
    python jobs/bench/kernels.py --only cut

One CUDA device, torch and triton are all that it needs. The floor of a case is one read of the
logits and one write of the entries at the copy bandwidth measured in the same run. Steps are timed
as CUDA graphs over several sets of logits, so that no step finds its input in the cache; results of
the same buffers are compared with float64. The `cut` cases truncate and draw from logits that
nobody has masked; tokens that a step drew are compared with the largest logit + noise of what it
kept.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from device_timing import copy_bandwidth, time_graph
from kernel_cases import CASES, SETS, Case, CaseStep
from kernel_checks import check


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What was measured of a case."""

    name: str
    entries: int
    median_ms: float
    low_ms: float
    high_ms: float
    floor_ms: float
    goal_ms: float | None
    host_ms: float
    worst_logprob: float
    """Largest error of a logprob over the error that is allowed."""
    worst_tail: float
    """Largest relative error of a tail mass."""


def main() -> None:
    """Run the cases and print a table; exit with an error if an output is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replays", type=int, default=30, help="timed replays of each graph")
    parser.add_argument("--only", default="", help="run only cases whose name holds this")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        raise SystemExit(f"--only: no case holds {options.only!r}, of {[c.name for c in CASES]}")
    device = torch.device("cuda")
    print(
        f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, "
        f"torch {torch.__version__}, triton {triton.__version__}, "
        f"Python {platform.python_version()}"
    )
    bandwidth = copy_bandwidth(device, options.replays)
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, bytes read plus bytes written")
    results = [run_case(case, device, bandwidth, options.replays) for case in cases]
    print(
        f"{'case':<35}{'entries':>10}{'median ms':>11}{'p10-p90':>16}{'floor':>8}{'x floor':>9}"
        f"{'goal':>7}{'host ms':>9}{'logq err':>10}{'tail err':>10}"
    )
    for result in results:
        goal = "" if result.goal_ms is None else f"{result.goal_ms:.2f}"
        print(
            f"{result.name:<35}{result.entries:>10}{result.median_ms:>11.4f}"
            f"{f'{result.low_ms:.4f}-{result.high_ms:.4f}':>16}{result.floor_ms:>8.4f}"
            f"{result.median_ms / result.floor_ms:>9.2f}{goal:>7}{result.host_ms:>9.3f}"
            f"{result.worst_logprob:>10.2f}{result.worst_tail:>10.1e}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(result) for result in results], file, indent=1)
    wrong = [r.name for r in results if r.worst_logprob > 1.0 or r.worst_tail > 1e-5]
    if wrong:
        raise SystemExit(f"errors above what is allowed in: {', '.join(wrong)}")


def run_case(case: Case, device: torch.device, bandwidth: float, replays: int) -> Result:
    """Time one case and check its output.

    Args:
        case: the workload.
        device: the device.
        bandwidth: bytes per second for the floor.
        replays: timed replays.

    Returns:
        What was measured.
    """
    step = CaseStep.make(case, device)
    repeats = 3 * SETS

    def steps() -> None:
        for index in range(repeats):
            step.run(index)

    times = time_graph(steps, repeats, replays)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for index in range(20):
        step.run(index)
    host_ms = (time.perf_counter() - begin) / 20 * 1e3
    torch.cuda.synchronize()

    step.poison()
    step.run(0)
    worst_logprob, worst_tail = check(step, 0)
    logits, rows = step.sets[0], step.kinds.shape[0]
    entries = int(step.out.offsets[rows])
    size = logits.numel() * logits.element_size() + 8 * (entries + rows * case.draws)
    return Result(
        name=case.name,
        entries=entries,
        median_ms=times.median,
        low_ms=times.low,
        high_ms=times.high,
        floor_ms=size / bandwidth * 1e3,
        goal_ms=case.goal_ms,
        host_ms=host_ms,
        worst_logprob=worst_logprob,
        worst_tail=worst_tail,
    )


if __name__ == "__main__":
    main()
