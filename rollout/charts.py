"""Draw the charts of `rollout report` as SVG texts.

matplotlib, because what it draws is static, small and complete in itself: no script, no font and
no network when the page is opened. Text stays text, so that a page can be searched.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

import matplotlib
import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from rollout.report_data import SIZE_EDGES, TAIL_EDGES, ReportData
from rollout.schema.records import CommitRecord

BLUE, ORANGE, GREEN, RED, GREY = "#3b6ea8", "#d98032", "#4c9a5b", "#c0453e", "#9a9a9a"
_SHADES: Final = (BLUE, ORANGE, GREEN, "#8a63a8", GREY, "#b58f2b")
_UNITS: Final = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_MOST_GROUPS: Final = 400
_MOST_REASONS: Final = 10
_STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
}


def draw(name: str, paint: Callable[[Any], None], *, height: float = 2.6) -> str:
    """Draw one chart.

    Args:
        name: makes the ids inside the SVG its own.
        paint: draws on matplotlib axes.
        height: inches, at a width of 5.6.

    Returns:
        An SVG element.
    """
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(5.6, height), layout="constrained")
        paint(figure.add_subplot())
        out = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing)
    text = out.getvalue()
    return text[text.index("<svg") :]


def progress(commits: Sequence[CommitRecord], planned: int) -> Callable[[Any], None]:
    """Committed rollouts over time, and how many were planned."""
    ordered = sorted(commits, key=lambda record: record.created_at)
    times = [datetime.fromisoformat(record.created_at) for record in ordered]
    seconds = [(time - times[0]).total_seconds() for time in times]
    scale, unit = next((s, u) for s, u in _UNITS if seconds[-1] >= 2 * s or s == 1)
    passed = [value / scale for value in seconds]
    rows = np.cumsum([record.rows for record in ordered])

    def paint(axes: Any) -> None:
        axes.step([0, *passed], [0, *rows], where="post", color=BLUE)
        axes.plot(passed, rows, ".", color=BLUE, markersize=4)
        axes.axhline(planned, color=GREY, linestyle="--", linewidth=1)
        axes.text(0, planned, " planned", color=GREY, va="bottom")
        axes.set_ylim(0, max(planned, int(rows[-1])) * 1.15 or 1)
        if passed[-1] == 0:
            axes.set_xlim(-1, 1)
            axes.set_xticks([0])
        axes.set_xlabel(f"{unit} since the first commit")
        axes.set_ylabel("rollouts")

    return paint


def completeness(parts: Sequence[tuple[str, int]]) -> Callable[[Any], None]:
    """One bar of named counts."""
    colours = {"committed": GREEN, "set aside": ORANGE, "missing": RED, "unreadable": "#7a2f2a"}

    def paint(axes: Any) -> None:
        left = 0
        for name, count in parts:
            label = f"{name} {count:,}"
            axes.barh([0], [count], left=left, color=colours[name], label=label, height=0.6)
            left += count
        axes.set_yticks([])
        axes.set_xlim(0, max(left, 1))
        axes.grid(visible=False)
        axes.legend(loc="upper center", ncols=len(parts), frameon=False, bbox_to_anchor=(0.5, 1.5))

    return paint


def rewards_over_run(frame: pl.DataFrame) -> Callable[[Any], None]:
    """Mean reward of each part in the order of units, with the spread of its rollouts."""
    by_part = (
        frame.group_by("part")
        .agg(
            pl.col("reward").mean().alias("mean"),
            pl.col("reward").quantile(0.1).alias("low"),
            pl.col("reward").quantile(0.9).alias("high"),
        )
        .sort("part")
    )

    def paint(axes: Any) -> None:
        part = by_part["part"].to_numpy()
        low, mean, high = (by_part[name].to_numpy() for name in ("low", "mean", "high"))
        if len(part) > 1:
            axes.fill_between(part, low, high, color=BLUE, alpha=0.18, label="p10 to p90")
        else:
            axes.vlines(part, low, high, color=BLUE, alpha=0.35, linewidth=5, label="p10 to p90")
        axes.plot(part, mean, "-o", color=BLUE, markersize=3, label="mean")
        axes.set_xlabel("part, in the order of units")
        axes.set_ylabel("reward")
        _whole_numbers(axes, len(part))
        axes.legend(frameon=False)

    return paint


def rewards_by_group(frame: pl.DataFrame) -> Callable[[Any], None]:
    """Smallest, mean and largest reward of each group, ordered by mean."""
    groups = (
        frame.group_by("prompt_id")
        .agg(
            pl.col("reward").mean().alias("mean"),
            pl.col("reward").min().alias("low"),
            pl.col("reward").max().alias("high"),
        )
        .sort("mean", "prompt_id")
    )
    total = len(groups)
    if total > _MOST_GROUPS:
        groups = groups[np.linspace(0, total - 1, _MOST_GROUPS).round().astype(int).tolist()]

    def paint(axes: Any) -> None:
        at = np.arange(len(groups))
        low, mean, high = (groups[name].to_numpy() for name in ("low", "mean", "high"))
        axes.vlines(
            at, low, high, color=BLUE, alpha=0.35, linewidth=min(max(0.6, 120 / len(groups)), 5)
        )
        axes.plot(at, mean, ".", color=BLUE, markersize=3)
        shown = "" if total == len(groups) else f", {len(groups)} of them shown"
        axes.set_xlabel(f"{total:,} groups by mean{shown} (line: smallest to largest)")
        axes.set_xticks([])
        axes.set_ylabel("reward")

    return paint


def lengths(data: ReportData) -> Callable[[Any], None]:
    """Completion lengths, stacked by finish reason."""
    reasons = sorted({reason for reason, _ in data.lengths})
    longest = max(tokens for _, tokens in data.lengths)
    edges = np.unique(np.linspace(0.5, longest + 0.5, min(longest, 40) + 1).round(1))

    def paint(axes: Any) -> None:
        base = np.zeros(len(edges) - 1)
        for index, reason in enumerate(reasons):
            own = [(tokens, n) for (name, tokens), n in data.lengths.items() if name == reason]
            counts, _ = np.histogram([t for t, _ in own], edges, weights=[n for _, n in own])
            axes.bar(
                edges[:-1],
                counts,
                np.diff(edges),
                bottom=base,
                align="edge",
                color=_SHADES[index % len(_SHADES)],
                label=f"{reason} {int(counts.sum()):,}",
            )
            base += counts
        _whole_numbers(axes, longest)
        axes.set_xlabel("tokens")
        axes.set_ylabel("rollouts")
        axes.legend(frameon=False)

    return paint


def support_sizes(data: ReportData) -> Callable[[Any], None]:
    """Support sizes on a logarithmic scale, singletons as a bar of their own."""
    total = sum(int(counts.sum()) for counts in data.sizes.values())

    def paint(axes: Any) -> None:
        for index, (kind, counts) in enumerate(sorted(data.sizes.items())):
            share = counts / max(total, 1)
            colour = _SHADES[index]
            single = f", {share[0]:.1%} singletons"
            axes.bar(0.6, share[0], 0.3, color=colour, alpha=0.6, hatch="//", edgecolor="white")
            axes.stairs(share[1:], SIZE_EDGES[1:], fill=True, color=colour, alpha=0.6)
            axes.plot([], [], "s", color=colour, alpha=0.6, label=f"{kind}{single}")
        _logarithmic(axes.set_xscale, axes.xaxis)
        largest = max(np.flatnonzero(counts)[-1] for counts in data.sizes.values() if counts.any())
        axes.set_xlim(0.5, max(SIZE_EDGES[largest + 1] * 1.2, 4))
        axes.set_xlabel("ids recorded for a token (hatched: exactly one)")
        axes.set_ylabel("share of tokens")
        axes.legend(frameon=False)

    return paint


def tail_mass(data: ReportData) -> Callable[[Any], None]:
    """Tail mass of untruncated rows on a logarithmic scale."""

    def paint(axes: Any) -> None:
        total = max(int(data.tails.sum()) + data.small_tails, 1)
        axes.stairs(data.tails / total, TAIL_EDGES, fill=True, color=ORANGE)
        _logarithmic(axes.set_xscale, axes.xaxis)
        axes.set_xlabel(f"tail mass ({data.small_tails / total:.1%} of tokens below 1e-8)")
        axes.set_ylabel("share of tokens")

    return paint


def entropy(data: ReportData) -> Callable[[Any], None]:
    """Mean -log q of the sampled tokens by position, which estimates the entropy of q."""

    def paint(axes: Any) -> None:
        count = data.tokens.size
        bins = min(count, 200)
        edges = np.unique(np.linspace(0, count, bins + 1).astype(int))
        sums = np.add.reduceat(data.surprisal, edges[:-1])
        tokens = np.add.reduceat(data.tokens, edges[:-1])
        used = tokens > 0
        axes.plot(edges[:-1][used], sums[used] / tokens[used], color=BLUE)
        _whole_numbers(axes, count)
        axes.set_xlabel("position")
        axes.set_ylabel("nats a token", color=BLUE)
        axes.set_ylim(bottom=0)
        other = axes.twinx()
        other.plot(edges[:-1], tokens / np.diff(edges), color=GREY, linewidth=1)
        other.set_ylabel("tokens there", color=GREY)
        other.set_ylim(bottom=0)
        other.grid(visible=False)

    return paint


def largest_step(steps: Sequence[int], capacity: int) -> Callable[[Any], None]:
    """The largest sampling step so far, part by part, against the capture's capacity."""

    def paint(axes: Any) -> None:
        axes.plot(range(len(steps)), steps, "-o", color=BLUE, markersize=3, label="largest step")
        axes.axhline(capacity, color=RED, linestyle="--", linewidth=1, label="capacity")
        _logarithmic(axes.set_yscale, axes.yaxis)
        axes.set_xlabel("part, in the order of commits")
        axes.set_ylabel("support entries")
        _whole_numbers(axes, len(steps))
        axes.legend(frameon=False)

    return paint


def set_aside(reasons: Sequence[tuple[str, str, int]]) -> Callable[[Any], None]:
    """Prompts and rollouts that were set aside, by stage and reason, most frequent first."""
    shown = list(reversed(reasons[:_MOST_REASONS]))

    def paint(axes: Any) -> None:
        names = [f"{stage}: {reason}" for stage, reason, _ in shown]
        counts = [count for _, _, count in shown]
        bars = axes.barh(names, counts, color=ORANGE, height=0.6)
        axes.bar_label(bars, [f"{count:,}" for count in counts], padding=3)
        axes.set_xlim(0, max(counts) * 1.15)
        axes.set_ylim(-0.6, max(len(shown), 4) - 0.4)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.set_xlabel("prompts and rollouts")

    return paint


def _whole_numbers(axes: Any, count: int) -> None:
    """Mark whole numbers on the x axis alone."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    if count == 1:
        axes.set_xlim(-1, 1)


def _logarithmic(set_scale: Callable[[str], None], axis: Any) -> None:
    """Scale an axis, with plain numbers at the powers of ten: formulas are not drawn."""
    set_scale("log")
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
