"""Jobs on an S3 server that refuses, throttles and hangs up, and on full disks."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, fake_engine, fake_job, write_ids
from fault_proxy import Call, FaultProxy, fault_proxy
from s3_server import s3_server
from tiny_model import make_tiny_model

from rollout.config import JobConfig, PromptsConfig
from rollout.dataset import read_dataset
from rollout.errors import InputError, OutputError, StoppedError
from rollout.pipeline import generate
from rollout.prompts import check_prompts_file
from rollout.resolve import resolve_job
from rollout.stop import StopSignals
from rollout.storage import Storage
from rollout.storage_errors import explain
from rollout.summary import Summary
from rollout.verify import verify_dataset

SECRETS = ("pl4nted-secret-key", "pl4nted-session-token", "PLANTEDKEYID")
PROMPTS = 48


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server("bucket") as url:
        yield url


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "PLANTEDKEYID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "pl4nted-secret-key")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "pl4nted-session-token")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with fault_proxy(server) as found:
        yield found


@pytest.fixture
def engine() -> Iterator[type[FakeEngine]]:
    with fake_engine() as found:
        yield found


def s3_job(folder: Path, proxy: FaultProxy, **output: Any) -> JobConfig:
    client = {"endpoint_url": proxy.url, "region_name": "us-east-1"}
    options = {"client_kwargs": client, "config_kwargs": {"retries": {"max_attempts": 1}}}
    section = {
        "storage_options": options,
        "unit_prompts": 8,
        "retry_seconds": 5.0,
        "pending_path": str(folder / "pending"),
    }
    source = write_ids(folder / "p.jsonl", PROMPTS)
    return fake_job(source, f"s3://bucket/{folder.name}", output=section | output)


def run(config: JobConfig) -> Summary:
    return generate(config, show_progress=False)


def stored(config: JobConfig, server: str) -> int:
    """Rollouts that a reader by records finds, each file whole."""
    options = {
        "key": "k",
        "secret": "s",
        "client_kwargs": {"endpoint_url": server, "region_name": "us-east-1"},
    }
    storage = Storage.open(config.output.path, options)
    assert verify_dataset(storage).faults == []
    view = read_dataset(storage)
    assert sum(len(record.keys) for record in view.commits) == len(view.covered)
    return len(view.covered)


def is_shard(call: Call) -> bool:
    return call.method == "PUT" and "/data/" in call.path


def check_no_secret(text: str) -> None:
    for secret in SECRETS:
        assert secret not in text


@pytest.mark.parametrize(
    ("rule", "cause"),
    [
        (lambda call: (403, "AccessDenied") if call.method == "PUT" else None, "AccessDenied"),
        (lambda call: (400, "AuthorizationHeaderMalformed"), "AuthorizationHeaderMalformed"),
        (lambda call: (400, "ExpiredToken"), "credentials expired"),
        (lambda call: (404, "NoSuchBucket"), "bucket"),
    ],
    ids=["read-only", "wrong region", "expired from the start", "no such bucket"],
)
def test_u20_an_output_that_takes_nothing_is_told_before_the_engine(
    rule: Any, cause: str, proxy: FaultProxy, engine: type[FakeEngine], tmp_path: Path
) -> None:
    proxy.rule = rule
    start = time.monotonic()
    with pytest.raises(OutputError) as found:
        run(s3_job(tmp_path, proxy))
    assert cause in str(found.value)
    assert time.monotonic() - start < 20
    assert engine.started == 0
    check_no_secret(str(found.value))


def test_u20_no_credentials_are_told_before_the_engine(
    proxy: FaultProxy,
    engine: type[FakeEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(OutputError, match=r"[Cc]redentials"):
        run(s3_job(tmp_path, proxy))
    assert engine.started == 0


def test_u20_credentials_that_expire_are_picked_up_when_renewed(
    proxy: FaultProxy,
    server: str,
    engine: type[FakeEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shards = itertools.count(1)
    expired = threading.Event()

    def rule(call: Call) -> tuple[int, str] | None:
        if is_shard(call) and next(shards) == 3:
            expired.set()
        return (400, "ExpiredToken") if expired.is_set() and call.key == SECRETS[2] else None

    def renew() -> None:
        assert expired.wait(60)
        time.sleep(2.0)
        os.environ["AWS_ACCESS_KEY_ID"] = "RENEWEDKEYID"

    proxy.rule = rule
    thread = threading.Thread(target=renew)
    thread.start()
    with caplog.at_level(logging.WARNING):
        summary = run(s3_job(tmp_path, proxy, retry_seconds=30.0))
    thread.join()
    assert summary.rollouts_committed == PROMPTS == stored(s3_job(tmp_path, proxy), server)
    assert "credentials expired" in caplog.text
    check_no_secret(caplog.text)


def test_throttling_and_lost_connections_cost_nothing(
    proxy: FaultProxy, server: str, engine: type[FakeEngine], tmp_path: Path
) -> None:
    calls = itertools.count()
    answers = {0: (503, "SlowDown"), 3: (0, "hang up"), 6: (500, "InternalError")}
    # not while the output is probed, which tries each call once
    proxy.rule = lambda call: answers.get(next(calls) % 9) if engine.started else None
    engine.log = tmp_path / "log"
    config = s3_job(tmp_path, proxy, retry_seconds=60.0)
    assert run(config).rollouts_committed == PROMPTS == stored(config, server)
    assert len(engine.log.read_text().splitlines()) == PROMPTS


def test_an_outage_is_waited_out_with_finished_parts_on_the_disk(
    proxy: FaultProxy,
    server: str,
    engine: type[FakeEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shards = itertools.count(1)
    out = threading.Event()
    kept = []

    def rule(call: Call) -> tuple[int, str] | None:
        if not is_shard(call):
            return None
        if next(shards) == 3:
            out.set()
        if out.is_set() and (found := list((tmp_path / "pending").rglob("*.json"))):
            kept.append(len(found))
            if len(found) >= 2:
                out.clear()  # back
        return (503, "SlowDown") if out.is_set() else None

    proxy.rule = rule
    config = s3_job(tmp_path, proxy, retry_seconds=1.0)
    with caplog.at_level(logging.WARNING):
        summary = run(config)
    assert max(kept) >= 2
    assert summary.rollouts_committed == PROMPTS == stored(config, server)
    assert "keeping what is finished locally" in caplog.text
    assert not list((tmp_path / "pending").rglob("*.parquet"))


def test_what_an_outage_left_is_uploaded_by_the_next_run(
    proxy: FaultProxy, server: str, engine: type[FakeEngine], tmp_path: Path
) -> None:
    shards = itertools.count(1)
    proxy.rule = lambda call: (503, "SlowDown") if is_shard(call) and next(shards) > 2 else None
    engine.log = tmp_path / "log"
    config = s3_job(tmp_path, proxy, retry_seconds=0.5)
    with pytest.raises(OutputError, match=r"\d+ finished rollouts are kept in .*pending") as found:
        run(config)
    check_no_secret(str(found.value))
    done = stored(config, server)
    assert 0 < done < PROMPTS
    proxy.rule = lambda call: None
    again = run(config)
    assert stored(config, server) == PROMPTS
    assert again.rollouts_skipped > done
    # everything that was finished was kept, and nothing is sampled twice
    assert len(engine.log.read_text().splitlines()) == PROMPTS
    assert not list((tmp_path / "pending").rglob("*.*"))


def test_a_signal_in_an_outage_keeps_what_is_finished(
    proxy: FaultProxy,
    server: str,
    engine: type[FakeEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards = itertools.count(1)
    out = threading.Event()

    def rule(call: Call) -> tuple[int, str] | None:
        if is_shard(call) and next(shards) > 2 and not out.is_set():
            out.set()
            os.kill(os.getpid(), signal.SIGTERM)
        return (503, "SlowDown") if out.is_set() and call.method == "PUT" else None

    proxy.rule = rule
    engine.log = tmp_path / "log"
    hurried = functools.partial(StopSignals, hurry_seconds=1.0)
    monkeypatch.setattr("rollout.pipeline.StopSignals", hurried)
    config = s3_job(tmp_path, proxy, retry_seconds=300.0)
    start = time.monotonic()
    with pytest.raises(StoppedError, match=r"finished rollouts are kept in"):
        run(config)
    assert time.monotonic() - start < 100
    proxy.rule = lambda call: None
    run(config)
    assert stored(config, server) == PROMPTS
    assert len(engine.log.read_text().splitlines()) == PROMPTS


def test_what_is_kept_is_bounded(
    proxy: FaultProxy, server: str, engine: type[FakeEngine], tmp_path: Path
) -> None:
    shards = itertools.count(1)
    proxy.rule = lambda call: (503, "SlowDown") if is_shard(call) and next(shards) > 2 else None
    config = s3_job(tmp_path, proxy, retry_seconds=0.5, pending_bytes=0)
    with pytest.raises(OutputError, match="SlowDown"):
        run(config)
    assert not list((tmp_path / "pending").rglob("*.*"))
    proxy.rule = lambda call: None
    run(config)
    assert stored(config, server) == PROMPTS


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """On a real small disk, in a namespace of its own; see `full_disk.py`."""
    script = Path(__file__).with_name("full_disk.py")
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kept = PROMPTS - found["committed"]
    assert 0 < kept < PROMPTS
    assert "No space left on device" in found["error"]
    assert f"{kept} finished rollouts are kept in {tmp_path}/kept/" in found["error"]
    assert found["damaged"] == []
    assert set(found["rows"]) == {8}  # what is under a public name is whole
    # with room again
    assert (found["in_all"], found["leftovers"], found["faults"]) == (PROMPTS, 0, [])
    assert found["sampled"] == PROMPTS  # nothing was sampled again


def test_secrets_reach_no_message_and_no_record(tmp_path: Path) -> None:
    url = "nosuch://user:pl4nted-secret-key@host/x?X-Amz-Signature=pl4nted-session-token"
    with pytest.raises(OutputError) as found:
        Storage.open(url)
    check_no_secret(f"{found.value} {found.value!r}")
    assert "nosuch://host/x?X-Amz-Signature=***" in str(found.value)
    prompts = PromptsConfig(path=f"{url}&file=p.jsonl")
    with pytest.raises(InputError) as unread:
        check_prompts_file(prompts)
    check_no_secret(f"{unread.value} {prompts.name}")
    # what a client says may hold what it was given
    options = {"client_kwargs": {"aws_session_token": "pl4nted-session-token"}, "key": SECRETS[2]}
    error = OSError(f"refused {SECRETS[2]} with {SECRETS[1]} at https://u:{SECRETS[0]}@host/b")
    assert explain(error, options) == "OSError: refused *** with *** at https://host/b"
    source = write_ids(tmp_path / "p.jsonl", 1)
    job = fake_job(
        source,
        "s3://user:pl4nted-secret-key@bucket/x",
        output={"storage_options": {"secret": "pl4nted-session-token"}},
        model={"path": str(make_tiny_model(tmp_path / "model"))},
    )
    check_no_secret(resolve_job(job).record.to_json().decode())
