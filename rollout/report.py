"""What `rollout inspect` says about a dataset, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.tally import Spread

WIDTH = 100
_LABEL = 15
_COLUMNS = ("mean", "min", "p10", "median", "p90", "p99", "max")


@dataclass(frozen=True, kw_only=True, slots=True)
class SupportReport:
    """The recorded supports of one kind."""

    kind: str
    """kept, top or none."""
    rollouts: int
    tokens: int
    sizes: Spread | None
    """Ids recorded a token; None for `none`."""
    singleton_share: float | None
    """Share of the tokens with exactly one id."""
    tail_mean: float | None
    """Mean probability outside the recorded ids; None but for `top`."""
    tail_maximum: float | None
    tail_above_1_percent: float | None
    """Share of the tokens whose tail mass is above 0.01."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectReport:
    """A dataset in numbers; everything is exact."""

    url: str
    format_version: int
    fingerprint: str
    model: str | None
    """Name or folder of the model."""
    model_digest: str | None
    """Digest of the weights."""
    dtype: str | None
    engines: tuple[str, ...]
    """Name and version of every engine that sampled a part."""
    parts: int
    """Committed parts that hold rollouts."""
    data_bytes: int
    """Of the shards."""
    orphans: int
    """Files in data/ that no commit record names; a plain scan of the folder would read them."""
    prompts_planned: int
    prompts_complete: int
    """Planned prompts with every rollout committed."""
    prompts_started: int
    """Planned prompts with some, but not all, of their rollouts committed."""
    prompts_rejected: int
    """Rows of the prompts file set aside whole."""
    rollouts_planned: int
    """n for each planned prompt that is not set aside; see `inspect_dataset`."""
    rollouts_committed: int
    rollouts_rejected: int
    """Single rollouts set aside and not sampled later."""
    rollouts_missing: int
    """Planned, neither committed nor rejected."""
    rejections: tuple[tuple[str, str, int], ...]
    """(stage, reason, count) of prompts and rollouts set aside, most frequent first."""
    finish_reasons: tuple[tuple[str | None, int], ...]
    """(reason, rollouts), most frequent first."""
    prompt_tokens: Spread | None
    """Prompt lengths, one a rollout."""
    tokens: Spread | None
    """Completion lengths, terminal token included."""
    total_tokens: int
    total_entries: int
    """Support entries."""
    supports: tuple[SupportReport, ...]
    """By kind."""
    rewards: Spread | None
    rollouts_without_reward: int
    """No reward, or one that is not a finite number."""
    groups_with_rewards: int
    """Prompts with at least two rewards."""
    groups_even: int
    """Of these, how many have the same reward throughout: they teach nothing by comparison."""
    polars_line: str | None
    """One line of Python that opens the data; None while there is none."""


def format_report(report: InspectReport) -> str:
    """Lay a report out for a terminal.

    Args:
        report: What `rollout.inspect.inspect_dataset` returned.

    Returns:
        Lines of at most 100 columns; only the line of polars may be longer, it is to be copied.
    """
    lines = [
        *_facts(report),
        "",
        *_spreads(report),
        "",
        *_polars(report),
    ]
    return "\n".join(lines)


def _facts(report: InspectReport) -> list[str]:
    digest = (report.model_digest or "").removeprefix("sha256:")[:12]
    made_by = ", ".join(
        [
            (report.model or "model not recorded") + (f" ({digest})" if digest else ""),
            *([report.dtype] if report.dtype else []),
            " + ".join(report.engines) or "engine not recorded",
        ]
    )
    lines = [
        _line("dataset", report.url),
        _line("made by", made_by),
        _line("fingerprint", f"{report.fingerprint[:32]}, format {report.format_version}"),
        _line(
            "prompts",
            f"{report.prompts_planned:,} planned: {report.prompts_complete:,} complete, "
            f"{report.prompts_started:,} in part; {report.prompts_rejected:,} rejected",
        ),
        _line(
            "rollouts",
            f"{report.rollouts_committed:,} of {report.rollouts_planned:,} committed, "
            f"{report.rollouts_rejected:,} rejected, {report.rollouts_missing:,} missing",
        ),
        _line(
            "stored",
            f"{_count(report.parts, 'part')}, {_size(report.data_bytes)}, "
            f"{report.total_tokens:,} tokens, {report.total_entries:,} support entries",
        ),
    ]
    if report.finish_reasons:
        reasons = (f"{reason or '(none)'} {count:,}" for reason, count in report.finish_reasons)
        lines.append(_line("finished by", ", ".join(reasons)))
    lines += [
        _line("rejected", f"{count:,} at {stage}: {reason}")
        for stage, reason, count in report.rejections
    ]
    return lines


def _spreads(report: InspectReport) -> list[str]:
    lines = [" " * _LABEL + "".join(f"{name:>11}" for name in _COLUMNS)]
    rows = [("prompt tokens", report.prompt_tokens, 0), ("tokens", report.tokens, 0)]
    rows += [(f"support {item.kind}", item.sizes, 0) for item in report.supports]
    rows.append(("reward", report.rewards, 3))
    lines += [_row(name, spread, digits) for name, spread, digits in rows if spread is not None]
    if len(lines) == 1:
        return ["no rollouts yet"]
    lines.append("")
    for item in report.supports:
        text = f"{_count(item.rollouts, 'rollout')}, {item.tokens:,} tokens"
        if item.singleton_share is not None:
            text += f", {item.singleton_share:.1%} with a single id"
        if item.tail_mean is not None:
            text += (
                f"; tail mass {item.tail_mean:.2g} on average, {item.tail_maximum:.2g} at most, "
                f"{item.tail_above_1_percent:.1%} above .01"
            )
        lines.append(_line(f"support {item.kind}", text))
    if report.rewards is not None:
        text = f"{report.groups_even:,} of {_count(report.groups_with_rewards, 'group')} all equal"
        if report.rollouts_without_reward:
            text += f"; {_count(report.rollouts_without_reward, 'rollout')} without a reward"
        lines.append(_line("reward", text))
    return lines


def _polars(report: InspectReport) -> list[str]:
    if report.polars_line is None:
        return ["no data to open yet"]
    lines = ["open it with polars:", f"  {report.polars_line}"]
    if report.orphans:
        lines.append(
            f"  {_count(report.orphans, 'file')} in data/ without a commit record would be read "
            "too: run the job again first"
        )
    return lines


def _row(name: str, spread: Spread, digits: int) -> str:
    rest = (spread.minimum, spread.p10, spread.median, spread.p90, spread.p99, spread.maximum)
    cells = [_number(spread.mean, max(digits, 1)), *(_number(value, digits) for value in rest)]
    return f"{name:<{_LABEL}}" + "".join(f"{cell:>11}" for cell in cells)


def _number(value: float, digits: int) -> str:
    text = f"{value:,.{digits}f}"
    return text if len(text) <= 10 else f"{value:.3g}"


def _line(label: str, text: str) -> str:
    room = WIDTH - _LABEL
    if len(text) > room:
        # both ends of a path or a list of reasons say more than its middle
        half = (room - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    return f"{label:<{_LABEL}}{text}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"
