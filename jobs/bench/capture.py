"""What the capture costs: whole jobs with it against the same sampling without, in one engine.

    python jobs/bench/capture.py --supports 8,174,4000 --pairs 20

A Qwen3-1.7B-shaped model with random weights samples 512 requests at once; the spread of its logits
sets the mean support (chosen by a search before the timing). Arms alternate within one engine:
`stock` is vLLM's sampler with nothing recorded, `capture` records into a spool while threads write
and commit Parquet on a local disk. Both draw the same number of tokens (ignore_eos). Printed: the
median of the paired ratios with a bootstrap interval, the seconds from the last token to the last
commit, the added time of a step by CUDA events, the seconds stalled, and a check of the data.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to set weights in the worker

from rollout.dataset import DatasetWriter
from rollout.engine import sampling_params
from rollout.engine_start import LazyEngine
from rollout.jobfile import check_job
from rollout.model_files import ModelFiles
from rollout.render import Renderer
from rollout.resolve import ResolvedJob
from rollout.run import Run
from rollout.schema.records import DatasetRecord, fingerprint_of
from rollout.storage import Storage

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# standard deviations of the logits that give these mean supports at top_p .95, from a first search
SCALES = {8: 9.0, 174: 5.3, 4000: 3.63}


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is sampled in one arm."""

    requests: int
    tokens: int
    sampling: dict[str, Any]


