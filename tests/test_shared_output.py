"""Several processes of one job on one output share its units."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_engine import fake_engine, fake_job, write_ids
from s3_server import s3_server
from waiting import wait_for

from rollout.dataset import read_dataset
from rollout.lease import has_died, process_name
from rollout.pipeline import generate
from rollout.storage import Storage
from rollout.summary import Summary

_JOB = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from fake_engine import fake_engine, fake_job
from rollout.errors import RolloutError
from rollout.pipeline import generate
prompts, output, sections, log = json.loads(sys.argv[1])
with fake_engine() as engine:
    engine.step_seconds, engine.log = 0.1, Path(log)
    try:
        summary = generate(fake_job(Path(prompts), output, **sections), show_progress=False)
    except RolloutError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(json.dumps(summary.as_dict()))
"""


@contextlib.contextmanager
def process(
    prompts: Path, output: str, log: Path, /, **sections: Any
) -> Iterator[subprocess.Popen[str]]:
    """A job in a process of its own."""
    sections["output"] = {"unit_prompts": 8} | sections.pop("output", {})
    arguments = json.dumps([str(prompts), output, sections, str(log)])
    with subprocess.Popen(
        [sys.executable, "-c", _JOB, arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as found:
        try:
            yield found
        finally:
            found.kill()


def summary_of(found: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a job to succeed."""
    out, err = found.communicate(timeout=120)
    assert found.returncode == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def returned(log: Path) -> Counter[str]:
    """How often each rollout was generated."""
    return Counter(name.rsplit("-", 2)[0] for name in log.read_text().splitlines())


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server("bucket") as url:
        yield url


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_u17_two_processes_share_a_job(kind: str, endpoint: str, tmp_path: Path) -> None:
    prompts, log = write_ids(tmp_path / "p.jsonl", 96), tmp_path / "log"
    client = {"endpoint_url": endpoint, "region_name": "us-east-1"}
    options = {"key": "testing", "secret": "s3cr3t-value", "client_kwargs": client}
    output = str(tmp_path / "out") if kind == "local" else f"s3://bucket/{tmp_path.name}"
    section = {"storage_options": options if kind == "s3" else {}}
    sampling = {"n": 2}
    with (
        process(prompts, output, log, output=section, sampling=sampling) as a,
        process(prompts, output, log, output=section, sampling=sampling) as b,
    ):
        found = [summary_of(a), summary_of(b)]
    view = read_dataset(Storage.open(output, section["storage_options"]))
    assert len(view.covered) == sum(len(record.keys) for record in view.commits) == 192
    counts = returned(log)
    assert len(counts) == 192
    assert set(counts.values()) == {1}
    for one in found:
        assert one["rollouts_committed"] > 0
        assert one["rollouts_asked"] == 192
        done = ("rollouts_committed", "rollouts_elsewhere", "rollouts_skipped")
        assert sum(one[name] for name in done) == 192
    assert view.storage.list("_lease") == []


def test_u24_one_with_nothing_to_do_ends_well(tmp_path: Path) -> None:
    prompts, log = write_ids(tmp_path / "p.jsonl", 8), tmp_path / "log"
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(process(prompts, str(tmp_path / "out"), log)) for _ in range(3)]
        found = [summary_of(job) for job in jobs]
    assert sorted(one["rollouts_committed"] for one in found) == [0, 0, 8]
    assert sum(returned(log).values()) == 8


def test_u17_the_units_of_a_killed_process_are_taken_over(tmp_path: Path) -> None:
    prompts, log = write_ids(tmp_path / "p.jsonl", 160), tmp_path / "log"
    output = tmp_path / "out"
    with (
        process(prompts, str(output), log) as a,
        process(prompts, str(output), tmp_path / "other") as b,
    ):
        wait_for(lambda: a.poll() is not None or (log.exists() and (tmp_path / "other").exists()))
        assert a.poll() is None
        a.kill()
        a.wait()
        left = summary_of(b)
    view = read_dataset(Storage.open(str(output)))
    assert len(view.covered) == 160
    assert left["rollouts_committed"] + left["rollouts_skipped"] + left["rollouts_elsewhere"] == 160
    # again at most what the killed one had taken and not committed: four units of eight
    generated = sum(returned(log).values()) + sum(returned(tmp_path / "other").values())
    assert generated <= 160 + 4 * 8


def test_u17_another_run_is_refused_while_one_works(tmp_path: Path) -> None:
    prompts, log = write_ids(tmp_path / "p.jsonl", 160), tmp_path / "log"
    output = str(tmp_path / "out")
    with process(prompts, output, log) as a:
        wait_for(lambda: log.exists() or a.poll() is not None)
        with process(prompts, output, log, sampling={"temperature": 0.5}) as b:
            _, err = b.communicate(timeout=60)
        assert b.returncode == 4
        assert "`sampling.temperature` is 1.0 there and 0.5 now" in err
        assert summary_of(a)["rollouts_committed"] == 160


def test_two_threads_share_an_output_in_memory(tmp_path: Path) -> None:
    prompts = write_ids(tmp_path / "p.jsonl", 64)
    config = fake_job(prompts, f"memory://{tmp_path.name}", output={"unit_prompts": 4})

    def run(_: int) -> Summary:
        return generate(config, show_progress=False)

    with fake_engine() as engine, ThreadPoolExecutor(2) as pool:
        engine.log, engine.step_seconds = tmp_path / "log", 0.01
        found = list(pool.map(run, range(2)))
    assert sum(one.rollouts_committed for one in found) == 64
    assert set(returned(tmp_path / "log").values()) == {1}


def test_a_process_is_known_to_have_died() -> None:
    assert not has_died(process_name())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        name = process_name(child.pid)
        assert not has_died(name)
        child.communicate(b"\n")
    assert has_died(name)
    # another process with the same id is not the one that held the lease
    own = process_name().split(" ")
    assert has_died(" ".join([*own[:3], "1"]))
    # of another machine, or unknown: only time tells
    assert not has_died(" ".join(["other-boot", own[1], "1", "1"]))
    assert not has_died("")
    assert not has_died(f"{os.getpid()}")
