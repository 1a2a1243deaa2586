"""vLLM, driven request by request.

`LLM.generate` would hold every prompt and output until the end; here requests are added one at a
time and finished ones come back from `step`, so that memory stays bounded and a death of the engine
costs only the window in flight.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from dataclasses import dataclass
from typing import Any

from rollout.capture.lifeline import JOB_PID
from rollout.capture.request import extra_args
from rollout.capture.worker_config import CONFIG_KEY
from rollout.config import CaptureConfig, SamplingConfig
from rollout.errors import ConfigError, EngineError, RolloutError
from rollout.model_files import ModelFiles

_log = logging.getLogger(__name__)

# what the job decides; each would change what is sampled or captured behind its back
_OWNED = {
    "model": "model.path",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "tokenizer": "model.path",
    "seed": "sampling.seed",
    "generation_config": "sampling",
    "override_generation_config": "sampling",
    "worker_cls": "the capture",
    "worker_extension_cls": "the capture",
    "additional_config": "the capture",
    "logprobs_mode": "the capture",
    "max_logprobs": "the capture",
    "return_sampling_mask": "the capture",
    "hf_token": "the environment variable HF_TOKEN: the job file is recorded in the dataset",
}
# each lets tokens be drawn from a distribution that the capture does not see
_REFUSED = {
    "speculative_config": "speculative decoding",
    "spec_method": "speculative decoding",
    "spec_model": "speculative decoding",
    "spec_tokens": "speculative decoding",
    "logits_processors": "custom logits processors",
    "enable_batch_sharded_sampling": "batch-sharded sampling",
    "watermark_config": "watermarks",
    "enable_trace_replay": "trace replay",
    "runner": "runners other than generation",
    "data_parallel_size": "data parallelism inside one engine; run one job a replica",
}
# these change speed or memory but no distribution; any other argument is part of the fingerprint
THROUGHPUT_ARGS = frozenset(
    {
        "async_scheduling",
        "block_size",
        "cpu_offload_gb",
        "disable_log_stats",
        "distributed_executor_backend",
        "download_dir",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "load_format",
        "long_prefill_token_threshold",
        "max_long_partial_prefills",
        "max_num_batched_tokens",
        "max_num_partial_prefills",
        "max_num_seqs",
        "max_parallel_loading_workers",
        "num_gpu_blocks_override",
        "pipeline_parallel_size",
        "swap_space",
        "tensor_parallel_size",
        "trust_remote_code",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A request that the engine has returned."""

    internal_id: str
    token_ids: list[int]
    text: str | None
    """What the engine decoded; null unless stop strings asked it to."""
    finish_reason: str | None
    stop_reason: str | None


def refuse_owned(args: dict[str, Any]) -> None:
    """Refuse engine arguments that belong to the job or that a capture can't follow.

    Raises:
        ConfigError: naming the argument and where its value belongs.
    """
    for name, value in args.items():
        if name in _OWNED:
            raise ConfigError(f"engine.{name}: decided by the job, not here; see {_OWNED[name]}")
        if name in _REFUSED and value not in (None, False, "auto", 1):
            raise ConfigError(f"engine.{name}: {_REFUSED[name]} can't be captured, remove it")


def check_engine_args(args: dict[str, Any]) -> None:
    """Refuse names that the installed vLLM does not know; imports vLLM but loads nothing.

    Raises:
        ConfigError: with the nearest known name.
        EngineError: vLLM is not installed.
    """
    refuse_owned(args)
    known = {field.name for field in dataclasses.fields(_engine_args_class())}
    for name in args:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise ConfigError(f"engine.{name}: this vLLM has no such argument{hint}")


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
        _set_environment()
        os.environ[JOB_PID] = str(os.getpid())
        engine_args = engine_arguments(files, capture, args, seed, has_tokenizer)
        _engine_args_class()
        from vllm import LLM

        try:
            self._llm = LLM(**engine_args)
        except Exception as error:  # whatever went wrong at start-up, the engine is not there
            raise EngineError(f"vLLM did not start: {_first_line(error)}") from error
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
            raise RequestError(_first_line(error)) from error
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
                f"vLLM did not reload weights from {folder}: {_first_line(error)}"
            ) from error
        # cached prefixes hold keys and values of the old weights
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not drop its prefix cache after a reload of the weights")

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._llm.llm_engine.has_unfinished_requests())

    def close(self) -> None:
        """Shut the engine and its processes down, also a dead one."""
        try:
            self._llm.llm_engine.engine_core.shutdown()
        except Exception as error:  # its processes end with the job in any case
            _log.warning("vLLM did not shut down: %s", _first_line(error))

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        try:
            replies: list[Any] = self._llm.collective_rpc(method, args=args)
        except Exception as error:
            raise _died(error) from error
        return replies


def engine_arguments(
    files: ModelFiles,
    capture: CaptureConfig,
    args: dict[str, Any],
    seed: int,
    has_tokenizer: bool,
) -> dict[str, Any]:
    """Return what vLLM is started with; see `Engine` for the arguments."""
    worker = "gpu_worker.GPUCaptureWorker" if _has_cuda() else "cpu_worker.CPUCaptureWorker"
    defaults = {} if has_tokenizer else {"skip_tokenizer_init": True}
    return (
        defaults
        | args
        | {
            "model": files.path,
            "revision": files.revision,
            "dtype": files.dtype,
            "seed": seed,
            "generation_config": "vllm",  # neutral: the checkpoint's file changes nothing
            "worker_cls": f"rollout.capture.{worker}",
            "logprobs_mode": "processed_logits",
            "additional_config": {CONFIG_KEY: capture.model_dump(exclude={"spool_bytes"})},
        }
    )


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


def _engine_args_class() -> Any:
    _set_environment()
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:
        raise EngineError(
            f"vLLM can't be imported ({error}); install rollout[gpu] or rollout[cpu]"
        ) from error
    return EngineArgs


def _has_cuda() -> bool:
    import torch

    # unlike is_available, this asks the driver's management library and starts no CUDA context,
    # which a forked engine process could not use
    return torch.cuda.device_count() > 0


def _set_environment() -> None:
    """Set what must stand before vLLM is imported; what the user has set stays."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # a fused sampler draws from logits that were never masked: the capture can't follow it
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    if not _has_cuda():
        # one process: three times the start-up otherwise, and no launch thread to keep free
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def _died(error: Exception) -> EngineError:
    return EngineError(f"vLLM died: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
