"""From a returned request and its capture to the row of the dataset, or to the reason why not."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.assemble import CapturedTokens, Failure
from rollout.engine import Finished
from rollout.resolve import ResolvedJob
from rollout.rows import Rejection, RolloutRow
from rollout.work import Missing, group_id

_log = logging.getLogger(__name__)
_MOST_REWARD = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A rollout that was asked of the engine."""

    item: Missing
    sample_index: int
    prompt_token_ids: list[int]

    @property
    def unit(self) -> str:
        """The unit that it is committed with."""
        return self.item.unit


class Finisher:
    """Builds rows, with the user's reward function; counts what that function got wrong."""

    def __init__(self, job: ResolvedJob) -> None:
        """Count from zero.

        Args:
            job: the job, for its names, renderer and reward.
        """
        self._job = job
        self.reward_errors = 0
        self.first_reward_error: str | None = None

    def row(
        self,
        request: Request,
        finished: Finished,
        token_ids: npt.NDArray[np.int32],
        captured: CapturedTokens,
    ) -> RolloutRow:
        """Build the row of a whole rollout.

        Args:
            request: what was asked.
            finished: what the engine returned.
            token_ids: [T] the returned tokens.
            captured: their capture.
        """
        prompt = request.item.prompt
        group = group_id(self._job.record.fingerprint, prompt.key)
        text = finished.text
        if text is None:
            text = self._job.renderer.decode(finished.token_ids)
        return RolloutRow(
            prompt_key=prompt.key,
            rollout_id=f"{group}-{request.sample_index}",
            group_id=group,
            prompt_id=prompt.prompt_id,
            sample_index=request.sample_index,
            group_size=prompt.sampling.n,
            prompt_token_ids=np.array(request.prompt_token_ids, np.int32),
            token_ids=token_ids,
            text=text,
            sampled_logprobs=captured.sampled_logprobs,
            temperature=prompt.sampling.temperature,
            policy_step=self._job.config.model.policy_step,
            support_kind=captured.support_kind,
            support_offsets=captured.support_offsets,
            stored_entries=captured.entries,
            tail_mass=captured.tail_mass,
            draw_entries=captured.draw_entries,
            finish_reason=finished.finish_reason,
            stop_reason=finished.stop_reason,
            reward=self._reward(request, text, finished.token_ids),
            metadata=prompt.metadata,
        )

    def rejection(self, request: Request, failure: Failure, stage: str) -> Rejection:
        """Describe a rollout that can't be recorded, for the table of rejected rows.

        Args:
            request: what was asked.
            failure: why it can't.
            stage: where it failed, `sample` or `capture`.
        """
        prompt = request.item.prompt
        _log.warning(
            "sample %d of prompt %s failed: %s: %s",
            request.sample_index,
            prompt.prompt_id,
            failure.reason,
            failure.detail,
        )
        return Rejection(
            prompt_key=prompt.key,
            prompt_id=prompt.prompt_id,
            sample_index=request.sample_index,
            file=self._job.config.prompts.name,
            line=prompt.line,
            stage=stage,
            reason=failure.reason,
            detail=failure.detail,
            num_prompt_tokens=len(request.prompt_token_ids),
        )

    def _reward(self, request: Request, text: str | None, token_ids: list[int]) -> float | None:
        """Call the user's function; a rollout is kept even where it raises."""
        reward = self._job.reward
        if reward is None:
            return None
        try:
            value = float(reward.function(request.item.prompt.row, text or "", token_ids))
            if not abs(value) <= _MOST_REWARD:
                raise ValueError(f"got {value}, expected a finite number that float32 holds")
        # the user's code may raise anything, and what it runs may call exit()
        except (Exception, SystemExit) as error:
            self.reward_errors += 1
            if self.first_reward_error is None:
                self.first_reward_error = f"{type(error).__name__}: {error}"
                _log.exception("reward %s failed; the rollout is kept without one", reward.name)
            return None
        return value
