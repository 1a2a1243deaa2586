r"""What exact supports and centering are worth on the reverse-text task, with seeds and spreads.

Every arm starts from the same model and differs in what is named; a table gives the mean held-out
reward of each with the range over the seeds. Arms that differ by less than their ranges do not
differ as far as this task can tell.

    python jobs/reverse_text/ablations.py --setting single --seeds 3 --output out/ablations

A look at two arms in seconds, which says nothing yet of what they are worth:

    python jobs/reverse_text/ablations.py --setting single --match "top_p 0.6: full support" \
      --seeds 1 --rounds 1 --prompts 4 --held-out 16 --output out/look

Settings:
    single      one dataset of the initial policy, 24 epochs over it; top_p .95, .8, .6
    rounds      new data in each of 8 rounds; top_p .95, .8, .6
    stale       weights that are up to 1, 4 and 16 rounds old sample 16 rounds' data; top_p .8
    untruncated top_p 1: recorded head and tail, or K draws, instead of an exact support

Arms that sample alike share the datasets of the initial policy. Several processes may fill one
output side by side if no two of them run the same seed of an arm.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rounds import Plan, run_rounds, set_environment

# name -> overrides of replay.yaml
TRUNCATED = {
    "full support, centred": (),
    "full vocabulary, centred": ("normaliser=vocabulary",),
    "full support, not centred": ("loss.centering=off",),
    "full vocabulary, not centred": ("normaliser=vocabulary", "loss.centering=off"),
}
UNTRUNCATED = {
    "whole vocabulary, centred": (("capture.top=64",), ("loss.centering=tail",)),
    "top 8 + tail, centred": (("capture.top=8",), ("loss.centering=tail",)),
    "8 draws, centred": (
        ("capture.top=0", "capture.draws=8"),
        ("loss.centering=sampled", "data.untruncated=draws"),
    ),
    "not centred": (("capture.top=0",), ("loss.centering=off",)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One line of the table."""

    setting: str
    name: str
    generate: tuple[str, ...]
    replay: tuple[str, ...]
    rounds: int
    prompts: int = 64
    sample_every: int = 1
    reload_every: int = 1


def arms_of(setting: str) -> Iterator[Arm]:
    """Yield the arms of a setting, those to be compared next to each other."""
    if setting in ("single", "rounds"):
        single = setting == "single"
        for top_p in (0.6, 0.8, 0.95):
            for name, overrides in TRUNCATED.items():
                yield Arm(
                    setting=setting,
                    name=f"top_p {top_p}: {name}",
                    generate=(f"sampling.top_p={top_p}",),
                    replay=(*overrides, f"epochs={12 if single else 4}"),
                    rounds=2 if single else 8,
                    sample_every=0 if single else 1,
                )
    elif setting == "stale":
        for reload_every in (1, 4, 16):
            for name, overrides in TRUNCATED.items():
                yield Arm(
                    setting=setting,
                    name=f"{reload_every} rounds old: {name}",
                    generate=("sampling.top_p=0.8",),
                    replay=(*overrides, "data.groups_per_step=8"),
                    rounds=16,
                    prompts=32,
                    reload_every=reload_every,
                )
    else:
        for name, (generate, replay) in UNTRUNCATED.items():
            yield Arm(
                setting=setting,
                name=name,
                generate=("sampling.top_p=1.0", *generate),
                replay=replay,
                rounds=8,
            )


def table(lines: list[dict[str, Any]]) -> str:
    """Lay the results out as Markdown: the rewards by seed, their mean and range, and the mean k3.

    Args:
        lines: As written to `ablations.jsonl`.

    Returns:
        The table.
    """
    rows = [
        "| setting | arm | start | end, by seed | mean | range | k3 |",
        "|---|---|---|---|---|---|---|",
    ]
    lines = sorted(lines, key=lambda line: line["seed"])
    for setting, arm in dict.fromkeys((line["setting"], line["arm"]) for line in lines):
        found = [line for line in lines if (line["setting"], line["arm"]) == (setting, arm)]
        start, k3 = (statistics.mean(line[name] for line in found) for name in ("start", "k3"))
        ends = [line["end"] for line in found]
        rows.append(
            f"| {setting} | {arm} | {start:.3f} | {' '.join(f'{end:.3f}' for end in ends)} "
            f"| {statistics.mean(ends):.3f} | {min(ends):.3f} to {max(ends):.3f} | {k3:.2f} |"
        )
    return "\n".join(rows)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the results so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@click.command(context_settings={"show_default": True})
