"""The arms of the capture benchmark: what samples the same requests, with and without records."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from random_model import SAMPLES, prompt_ids, resolved_job

from rollout.dataset import DatasetWriter
from rollout.engine_start import LazyEngine
from rollout.host_memory import spool_budget
from rollout.resolve import ResolvedJob
from rollout.run import Run
from rollout.storage import Storage

# what the command of a process below the benchmark's says of it; others are the engine's
_PROCESSES = {"take": b"rollout.capture.ring_process", "write": b"rollout.part_process"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is sampled in one arm."""

    requests: int
    """`SAMPLES` for each prompt."""
    tokens: int
    """Mean of a request; the prompts' lengths go evenly from half of it to half more."""
    sampling: dict[str, Any]
    capture: dict[str, Any]
    output: dict[str, Any] = field(default_factory=dict)
    """What the job's `output` section says beside the path."""
    times: int = 1
    """How many times the usual number the requests are."""

    def length(self, prompt: int) -> int:
        """Return the number of tokens that each request of a prompt samples."""
        return self.tokens // 2 + prompt * 37 % (self.tokens + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One arm's run."""

    tokens: int
    sampled: float
    """Seconds to the last token."""
    committed: float
    """Seconds to the last commit; the same where nothing is committed."""
    entries: int = 0
    waited: float = 0.0
    """Seconds in which the sampler waited for a slot of the ring."""
    held: float = 0.0
    """Seconds in which no request was admitted."""
    largest_step: int = 0
    cpu: dict[str, float] = field(default_factory=dict)
    """CPU seconds of the job, the engine, the process that takes steps, the ones that write."""


