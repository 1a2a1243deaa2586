"""Count what a dataset holds of what was planned, from its records alone."""

from __future__ import annotations

from collections import Counter

import polars as pl

from rollout.dataset_view import DatasetView


def count_completeness(view: DatasetView, rollouts: pl.DataFrame | None) -> dict[str, int]:
    """Count prompts and rollouts: planned, there, set aside, missing.

    A planned prompt asks for the `group_size` of its rollouts, or, where it was not read, for the n
    of the job that made the dataset (1 where no job is recorded).

    Args:
        view: the dataset.
        rollouts: prompt_key and group_size of rollouts that were read, as many as there may be.

    Returns:
        The fields of `InspectReport` that begin with `prompts_` and `rollouts_`.
    """
    whole = {item.prompt_key for item in view.rejected if item.sample_index is None}
    single = Counter(
        item.prompt_key
        for item in view.rejected
        if item.sample_index is not None and item.prompt_key not in whole
    )
    prompts = _prompts(view)
    planned, there = len(prompts), pl.col("rows")
    started = prompts.select((there > 0).sum()).item()
    if whole:
        prompts = prompts.filter(~pl.col("prompt_key").is_in(pl.Series(list(whole)).implode()))
    # fewer than there are is never asked for: n may have been lowered between two runs
    wanted = there
    if single:
        failed = {"prompt_key": list(single), "failed": list(single.values())}
        prompts = prompts.join(pl.DataFrame(failed), on="prompt_key", how="left")
        wanted = there + pl.col("failed").fill_null(0)
    asked = view.record.samples_asked
    usual: pl.Expr = pl.lit(1 if asked is None else asked)
    if rollouts is not None:
        size = pl.col("group_size").max().cast(pl.Int64)
        sizes = rollouts.group_by("prompt_key").agg(size)
        prompts = prompts.join(sizes, on="prompt_key", how="left")
        usual = pl.col("group_size").fill_null(usual)
    wanted = pl.max_horizontal(usual, wanted)
    total, complete, rows = prompts.select(
        wanted.sum().alias("wanted"),
        (wanted == there).sum().alias("complete"),
        there.sum().alias("rows"),
    ).row(0)
    return {
        "prompts_planned": planned,
        "prompts_complete": complete,
        "prompts_started": started - complete,
        "prompts_rejected": len(whole),
        "rollouts_planned": total,
        "rollouts_committed": rows,
        "rollouts_rejected": single.total(),
        "rollouts_missing": total - rows - single.total(),
    }


def _prompts(view: DatasetView) -> pl.DataFrame:
    """List every prompt that is planned or committed, with its rollouts: prompt_key, rows."""
    keys = [key for record in view.commits for key in record.prompt_keys]
    counts = [rows for record in view.commits for rows in record.prompt_rows]
    plan = pl.Series(view.plan_ids["prompt_key"])
    listed = pl.DataFrame(
        {
            "prompt_key": pl.concat([plan, pl.Series(keys, dtype=pl.String)]),
            "rows": pl.Series([0] * len(plan) + counts, dtype=pl.Int64),
        }
    )
    has_rows = pl.col("rows") > 0
    prompts = listed.group_by("prompt_key").agg(pl.sum("rows"), has_rows.sum().alias("parts"))
    several = set(prompts.filter(pl.col("parts") > 1)["prompt_key"])
    prompts = prompts.drop("parts")
    if not several:
        return prompts
    # a rollout that two records name, as only damage can do, counts once
    distinct = {key: len(samples) for key, samples in view.samples_of(several).items()}
    again = {"prompt_key": list(distinct), "rows": list(distinct.values())}
    return prompts.update(pl.DataFrame(again), on="prompt_key")
