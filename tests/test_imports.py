"""What imports what: light commands, and a trainer that needs no engine."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
from synthetic import make_record, make_row, plan

from rollout.dataset import DatasetWriter
from rollout.storage import Storage

ROOT = Path(__file__).parent.parent
HEAVY = ("numpy", "pandas", "polars", "pyarrow", "pydantic", "torch", "transformers", "triton")
SCRIPT = Path(sys.executable).parent / "rollout"

_LOADED = """
import json, sys
{code}
print(json.dumps([name for name in {names!r} if name in sys.modules]))
"""
_NO_VLLM = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def python(code: str) -> str:
    """Run code in a fresh interpreter, outside of the repository's folder."""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()[-1]


def loaded(code: str, *names: str) -> list[str]:
    found: list[str] = json.loads(python(_LOADED.format(code=code, names=names)))
    return found


def test_the_package_loads_nothing_heavy() -> None:
    assert loaded("import rollout", *HEAVY, "vllm", "click", "yaml") == []


def test_the_command_loads_nothing_heavy() -> None:
    assert loaded("import rollout.cli", *HEAVY, "vllm", "yaml", "fsspec") == []


@pytest.mark.parametrize("module", ["jobfile", "config", "summary", "progress", "reward"])
def test_the_job_file_needs_no_torch(module: str) -> None:
    assert loaded(f"import rollout.{module}", "torch", "pyarrow", "transformers", "vllm") == []


@pytest.mark.parametrize(
    "module",
    [
        "dataset",
        "inspect",
        "shard",
        "storage",
        "prompts",
        "render",
        "model_files",
        "spool",
        "assemble",
        "work",
        "units",
        "schema.columns",
        "schema.entries",
    ],
)
def test_the_dataset_and_the_input_need_no_torch(module: str) -> None:
    assert loaded(f"import rollout.{module}", "torch", "triton", "transformers", "vllm") == []


@pytest.mark.parametrize("args", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_answers_at_once(args: list[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = subprocess.run([SCRIPT, *args], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert found.stdout
    # processor time: the wall clock of a busy machine says nothing
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize("args", [["--help"], ["generate", "--help"]])
def test_help_loads_nothing_heavy(args: list[str]) -> None:
    found = subprocess.run(
        [sys.executable, "-X", "importtime", SCRIPT, *args],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.rpartition("|")[2].strip() for line in found.stderr.splitlines()}
    assert "click" in names
    assert names.isdisjoint({*HEAVY, "vllm", "yaml", "fsspec"})


_REPLAY = """
from rollout.loader import RolloutLoader
from rollout.losses import LossConfig, compute_loss
loader = RolloutLoader({path!r}, vocab_size=200_000, groups_per_step=1, token_budget=1000)
(batch,) = loader
inputs = batch.loss_inputs(batch.sampler_logprobs, batch.sampler_support_logprobs)
outputs = compute_loss(inputs, LossConfig(loss="icepop", centering="exact"))
total = float(outputs.metrics.policy_loss * batch.global_denominator)
try:
    import vllm
except ModuleNotFoundError:
    print(int(outputs.metrics.num_tokens), total, float(outputs.metrics.log_ratio.abs().max()))
"""


def test_loader_and_losses_work_without_an_engine(tmp_path: Path) -> None:
    writer = DatasetWriter.open(Storage.open(str(tmp_path), {}), make_record())
    writer.append_plan(plan("u0", "p"))
    writer.commit_part(
        "u0",
        [
            make_row("p", 0, lengths=[1, 5], reward=1.0),
            make_row("p", 1, lengths=[3, 3, 1, 7, 2], reward=0.0),
        ],
    )
    refuse = _NO_VLLM.format(names=("vllm", "transformers", "huggingface_hub"))
    found = python(refuse + _REPLAY.format(path=str(tmp_path)))
    # two tokens of advantage 0.5 and five of -0.5, each with the ratio 1
    assert found.split() == ["7", "1.5", "0.0"]


def test_an_engine_that_is_missing_is_one_line() -> None:
    code = _NO_VLLM.format(names=("vllm",)) + (
        "from rollout.engine_args import check_engine_args\n"
        "from rollout.errors import EngineError\n"
        "try:\n    check_engine_args({})\n"
        "except EngineError as error:\n    print(error)\n"
    )
    line = python(code)
    assert line.startswith("vLLM can't be imported (")
    assert line.endswith("install rollout[gpu] or rollout[cpu]")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("rollout", include_external_packages=True, cache_dir=None)


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.startswith("rollout")}


def reach(graph: grimp.ImportGraph, *modules: str) -> set[str]:
    return ours(set(modules).union(*(graph.find_upstream_modules(name) for name in modules)))


@pytest.mark.parametrize("part", ["rollout.schema", "rollout.kernels"])
def test_the_format_and_the_kernels_import_nothing_of_ours(
    graph: grimp.ImportGraph, part: str
) -> None:
    inside = {part, *graph.find_descendants(part)}
    assert len(inside) > 3
    imported = {found for name in inside for found in graph.find_modules_directly_imported_by(name)}
    assert ours(imported) <= inside


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("vllm", ("rollout.engine", "rollout.engine_args", "rollout.capture.")),
        ("transformers", ("rollout.render", "rollout.replay_model")),
        ("fsspec", ("rollout.storage", "rollout.prompt_files")),
        ("triton", ("rollout.kernels.",)),
        ("click", ("rollout.cli",)),
        (
            "pydantic",
            (
                "rollout.config",
                "rollout.engine_args",
                "rollout.jobfile",
                "rollout.prompts",
                "rollout.replay_config",
            ),
        ),
    ],
)
def test_each_package_has_its_place(
    graph: grimp.ImportGraph, package: str, allowed: tuple[str, ...]
) -> None:
    found = graph.find_modules_that_directly_import(package)
    assert found
    assert [name for name in sorted(found) if not name.startswith(allowed)] == []


def test_the_generating_and_the_training_side_share_no_more_than_the_dataset(
    graph: grimp.ImportGraph,
) -> None:
    # the workers are imported by name, in the engine's processes
    generating = reach(graph, "rollout.pipeline", "rollout.capture.worker", "rollout.capture.v1")
    training = reach(graph, "rollout.loader", "rollout.losses")
    assert {"rollout.engine", "rollout.capture.core", "rollout.spool"} <= generating
    assert {"rollout.batch", "rollout.loss_rows", "rollout.shard_reader"} <= training
    # the kernels lie below both, and import nothing of ours
    shared = {name for name in generating & training if not name.startswith("rollout.kernels")}
    assert {"rollout.rows", "rollout.storage", "rollout.schema.columns"} <= shared
    for name in shared:
        imported = graph.find_modules_directly_imported_by(name)
        assert imported.isdisjoint({"torch", "triton", "vllm"}), name
    sides = ("capture", "engine", "spool", "loss", "loader", "batch")
    assert [name for name in sorted(shared) if any(side in name for side in sides)] == []


def test_the_import_contracts_hold() -> None:
    found = subprocess.run(
        [SCRIPT.parent / "lint-imports", "--no-cache"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert found.returncode == 0, found.stdout
    assert "0 broken" in found.stdout
