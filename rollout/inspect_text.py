"""Lay out what `rollout inspect` found for a terminal of 100 columns, in plain ASCII."""

from __future__ import annotations

import shlex
from typing import Any, Final

from rollout.agreement_file import summary_of
from rollout.report import InspectReport
from rollout.rows import Rejection
from rollout.tally import Spread
from rollout.terminal_text import WIDTH, fit_middle, printable, wrap

_LABEL = 15
_COLUMNS = ("mean", "min", "p10", "median", "p90", "p99", "max")
_LISTED = 10
# sampling values that say nothing while they are so
_NEUTRAL: Final[dict[str, Any]] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

# what a reader asks for first
_FIRST: Final = ("n", "temperature", "top_p", "top_k", "min_p", "max_tokens")


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
    lines = [
        _line("dataset", report.url),
        *_wrapped("status", status_of(report)),
        _line("made by", made_by(report)),
        *_wrapped("settings", settings_of(report)),
        _line("fingerprint", f"{report.fingerprint[:32]}, format {report.format_version}"),
        *(_line(label, text) for label, text in counts_of(report)),
    ]
    if report.first_commit is not None:
        lines.append(_line("committed", f"{report.first_commit} to {report.last_commit}"))
    lines += [
        _line("bad shard", f"{bad.file} ({counted(bad.rows, 'rollout')}): {bad.problem}")
        for bad in report.bad_shards[:_LISTED]
    ]
    lines += _more(len(report.bad_shards))
    if report.rollouts_read and report.rollouts_read < report.rollouts_committed:
        readable = report.rollouts_committed - report.unreadable
        if report.rollouts_read < readable:
            lines += _wrapped(
                "read",
                f"{counted(report.rollouts_read, 'rollout')} of "
                f"{counted(report.shards_read, 'shard')}, evenly spread; the numbers from here on "
                "are theirs; --full reads all",
            )
    if report.finish_reasons:
        reasons = (f"{reason or '(none)'} {count:,}" for reason, count in report.finish_reasons)
        lines.append(_line("finished by", ", ".join(reasons)))
    lines += [
        _line("rejected", f"{count:,} at {stage}: {reason}")
        for stage, reason, count in report.rejections
    ]
    lines += [_line("", f"  {describe(item)}") for item in report.rejected[:_LISTED]]
    lines += _more(len(report.rejected))
    lines += _wrapped("agreement", agreement_of(report))
    if report.first_prompt is not None:
        name = shlex.quote(printable(report.first_prompt))
        lines.append(_line("look closer", f"--prompt {name}, with it --sample 0, and --token 0"))
    return lines


def describe(item: Rejection) -> str:
    """Say on one line which prompt or rollout was set aside, where it came from, and why."""
    name = item.prompt_id if item.prompt_id is not None else item.prompt_key[:16]
    which = "whole" if item.sample_index is None else f"sample {item.sample_index}"
    line = "" if item.line is None else f":{item.line}"
    return f"{printable(name)} {which} ({printable(item.file)}{line}): {item.reason}: " + printable(
        item.detail
    )


def status_of(report: InspectReport) -> str:
    """Say in one sentence whether a dataset is complete, and what it lacks."""
    aside = []
    if report.prompts_rejected:
        aside.append(counted(report.prompts_rejected, "prompt"))
    if report.rollouts_rejected:
        aside.append(counted(report.rollouts_rejected, "rollout"))
    told = f"; {' and '.join(aside)} set aside" if aside else ""
    if report.complete:
        return ("complete" if report.prompts_planned else "empty: nothing is planned") + told
    missing = []
    if report.rollouts_missing:
        missing.append(f"{counted(report.rollouts_missing, 'rollout')} not sampled")
    if report.bad_shards:
        shards = counted(len(report.bad_shards), "shard")
        missing.append(f"{shards} unreadable with {counted(report.unreadable, 'rollout')}")
    return "INCOMPLETE: " + ", ".join(missing) + told


