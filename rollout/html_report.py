"""Write a dataset's page: one HTML file with charts, which needs no network and runs no script."""

from __future__ import annotations

import contextlib
import html
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rollout.dataset import DatasetView, read_dataset
from rollout.errors import ConfigError, OutputError
from rollout.inspect import inspect_view
from rollout.inspect_text import (
    agreement_of,
    counted,
    counts_of,
    groups_of,
    made_by,
    settings_of,
    status_of,
)
from rollout.report import InspectReport
from rollout.report_data import ReportData, collect
from rollout.storage import Storage

_LISTED: Final = 200
_STYLE: Final = """
body { font: 15px/1.45 sans-serif; color: #222; max-width: 1180px; margin: 24px auto; padding: 0
16px; } h1 { font-size: 22px; margin: 0; } h2 { font-size: 17px; margin: 28px 0 8px; }
.url { color: #666; overflow-wrap: anywhere; } .status { font-weight: bold; padding: 8px 12px;
border-radius: 4px; margin: 12px 0; } .good { background: #e3f1e6; } .bad { background: #f8dfdd; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 20px; }
figure { margin: 0; } figcaption { font-weight: bold; margin-bottom: 4px; }
svg { width: 100%; height: auto; } table { border-collapse: collapse; margin: 6px 0; }
td, th { border-bottom: 1px solid #ddd; padding: 3px 12px 3px 0; text-align: left; vertical-align:
top; overflow-wrap: anywhere; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f5f5f5; padding: 10px; overflow-x: auto; } .none { color: #777; }
"""
# the browser itself refuses anything that is not in the file
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(
    path: str | Path,
    output: str | Path,
    storage_options: Mapping[str, Any] | None = None,
    *,
    full: bool = False,
) -> int:
    """Write the page of a dataset.

    Args:
        path: the dataset.
        output: a local file, replaced if it exists.
        storage_options: options of the dataset's fsspec filesystem.
        full: read every shard; else an even sample of a large dataset.

    Returns:
        Bytes written.

    Raises:
        ConfigError: matplotlib is not installed.
        DatasetError: not a dataset, of a newer format, or a record is missing or damaged.
        OutputError: the page can't be written.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("rollout report needs matplotlib: pip install rollout[report]") from error
    target = Path(output)
    unfinished = target.with_name(f".{target.name}.unfinished")
    with _writing(target):
        # before minutes of reading
        unfinished.touch()
    try:
        view = read_dataset(Storage.open(path, dict(storage_options or {})))
        found = inspect_view(view, path, full=full)
        page = build_page(view, found, collect(view, full=full)).encode()
        with _writing(target):
            unfinished.write_bytes(page)
            os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return len(page)


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"report: can't write {target}: {error.strerror or error}") from error


def build_page(view: DatasetView, found: InspectReport, data: ReportData) -> str:
    """Lay out the page.

    Args:
        view: the dataset.
        found: what `inspect_view` says about it.
        data: what the charts are drawn from.

    Returns:
        A whole HTML document.
    """
    mood = "good" if found.complete else "bad"
    sampled = ""
    if data.rollouts < found.rollouts_committed - found.unreadable:
        sampled = (
            f"<p>Charts are drawn from {counted(data.rollouts, 'rollout')} of "
            f"{counted(data.shards, 'shard')}, evenly spread over the run.</p>"
        )
    body = [
        "<h1>Rollouts</h1>",
        f'<div class="url">{_text(found.url)}</div>',
        f'<div class="status {mood}">{_text(status_of(found))}</div>',
        _facts(found),
        sampled,
        "<h2>Charts</h2>",
        f'<div class="charts">{"".join(_charts(view, found, data))}</div>',
        *_problems(found),
        "<h2>Agreement of trainer and sampler</h2>",
        _agreement(found),
        "<h2>Provenance</h2>",
        _provenance(view, found),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{_text(found.url)}</title><style>{_STYLE}</style></head>\n<body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def _charts(view: DatasetView, found: InspectReport, data: ReportData) -> Iterable[str]:
    from rollout import charts

    whole = found.rollouts_committed - found.unreadable
    parts = [
        ("committed", whole),
        ("unreadable", found.unreadable),
        ("set aside", found.rollouts_rejected),
        ("missing", found.rollouts_missing),
    ]
    parts = [part for part in parts if part[1]]
    if parts:
        yield _chart("completeness", charts.completeness(parts), height=1.1)
    else:
        yield _nothing("completeness", "nothing is planned")
    if view.commits:
        yield _chart("progress", charts.progress(view.commits, found.rollouts_planned))
    frame = data.reward_frame()
    if frame is None:
        yield _nothing("rewards", "no rollout has a reward")
    else:
        yield _chart("rewards over the run", charts.rewards_over_run(frame))
        yield _chart("rewards by group", charts.rewards_by_group(frame))
    if data.rollouts:
        yield _chart("lengths and finish reasons", charts.lengths(data))
    if any(counts.any() for counts in data.sizes.values()):
        yield _chart("support sizes", charts.support_sizes(data))
    else:
        yield _nothing("support sizes", "no rollout has a support")
    if data.tails.any() or data.small_tails:
        yield _chart("tail mass", charts.tail_mass(data))
    else:
        yield _nothing("tail mass", "every support is exact, there is no tail")
    if data.tokens.any():
        yield _chart("entropy over position (mean -log q of what was drawn)", charts.entropy(data))
    yield _steps(view)
    if found.rejections:
        yield _chart("set aside by reason", charts.set_aside(found.rejections))
    else:
        yield _nothing("set aside by reason", "nothing was set aside")


def _steps(view: DatasetView) -> str:
    from rollout import charts

    title = "largest step against capacity"
    ordered = sorted(view.commits, key=lambda record: record.created_at)
    told = [
        (step, capacity)
        for record in ordered
        if isinstance(step := record.engine.get("largest_step"), int)
        and isinstance(capacity := record.engine.get("support_capacity"), int)
        and step > 0
    ]
    if not told:
        return _nothing(title, "the records of this run do not hold it")
    return _chart(title, charts.largest_step([step for step, _ in told], told[-1][1]))


def _chart(title: str, paint: Any, *, height: float = 2.6) -> str:
    from rollout import charts

    drawn = charts.draw(title, paint, height=height)
    return f"<figure><figcaption>{_text(title)}</figcaption>{drawn}</figure>"


def _nothing(title: str, why: str) -> str:
    return (
        f'<figure><figcaption>{_text(title)}</figcaption><p class="none">{_text(why)}</p></figure>'
    )


def _facts(found: InspectReport) -> str:
    rows = [
        ("made by", made_by(found)),
        ("settings", settings_of(found)),
        *counts_of(found),
    ]
    if found.rewards is not None:
        rows.append(("reward", f"{found.rewards.mean:.4f} on average; {groups_of(found)}"))
    if found.nonfinite_rewards:
        rows.append(("reward", f"{found.nonfinite_rewards:,} NaN or infinite"))
    rows.append(("agreement", agreement_of(found)))
    if found.first_prompt is not None:
        command = f"rollout inspect {shlex.quote(found.url)} --prompt "
        rows.append(
            ("look closer", f"{command}{shlex.quote(found.first_prompt)} --sample 0 --token 0")
        )
    return _table(rows)


def _problems(found: InspectReport) -> list[str]:
    parts = ["<h2>Set aside</h2>"]
    if found.rejections:
        counts = [(stage, reason, f"{n:,}") for stage, reason, n in found.rejections]
        parts.append(_table(counts, ("stage", "reason", "count")))
        rows = [
            (
                item.prompt_id or item.prompt_key,
                "whole" if item.sample_index is None else str(item.sample_index),
                item.file + ("" if item.line is None else f":{item.line}"),
                item.reason,
                item.detail,
            )
            for item in found.rejected[:_LISTED]
        ]
        heads = ("prompt", "sample", "from", "reason", "detail")
        listed = _table(rows, heads) + _more(len(found.rejected))
        parts.append(f"<details open><summary>which</summary>{listed}</details>")
    else:
        parts.append('<p class="none">nothing</p>')
    if found.bad_shards:
        rows_bad = [(bad.file, f"{bad.rows:,}", bad.problem) for bad in found.bad_shards[:_LISTED]]
        listed = _table(rows_bad, ("file", "rollouts", "problem")) + _more(len(found.bad_shards))
        parts += ["<h2>Unreadable shards</h2>", listed]
    return parts


def _more(count: int) -> str:
    left = count - _LISTED
    return f"<p>and {left:,} more: rollout inspect --json names all</p>" if left > 0 else ""


def _agreement(found: InspectReport) -> str:
    if found.agreement is None:
        return f'<p class="none">{_text(agreement_of(found))}</p>'
    tables = [
        f"<p>{_text(agreement_of(found))}. A ratio is the trainer's probability of a token "
        "over the sampler's.</p>"
    ]
    for name in ("by_position", "by_support"):
        stats = found.agreement.get(name)
        if isinstance(stats, list) and stats:
            rows = [
                tuple(_cell(item.get(key)) for key in ("label", "tokens", "mean", "k3"))
                for item in stats
                if isinstance(item, dict)
            ]
            tables.append(_table(rows, (name.replace("_", " "), "tokens", "ratio", "k3")))
    return "".join(tables)


def _provenance(view: DatasetView, found: InspectReport) -> str:
    rows = [
        ("model", f"{found.model or 'not recorded'} {found.model_revision or ''}"),
        ("weights", found.model_digest or "not recorded"),
        ("tokenizer", found.tokenizer_digest or "not recorded"),
        ("engine", " + ".join(found.engines) or "not recorded"),
        ("prompts", found.prompts_file or "not recorded"),
        ("reward", found.reward_function or "none"),
        ("fingerprint", found.fingerprint),
        ("format version", str(found.format_version)),
        ("committed", f"{found.first_commit} to {found.last_commit}"),
        ("polars", found.polars_line or "no data to open yet"),
    ]
    record = {
        "fingerprint_inputs": view.record.fingerprint_inputs,
        "provenance": view.record.provenance,
    }
    shown = _text(json.dumps(record, indent=2, ensure_ascii=False))
    return (
        _table(rows) + f"<details><summary>the whole record</summary><pre>{shown}</pre></details>"
    )


def _table(rows: Sequence[Sequence[str]], heads: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    lines = ("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if heads else ''}{''.join(lines)}</table>"


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _text(value: str) -> str:
    return html.escape(value)
