"""What vLLM reads from the environment, as the product sets it."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from rollout.engine_args import set_environment


@pytest.fixture
def environment() -> dict[str, str]:
    """What `set_environment` sets where nothing is set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    with mock.patch.dict(os.environ, kept, clear=True):
        set_environment()
        return {name: value for name, value in os.environ.items() if name not in kept}


def test_vllm_knows_every_variable_that_is_set(environment: dict[str, str]) -> None:
    from vllm import envs

    # vLLM ignores a misspelt one
    assert set(environment) <= set(envs.environment_variables)


def test_engine_processes_are_spawned(environment: dict[str, str]) -> None:
    from vllm import envs

    with mock.patch.dict(os.environ, environment):
        assert envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"]() == "spawn"


def test_what_the_user_has_set_stays() -> None:
    with mock.patch.dict(os.environ, {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}):
        set_environment()
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
