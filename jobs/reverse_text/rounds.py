"""Learn to reverse words by rounds: generate, replay, generate with the new weights.

Each round writes its own dataset through `rollout generate`'s pipeline and trains on it with
`rollout replay`'s trainer; the engine idles meanwhile. One engine lives through all rounds, its
weights reloaded in between, and after every reload the trainer's probabilities are compared with
those that the engine recorded: a reload that did not take ends the run.

    python jobs/reverse_text/rounds.py --seed 0 --output out/reverse-text/seed-0

`--sample-every 0` is pure off-policy training: one dataset from the initial policy, every round
another pass over it. `--reload-every s` samples with weights that are up to s rounds old.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
from proof import Prover
from task import draw_word

HERE = Path(__file__).resolve().parent
# one engine process and no helper threads: a step of this model is shorter than waking a thread
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
HELD_OUT_SEED = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One run of rounds."""

    model: Path
    """The initial policy."""
    output: Path
    first: Path | None = None
    """Where the datasets of the initial policy are or are to be, for runs that share them."""
    seed: int = 0
    rounds: int = 10
    prompts: int = 128
    """New words of each dataset."""
    held_out: int = 256
    """Words that measure, the same in every run."""
    sample_every: int = 1
    """Rounds between datasets; 0 samples once."""
    reload_every: int = 1
    """Rounds between the weights that sample the datasets."""
    measure_every: int = 1
    """Rounds between measurements on the held-out words; the last round is always measured."""
    tolerance: float = 1e-3
    """Largest |p / q - 1| of a token on the weights that sampled it; bfloat16 needs more."""
    k3_tolerance: float = 1e-6
    """The same of k3, nats."""
    keep_checkpoints: bool = True
    """Whether the weights of rounds that no later one needs stay on the disk."""
    generate: tuple[str, ...] = ()
    """Overrides of generate.yaml."""
    replay: tuple[str, ...] = ()
    """Overrides of replay.yaml."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What is known after a number of rounds."""

    seed: int
    round: int
    """Rounds of training done."""
    reward: float
    """Mean over the held-out words."""
    exact: float
    """Share of held-out words with reward 1."""
    largest_deviation: float
    """Largest |p / q - 1| of a held-out token on the weights that sampled it."""
    agreement_k3: float
    """k3 of those tokens, nats."""
    mean_support: float
    k3: float | None = None
    """KL(q || p) of the last training step so far, nats; none before the first."""
    grad_norm: float | None = None
    masked_share: float | None = None
    """Of the same step."""
    sampled_per_second: float | None = None
    """Tokens of the last dataset over the seconds from its first request to its last rollout."""
    trained_per_second: float | None = None
    """Scored tokens of the last training over the seconds of its steps."""
    seconds_generate: float = 0.0
    """Both datasets of the round before this, engine start included in the first."""
    seconds_replay: float = 0.0
    seconds_total: float = 0.0
    """Since the run began."""
    load_average: float = 0.0


