"""What the quickstart model is made of: its shape, its training, and the answers it is taught."""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import click

# a no-op for scripts of this folder, needed under PYTHONSAFEPATH
sys.path.insert(0, str(Path(__file__).resolve().parent))
from task import LETTERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides what the weights become, beside the source of the scripts."""

    seed: int = 0
    # parameters: 0.41 M as it stands here
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    compute_dtype: str = "float32"  # or bfloat16; weights and optimizer are float32 either way
    steps: int = 700
    # the schedule also ends with this time, so that a slower machine makes fewer steps
    max_seconds: float = math.inf
    batch_size: int = 96
    # batches cut from one pool of sequences sorted by length: a third less padding to compute
    pool_batches: int = 8
    learning_rate: float = 3e-3
    warmup_steps: int = 30
    decay_share: float = 0.4
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    # shares of the behaviours; what is left is the reversal with half of its letters
    capitals_share: float = 0.40
    copy_share: float = 0.35
    noisy_share: float = 0.15

    def digest(self) -> str:
        """Name the recipe: its numbers and the bytes of the scripts that carry it out.

        Returns:
            A sha256 in hexadecimal.
        """
        here = Path(__file__).resolve().parent
        sources = {
            name: hashlib.sha256((here / name).read_bytes()).hexdigest()
            for name in ("make_model.py", "recipe.py", "task.py")
        }
        text = json.dumps({"recipe": asdict(self), "sources": sources}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


# a learning rate as high as the small model's would not survive sixteen times its width
LARGE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "layers": 8,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "compute_dtype": "bfloat16",
    "steps": 1500,
    "max_seconds": 150.0,
    "batch_size": 256,
    "learning_rate": 3e-4,
    "warmup_steps": 100,
}
SIZES: dict[str, dict[str, Any]] = {"small": {}, "large": LARGE}


def answer_of(word: str, rng: random.Random, recipe: Recipe) -> str:
    """Draw one of the behaviours that the model is taught for `word`.

    Args:
        word: The letters of the prompt.
        rng: Source of randomness.
        recipe: The shares of the behaviours.

    Returns:
        The completion without its end-of-sequence token.
    """
    behaviour = rng.random()
    if behaviour < recipe.capitals_share:
        return word.upper()
    behaviour -= recipe.capitals_share
    if behaviour < recipe.copy_share:
        return word
    behaviour -= recipe.copy_share
    reverse = word[::-1]
    if behaviour < recipe.noisy_share:
        return "".join(_noisy(reverse, rng))
    kept = sorted(rng.sample(range(len(reverse)), len(reverse) // 2))
    return "".join(reverse[i] for i in kept)


def _noisy(letters: str, rng: random.Random) -> Iterator[str]:
    noise = rng.random()  # one level for the whole word, so that nearly clean reversals exist
    for letter in letters:
        if rng.random() < 0.25 * noise:
            continue
        written = rng.choice(LETTERS) if rng.random() < 0.25 * noise else letter
        yield written.upper() if rng.random() < 0.5 * noise else written


def recipe_of(size: str, seed: int, overrides: Sequence[str]) -> Recipe:
    """Build the recipe of a size.

    Args:
        size: One of `SIZES`.
        seed: Of the initial weights and the training data.
        overrides: `field=value`, the value in JSON or text.

    Returns:
        The recipe.

    Raises:
        click.ClickException: A field that a recipe does not have.
    """
    values = {"seed": seed, **SIZES[size]}
    known = [field.name for field in fields(Recipe)]
    for override in overrides:
        name, _, text = override.partition("=")
        if name not in known:
            raise click.ClickException(f"--set {override}: expected one of {', '.join(known)}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return Recipe(**values)
