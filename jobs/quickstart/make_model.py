"""Make the quickstart model: a tiny causal LM that reverses words only sometimes.

A Qwen3-architecture model of 0.4 M parameters learns, by next-token prediction, a mixture of
answers to the same prompt: the word in capitals, a copy, a noisy reversal, a reversal with letters
missing. Sampling from it earns a mean reward of about 0.2, so a policy-gradient step has better
and worse rollouts to choose from. Nothing is downloaded.

    python jobs/quickstart/make_model.py --output out/quickstart-model
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

# a no-op for `python jobs/quickstart/make_model.py`, needed under PYTHONSAFEPATH
sys.path.insert(0, str(Path(__file__).resolve().parent))
from task import LETTERS, MAX_COMPLETION_TOKENS, draw_word, reverse_reward

RECORD_NAME = "quickstart_model.json"
EXPECTED_REWARD = (0.15, 0.40)

PAD, EOS, BOS, SEP, UNK = "<pad>", "<eos>", "<bos>", "<sep>", "<unk>"
SPECIAL_TOKENS = (PAD, EOS, BOS, SEP, UNK)
# 5 special tokens, 52 letters and 7 never-trained ids: a width that every kernel likes
VOCAB_SIZE = 64
# far more than the task needs: tests of long rollouts use the same model
MAX_LENGTH = 4096
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ message['content'] }}<sep>"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('expected the roles user and assistant') }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides what the weights become, beside the source of the two scripts."""

    seed: int
    steps: int
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
            for name in ("make_model.py", "task.py")
        }
        text = json.dumps({"recipe": asdict(self), "sources": sources}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


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


def make_tokenizer() -> Any:
    """Build the tokenizer: one token a character, BOS before plain text, a chat template.

    Returns:
        A `PreTrainedTokenizerFast` with 64 ids.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    named = [*SPECIAL_TOKENS, *LETTERS, *LETTERS.upper()]
    reserved = [f"<reserved_{i}>" for i in range(VOCAB_SIZE - len(named))]
    ids = {token: i for i, token in enumerate([*named, *reserved])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in (*SPECIAL_TOKENS, *reserved)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, ids[BOS])]
    )
    tokenizer.decoder = decoders.Fuse()  # letters are joined without spaces
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        sep_token=SEP,
        unk_token=UNK,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: Any) -> Any:
    """Build the untrained model from torch's global random state.

    Args:
        tokenizer: Gives the special ids.

    Returns:
        A float32 `Qwen3ForCausalLM` of 0.41 M parameters.
    """
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        # with tied weights an engine on CPU keeps its old head when weights are reloaded
        tie_word_embeddings=False,
        dtype="float32",
        **special,
    )
    model = Qwen3ForCausalLM(config)
    # no sampling defaults: what the job file leaves out is neutral
    model.generation_config = GenerationConfig(**special)
    return model


def training_batches(tokenizer: Any, recipe: Recipe) -> Iterator[tuple[list[list[int]], list[int]]]:
    """Draw batches without end, from words that are not held out.

    Args:
        tokenizer: Turns characters into ids.
        recipe: Batch size, shares, seed.

    Yields:
        The sequences BOS word SEP answer EOS, and the position of SEP in each (scoring starts).
    """
    rng = random.Random(recipe.seed)
    ids = tokenizer.get_vocab()
    while True:
        pool = []
        for _ in range(recipe.pool_batches * recipe.batch_size):
            word = draw_word(rng, held_out=False)
            tokens = [BOS, *word, SEP, *answer_of(word, rng, recipe), EOS]
            pool.append(([ids[token] for token in tokens], len(word) + 1))
        pool.sort(key=lambda item: len(item[0]))
        starts = list(range(0, len(pool), recipe.batch_size))
        rng.shuffle(starts)
        for start in starts:
            batch = pool[start : start + recipe.batch_size]
            yield [sequence for sequence, _ in batch], [sep for _, sep in batch]


def train(model: Any, tokenizer: Any, recipe: Recipe) -> None:
    """Train by next-token prediction on the answers, printing the loss as it goes.

    Args:
        model: Changed in place.
        tokenizer: Turns characters into ids.
        recipe: Everything else.
    """
    import torch
    from torch.nn.functional import cross_entropy

    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    started = time.monotonic()
    batches = training_batches(tokenizer, recipe)
    for step in range(recipe.steps):
        warm = (step + 1) / recipe.warmup_steps
        decay = (recipe.steps - step) / (recipe.decay_share * recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, warm, decay)
        sequences, separators = next(batches)
        ids = torch.full((len(sequences), max(map(len, sequences))), tokenizer.pad_token_id)
        scored = torch.zeros_like(ids, dtype=torch.bool)
        for row, (sequence, separator) in enumerate(zip(sequences, separators, strict=True)):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            scored[row, separator : len(sequence) - 1] = True
        # padding stands on the right, where causal attention never looks: no mask is needed
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        loss = cross_entropy(model.lm_head(hidden[scored[:, :-1]]), ids[:, 1:][scored[:, :-1]])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == recipe.steps:
            seconds = time.monotonic() - started
            click.echo(f"step {step + 1}/{recipe.steps}  loss {loss.item():.3f}  {seconds:.0f} s")


def measure_reward(model: Any, tokenizer: Any, *, num_prompts: int = 512, seed: int = 1) -> float:
    """Sample one completion of each of `num_prompts` held-out words and score them.

    Plain Hugging Face sampling at temperature 1, top_p 0.95, no top_k.

    Args:
        model: The trained model.
        tokenizer: Its tokenizer; renders the prompts by the chat template.
        num_prompts: Words to draw.
        seed: Of the words and of the sampling.

    Returns:
        The mean reward, in [0, 1].
    """
    import torch

    torch.manual_seed(seed)
    rng = random.Random(seed)
    words = [draw_word(rng, held_out=True) for _ in range(num_prompts)]
    batch = tokenizer.apply_chat_template(
        [[{"role": "user", "content": word}] for word in words],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    model.eval()
    sampled = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=True,
        temperature=1.0,
        top_p=0.95,
        top_k=0,
        max_new_tokens=MAX_COMPLETION_TOKENS,
    )[:, batch["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    rewards = [
        reverse_reward({"answer": word[::-1]}, text, ids)
        for word, text, ids in zip(words, texts, sampled.tolist(), strict=True)
    ]
    return sum(rewards) / len(rewards)


def finished_record(output: Path, digest: str) -> dict[str, Any] | None:
    """Look at what stands at `output`.

    Args:
        output: The folder of the model.
        digest: Of the recipe that is asked for.

    Returns:
        The record of a finished model of this very recipe, or None where the model has to be made.

    Raises:
        click.ClickException: The path holds something that this script did not make.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    try:
        record = json.loads((output / RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise click.ClickException(
            f"{output} exists and is not a quickstart model, choose another --output or remove it"
        ) from None
    return record if isinstance(record, dict) and record.get("recipe") == digest else None


def save(model: Any, tokenizer: Any, output: Path, record: dict[str, Any]) -> None:
    """Write the model beside its destination, then move it there whole.

    Args:
        model: The trained model.
        tokenizer: Its tokenizer.
        output: The folder; an older quickstart model in it is replaced.
        record: Written last, as the sign of a finished model.
    """
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as work:
        made = Path(work) / "made"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        (made / RECORD_NAME).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if output.exists():
            output.rename(Path(work) / "old")
        made.rename(output)


@click.command(context_settings={"show_default": True})
@click.option("--output", type=click.Path(path_type=Path), default=Path("out/quickstart-model"))
@click.option("--seed", type=int, default=0, help="Of the initial weights and the training data.")
@click.option("--steps", type=click.IntRange(min=1), default=700, help="Optimizer steps.")
def main(output: Path, seed: int, steps: int) -> None:
    """Make the quickstart model, unless the same one is already there."""
    recipe = Recipe(seed=seed, steps=steps)
    digest = recipe.digest()
    record = finished_record(output, digest)
    if record is not None:
        click.echo(f"{output} is up to date, mean reward {record['mean_reward']:.3f}")
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    # read when torch loads: threads that spin while they wait cost minutes on a busy machine
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # but a short spin saves a third of the time: the operations of this model are as short
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    train(model, tokenizer, recipe)
    reward = measure_reward(model, tokenizer)
    record = {"recipe": digest, **asdict(recipe), "mean_reward": reward}
    save(model, tokenizer, output, record)
    low, high = EXPECTED_REWARD
    click.echo(
        f"{output} made in {time.monotonic() - started:.0f} s, "
        f"mean reward {reward:.3f} on 512 held-out prompts (expected {low} to {high})"
    )


if __name__ == "__main__":
    main()