def run_rounds(plan: Plan, engine: Any) -> Iterator[Round]:
    """Run the rounds, yielding what is known before the first and after each.

    Args:
        plan: What to do; its output must be new.
        engine: A `rollout.engine_start.KeptEngine`.

    Yields:
        One record a measurement; they are also appended to `rounds.jsonl`.
    """
    from rollout.jobfile import load_file
    from rollout.replay import replay
    from rollout.replay_config import ReplayConfig

    plan.output.mkdir(parents=True)
    words = random.Random(plan.seed)
    write_prompts(plan.output / "held_out.jsonl", plan.held_out, random.Random(HELD_OUT_SEED), True)
    started = time.monotonic()
    compute_dtype = load_file(ReplayConfig, HERE / "replay.yaml", plan.replay).model.compute_dtype
    prover = Prover(
        compute_dtype=compute_dtype, tolerance=plan.tolerance, k3_tolerance=plan.k3_tolerance
    )
    policies = [plan.model]
    data = plan.output
    rates: dict[str, float | None] = {}
    generating, training = 0.0, 0.0
    for number in range(plan.rounds + 1):
        folder = plan.output / f"round-{number:02d}"
        folder.mkdir()
        # what is there already is not sampled again
        place = folder if number or plan.first is None else plan.first
        place.mkdir(parents=True, exist_ok=True)
        if number % plan.measure_every == 0 or number == plan.rounds:
            begin = time.monotonic()
            held_out = plan.output / "held_out.jsonl"
            measured = sample(
                plan, engine, prover, number, policies[-1], held_out, place / "held_out", n=1
            )
            rewards = measured.rewards
            now = time.monotonic()
            record = Round(
                seed=plan.seed,
                round=number,
                reward=sum(rewards) / len(rewards),
                exact=sum(reward == 1.0 for reward in rewards) / len(rewards),
                largest_deviation=measured.largest_deviation,
                agreement_k3=measured.k3,
                mean_support=measured.mean_support,
                **rates,
                seconds_generate=generating + now - begin,
                seconds_replay=training,
                seconds_total=now - started,
                load_average=os.getloadavg()[0],
            )
            with (plan.output / "rounds.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")
            yield record
        if number == plan.rounds:
            return
        begin = time.monotonic()
        if number == 0 or (plan.sample_every and number % plan.sample_every == 0):
            data, prompts = place / "data", place / "prompts.jsonl"
            write_prompts(prompts, plan.prompts, words, held_out=False)
            sampler = policies[number - number % plan.reload_every]
            sampled = sample(plan, engine, prover, number, sampler, prompts, data)
            rates["sampled_per_second"] = sampled.tokens_per_second
        generating = time.monotonic() - begin
        begin = time.monotonic()
        overrides = [
            f"model.path={policies[-1]}",
            f"data.path={data}",
            f"data.seed={1000 * plan.seed + number}",
            f"output.path={folder / 'train'}",
        ]
        config = load_file(ReplayConfig, HERE / "replay.yaml", [*plan.replay, *overrides])
        summary = replay(config, stream=io.StringIO())
        training = time.monotonic() - begin
        policies.append(summary.checkpoint)
        last = last_metrics(folder / "train")
        rates |= {name: last[name] for name in ("k3", "grad_norm", "masked_share")}
        rates["trained_per_second"] = summary.tokens / summary.seconds
        if not plan.keep_checkpoints:
            oldest = (number + 1) - (number + 1) % plan.reload_every
            for policy in policies[1 : min(oldest, number + 1)]:
                shutil.rmtree(policy, ignore_errors=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What a dataset holds, in short."""

    rewards: tuple[float, ...]
    mean_support: float
    largest_deviation: float
    k3: float
    tokens_per_second: float | None
    """Of sampling; none where the dataset was there."""


def sample(
    plan: Plan,
    engine: Any,
    prover: Prover,
    number: int,
    policy: Path,
    prompts: Path,
    output: Path,
    n: int | None = None,
) -> Sampled:
    """Write a dataset, unless it is there, and prove that the right weights sampled it.

    Args:
        plan: Of the run.
        engine: A `rollout.engine_start.KeptEngine`.
        prover: Of the run.
        number: The round.
        policy: The checkpoint that samples.
        prompts: The prompts file.
        output: The dataset, new.
        n: Rollouts a prompt; the job file's by default.

    Returns:
        Rewards and supports.

    Raises:
        TrainingError: Ratios are off on the very weights that should have sampled the data.
        IncompleteError: Rollouts are missing.
    """
    from rollout.dataset_view import read_dataset
    from rollout.errors import IncompleteError
    from rollout.jobfile import load_job
    from rollout.pipeline import generate
    from rollout.storage import Storage

    overrides = [f"model.path={policy}", f"prompts.path={prompts}", f"output.path={output}"]
    overrides += [f"model.policy_step={number}"] + ([] if n is None else [f"sampling.n={n}"])
    job = load_job(HERE / "generate.yaml", [*plan.generate, *overrides])
    summary = generate(job, show_progress=False, kept=engine)
    problem = summary.problem()
    if problem is not None:
        raise IncompleteError(problem)
    report = prover.prove(output, policy)
    view = read_dataset(Storage.open(output))
    tokens = sum(record.tokens for record in view.shards)
    rewards: list[float] = []
    for record in view.shards:
        with view.open_shard(record) as shard:
            rewards += shard.read(columns=["reward"])["reward"].to_pylist()
    return Sampled(
        rewards=tuple(rewards),
        mean_support=sum(record.entries for record in view.shards) / tokens,
        largest_deviation=report.largest_deviation,
        k3=report.replayed.k3,
        tokens_per_second=summary.tokens / summary.seconds_sampling if summary.tokens else None,
    )


def write_prompts(path: Path, count: int, rng: random.Random, held_out: bool) -> None:
    """Write words, each once, as chat messages with their answers.

    Args:
        path: The prompts file.
        count: Words.
        rng: Source of randomness.
        held_out: Which side of the task's split they come from.
    """
    words: dict[str, None] = {}
    while len(words) < count:
        words[draw_word(rng, held_out=held_out)] = None
    lines = [
        {"id": word, "messages": [{"role": "user", "content": word}], "answer": word[::-1]}
        for word in words
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def last_metrics(folder: Path) -> dict[str, Any]:
    """Return the numbers of the last step of a training run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last: dict[str, Any] = json.loads(lines[-1])
    return last


def show(record: Round) -> None:
    """Print one line."""
    click.echo(
        f"{time.strftime('%H:%M:%S')}  seed {record.seed}  round {record.round:2d}  "
        f"reward {record.reward:.3f}  exact {record.exact:.3f}  "
        f"support {record.mean_support:.2f}  |ratio - 1| {record.largest_deviation:.1e}  "
        f"generate {record.seconds_generate:.1f} s  replay {record.seconds_replay:.1f} s  "
        f"total {record.seconds_total:.0f} s  load {record.load_average:.1f}"
    )


def set_environment() -> None:
    """Set what torch and vLLM read when they are imported; what the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@click.command(context_settings={"show_default": True})
@click.option("--model", type=click.Path(path_type=Path), default="out/quickstart-model")
@click.option("--output", type=click.Path(path_type=Path), default="out/reverse-text/seed-0")
@click.option("--seed", type=int, default=0)
@click.option("--rounds", type=click.IntRange(min=1), default=10)
@click.option("--prompts", type=click.IntRange(min=1), default=128, help="Of each dataset.")
@click.option("--held-out", type=click.IntRange(min=1), default=256, help="Words that measure.")
@click.option("--sample-every", type=click.IntRange(min=0), default=1)
@click.option("--reload-every", type=click.IntRange(min=1), default=1)
@click.option("--tolerance", type=float, default=1e-3, help="Of a token's ratio after a reload.")
@click.option("--k3-tolerance", type=float, default=1e-6, help="Of their k3.")
@click.option("--keep-checkpoints/--drop-checkpoints", default=True)
@click.option("--records", type=click.Path(path_type=Path), help="A second rounds.jsonl.")
@click.option("--generate-set", multiple=True, metavar="KEY=VALUE", help="Of generate.yaml.")
@click.option("--replay-set", multiple=True, metavar="KEY=VALUE", help="Of replay.yaml.")
def main(
    model: Path,
    output: Path,
    seed: int,
    rounds: int,
    prompts: int,
    held_out: int,
    sample_every: int,
    reload_every: int,
    tolerance: float,
    k3_tolerance: float,
    keep_checkpoints: bool,
    records: Path | None,
    generate_set: Sequence[str],
    replay_set: Sequence[str],
) -> None:
    """Alternate generation and replay, and print the reward on held-out words."""
    if output.exists():
        raise click.ClickException(f"{output} exists, choose another --output or remove it")
    set_environment()
    from rollout.engine_start import KeptEngine
    from rollout.errors import RolloutError

    plan = Plan(
        model=model,
        output=output,
        seed=seed,
        rounds=rounds,
        prompts=prompts,
        held_out=held_out,
        sample_every=sample_every,
        reload_every=reload_every,
        tolerance=tolerance,
        k3_tolerance=k3_tolerance,
        keep_checkpoints=keep_checkpoints,
        generate=tuple(generate_set),
        replay=tuple(replay_set),
    )
    engine = KeptEngine(seed)
    try:
        for record in run_rounds(plan, engine):
            show(record)
            if records is not None:
                shutil.copyfile(output / "rounds.jsonl", records)
    except RolloutError as error:
        raise click.ClickException(str(error)) from None
    finally:
        engine.close()


if __name__ == "__main__":
    main()
