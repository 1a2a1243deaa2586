"""What a job did, counted so that everything reconciles, and how it is printed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rollout.terminal_text import WIDTH, fit, printable


@dataclass(kw_only=True, slots=True)
class Summary:
    """Counts of one run of a job."""

    prompts_read: int = 0
    """Rows of the prompts file, readable or not."""
    prompts_rejected: int = 0
    prompts_truncated: int = 0
    """Cut from the left to leave room, as the job asked."""
    prompts_orphaned: int = 0
    """Planned by an earlier run and gone from the file, perhaps edited; their rollouts stay."""
    rollouts_asked: int = 0
    """Rollouts of the prompts that were not rejected."""
    rollouts_skipped: int = 0
    """Committed by an earlier run."""
    rollouts_elsewhere: int = 0
    """Committed by other processes of the job while this one ran."""
    rollouts_committed: int = 0
    """Committed by this run."""
    rollouts_failed: int = 0
    max_failed_share: float = 1.0
    """Share of failed rollouts above which a job is no success of any kind."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Rejected prompts and failed rollouts by reason."""
    reward_errors: int = 0
    """Rollouts whose reward function raised; committed without a reward."""
    first_reward_error: str | None = None
    parts: int = 0
    tokens: int = 0
    entries: int = 0
    largest_step: int = 0
    """Most support entries of one step."""
    support_capacity: int = 0
    suggested_capacity: int = 0
    seconds: float = 0.0
    """From the first request to the last commit."""
    seconds_sampling: float = 0.0
    """From the first request to the last returned rollout."""
    replaced_rows: int = 0
    """Rows captured again after a preemption."""
    rollouts_covered: int = 0
    """Finished, but committed by another process meanwhile."""
    seconds_waited: float = 0.0
    """That sampling waited for a capture buffer."""
    seconds_held: float = 0.0
    """That no request was admitted since the host held too much."""
    engine: dict[str, Any] = field(default_factory=dict)
    engine_deaths: list[str] = field(default_factory=list)
    """What each death of the engine was, and what was in flight and sampled again."""

    @property
    def reconciles(self) -> bool:
        """Whether every rollout that was asked for is accounted for."""
        return self._accounted() == self.rollouts_asked

    @property
    def nothing_was_left(self) -> bool:
        """Whether everything that was asked for was there before the run."""
        return 0 < self.rollouts_asked == self.rollouts_skipped

    def _accounted(self) -> int:
        done = self.rollouts_skipped + self.rollouts_committed + self.rollouts_covered
        return done + self.rollouts_elsewhere + self.rollouts_failed

    @property
    def too_many_failed(self) -> bool:
        """Whether a larger share failed than the job allows."""
        return self.rollouts_failed > self.max_failed_share * self.rollouts_asked

    def problem(self) -> str | None:
        """Say in one sentence what is missing at the end, if anything is."""
        if self.rollouts_asked == 0:
            why = ", ".join(f"{reason}: {count}" for reason, count in self.reasons.most_common())
            return (
                f"none of {self.prompts_read} prompts could be used{f' ({why})' if why else ''}: "
                "`rollout inspect` names their lines"
            )
        parts = []
        if self.rollouts_failed:
            parts.append(
                f"{self.rollouts_failed} of {self.rollouts_asked} rollouts failed, the same "
                "command tries them again"
            )
        if self.reward_errors:
            parts.append(
                f"{self.reward_errors} rollouts are there without a reward, since its function "
                f"failed ({self.first_reward_error}): `rollout join` adds rewards"
            )
        if not self.reconciles:
            parts.append(
                f"{self.rollouts_asked} rollouts were asked for and {self._accounted()} are "
                "accounted for"
            )
        return "; ".join(parts) or None

    def as_dict(self) -> dict[str, Any]:
        """Return all counts, for JSON."""
        # asdict would rebuild the counter from pairs and count those
        return asdict(replace(self, reasons=Counter())) | {
            "reasons": dict(self.reasons.most_common())
        }

    def table(self) -> str:
        """Format for a terminal, at most 100 columns."""
        cut = f", {self.prompts_truncated} truncated" if self.prompts_truncated else ""
        others = self.rollouts_elsewhere + self.rollouts_covered
        elsewhere = f"{others} by other processes, " if others else ""
        lines = [
            ("prompts", f"{self.prompts_read} read, {self.prompts_rejected} rejected{cut}"),
            (
                "rollouts",
                f"{self.rollouts_asked} asked, {self.rollouts_skipped} already there, {elsewhere}"
                f"{self.rollouts_committed} committed, {self.rollouts_failed} failed",
            ),
        ]
        if self.nothing_was_left:
            there = f"all {self.rollouts_asked} rollouts that the job asks for are there"
            lines.append(("finished", f"nothing was left to do: {there}"))
        else:
            lines += self._sampled()
        if self.prompts_orphaned:
            left = f"{self.prompts_orphaned} prompts of earlier runs are not in the file any more"
            lines.append(("orphaned", f"{left}; their rollouts stay"))
        lines += [("reason", f"{reason}: {count}") for reason, count in self.reasons.most_common()]
        lines += [("engine died", death) for death in self.engine_deaths]
        if self.reward_errors:
            lines.append(("reward", f"{self.reward_errors} failed: {self.first_reward_error}"))
        return "\n".join(_line(name, text) for name, text in lines)

    def _sampled(self) -> list[tuple[str, str]]:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        mean = self.entries / self.tokens if self.tokens else 0.0
        lines = [
            ("tokens", f"{self.tokens} in {self.seconds:.1f} s, {rate:.0f} tokens/s"),
            ("support", f"{self.entries} entries, mean {mean:.1f} a token"),
        ]
        if self.largest_step:
            room = f"{self.largest_step} entries of a capacity of {self.support_capacity}"
            lines.append(("largest step", f"{room}; {self.suggested_capacity} would do"))
        stalls = f"waited {self.seconds_waited:.1f} s for capture buffers"
        lines.append(("stalls", f"{stalls}, {self.seconds_held:.1f} s for the output"))
        return lines


def _line(name: str, text: str) -> str:
    return fit(f"{name:<13} {printable(' '.join(text.split()))}", WIDTH)
