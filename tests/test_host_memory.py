"""How much a job's spool may take, and where it is."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollout import host_memory, spool_folder
from rollout.errors import ConfigError
from rollout.host_memory import free_bytes, num_gpus, spool_budget

GIB = 2**30


class Usage(NamedTuple):
    """What `shutil.disk_usage` returns."""

    total: int
    used: int
    free: int


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes this process see another host."""
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "cgroup")

    def become(
        *,
        disk: int = 4096 * GIB,
        memory: int | None = None,
        gpus: int = 0,
        group: str = "/",
        limits: dict[str, tuple[str, int, int]] | None = None,
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, disk))
        for number in range(gpus):
            (tmp_path / "proc/driver/nvidia/gpus" / f"0000:{number:02x}:00.0").mkdir(parents=True)
        (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/self/cgroup").write_text(f"12:pids:/old\n0::{group}\n")
        if memory is not None:
            text = f"MemTotal: 1 kB\nMemFree: 2 kB\nMemAvailable:   {memory // 1024} kB\n"
            (tmp_path / "proc/meminfo").write_text(text)
        for name, (most, used, files) in (limits or {}).items():
            folder = tmp_path / "cgroup" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "memory.max").write_text(f"{most}\n")
            (folder / "memory.current").write_text(f"{used}\n")
            (folder / "memory.stat").write_text(f"anon 7\ninactive_file {files}\nactive_file 9\n")

    return become


@pytest.mark.parametrize(
    ("memory", "gpus", "budget"),
    [
        (2048, 8, 64),  # a quarter for eight jobs
        (128, 1, 32),
        (128, 0, 32),  # none is known of
        (256, 8, 8),  # the least
        (16, 8, 4),  # which a quarter does not hold
    ],
)
def test_the_budget_goes_by_what_is_free(
    host: Any, tmp_path: Path, memory: int, gpus: int, budget: int
) -> None:
    host(memory=memory * GIB, gpus=gpus)
    assert num_gpus() == gpus
    assert spool_budget(None, tmp_path) == budget * GIB


def test_the_least_of_disk_memory_and_groups_counts(host: Any, tmp_path: Path) -> None:
    host(disk=100 * GIB, memory=200 * GIB)
    assert free_bytes(tmp_path) == 100 * GIB
    host(disk=300 * GIB, memory=200 * GIB)
    assert free_bytes(tmp_path) == 200 * GIB
    # of a container: its own group is the root that it sees
    host(memory=200 * GIB, limits={"": (str(64 * GIB), 20 * GIB, 4 * GIB)})
    assert free_bytes(tmp_path) == 48 * GIB  # pages of files go


def test_limits_of_the_groups_above_count(host: Any, tmp_path: Path) -> None:
    limits = {
        "slurm/job_1/step_0": ("max", 3 * GIB, 0),
        "slurm/job_1": (str(32 * GIB), 2 * GIB, 0),
        "slurm": (str(10 * GIB), 11 * GIB, 0),
    }
    host(memory=200 * GIB, group="/slurm/job_1/step_0", limits=limits)
    assert free_bytes(tmp_path) == 0
    with pytest.raises(ConfigError, match="has room for 0 bytes, expected 67108864"):
        spool_budget(None, tmp_path)
    del limits["slurm"]
    shutil.rmtree(tmp_path / "cgroup" / "slurm")
    host(group="/slurm/job_1/step_0", limits=limits)
    assert free_bytes(tmp_path) == 30 * GIB


def test_a_host_that_tells_nothing_goes_by_its_disk(host: Any, tmp_path: Path) -> None:
    host(disk=40 * GIB)
    (tmp_path / "proc/self/cgroup").unlink()
    assert spool_budget(None, tmp_path) == 10 * GIB


def test_what_the_job_states_is_taken_and_doubted(
    host: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host(memory=64 * GIB)
    with caplog.at_level(logging.WARNING):
        assert spool_budget(32 * GIB, tmp_path) == 32 * GIB
        assert not caplog.records
        assert spool_budget(33 * GIB, tmp_path) == 33 * GIB
    assert f"capture.spool_bytes is {33 * GIB}" in caplog.text
    assert f"has room for {64 * GIB}" in caplog.text


def test_this_host_tells_what_python_finds(tmp_path: Path) -> None:
    free = free_bytes(tmp_path)
    assert 0 < free <= shutil.disk_usage(tmp_path).free
    meminfo = Path("/proc/meminfo").read_text()
    total = int(meminfo.partition("MemTotal:")[2].split()[0])
    assert free < 1024 * total


@pytest.mark.parametrize(
    ("memory_disk", "temporary", "in_memory"),
    [
        (16 * GIB, 400 * GIB, True),
        (15 * GIB, 400 * GIB, False),  # nobody wants rows dropped beside an empty disk
        (2**26, 400 * GIB, False),
        (5 * GIB, 20 * GIB, True),
        (4 * GIB, 20 * GIB, False),
    ],
)
def test_a_small_memory_disk_is_passed_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory_disk: int,
    temporary: int,
    in_memory: bool,
) -> None:
    # containers often have 64 MiB of it
    monkeypatch.setattr(spool_folder, "_MEMORY_DISK", tmp_path)
    free = {tmp_path: memory_disk, Path(tempfile.gettempdir()): temporary}
    monkeypatch.setattr(spool_folder, "free_bytes", lambda path: free[path])
    assert spool_folder.spool_parent() == (tmp_path if in_memory else Path(tempfile.gettempdir()))


def test_what_a_killed_job_left_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_disk, temporary = tmp_path / "shm", tmp_path / "tmp"
    for parent in (memory_disk, temporary):
        parent.mkdir()
        dead = Path(tempfile.mkdtemp(prefix="rollout-job-", dir=parent))
        (dead / "owner.lock").touch()
        (dead / "segment").write_bytes(b"x")
    monkeypatch.setattr(spool_folder, "_MEMORY_DISK", memory_disk)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def free(path: Path) -> int:
        return 0 if path == memory_disk and any(path.glob("*/segment")) else 2 * GIB

    monkeypatch.setattr(spool_folder, "free_bytes", free)
    with spool_folder.spool_folder() as folder:
        assert Path(folder).parent == memory_disk
        assert list(temporary.iterdir()) == []
