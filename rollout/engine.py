"""vLLM, driven request by request.

`LLM.generate` would hold every prompt and output until the end; here requests are added one at a
time and finished ones come back from `step`, so that memory stays bounded and a death of the engine
costs only the window in flight.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from rollout.capture.lifeline import JOB_PID
from rollout.capture.request import extra_args
from rollout.config import CaptureConfig, SamplingConfig
from rollout.engine_args import engine_arguments, engine_has_device, first_line, set_environment
from rollout.engine_watch import EngineWatch
from rollout.errors import EngineError, RolloutError
from rollout.model_files import ModelFiles

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A request that the engine has returned."""

    internal_id: str
    token_ids: list[int]
    text: str | None
    """What the engine decoded; null unless stop strings asked it to."""
    finish_reason: str | None
    stop_reason: str | None


class RequestError(RolloutError, ValueError):
    """Raised when vLLM refuses one request; others are not affected."""


class Engine:
    """One vLLM engine with the capture installed."""

    def __init__(
        self,
        files: ModelFiles,
        capture: CaptureConfig,
        args: dict[str, Any],
        *,
        seed: int,
        has_tokenizer: bool,
    ) -> None:
        """Load the weights and start the engine.

        Args:
            files: the checkpoint.
            capture: the job's `capture` section.
            args: the job's `engine` section, checked.
            seed: the engine's seed: another one for each run of a job without a seed, so that a
                resumed job does not draw the same samples again.
            has_tokenizer: whether the checkpoint brings one.

        Raises:
            EngineError: vLLM is not installed, or refuses to start.
        """
        set_environment()
        os.environ[JOB_PID] = str(os.getpid())
        engine_args = engine_arguments(files, capture, args, seed, has_tokenizer)
        if not engine_has_device():
            raise EngineError(
                "vLLM did not start: this machine has no device that the installed build can use; "
                "run the job where there is one, or install rollout[cpu]"
            )
        from vllm import LLM

        try:
            self._llm = LLM(**engine_args)
        except Exception as error:  # whatever went wrong at start-up, the engine is not there
            raise EngineError(f"vLLM did not start: {first_line(error)}") from error
        self._watch = EngineWatch(self._llm.llm_engine.engine_core)
        self._internal: dict[str, str] = {}
        self._with_text: set[str] = set()
        self.max_model_len: int = self._llm.model_config.max_model_len
        self.max_num_seqs: int = self._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs

    def start_capture(self, folder: str) -> None:
        """Record into a spool folder from now on."""
        self._rpc("capture_start", folder)

    def stop_capture(self) -> None:
        """Stop recording; sampling goes on as in stock vLLM."""
        self._rpc("capture_stop")

    def flush_capture(self) -> None:
        """Wait until everything captured is in the spool; drains the steps in flight.

        Raises:
            EngineError: the capture has failed, for instance since the spool's disk is full.
        """
        errors = [error for error in self._rpc("capture_flush") if error]
        if errors:
            raise EngineError(f"the capture failed: {errors[0]}")

    def facts(self) -> dict[str, Any]:
        """Describe what samples: version, runner, dtypes of weights, head and logits.

        The dtype of the logits is known once a token has been sampled. Drains the steps in flight.

        Raises:
            EngineError: not exactly one rank captures.
        """
        import vllm

        replies = self._rpc("capture_facts")
        facts = [reply for reply in replies if reply is not None]
        if len(facts) != 1:
            raise EngineError(f"{len(facts)} of {len(replies)} ranks capture, expected 1")
        return {"engine": "vllm", "engine_version": vllm.__version__, **facts[0]}

    def add(self, request_id: str, prompt_token_ids: list[int], params: Any) -> str:
        """Queue a request.

        Raises:
            RequestError: the engine refuses this one.
            EngineError: the engine died.

        Args:
            request_id: unique among the requests in flight.
            prompt_token_ids: the prompt.
            params: from `sampling_params`.

        Returns:
            The engine's internal id, by which the capture knows the request.
        """
        try:
            internal: str = self._llm.llm_engine.add_request(
                request_id, {"prompt_token_ids": prompt_token_ids}, params
            )
        except (ValueError, TypeError) as error:
            raise RequestError(first_line(error)) from error
        except Exception as error:  # whatever else: the engine takes no requests any more
            raise _died(error) from error
        self._internal[request_id] = internal
        if params.detokenize:
            self._with_text.add(request_id)
        return internal

    def step(self) -> list[Finished]:
        """Run one step and return the requests that finished; only with requests in flight.

        Raises:
            EngineError: the engine died.
        """
        try:
            outputs = self._llm.llm_engine.step()
        except Exception as error:
            raise _died(error) from error
        finished = []
        for output in outputs:
            if not output.finished:
                continue
            completion = output.outputs[0]
            has_text = output.request_id in self._with_text
            self._with_text.discard(output.request_id)
            stop = completion.stop_reason
            finished.append(
                Finished(
                    internal_id=self._internal.pop(output.request_id),
                    token_ids=list(completion.token_ids),
                    text=completion.text if has_text else None,
                    finish_reason=completion.finish_reason,
                    stop_reason=None if stop is None else str(stop),
                )
            )
        return finished

    def abort(self, internal_ids: list[str]) -> None:
        """Drop requests in flight; they are not returned by `step`.

        Raises:
            EngineError: the engine died.
        """
        gone = set(internal_ids)
        external = [name for name, internal in self._internal.items() if internal in gone]
        try:
            self._llm.llm_engine.abort_request(internal_ids, internal=True)
        except Exception as error:
            raise _died(error) from error
        for name in external:
            del self._internal[name]
            self._with_text.discard(name)

    def reload_weights(self, folder: str) -> None:
        """Replace the weights in place by another checkpoint of the same model.

        Only between jobs. On CPU with tied embeddings vLLM keeps its old output weight and says
        nothing (`rollout.engine_start.KeptEngine` starts a new engine there).

        Args:
            folder: a local Hugging Face checkpoint.

        Raises:
            EngineError: vLLM refuses, or requests are in flight.
        """
        if self.has_unfinished:
            raise EngineError("weights can't be reloaded: requests are in flight")
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        except Exception as error:  # an engine with half of its weights replaced is no engine
            raise EngineError(
                f"vLLM did not reload weights from {folder}: {first_line(error)}"
            ) from error
        # cached prefixes hold keys and values of the old weights
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not drop its prefix cache after a reload of the weights")

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._llm.llm_engine.has_unfinished_requests())

    def wake(self) -> None:
        """Let a `step` that waits for a process of the engine fail; from any thread."""
        self._watch.wake()

    def close(self) -> None:
        """Shut the engine and its processes down, also a dead one."""
        self._watch.close()
        try:
            self._llm.llm_engine.engine_core.shutdown()
        except Exception as error:  # its processes end with the job in any case
            _log.warning("vLLM did not shut down: %s", first_line(error))

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        try:
            replies: list[Any] = self._llm.collective_rpc(method, args=args)
        except Exception as error:
            raise _died(error) from error
        return replies


def sampling_params(
    config: SamplingConfig,
    *,
    kind: int,
    draw_seed: int,
    seed: int | None,
    stop_ids: tuple[int, ...],
) -> Any:
    """Translate sampling values to vLLM's SamplingParams.

    Args:
        config: the effective values of the row.
        kind: what the capture records (`rollout.capture.request`).
        draw_seed: seed of the recorded draws.
        seed: the request's own seed, or null.
        stop_ids: end-of-sequence ids beside the tokenizer's own.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ids = dict.fromkeys((*config.stop_token_ids, *(() if config.ignore_eos else stop_ids)))
    return SamplingParams(
        n=1,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_tokens=config.max_tokens,
        min_tokens=config.min_tokens,
        stop=list(config.stop) or None,
        stop_token_ids=list(ids) or None,
        ignore_eos=config.ignore_eos,
        allowed_token_ids=list(config.allowed_token_ids) if config.allowed_token_ids else None,
        bad_words=list(config.bad_words) or None,
        seed=seed,
        logprobs=None,
        detokenize=bool(config.stop),  # only stop strings need text while sampling
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=extra_args(kind, draw_seed),
    )


def _died(error: Exception) -> EngineError:
    return EngineError(f"vLLM died: {first_line(error)}")