def run_capture(engine: LazyEngine, model: Path, folder: Path, load: Load) -> Timing:
    """Run a whole job of the product, to its last commit on a local disk."""
    job = resolved_job(
        model,
        folder,
        lengths=[load.length(prompt) for prompt in range(load.requests // SAMPLES)],
        sampling=load.sampling,
        capture=load.capture,
        engine={"max_num_seqs": 512},
        output=load.output,
    )
    # a folder of its own, beside the last job's
    engine.spool_folder = tempfile.mkdtemp(dir=Path(engine.spool_folder).parent)
    writer = DatasetWriter.open(Storage.open(job.config.output.path), job.record)
    writer.engine = {"engine": "vllm"}  # asking it for more would drain its pipeline
    engine.get().start_capture(engine.spool_folder)
    spool_bytes = spool_budget(job.config.capture.spool_bytes, Path(engine.spool_folder))
    run = Run(job, writer, engine, spool_bytes=spool_bytes)
    start, before = time.perf_counter(), cpu_seconds()
    run.work()
    committed = time.perf_counter() - start
    cpu = cpu_seconds()
    summary = run.summary()
    run.finish()
    engine.get().stop_capture()
    if summary.rollouts_failed:
        raise RuntimeError(f"rollouts failed: {summary.reasons}")
    return Timing(
        tokens=summary.tokens,
        sampled=summary.seconds_sampling,
        committed=committed,
        entries=summary.entries,
        waited=summary.seconds_waited,
        held=summary.seconds_held,
        largest_step=summary.largest_step,
        cpu={name: seconds - before.get(name, 0.0) for name, seconds in cpu.items()},
    )


def set_fused(worker: Any, on: bool) -> bool:
    """In the worker: let vLLM draw by FlashInfer where that is installed, as it does by itself.

    The capture has switched it off, and what it records needs it off.

    Args:
        worker: vLLM's worker.
        on: whether it may.

    Returns:
        Whether vLLM draws by FlashInfer now, where the requests allow it.
    """
    sampler: Any = getattr(worker.model_runner, "sampler", None)
    if not hasattr(sampler, "use_flashinfer"):
        return False
    sampler.use_flashinfer = on and find_spec("flashinfer") is not None
    return bool(sampler.use_flashinfer)


def run_stock(llm: Any, load: Load, **params: Any) -> Timing:
    """Drive vLLM by the same loop with nothing recorded; `params` asks for vLLM's own records.

    Args:
        llm: vLLM's LLM.
        load: what to sample.
        params: further SamplingParams, such as `logprobs`.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def values(index: int) -> Any:
        return SamplingParams(
            max_tokens=load.length(index // SAMPLES),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **load.sampling,
            **params,
        )

    engine = llm.llm_engine
    window = 3 * engine.vllm_config.scheduler_config.max_num_seqs
    left, in_flight, tokens = iter(range(load.requests)), 0, 0
    llm.collective_rpc(set_fused, args=(True,))
    start, before = time.perf_counter(), cpu_seconds()
    exhausted = False
    while not exhausted or in_flight:
        while not exhausted and in_flight < window:
            index = next(left, None)
            exhausted = index is None
            if index is not None:
                prompt = {"prompt_token_ids": prompt_ids(index // SAMPLES)}
                engine.add_request(f"stock-{index}", prompt, values(index))
                in_flight += 1
        for output in engine.step():
            if output.finished:
                tokens += len(output.outputs[0].token_ids)
                in_flight -= 1
    seconds = time.perf_counter() - start
    llm.collective_rpc(set_fused, args=(False,))
    cpu = {name: value - before.get(name, 0.0) for name, value in cpu_seconds().items()}
    return Timing(tokens=tokens, sampled=seconds, committed=seconds, cpu=cpu)


def cpu_milliseconds(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1e3 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds so far of this process and of those below it, by what they do."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    found: dict[str, float] = {}
    for pid in below:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            name = next((n for n, part in _PROCESSES.items() if part in command), "engine")
            name = "job" if pid == os.getpid() else name
            found[name] = found.get(name, 0.0) + cpu_milliseconds(pid) / 1e3
    return found


def check_data(folder: Path) -> str:
    """Read a shard back with pyarrow and check one rollout with plain float64.

    Raises:
        AssertionError: what is stored contradicts itself.
    """
    shard = sorted((folder / "data" / "data").glob("*.parquet"))[0]
    table = pq.ParquetFile(shard, page_checksum_verification=True).read_row_group(0)
    row = table.slice(0, 1).to_pylist()[0]
    offsets = row["support_offsets"]
    entries = np.array(row["support_entries"], np.uint64)
    ids = (entries & np.uint64(0xFFFFFFFF)).astype(np.int64)
    logprobs = (entries >> np.uint64(32)).astype(np.uint32).view(np.float32).astype(np.float64)
    for i, token in enumerate(row["token_ids"]):
        part = slice(offsets[i], offsets[i + 1])
        mass = np.exp(logprobs[part]).sum() + row["tail_mass"][i]
        assert abs(np.log(mass)) < 1e-5, mass
        at = np.flatnonzero(ids[part] == token)
        if row["support_kind"] == "kept":
            assert at.size == 1
        for found in at:
            assert np.float32(logprobs[part][found]) == np.float32(row["sampled_logprobs"][i])
    return f"{len(row['token_ids'])} tokens of a stored rollout have mass 1 within 1e-5"


def disk_speed(folder: Path) -> float:
    """Return the bytes a second that the folder's disk takes, waiting for them to be there."""
    data = np.random.default_rng(0).bytes(64 * 2**20)
    path = folder / "speed"
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(32):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return 32 * len(data) / seconds


def first_job(model: Path, folder: Path, load: Load, engine: str) -> ResolvedJob:
    """Resolve the job that an engine is started with; what it samples then is other jobs'."""
    return resolved_job(
        model,
        folder,
        lengths=[1],
        sampling=load.sampling,
        capture=load.capture,
        engine=_engine_section(engine),
    )


def _engine_section(text: str) -> dict[str, Any]:
    """Return the job's `engine` section: the benchmark's with what a person adds as JSON."""
    added: dict[str, Any] = json.loads(text)
    return {
        "max_num_seqs": 512,
        # steps in which requests begin have more tokens than rows, and vLLM's graphs end at 512
        "max_cudagraph_capture_size": 640,
        "gpu_memory_utilization": 0.9,
        "load_format": "dummy",
        "max_model_len": 4096,
        "enable_prefix_caching": False,
    } | added
