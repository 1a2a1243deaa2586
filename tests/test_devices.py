"""The devices that an engine asks for, against those that a machine shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from engine_jobs import write_prompts
from tiny_model import make_tiny_model

from rollout.cli import main
from rollout.devices import check_devices
from rollout.errors import ConfigError

# a build of vLLM for CUDA on a machine without a device, as on a login node
LOGIN_NODE = """
import sys
from vllm import platforms
platforms.resolve_current_platform_cls_qualname = (
    lambda: "vllm.platforms.interface.UnspecifiedPlatform"
)
from rollout.cli import main
main(sys.argv[1:])
"""
COUNT = """
import torch
from rollout.devices import check_devices, num_cuda_devices
from rollout.errors import ConfigError
there = num_cuda_devices()
assert there > 0
check_devices({"tensor_parallel_size": there})
try:
    check_devices({"tensor_parallel_size": there + 1})
except ConfigError as error:
    print(error)
assert not torch.cuda.is_initialized()
assert not any(torch._C._cuda_hasPrimaryContext(i) for i in range(there))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def job_file(folder: Path, model: Path, **engine: Any) -> Path:
    sizes = {"enforce_eager": True, "kv_cache_memory_bytes": 2**26, "max_model_len": 64}
    path = folder / "job.yaml"
    prompts = write_prompts(folder / "prompts.jsonl", [{"prompt": "a"}])
    data = {
        "model": {"path": str(model)},
        "prompts": {"path": str(prompts)},
        "sampling": {"max_tokens": 4, "top_p": 0.9},
        "output": {"path": str(folder / "out")},
        "engine": sizes | engine,
    }
    path.write_text(yaml.safe_dump(data))
    return path


def dry_run(path: Path) -> Result:
    return CliRunner().invoke(main, ["generate", "--config", str(path), "--dry-run"])


def on_a_login_node(path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOGIN_NODE, "generate", "--config", str(path), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def show(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None = None) -> None:
    """Let torch count this many CUDA devices."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("there", "engine", "asked"),
    [
        (1, {"tensor_parallel_size": 2}, "engine.tensor_parallel_size 2: needs 2"),
        (7, {"tensor_parallel_size": 8, "distributed_executor_backend": "mp"}, "needs 8"),
        (4, {"pipeline_parallel_size": 5}, "engine.pipeline_parallel_size 5: needs 5"),
        (
            4,
            {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
            "engine.tensor_parallel_size 4 x engine.pipeline_parallel_size 2: needs 8",
        ),
        (4, {"tensor_parallel_size": 5, "nnodes": 1}, "needs 5"),
        (2, {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2}, "needs 4"),
    ],
)
def test_more_devices_than_there_are(
    monkeypatch: pytest.MonkeyPatch, there: int, engine: dict[str, Any], asked: str
) -> None:
    show(monkeypatch, there)
    with pytest.raises(ConfigError) as caught:
        check_devices(engine)
    assert f"{asked} CUDA devices, expected at most the {there} that" in str(caught.value)
    assert "CUDA_VISIBLE_DEVICES" not in str(caught.value)


@pytest.mark.parametrize(
    ("there", "engine"),
    [
        (1, {}),
        (1, {"tensor_parallel_size": 1}),
        (8, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}),
        (0, {"tensor_parallel_size": 8}),
        # their processes may run on other machines
        (1, {"tensor_parallel_size": 8, "distributed_executor_backend": "ray"}),
        (1, {"tensor_parallel_size": 8, "distributed_executor_backend": "external_launcher"}),
        (4, {"tensor_parallel_size": 8, "nnodes": 2}),
    ],
)
def test_devices_that_may_suffice(
    monkeypatch: pytest.MonkeyPatch, there: int, engine: dict[str, Any]
) -> None:
    show(monkeypatch, there)
    check_devices(engine)


def test_a_job_that_asks_for_too_many_is_refused_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    show(monkeypatch, 1, visible="3")
    path = job_file(tmp_path, model, tensor_parallel_size=2)
    monkeypatch.setattr("rollout.engine_start.Engine", None)
    for more in ([], ["--dry-run"]):
        result = CliRunner().invoke(main, ["generate", "--config", str(path), *more])
        assert result.exit_code == 2, result.output
        assert result.stderr == (
            "error: engine.tensor_parallel_size 2: needs 2 CUDA devices, expected at most the 1 "
            "that this machine shows (CUDA_VISIBLE_DEVICES is '3'): lower it, or run the job where "
            "there are more\n"
        )
        assert not (tmp_path / "out").exists()


def test_a_machine_without_devices_says_that_it_compared_nothing(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    show(monkeypatch, 0)
    result = dry_run(job_file(tmp_path, model, tensor_parallel_size=2))
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout)["devices"] == (
        "2 asked for, not compared: no CUDA device here"
    )
    assert "WARNING" not in result.stderr
    alone = dry_run(job_file(tmp_path, model))
    assert yaml.safe_load(alone.stdout)["devices"] == "no CUDA device here"


def test_a_login_node_checks_the_rest_of_the_job(model: Path, tmp_path: Path) -> None:
    path = job_file(tmp_path, model, tensor_parallel_size=8)
    dry = on_a_login_node(path, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    shown = yaml.safe_load(dry.stdout)
    assert shown["devices"].startswith("8 asked for, not compared: no CUDA device here; vLLM finds")
    assert shown["engine arguments"]["worker_cls"].endswith(".GPUCaptureWorker")
    assert shown["first prompts"] == [{"line": 1, "token_ids": [64], "text": "a"}]
    wrong = on_a_login_node(path, "--dry-run", "--set", "engine.max_num_seq=4")
    assert wrong.returncode == 2
    assert "did you mean `max_num_seqs`?" in wrong.stderr
    started = on_a_login_node(path)
    assert started.returncode == 5
    last = started.stderr.splitlines()[-1]
    assert last.startswith("error: vLLM did not start: this machine has no device that the ")
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
def test_counting_devices_starts_no_context() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    assert "that this machine shows" in done.stdout