def resolved_job(
    model: Path, output: Path, load: Load, engine: dict[str, Any], capture: dict[str, Any]
) -> ResolvedJob:
    """A job on a model of random weights: nothing to resolve, no tokenizer."""
    prompts = output / "prompts.jsonl"
    rows = [{"id": str(i), "prompt_token_ids": [100 + i % 1000] * 16} for i in range(load.requests)]
    output.mkdir(parents=True, exist_ok=True)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = check_job(
        {
            "model": {"path": str(model)},
            "prompts": {"path": str(prompts)},
            "sampling": load.sampling | {"max_tokens": load.tokens, "ignore_eos": True},
            "capture": capture,
            "output": {
                "path": str(output / "data"),
                "unit_prompts": max(load.requests // 8, 1),
                "shard_bytes": 64 * 2**20,
                "commit_threads": 8,
            },
            "engine": engine,
        }
    )
    files = ModelFiles(
        name=str(model),
        path=str(model),
        folder=model,
        revision=None,
        weights_digest="random",
        config_digest="",
        tokenizer_digest="",
        template_digest="",
        config=CONFIG,
        dtype="bfloat16",
    )
    inputs: dict[str, Any] = {"bench": str(output)}
    record = DatasetRecord(
        fingerprint=fingerprint_of(inputs), fingerprint_inputs=inputs, provenance={}
    )
    renderer = Renderer(files, config.prompts, trust_remote_code=False)
    return ResolvedJob(
        config=config, files=files, renderer=renderer, reward=None, stop_ids=(), record=record
    )


def set_scale(model: torch.nn.Module, scale: float) -> None:
    """Give the head's rows the length that makes logits of this standard deviation."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                deviation = 0.02
                if "embed" in name:
                    deviation = 1.0
                if "lm_head" in name:
                    deviation = scale / CONFIG["hidden_size"] ** 0.5  # type: ignore[operator]
                weight.normal_(0.0, deviation, generator=generator)


def run_capture(job: ResolvedJob, engine: LazyEngine, folder: Path) -> dict[str, float]:
    """One job with the capture, to its last commit."""
    engine.spool_folder = tempfile.mkdtemp(prefix="bench-spool-", dir="/dev/shm")
    storage = Storage.open(job.config.output.path)
    writer = DatasetWriter.open(storage, job.record)
    writer.engine = {"engine": "vllm"}  # asking it for more would drain its pipeline
    engine.get().start_capture(engine.spool_folder)
    run = Run(job, writer, engine)
    start = time.perf_counter()
    run.work()
    end = time.perf_counter()
    summary = run.summary()
    run.finish()
    engine.get().stop_capture()
    assert summary.rollouts_failed == 0, summary.reasons
    return {
        "seconds": end - start,
        "sampled": summary.seconds_sampling,
        "tokens": summary.tokens,
        "entries": summary.entries,
        "stalled": summary.seconds_waited + summary.seconds_held,
        "largest": summary.largest_step,
    }


def run_stock(job: ResolvedJob, engine: LazyEngine) -> dict[str, float]:
    """The same requests with nothing recorded."""
    running = engine.get()
    params = sampling_params(job.config.sampling, kind=0, draw_seed=0, seed=None, stop_ids=())
    waiting = list(range(job_requests(job)))
    window, in_flight, tokens = 3 * running.max_num_seqs, 0, 0
    start = time.perf_counter()
    while waiting or in_flight:
        while waiting and in_flight < window:
            index = waiting.pop(0)
            running.add(f"stock-{index}", [100 + index % 1000] * 16, params)
            in_flight += 1
        for finished in running.step():
            tokens += len(finished.token_ids)
            in_flight -= 1
    return {"seconds": time.perf_counter() - start, "tokens": tokens}


def job_requests(job: ResolvedJob) -> int:
    """Requests of a job: its prompts, one sample each."""
    return sum(1 for _ in Path(job.config.prompts.path).open())


def time_steps(worker: Any, on: bool) -> list[float] | None:
    """In the worker: put CUDA events around the capture of a step; off returns milliseconds."""
    adapter = worker._adapter
    if on:
        stock, events = adapter.on_step, []

        def timed(*args: Any) -> None:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
            first.record()
            stock(*args)
            last.record()
            events.append((first, last))

        worker._bench_events, adapter.on_step = events, timed
        return None
    torch.cuda.synchronize()
    return [first.elapsed_time(last) for first, last in worker._bench_events]


def bootstrap(ratios: list[float]) -> tuple[float, float, float]:
    """Median with a 95 % percentile bootstrap interval."""
    rng = np.random.default_rng(0)
    values = np.array(ratios)
    medians = np.median(rng.choice(values, (4000, len(values))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def check_data(folder: Path) -> str:
    """Read one shard back with pyarrow and check its rows with plain float64."""
    import pyarrow.parquet as pq

    shard = sorted((folder / "data" / "data").glob("*.parquet"))[0]
    table = pq.ParquetFile(shard, page_checksum_verification=True).read_row_group(0)
    row = table.slice(0, 1).to_pylist()[0]
    offsets, entries = row["support_offsets"], np.array(row["support_entries"], np.uint64)
    for i, token in enumerate(row["token_ids"]):
        part = entries[offsets[i] : offsets[i + 1]]
        ids = (part & np.uint64(0xFFFFFFFF)).astype(np.int64)
        logprobs = (part >> np.uint64(32)).astype(np.uint32).view(np.float32)
        assert (ids == token).sum() == 1
        assert abs(np.log(np.exp(logprobs.astype(np.float64)).sum())) < 1e-5
    return f"{len(row['token_ids'])} tokens of one rollout add up to 1 within 1e-5"


def measure(
    name: str,
    engine: LazyEngine,
    model: Path,
    folder: Path,
    load: Load,
    pairs: int,
    capture: dict[str, Any],
) -> None:
    """Time one setting and print its lines."""
    stock_tps, capture_tps, whole, sampled, tails, stalls = [], [], [], [], [], []
    done: dict[str, float] = {}
    for pair in range(pairs + 1):
        output = folder / f"{name}-{pair}"
        job = resolved_job(model, output, load, {"max_num_seqs": 512}, capture)
        order = ("stock", "capture") if pair % 2 else ("capture", "stock")
        for arm in order:
            if arm == "stock":
                stock = run_stock(job, engine)
            else:
                done = run_capture(job, engine, output)
        if pair == 0:
            continue  # warm-up: kernels of this setting compile
        stock_tps.append(stock["tokens"] / stock["seconds"])
        capture_tps.append(done["tokens"] / done["seconds"])
        whole.append(stock["seconds"] / done["seconds"])
        sampled.append(stock["seconds"] / done["sampled"])
        tails.append(done["seconds"] - done["sampled"])
        stalls.append(done["stalled"])
    mid, low, high = bootstrap(sampled)
    whole_mid, whole_low, whole_high = bootstrap(whole)
    print(
        f"{name:<16} mean support {done['entries'] / done['tokens']:8.1f}"
        f"  stock {statistics.median(stock_tps):8.0f} tok/s"
        f"  to last token {mid:.4f} [{low:.4f}, {high:.4f}]"
        f"  to last commit {whole_mid:.4f} [{whole_low:.4f}, {whole_high:.4f}]"
        f"  tail {statistics.median(tails):.2f} s  stalled {sum(stalls):.2f} s"
        f"  largest step {done['largest']:.0f}  run {done['seconds']:.1f} s",
        flush=True,
    )
    print(f"{'':<16} check: {check_data(output)}", flush=True)


@click.command()
@click.option("--supports", default="8,174,4000", help="Mean supports, comma-separated.")
@click.option("--pairs", default=20, show_default=True, help="Interleaved pairs a setting.")
@click.option("--requests", default=512, show_default=True, help="Requests of a job.")
@click.option("--tokens", default=256, show_default=True, help="Tokens of a request.")
@click.option("--top-p", default=0.95, show_default=True)
@click.option("--top-k", default=0, show_default=True)
@click.option("--draws", default=0, show_default=True)
@click.option("--shape", default="{}", help="JSON over the model's configuration.")
@click.option("--engine", "engine_json", default="{}", help="JSON over the engine's arguments.")
def main(
    supports: str,
    pairs: int,
    requests: int,
    tokens: int,
    top_p: float,
    top_k: int,
    draws: int,
    shape: str,
    engine_json: str,
) -> None:
    """Measure the capture on this machine's GPU."""
    CONFIG.update(json.loads(shape))
    import vllm

    cuda = torch.cuda.is_available()
    machine = torch.cuda.get_device_name(0) if cuda else "CPU: a smoke test, no measurement"
    print(f"{machine}, torch {torch.__version__}, vllm {vllm.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        sampling = {"top_p": top_p, "top_k": top_k}
        load = Load(requests=requests, tokens=tokens, sampling=sampling)
        capture = {"draws": draws}
        engine_args = {
            "max_num_seqs": 512,
            "load_format": "dummy",
            "max_model_len": 4096,
            "enable_prefix_caching": False,
        } | json.loads(engine_json)
        job = resolved_job(model, folder / "first", load, engine_args, capture)
        engine = LazyEngine(job, tempfile.mkdtemp(dir="/dev/shm"))
        start = time.perf_counter()
        engine.get()
        print(f"engine ready after {time.perf_counter() - start:.0f} s", flush=True)
        for support in (int(part) for part in supports.split(",")):
            scale = SCALES[support]
            engine.get()._llm.apply_model(lambda m, s=scale: set_scale(m, s))
            measure(f"support {support}", engine, model, folder, load, pairs, capture)
            if not cuda:
                continue
            engine.get().start_capture(tempfile.mkdtemp(dir="/dev/shm"))
            rpc = engine.get()._llm.collective_rpc
            rpc(time_steps, args=(True,))
            run_stock_with_capture(job, engine)
            steps = [ms for ms in rpc(time_steps, args=(False,))[0] if ms > 0]
            engine.get().stop_capture()
            quantiles = np.quantile(steps, [0.1, 0.5, 0.9])
            print(
                f"{'':<16} capture of a step by CUDA events: median {quantiles[1]:.3f} ms, "
                f"10-90 % {quantiles[0]:.3f}-{quantiles[2]:.3f} ms, {len(steps)} steps",
                flush=True,
            )
        engine.close()


def run_stock_with_capture(job: ResolvedJob, engine: LazyEngine) -> None:
    """Sample one load with rows that are recorded, for the events; nobody reads the spool."""
    running = engine.get()
    params = sampling_params(job.config.sampling, kind=1, draw_seed=0, seed=None, stop_ids=())
    for index in range(512):
        running.add(f"timed-{index}", [100 + index] * 16, params)
    while running.has_unfinished:
        running.step()
    running.flush_capture()


if __name__ == "__main__":
    main()
