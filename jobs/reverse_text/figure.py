"""Draw the rewards of several runs of rounds.

python jobs/reverse_text/figure.py out/reverse-text/seed-* --output docs/reverse_text.png
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import matplotlib

matplotlib.use("Agg")  # a file is all that is wanted, and a server has no screen
import matplotlib.pyplot as plt

GOAL = 0.8


@click.command(context_settings={"show_default": True})
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--output", type=click.Path(path_type=Path), default="docs/reverse_text.png")
def main(runs: tuple[Path, ...], output: Path) -> None:
    """Plot the held-out reward of each run over its rounds."""
    figure, axes = plt.subplots(figsize=(6.4, 4.0), dpi=100, layout="constrained")
    axes.axhline(GOAL, color="0.6", linewidth=1, linestyle=":")
    for number, run in enumerate(sorted(runs)):
        color = f"C{number}"
        text = (run / "rounds.jsonl").read_text(encoding="utf-8")
        records = [json.loads(line) for line in text.splitlines()]
        rounds = [record["round"] for record in records]
        label = f"seed {records[0]['seed']}: {records[-1]['reward']:.3f}"
        axes.plot(rounds, [r["reward"] for r in records], "o-", ms=4, color=color, label=label)
        axes.plot(rounds, [r["exact"] for r in records], "--", linewidth=1, color=color)
    axes.plot([], [], "--", linewidth=1, color="0.3", label="exact answers")
    axes.set(xlabel="rounds of replay", ylim=(0, 1.02), xticks=rounds)
    axes.set_ylabel("mean reward, 256 held-out words")
    axes.set_title("icepop, exact centering, top_p 0.95, replayed from shards", fontsize=10)
    axes.legend(loc="best", fontsize=9)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    click.echo(str(output))


if __name__ == "__main__":
    main()
