"""Write prompts.jsonl: 64 words that training never saw, as chat messages.

The file is committed; run this again only when the task changes.

    python jobs/quickstart/make_prompts.py
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import click

# a no-op for `python jobs/quickstart/make_prompts.py`, needed under PYTHONSAFEPATH
sys.path.insert(0, str(Path(__file__).resolve().parent))
from task import draw_word

DEFAULT_OUTPUT = Path(__file__).resolve().parent / "prompts.jsonl"


def prompt_lines(num_prompts: int, seed: int) -> list[str]:
    """Draw held-out words, each once, and write each as a row of the prompts file.

    Args:
        num_prompts: Rows.
        seed: Of the draw.

    Returns:
        JSON objects with `id`, `messages` and `answer`, without line ends.
    """
    rng = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < num_prompts:
        words[draw_word(rng, held_out=True)] = None
    return [
        json.dumps(
            {
                "id": f"reverse-{index:03d}",
                "messages": [{"role": "user", "content": word}],
                "answer": word[::-1],
            }
        )
        for index, word in enumerate(words)
    ]


@click.command(context_settings={"show_default": True})
@click.option("--output", type=click.Path(path_type=Path), default=DEFAULT_OUTPUT)
@click.option("--num-prompts", type=click.IntRange(min=1), default=64)
@click.option("--seed", type=int, default=64)
def main(output: Path, num_prompts: int, seed: int) -> None:
    """Write the prompts of the quickstart job."""
    lines = prompt_lines(num_prompts, seed)
    output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    click.echo(f"{output}: {num_prompts} prompts")


if __name__ == "__main__":
    main()