def made_by(report: InspectReport) -> str:
    """Say which weights and which engine made a dataset."""
    digest = (report.model_digest or "").removeprefix("sha256:")[:12]
    revision = f"@{report.model_revision}" if report.model_revision else ""
    name = (report.model or "model not recorded") + revision
    return ", ".join(
        [
            name + (f" ({digest})" if digest else ""),
            *([report.dtype] if report.dtype else []),
            " + ".join(report.engines) or "engine not recorded",
        ]
    )


def settings_of(report: InspectReport) -> str:
    """Say how it was sampled, captured and scored, less what says nothing."""
    values = dict.fromkeys(_FIRST) | report.sampling
    said = [
        f"{key} {value}"
        for key, value in values.items()
        if value not in (None, [], {}) and _NEUTRAL.get(key, "") != value and value is not False
    ]
    said += [f"{key} {report.capture[key]}" for key in ("top", "draws") if key in report.capture]
    if report.reward_function:
        said.append(f"reward {report.reward_function}")
    return ", ".join(said) or "not recorded"


def counts_of(report: InspectReport) -> list[tuple[str, str]]:
    """Count prompts, rollouts and what is stored: a label and a text each."""
    return [
        (
            "prompts",
            f"{report.prompts_planned:,} planned: {report.prompts_complete:,} complete, "
            f"{report.prompts_started:,} in part; {report.prompts_rejected:,} rejected",
        ),
        (
            "rollouts",
            f"{report.rollouts_committed:,} of {report.rollouts_planned:,} committed, "
            f"{report.rollouts_rejected:,} rejected, {report.rollouts_missing:,} missing",
        ),
        (
            "stored",
            f"{counted(report.parts, 'part')}, {_size(report.data_bytes)}, "
            f"{report.total_tokens:,} tokens, {report.total_entries:,} support entries",
        ),
    ]


def groups_of(report: InspectReport) -> str:
    """Say how many groups teach nothing by comparison."""
    groups = counted(report.groups_with_rewards, "group")
    return f"the same throughout in {report.groups_even:,} of {groups}"


def agreement_of(report: InspectReport) -> str:
    """Say how far a trainer agrees with the sampler, or how to find out."""
    if report.agreement is None:
        return "trainer and sampler were not compared: `rollout agree --save` does it"
    return summary_of(report.agreement)


def _more(count: int) -> list[str]:
    return (
        [_line("", f"  and {count - _LISTED:,} more: --json names all")] if count > _LISTED else []
    )


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
        text = f"{counted(item.rollouts, 'rollout')}, {item.tokens:,} tokens"
        if item.singleton_share is not None:
            text += f", {item.singleton_share:.1%} with a single id"
        if item.tail_mean is not None:
            text += (
                f"; tail mass {item.tail_mean:.2g} on average, {item.tail_maximum:.2g} at most, "
                f"{item.tail_above_1_percent:.1%} above .01"
            )
        lines += _wrapped(f"support {item.kind}", text)
    if report.rewards is not None:
        text = groups_of(report)
        if report.rollouts_without_reward:
            text += f"; {counted(report.rollouts_without_reward, 'rollout')} without a reward"
        lines.append(_line("reward", text))
    if report.nonfinite_rewards:
        lines.append(_line("reward", f"{report.nonfinite_rewards:,} NaN or infinite"))
    return lines


def _polars(report: InspectReport) -> list[str]:
    if report.polars_line is None:
        return ["no data to open yet"]
    lines = ["open it with polars:", f"  {report.polars_line}"]
    if report.orphans:
        lines.append(
            f"  {counted(report.orphans, 'file')} in data/ without a commit record would be read "
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


def _wrapped(label: str, text: str) -> list[str]:
    first, *rest = wrap(text, WIDTH - _LABEL)
    return [f"{label:<{_LABEL}}{first}", *(" " * _LABEL + line for line in rest)]


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{fit_middle(text, WIDTH - _LABEL)}"


def counted(number: int, noun: str) -> str:
    """Say how many there are of something."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"
