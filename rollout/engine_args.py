"""The engine's arguments: what a person may say, what the job decides, and whether vLLM agrees.

Only `engine_args_class` and what calls it import vLLM; no weight is read here.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import typing
from types import NoneType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rollout.capture.worker_config import CONFIG_KEY
from rollout.config import CaptureConfig
from rollout.devices import check_devices, num_cuda_devices
from rollout.errors import ConfigError, EngineError
from rollout.model_files import ModelFiles

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
# each lets tokens be drawn from a distribution that the capture does not see, or lets several ranks
# record what one has drawn
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
    "prefill_context_parallel_size": "prefill context parallelism",
    "data_parallel_size": "data parallelism inside one engine (one job for each replica works)",
}
# these change speed or memory but no distribution; any other argument is part of the fingerprint
THROUGHPUT_ARGS = frozenset(
    {
        "async_scheduling",
        "block_size",
        "cpu_offload_gb",
        "cudagraph_capture_sizes",
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
        "max_cudagraph_capture_size",
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
    """Refuse names that the installed vLLM does not know, and values of another type.

    Imports vLLM but loads nothing.

    Raises:
        ConfigError: with the nearest known name, or the expected type.
        EngineError: vLLM is not installed.
    """
    refuse_owned(args)
    known = {field.name: field.type for field in dataclasses.fields(engine_args_class())}
    for name, value in args.items():
        if name in known:
            _check_plain_type(name, value, known[name])
        else:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise ConfigError(f"engine.{name}: this vLLM has no such argument{hint}")


def _check_plain_type(name: str, value: Any, declared: Any) -> None:
    """Refuse a value of another type where vLLM declares numbers, strings or booleans alone."""
    options = typing.get_args(declared) or (declared,)
    if not all(option in (int, float, bool, str, NoneType) for option in options):
        return
    try:
        TypeAdapter(declared).validate_python(value)
    except ValidationError:
        expected = " or ".join("null" if o is NoneType else o.__name__ for o in options)
        raise ConfigError(f"engine.{name}: got {value!r}, expected {expected}") from None


def engine_arguments(
    files: ModelFiles,
    capture: CaptureConfig,
    args: dict[str, Any],
    seed: int,
    has_tokenizer: bool,
) -> dict[str, Any]:
    """Return what vLLM is started with; see `Engine` for the arguments."""
    # a build that finds no device is one for CUDA: what a dry run shows is what it will start with
    cuda = num_cuda_devices() > 0 or not engine_has_device()
    worker = "gpu_worker.GPUCaptureWorker" if cuda else "cpu_worker.CPUCaptureWorker"
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


def check_engine_config(
    files: ModelFiles, capture: CaptureConfig, args: dict[str, Any], has_tokenizer: bool
) -> None:
    """Let vLLM check the values itself, as it does when it starts; see `Engine` for the arguments.

    Where it finds no device it can't; then they are checked when it starts.

    Raises:
        ConfigError: vLLM refuses them, or they ask for more devices than there are.
        EngineError: vLLM is not installed.
    """
    engine_args = engine_args_class()
    # vLLM's own words for it are about its command line, and not said for every executor
    check_devices(args)
    if not engine_has_device():
        return
    try:
        engine_args(
            **engine_arguments(files, capture, args, 0, has_tokenizer)
        ).create_engine_config()
    except Exception as error:  # a wrong type surfaces as whatever the comparison raised
        raise ConfigError(f"engine: vLLM refuses these arguments: {_reason(error)}") from error


def engine_args_class() -> Any:
    """Import vLLM's EngineArgs.

    Raises:
        EngineError: vLLM is not installed.
    """
    set_environment()
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:
        raise EngineError(
            f"vLLM can't be imported ({error}); install rollout[gpu] or rollout[cpu]"
        ) from error
    return EngineArgs


def engine_has_device() -> bool:
    """Whether the installed vLLM finds a device that it can run on.

    Its CPU build always does; a build for CUDA does not on a login node.

    Raises:
        EngineError: vLLM is not installed.
    """
    engine_args_class()
    from vllm.platforms import current_platform

    return not current_platform.is_unspecified()


def set_environment() -> None:
    """Set what must stand before vLLM is imported; what the user has set stays."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # a fused sampler draws from logits that were never masked: the capture can't follow it
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    # a fork of a process that has used torch's threads hangs in the next loop that wants several
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if num_cuda_devices() == 0:
        # one process: three times the start-up otherwise, and no launch thread to keep free
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def first_line(error: BaseException) -> str:
    """Shorten an error to its type and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        item = error.errors()[0]
        where = ".".join(str(part) for part in item["loc"])
        said = str(item["msg"]).removeprefix("Value error, ").splitlines()[0]
        return f"{where}: {said}" if where else said
    return first_line(error)
