"""The capture on a CUDA engine: run by hand where there is one, `pytest -m gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("check", ["exact", "untruncated", "alignment", "processed", "overflow"])
def test_capture_on_cuda(check: str, runner: str) -> None:
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
        # in-process where the check looks at the sampler's own tensors
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if check in ("exact", "untruncated") else "1",
    }
    run("gpu_checks.py", check, environment)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_ranks_on_cuda(runner: str, stages: int) -> None:
    v2 = "1" if runner == "v2" else "0"
    run("ranks_on_gpu.py", str(stages), os.environ | {"VLLM_USE_V2_MODEL_RUNNER": v2})


def run(script: str, argument: str, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / script), argument],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
