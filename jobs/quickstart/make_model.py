"""Make the quickstart model: a tiny causal LM that reverses words only sometimes.

A Qwen3-architecture model of 0.4 M parameters learns, by next-token prediction, a mixture of
answers to the same prompt: the word in capitals, a copy, a noisy reversal, a reversal with letters
missing. Sampling from it earns a mean reward of about 0.2, so a policy-gradient step has better
and worse rollouts to choose from. Nothing is downloaded.

    python jobs/quickstart/make_model.py --output out/quickstart-model

`--size large` makes one of 0.4 B parameters by the same steps, for a GPU.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

# a no-op for `python jobs/quickstart/make_model.py`, needed under PYTHONSAFEPATH
sys.path.insert(0, str(Path(__file__).resolve().parent))
from recipe import SIZES, Recipe, answer_of, recipe_of
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


def make_model(tokenizer: Any, recipe: Recipe) -> Any:
    """Build the untrained model from torch's global random state.

    Args:
        tokenizer: Gives the special ids.
        recipe: Gives the shape.

    Returns:
        A float32 `Qwen3ForCausalLM` on the CPU.
    """
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
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


def train(model: Any, tokenizer: Any, recipe: Recipe) -> float:
    """Train by next-token prediction on the answers, printing the loss as it goes.

    Args:
        model: Changed in place, where it is.
        tokenizer: Turns characters into ids.
        recipe: Everything else.

    Returns:
        Tokens a second, padding not counted.
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
    device, half = model.device, recipe.compute_dtype == "bfloat16"
    started = time.monotonic()
    batches = training_batches(tokenizer, recipe)
    step, tokens, loss = 0, 0, torch.zeros(())
    while True:
        done = max(step / recipe.steps, (time.monotonic() - started) / recipe.max_seconds)
        if step and (step % 100 == 0 or done >= 1.0):
            value = loss.item()  # waits for a GPU
            seconds = time.monotonic() - started
            click.echo(
                f"{time.strftime('%H:%M:%S')}  step {step}/{recipe.steps}  loss {value:.3f}  "
                f"{seconds:.0f} s  {tokens / seconds:.0f} tokens/s"
            )
            if done >= 1.0:
                return tokens / seconds
        warm = (step + 1) / recipe.warmup_steps
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, warm, (1.0 - done) / recipe.decay_share)
        sequences, separators = next(batches)
        ids = torch.full((len(sequences), max(map(len, sequences))), tokenizer.pad_token_id)
        scored = torch.zeros_like(ids, dtype=torch.bool)
        for row, (sequence, separator) in enumerate(zip(sequences, separators, strict=True)):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            scored[row, separator : len(sequence) - 1] = True
        # found on the CPU, so that no step waits for a GPU
        index = scored[:, :-1].flatten().nonzero().squeeze(1).to(device)
        ids = ids.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            # padding stands on the right, where causal attention never looks: no mask is needed
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden.flatten(0, 1)[index])
        loss = cross_entropy(logits.float(), ids[:, 1:].flatten()[index])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        step += 1
        tokens += sum(map(len, sequences))


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
        input_ids=batch["input_ids"].to(model.device),
        attention_mask=batch["attention_mask"].to(model.device),
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
@click.option("--size", type=click.Choice(list(SIZES)), default="small")
@click.option("--seed", type=int, default=0, help="Of the initial weights and the training data.")
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps; the size's own.")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Of the recipe.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
def main(
    output: Path, size: str, seed: int, steps: int | None, overrides: Sequence[str], device: str
) -> None:
    """Make the quickstart model, unless the same one is already there."""
    recipe = recipe_of(size, seed, [*overrides, *([] if steps is None else [f"steps={steps}"])])
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
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, recipe).to(device)
    rate = train(model, tokenizer, recipe)
    reward = measure_reward(model, tokenizer)
    seconds = time.monotonic() - started
    parameters = sum(parameter.numel() for parameter in model.parameters())
    record = {
        "recipe": digest,
        **asdict(recipe),
        "max_seconds": recipe.max_seconds if math.isfinite(recipe.max_seconds) else None,
        "parameters": parameters,
        "mean_reward": reward,
        "seconds": seconds,
        "tokens_per_second": rate,
    }
    save(model, tokenizer, output, record)
    low, high = EXPECTED_REWARD
    click.echo(
        f"{output} made in {seconds:.0f} s, {parameters / 1e6:.1f} M parameters, "
        f"mean reward {reward:.3f} on 512 held-out prompts (expected {low} to {high})"
    )


if __name__ == "__main__":
    main()
