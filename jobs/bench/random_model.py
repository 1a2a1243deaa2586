"""A model of random weights in a real engine, whose logits have a chosen spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rollout.jobfile import check_job
from rollout.model_files import ModelFiles
from rollout.render import Renderer
from rollout.resolve import ResolvedJob
from rollout.schema.records import DatasetRecord, fingerprint_of

PROMPT_TOKENS = 16
SAMPLES = 8  # of each prompt, as in RL

# the shape of Qwen3-1.7B, with a head of its own
SHAPE: dict[str, Any] = {
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

# standard deviation of the logits for a mean support at top_p .95; each run prints what it got
SPREADS = {8: 9.0, 174: 5.3, 4000: 3.63}


def write_model(folder: Path, shape: dict[str, Any]) -> Path:
    """Write a configuration; the engine makes the weights up (load_format dummy)."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | shape))
    return folder


def prompt_ids(index: int) -> list[int]:
    """Return the tokens of a prompt."""
    return [100 + index % 100] * PROMPT_TOKENS


def resolved_job(
    model: Path,
    folder: Path,
    *,
    lengths: list[int],
    sampling: dict[str, Any],
    capture: dict[str, Any],
    engine: dict[str, Any],
    output: dict[str, Any] | None = None,
) -> ResolvedJob:
    """Return a job as `resolve_job` would: there is no weight file and no tokenizer to resolve.

    Args:
        model: from `write_model`.
        folder: for the prompts and the output.
        lengths: tokens to sample for each prompt, `SAMPLES` times.
        sampling: the job's `sampling` section.
        capture: the job's `capture` section.
        engine: the job's `engine` section.
        output: what the job's `output` section says beside the path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    rows = [
        {"id": str(i), "prompt_token_ids": prompt_ids(i), "sampling": {"max_tokens": length}}
        for i, length in enumerate(lengths)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = check_job(
        {
            "model": {"path": str(model)},
            "prompts": {"path": str(prompts)},
            "sampling": sampling | {"n": SAMPLES, "ignore_eos": True, "max_tokens": max(lengths)},
            "capture": capture,
            "output": {"path": str(folder / "data")} | (output or {}),
            "engine": engine,
        }
    )
    shape = json.loads((model / "config.json").read_text())
    files = ModelFiles(
        name=str(model),
        path=str(model),
        folder=model,
        revision=None,
        weights_digest="random",
        config_digest="",
        tokenizer_digest="",
        template_digest="",
        config=shape,
        dtype=shape["dtype"],
    )
    inputs: dict[str, Any] = {"bench": str(folder)}
    return ResolvedJob(
        config=config,
        files=files,
        renderer=Renderer(files, config.prompts, trust_remote_code=False),
        reward=None,
        stop_ids=(),
        record=DatasetRecord(
            fingerprint=fingerprint_of(inputs), fingerprint_inputs=inputs, provenance={}
        ),
    )


def set_weights(model: torch.nn.Module, spread: float, hidden_size: int) -> None:
    """In the worker: norms 1, matrices N(0, 0.02), embedding N(0, 1), head N(0, spread / sqrt(H)).

    Args:
        model: the engine's model.
        spread: standard deviation of the logits.
        hidden_size: H.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
            elif "lm_head" in name:
                weight.normal_(0.0, spread / hidden_size**0.5, generator=generator)
            else:
                weight.normal_(0.0, 1.0 if "embed" in name else 0.02, generator=generator)
