"""Time one sampling step: vLLM's samplers, and the capture beside them and in their place.

    python jobs/bench/samplers.py
    python jobs/bench/samplers.py --only "mean 174"

One CUDA device and vLLM 0.32 or 0.33 are needed; FlashInfer is timed where vLLM would use it. All
arms get the same float32 logits, as they are before top-k and top-p, and the same seeds and
positions. vLLM masks in place: each step gets a fresh copy, and copying is not timed. Steps are
launched ahead of a busy device, over several sets of logits, so that no step finds its input in the
cache; the arms take turns in each round.

Tokens are compared with those of vLLM's own sampler. The capture that truncates is exact, vLLM's
top-p is not in rows of many ids: rows may differ where the two kept other ids, and nowhere else.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from vllm.version import __version__ as vllm_version

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from device_timing import Times, time_in_turn
from kernel_cases import ROWS, VOCAB
from kernel_checks import unpack
from sampler_arms import (
    ARMS,
    FLASHINFER,
    SETTINGS,
    STOCK,
    TRUNCATES,
    Arm,
    Step,
    truncates,
    usable_arms,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The tokens of all sets of a setting, of `rows` rows together."""

    rows: int
    entries: int
    """Ids that the capture kept in all rows."""
    kept_otherwise: int
    """Rows of which vLLM kept other ids than the capture that truncates."""
    other_tokens: int
    """Rows of which that capture drew another token than vLLM."""
    unexplained: int
    """Those of them that kept the same ids, and rows in which the capture drew another token from
    vLLM's masked logits: none if all is right."""


def main() -> None:
    """Run every setting and print a table; exit with an error if tokens differ that may not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds of each setting")
    parser.add_argument("--only", default="", help="run only settings whose name holds this")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    settings = [setting for setting in SETTINGS if options.only in setting.name]
    if not settings:
        names = [setting.name for setting in SETTINGS]
        raise SystemExit(f"--only: no setting holds {options.only!r}, of {names}")
    device = torch.device("cuda")
    print(
        f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, vLLM {vllm_version}, "
        f"torch {torch.__version__}, triton {triton.__version__}, "
        f"Python {platform.python_version()}; {ROWS} x {VOCAB:,} float32"
    )
    add_noise, missing = usable_arms()
    if FLASHINFER not in missing:
        print(f"FlashInfer {importlib.import_module('flashinfer').__version__}")
    for name, reason in missing.items():
        print(f"not timed: {name}: {reason}")
    arms = {name: arm for name, arm in ARMS.items() if name not in missing}
    print(f"{'setting':<32}{'sampler':<36}{'median ms':>11}{'p10-p90':>16}{'x vLLM':>8}")
    report = []
    wrong = []
    for setting in settings:
        step = Step.make(setting, add_noise, device)
        compared = compare_tokens(step) if TRUNCATES in arms else None
        times = time_arms(step, arms, options.rounds)
        for name, measured in times.items():
            print(_line(setting.name, name, measured, times[STOCK].median))
        if compared is not None:
            print(
                f"    the capture keeps {compared.entries / compared.rows:,.1f} ids a row; of "
                f"{compared.rows:,} rows vLLM keeps other ids in {compared.kept_otherwise:,} and "
                f"draws another token in {compared.other_tokens:,}"
            )
            if compared.unexplained:
                wrong.append(f"{compared.unexplained} rows of {setting.name}")
        report.append(
            {
                "setting": asdict(setting),
                "times": {name: asdict(measured) for name, measured in times.items()},
                "tokens": None if compared is None else asdict(compared),
            }
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    if wrong:
        raise SystemExit(f"tokens differ where the same ids are kept: {', '.join(wrong)}")


def _line(setting: str, arm: str, times: Times, stock_ms: float) -> str:
    """Return one line of the table."""
    spread = f"{times.low:.4f}-{times.high:.4f}"
    note = "  it waits for the device: launches are in its time" if times.host_waits else ""
    ratio = times.median / stock_ms
    return f"{setting:<32}{arm:<36}{times.median:>11.4f}{spread:>16}{ratio:>8.2f}{note}"


def time_arms(step: Step, arms: dict[str, Arm], rounds: int) -> dict[str, Times]:
    """Time the arms by turns.

    Args:
        step: what they run on.
        arms: by name.
        rounds: timed rounds.

    Returns:
        Of one step, by the arms' names.
    """

    def all_sets(arm: Arm) -> Callable[[], None]:
        def work() -> None:
            for logits in step.copies:
                arm(step, logits)

        return work

    works = {name: all_sets(arm) for name, arm in arms.items()}
    return time_in_turn(works, step.restore, len(step.copies), rounds)


def compare_tokens(step: Step) -> Compared:
    """Compare the tokens of the capture with vLLM's in all sets.

    Args:
        step: what they run on, with vLLM's noise.

    Returns:
        What was the same.

    Raises:
        SystemExit: the capture flagged a row.
    """
    step.restore()
    rows, vocab_size = step.sets[0].shape
    entries = kept_otherwise = other_tokens = unexplained = 0
    for logits, copy in zip(step.sets, step.copies, strict=True):
        masked = step.mask(copy)
        theirs = step.draw(masked)
        step.capture(masked, step.out.sampled_ids, step.token_draw(cut=False))
        unexplained += int((step.out.sampled_ids != theirs).sum())
        tokens = truncates(step, logits)
        if bool(step.out.flags.any()):
            raise SystemExit("the capture flagged rows, expected none of these logits")
        total = int(step.out.offsets[rows])
        ids, _ = unpack(step.out.entries[:total])
        row = torch.repeat_interleave(
            torch.arange(rows, device=logits.device), step.out.counts.long()
        )
        kept = torch.zeros(rows, vocab_size, dtype=torch.bool, device=logits.device)
        kept[row, ids] = True
        alike = (kept == (masked > -torch.inf)).all(dim=1)
        unexplained += int((alike & (tokens != theirs)).sum())
        entries += total
        kept_otherwise += int((~alike).sum())
        other_tokens += int((tokens != theirs).sum())
    return Compared(
        rows=rows * len(step.sets),
        entries=entries,
        kept_otherwise=kept_otherwise,
        other_tokens=other_tokens,
        unexplained=unexplained,
    )


if __name__ == "__main__":
    main()
