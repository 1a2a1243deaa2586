"""The `rollout` command: parses, then imports what the command needs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import click

from rollout.errors import IncompleteError, RolloutError, TooManyFailedError
from rollout.terminal_text import printable
from rollout.version import VERSION


def _expected_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn errors raised on purpose into one line and an exit code; others keep their traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except RolloutError as error:
            # what others wrote into a message may have line breaks and colours
            click.echo(f"error: {printable(' '.join(str(error).splitlines()))}", err=True)
            sys.exit(error.exit_code)

    return run


_storage_options = click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the fsspec filesystem, JSON or text; the environment works too.",
)


@click.group()
@click.version_option(VERSION, prog_name="rollout")
@click.option("--verbose", is_flag=True, help="Log more than warnings.")
def main(verbose: bool) -> None:
    """Make datasets of RL rollouts with vLLM, and look at them.

    Exit codes: 0 done; 2 wrong job file or usage; 3 model, prompts or reward unreadable; 4 output
    not writable or another run's; 5 the engine failed; 6 rollouts are missing at the end; 7 no
    readable dataset; 8 training can't go on, or weights do not agree with a dataset; 9 stopped by
    a signal, with everything finished committed; 10 more rollouts failed than the job allows; 11
    verify found damage.
    """
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


@main.command()
@click.option("--config", "path", required=True, type=click.Path(), help="The job file.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of the job."
)
@click.option("--dry-run", is_flag=True, help="Check and print everything, load no weights.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@_expected_errors
def generate(path: str, overrides: Sequence[str], dry_run: bool, as_json: bool) -> None:
    """Sample rollouts with vLLM and write them, with their supports, as a dataset."""
    from rollout.jobfile import load_job

    config = load_job(path, overrides)
    if dry_run:
        from rollout.dry_run import describe_job

        click.echo(describe_job(config))
        return
    from rollout.pipeline import generate as run

    summary = run(config, show_progress=True)
    click.echo(json.dumps(summary.as_dict()) if as_json else summary.table())
    if not as_json:
        click.echo(f"look at it:   rollout inspect {config.output.path}")
    problem = summary.problem()
    if problem is not None:
        raise (TooManyFailedError if summary.too_many_failed else IncompleteError)(problem)


@main.command()
@click.argument("path")
@click.option("--prompt", metavar="ID", help="Show one prompt: its id, or the start of its key.")
@click.option("--sample", type=int, metavar="N", help="Show one sample of it, token by token.")
@click.option("--token", type=int, metavar="T", help="Show one token of it with its alternatives.")
@click.option("--full", is_flag=True, help="Read every shard; else a sample of a large dataset.")
@click.option("--tokenizer", metavar="FOLDER", help="Where the model's tokenizer.json is.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; see docs/inspect.md.")
@_storage_options
@_expected_errors
def inspect(path: str, storage_options: Sequence[str], **asked: Any) -> None:
    """Show what a dataset holds, or one prompt, sample or token of it."""
    from rollout.inspect_command import run_inspect

    click.echo(run_inspect(path, storage_options, **asked))


@main.command()
@click.argument("path")
@click.option("--digests-only", is_flag=True, help="Compare bytes, but don't decode the rows.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_storage_options
@_expected_errors
def verify(path: str, digests_only: bool, as_json: bool, storage_options: Sequence[str]) -> None:
    """Check every byte and every row of a dataset, and name what is damaged or missing."""
    from rollout.storage import Storage
    from rollout.storage_arguments import parse_storage_options
    from rollout.verify import verify_dataset

    storage = Storage.open(path, parse_storage_options(storage_options))
    report = verify_dataset(storage, rows=not digests_only)
    click.echo(json.dumps(report.as_dict()) if as_json else report.text())
    report.check()


@main.command()
@click.option("--config", "path", required=True, type=click.Path(), help="The replay file.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of the file."
)
@_expected_errors
def replay(path: str, overrides: Sequence[str]) -> None:
    """Train a model on a dataset, with no engine running."""
    from rollout.jobfile import load_file
    from rollout.replay_config import ReplayConfig

    config = load_file(ReplayConfig, path, overrides, what="replay file")
    from rollout.replay import replay as run

    summary = run(config)
    click.echo(f"{summary.steps} steps, {summary.seconds:.1f} s; checkpoint {summary.checkpoint}")


@main.command()
@click.argument("path")
@click.option("--model", required=True, help="A Hugging Face checkpoint: a folder or a hub id.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True
)
@click.option("--max-rollouts", type=click.IntRange(min=1), default=4096, show_default=True)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0),
    help="Fail if a token's ratio is further than this from 1.",
)
@click.option("--save", is_flag=True, help="Keep the report beside the data, for inspect.")
@_storage_options
@_expected_errors
def agree(
    path: str,
    model: str,
    dtype: str,
    max_rollouts: int,
    tolerance: float | None,
    save: bool,
    storage_options: Sequence[str],
) -> None:
    """Compare a model's probabilities with those that a dataset recorded."""
    from rollout.storage_arguments import parse_storage_options

    options = parse_storage_options(storage_options)
    from rollout.agreement import agree as run

    report = run(
        path, model, compute_dtype=dtype, max_rollouts=max_rollouts, storage_options=options
    )
    click.echo(report.table())
    if save:
        from rollout.agreement_file import save_agreement

        save_agreement(path, report, model=model, dtype=dtype, storage_options=options)
    report.check(tolerance)


@main.command()
@click.argument("path")
@click.option("-o", "--output", required=True, type=click.Path(), help="The page to write.")
@click.option("--full", is_flag=True, help="Read every shard; else a sample of a large dataset.")
@_storage_options
@_expected_errors
def report(path: str, output: str, full: bool, storage_options: Sequence[str]) -> None:
    """Write a page with charts of a dataset: one HTML file that needs no network."""
    from rollout.html_report import write_report
    from rollout.storage_arguments import parse_storage_options

    size = write_report(path, output, parse_storage_options(storage_options), full=full)
    click.echo(f"{output}: {size / 1e3:.0f} kB")


@main.command()
@click.argument("path")
@click.option("-o", "--output", required=True, help="File or folder to write.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "huggingface"]),
    default="jsonl",
    show_default=True,
)
@click.option("--supports/--no-supports", default=False, show_default=True)
@_storage_options
@_expected_errors
def export(
    path: str, output: str, form: str, supports: bool, storage_options: Sequence[str]
) -> None:
    """Write a dataset as JSON lines, or as a Hugging Face dataset's folder."""
    from pathlib import Path

    from rollout import export as module
    from rollout.storage_arguments import parse_storage_options

    options = parse_storage_options(storage_options)
    write = module.export_jsonl if form == "jsonl" else module.export_hugging_face
    rows = write(path, Path(output), supports=supports, storage_options=options)
    click.echo(f"{output}: {rows:,} rollouts")


@main.command()
@click.argument("path")
@click.argument("values", type=click.Path())
@click.option("-o", "--output", required=True, help="The new dataset's folder or URL.")
@_storage_options
@_expected_errors
def join(path: str, values: str, output: str, storage_options: Sequence[str]) -> None:
    """Add the rewards or advantages of a table, by rollout_id, in a new dataset."""
    from pathlib import Path

    from rollout.join import join_values
    from rollout.storage_arguments import parse_storage_options

    options = parse_storage_options(storage_options)
    # one set of options serves both sides; a local output takes none
    remote = options if "://" in output else None
    found = join_values(path, Path(values), output, storage_options=options, output_options=remote)
    click.echo(found.text())
