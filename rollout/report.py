"""What `rollout inspect` says about a dataset, in numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rollout.rows import Rejection
from rollout.shard_scan import BadShard
from rollout.tally import Spread

INSPECT_VERSION = 1
"""Version of what `--json` prints: a field is added without a change, never renamed or removed."""


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
    """A dataset in numbers; exact but for what `rollouts_read` says of a sample."""

    url: str
    format_version: int
    fingerprint: str
    model: str | None
    """Name or folder of the model."""
    model_revision: str | None
    """Commit of a hub id."""
    model_digest: str | None
    """Digest of the weights."""
    tokenizer_digest: str | None
    template_digest: str | None
    """Digest of the chat template."""
    dtype: str | None
    engines: tuple[str, ...]
    """Name and version of every engine that sampled a part."""
    sampling: dict[str, Any]
    """The sampling values in force, as the job recorded them."""
    capture: dict[str, Any]
    rollout_version: str | None
    """Of this package, when the dataset was begun."""
    prompts_file: str | None
    reward_function: str | None
    first_commit: str | None
    """When the first part was committed, UTC, ISO 8601."""
    last_commit: str | None
    parts: int
    """Committed parts that hold rollouts."""
    data_bytes: int
    """Of the shards."""
    orphans: int
    """Files in data/ that no commit record names; a plain scan of the folder would read them."""
    bad_shards: tuple[BadShard, ...]
    """Shards that a commit record names and that are missing or damaged."""
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
    rejected: tuple[Rejection, ...]
    """Every prompt and rollout set aside."""
    rollouts_read: int
    """Rollouts behind the numbers below; fewer than committed where a sample was read."""
    shards_read: int
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
    """Of those read."""
    nonfinite_rewards: int
    """Rewards that are NaN or infinite; they are in no other number."""
    groups_with_rewards: int
    """Prompts with at least two rewards."""
    groups_even: int
    """Of these, how many have the same reward throughout: they teach nothing by comparison."""
    first_prompt: str | None
    """The id of the plan's first prompt, to look closer with."""
    agreement: dict[str, Any] | None
    """The agreement report that stands beside the data, if there is one."""
    polars_line: str | None
    """One line of Python that opens the data; None while there is none."""

    @property
    def unreadable(self) -> int:
        """Committed rollouts whose shard is missing or damaged."""
        return sum(bad.rows for bad in self.bad_shards)

    @property
    def complete(self) -> bool:
        """Whether every planned rollout is committed or set aside, and no shard is bad."""
        return self.rollouts_missing == 0 and not self.bad_shards

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold; the fields are documented above."""
        values = dataclasses.asdict(self)
        own = {"complete": self.complete, "rollouts_unreadable": self.unreadable}
        return {"inspect_version": INSPECT_VERSION} | own | values