@click.option("--model", type=click.Path(path_type=Path), default="out/quickstart-model")
@click.option("--output", type=click.Path(path_type=Path), default="out/ablations")
@click.option(
    "--setting",
    "settings",
    multiple=True,
    type=click.Choice(["single", "rounds", "stale", "untruncated"]),
    default=("single", "rounds", "stale", "untruncated"),
)
@click.option("--seeds", type=click.IntRange(min=1), default=3)
@click.option("--first-seed", type=click.IntRange(min=0), default=0)
@click.option("--match", multiple=True, help="Only arms whose name holds this, or one of these.")
@click.option("--rounds", type=click.IntRange(min=1), help="Instead of each arm's own.")
@click.option("--prompts", type=click.IntRange(min=1), help="Instead of each arm's own.")
@click.option("--held-out", type=click.IntRange(min=1), default=256, help="Words that measure.")
@click.option("--tolerance", type=float, default=1e-3, help="Of a token's ratio after a reload.")
@click.option("--generate-set", multiple=True, metavar="KEY=VALUE", help="Of generate.yaml.")
@click.option("--replay-set", multiple=True, metavar="KEY=VALUE", help="Of replay.yaml.")
def main(
    model: Path,
    output: Path,
    settings: tuple[str, ...],
    seeds: int,
    first_seed: int,
    match: tuple[str, ...],
    rounds: int | None,
    prompts: int | None,
    held_out: int,
    tolerance: float,
    generate_set: tuple[str, ...],
    replay_set: tuple[str, ...],
) -> None:
    """Run every arm with every seed; those that are done already are skipped."""
    set_environment()
    from rollout.engine_start import KeptEngine

    results = output / "ablations.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    # seed by seed, so that a run cut short still compares the arms
    for seed in range(first_seed, first_seed + seeds):
        engine = KeptEngine(1000 * seed)  # each job draws with the next seed
        try:
            for setting in settings:
                for number, arm in enumerate(arms_of(setting)):
                    done = {
                        (line["setting"], line["arm"], line["seed"]) for line in read_lines(results)
                    }
                    wanted = not match or any(part in arm.name for part in match)
                    if not wanted or (setting, arm.name, seed) in done:
                        continue
                    sampling = "-".join(arm.generate).replace("=", "-")
                    num_rounds, num_prompts = rounds or arm.rounds, prompts or arm.prompts
                    shared = f"initial-{sampling}-{num_prompts}-seed-{seed}"
                    plan = Plan(
                        model=model,
                        output=output / f"{setting}-{number:02d}-seed-{seed}",
                        first=output / shared,
                        seed=seed,
                        rounds=num_rounds,
                        sample_every=arm.sample_every,
                        reload_every=arm.reload_every,
                        prompts=num_prompts,
                        held_out=held_out,
                        measure_every=num_rounds,
                        keep_checkpoints=False,
                        tolerance=tolerance,
                        generate=(*generate_set, *arm.generate),
                        replay=(*replay_set, *arm.replay),
                    )
                    shutil.rmtree(plan.output, ignore_errors=True)  # of a run that was cut short
                    first, last = run_rounds(plan, engine)
                    line = {
                        "setting": setting,
                        "arm": arm.name,
                        "seed": seed,
                        "start": first.reward,
                        "end": last.reward,
                        "k3": last.k3,
                        "masked_share": last.masked_share,
                        "seconds": last.seconds_total,
                    }
                    with results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
                    click.echo(json.dumps(line))
        finally:
            engine.close()
    click.echo(table(read_lines(results)))


if __name__ == "__main__":
    main()
