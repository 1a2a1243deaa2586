"""What people reported of jobs like these, each as a whole job on the fake engine.

Reports that need a real engine, or a part alone, are tests of that number elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow.dataset as ds
import pytest
from fake_engine import FakeEngine, fake_engine, fake_job, write_ids

from rollout.dataset import DatasetView, read_dataset
from rollout.engine import RequestError
from rollout.errors import ConfigError, EngineError
from rollout.jobfile import load_job
from rollout.loader import RolloutLoader
from rollout.pipeline import generate
from rollout.storage import Storage
from rollout.summary import Summary
from rollout.verify import verify_dataset

TESTS = Path(__file__).parent


def run(config: Any) -> Summary:
    return generate(config, show_progress=False)


def view_of(output: Path) -> DatasetView:
    return read_dataset(Storage.open(output))


def lines(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def ids(*tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt_token_ids": list(tokens)} | fields


def table(output: Path) -> pl.DataFrame:
    return pl.read_parquet(f"{output}/data/*.parquet")


def test_u10_a_mark_and_other_line_ends_change_nothing(tmp_path: Path) -> None:
    text = "".join(json.dumps(ids(i, id=f"p{i}")) + "\n" for i in range(3)).encode()
    mark = b"\xef\xbb\xbf"
    seen = []
    for number, content in enumerate(
        (text, mark + text, mark + text.replace(b"\n", b"\r\n"), text.rstrip(), text + b"\n\r\n")
    ):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(content)
        output = tmp_path / f"out{number}"
        with fake_engine():
            assert run(fake_job(path, output)).rollouts_committed == 3
        rows = table(output).select("rollout_id", "prompt_id", "prompt_token_ids")
        seen.append(sorted(rows.rows()))
    assert all(rows == seen[0] for rows in seen)


def test_u11_results_join_back_one_to_one(tmp_path: Path) -> None:
    odd = ["a", None, 1, "01", "dir/../x\ny", "\0", "../../etc", "i" * 10_000]
    rows = [ids(i, id=one, line=i) for i, one in enumerate(odd)] + [ids(90, line=90)]
    source = lines(tmp_path / "p.jsonl", *rows, '{"id":1,"id":2,"prompt_token_ids":[5]}')
    with fake_engine():
        summary = run(fake_job(source, tmp_path / "out"))
    assert (summary.prompts_read, summary.prompts_rejected) == (10, 1)
    found = {
        json.loads(metadata)["line"]: (prompt_id, tokens)
        for metadata, prompt_id, tokens in table(tmp_path / "out")
        .select("metadata", "prompt_id", "prompt_token_ids")
        .iter_rows()
    }
    named = {i: str(one) for i, one in enumerate(odd) if one is not None}
    assert {i: found[i][0] for i in named} == named
    assert {i: tokens for i, (_, tokens) in found.items()} == {
        **{i: [i] for i in range(len(odd))},
        90: [90],
    }
    (rejected,) = view_of(tmp_path / "out").rejected
    assert (rejected.line, rejected.detail) == (10, "key 'id' stands twice in one object")
    # nothing outside of the output, whatever an id says
    assert {path.name for path in tmp_path.iterdir()} == {"p.jsonl", "out"}


_ASKED = """
model: {{path: m}}
prompts: {{path: p.jsonl}}
output: {{path: out}}
sampling:
  max_tokens: 4
  {}
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("min_p: 1e-3", {"min_p": 0.001}),
        ('top_p: "0.9"', {"top_p": 0.9}),
        ("n: 8.0", {"n": 8}),
        ("top_k: 0", {"top_k": 0}),
        ("top_k: -1", {"top_k": 0}),
        ("temperture: 0.7", "did you mean `temperature`"),
        ("stop: no", "got False, expected text"),
        ("n: 2\n  n: 3", "stands twice"),
        ("temperature: ${TEMPERATURE}", "environment variables are not expanded"),
        ("n: !!python/object/apply:os.system ['touch x']", "python/object/apply"),
        ("n: !!python/name:os.system", "python/name"),
    ],
)
def test_u14_yaml_is_what_it_looks_like_or_refused(
    tmp_path: Path, line: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(_ASKED.format(line))
    if isinstance(expected, dict):
        found = load_job(str(path), []).sampling.model_dump()
        assert {name: found[name] for name in expected} == expected
        return
    with pytest.raises(ConfigError, match=expected.replace("$", r"\$")):
        load_job(str(path), [])
    # no code was run
    assert [one.name for one in tmp_path.iterdir()] == ["job.yaml"]


_KILLED_IN_A_GROUP = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(TESTS)!r})
from fake_engine import FakeEngine, fake_engine, fake_job
from rollout.pipeline import generate
from rollout.schema.records import CommitRecord

output = Path(sys.argv[2])

class DiesInAGroup(FakeEngine):
    max_num_seqs = 1
    returned = 0

    def step(self):
        if DiesInAGroup.returned == 5:
            rows = [CommitRecord.from_bytes(f.read_bytes()).rows for f in output.glob("_commit/*")]
            if sum(rows) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.001)
            return []
        DiesInAGroup.returned += 1
        return super().step()

job = fake_job(
    Path(sys.argv[1]), output, sampling={{"n": 8}}, output={{"flush_seconds": 0.01}}
)
with fake_engine(DiesInAGroup):
    generate(job, show_progress=False)
"""


def test_u15_a_resumed_job_says_what_is_there_and_what_it_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write_ids(tmp_path / "p.jsonl", 20), tmp_path / "out"
    with fake_engine() as engine:
        engine.dies_at = (4,)
        job = fake_job(
            source,
            output,
            failures={"engine_restarts": 0},
            output={"unit_prompts": 2},
            sampling={"n": 2},
        )
        with pytest.raises(EngineError):
            generate(job, show_progress=True)
    assert "going on" not in capsys.readouterr().err
    done = len(view_of(output).covered)
    assert 0 < done < 40
    # a prompt is edited: the new one is sampled, the rollouts of the old one stay
    source.write_text(source.read_text().replace("[7, 0, 0]", "[7, 7, 7]"))
    with fake_engine():
        summary = generate(fake_job(source, output, sampling={"n": 2}), show_progress=True)
    said = capsys.readouterr().err
    assert f"going on: {done} of 40 rollouts of the 20 prompts planned so far are there" in said
    assert (summary.rollouts_asked, summary.prompts_orphaned) == (40, 1)
    assert "1 prompts of earlier runs are not in the file any more" in summary.table()
    assert summary.rollouts_skipped + summary.rollouts_committed == 40


def test_u15_a_resumed_job_says_that_a_shard_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, output = write_ids(tmp_path / "p.jsonl", 4), tmp_path / "out"
    with fake_engine():
        job = fake_job(source, output, output={"unit_prompts": 2})
        run(job)
        assert caplog.messages == []
        lost = min((output / "data").iterdir())
        lost.unlink()
        summary = run(job)
    assert (summary.rollouts_skipped, summary.rollouts_committed) == (4, 0)
    (said,) = caplog.messages
    assert f"data/{lost.name} is missing although a commit record names it: its rollouts" in said


def test_u16_a_killed_group_becomes_whole(tmp_path: Path) -> None:
    source, output = lines(tmp_path / "p.jsonl", ids(1, id="a")), tmp_path / "out"
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED_IN_A_GROUP, str(source), str(output)], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(view_of(output).covered) == 5
    with fake_engine(reward=lambda row, text, ids: ids[0] % 7) as engine:
        engine.log = tmp_path / "log"
        summary = run(fake_job(source, output, sampling={"n": 8}))
    assert (summary.rollouts_skipped, summary.rollouts_committed) == (5, 3)
    assert len(engine.log.read_text().splitlines()) == 3
    rows = table(output).sort("sample_index")
    assert rows["sample_index"].to_list() == list(range(8))
    assert rows["group_id"].n_unique() == 1
    assert rows["rollout_id"].to_list() == [f"{rows['group_id'][0]}-{i}" for i in range(8)]
    assert verify_dataset(Storage.open(output)).rollouts_missing == 0


class FailsAMember(FakeEngine):
    """Refuses sample 3 of every tenth prompt."""

    asked = 0

    def add(self, request_id: str, prompt_token_ids: list[int], params: Any) -> str:
        if prompt_token_ids[0] % 10 == 0 and request_id.endswith("-3"):
            raise RequestError("planted")
        return super().add(request_id, prompt_token_ids, params)


def test_u16_a_short_group_says_so_and_counts_as_what_it_is(tmp_path: Path) -> None:
    source, output = write_ids(tmp_path / "p.jsonl", 40), tmp_path / "out"
    with fake_engine(FailsAMember, reward=lambda row, text, ids: ids[0] % 7):
        summary = run(fake_job(source, output, sampling={"n": 8}))
    assert (summary.rollouts_committed, summary.rollouts_failed) == (316, 4)
    groups = (
        table(output)
        .group_by("prompt_id")
        .agg(pl.len(), pl.col("group_size").max(), pl.col("sample_index"), pl.col("reward").mean())
    )
    short = groups.filter(pl.col("len") < pl.col("group_size"))
    assert sorted(short["prompt_id"]) == ["p0", "p10", "p20", "p30"]
    assert all(sorted(one) == [0, 1, 2, 4, 5, 6, 7] for one in short["sample_index"])
    loader = RolloutLoader(
        output, vocab_size=2**17, groups_per_step=40, token_budget=2**16, shuffle=False
    )
    (batch,) = loader
    assert loader.report.incomplete_groups == 4
    advantages: dict[str, list[float]] = {}
    starts = dict(zip(batch.rollout_index.tolist(), batch.advantages.tolist(), strict=True))
    for i, rollout_id in enumerate(batch.rollout_ids):
        advantages.setdefault(rollout_id.rsplit("-", 1)[0], []).append(starts[i])
    # the mean is over those that are there: seven of a short group, not eight
    assert sorted(len(found) for found in advantages.values()) == [7] * 4 + [8] * 36
    assert all(abs(sum(found)) < 1e-4 for found in advantages.values())


@pytest.mark.parametrize("crashed", [False, True])
def test_u19_four_readers_agree_on_the_folder(tmp_path: Path, crashed: bool) -> None:
    source, output = write_ids(tmp_path / "p.jsonl", 30), tmp_path / "out"
    with fake_engine() as engine:
        if crashed:
            engine.dies_at = (4,)
        with contextlib.suppress(Exception):
            run(
                fake_job(
                    source,
                    output,
                    failures={"engine_restarts": 0},
                    output={"unit_prompts": 4, "flush_seconds": 0.001},
                )
            )
    rows = len(view_of(output).covered)
    assert 0 < rows < 30 if crashed else rows == 30
    assert pl.scan_parquet(output / "data").select(pl.len()).collect().item() == rows
    assert table(output).height == rows
    assert ds.dataset(output / "data").count_rows() == rows
    with duckdb.connect() as connection:
        counted = connection.execute(f"select count(*) from '{output}/data/*.parquet'")
        assert counted.fetchall() == [(rows,)]
    # everything else is elsewhere
    assert {path.suffix for path in (output / "data").iterdir()} == {".parquet"}


class Uneven(FakeEngine):
    """A request takes as many steps as it has tokens."""

    max_num_seqs = 2

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self._left: dict[str, int] = {}

    def add(self, request_id: str, prompt_token_ids: list[int], params: Any) -> str:
        internal = super().add(request_id, prompt_token_ids, params)
        self._left[internal] = params.max_tokens
        return internal

    def step(self) -> list[Any]:
        running = list(self._left)[: self.max_num_seqs]
        for name in running:
            self._left[name] -= 1
        done = {name: self._queue.pop(name) for name in running if self._left[name] == 0}
        if not done:
            return []
        waiting, self._queue = self._queue, done
        try:
            for name in done:
                del self._left[name]
            return super().step()
        finally:
            self._queue = waiting


def test_u24_uneven_lengths_hold_nobody_up(tmp_path: Path) -> None:
    source = lines(
        tmp_path / "p.jsonl",
        ids(1, id="long", sampling={"max_tokens": 2000}),
        ids(2, id="short", sampling={"max_tokens": 2}),
        ids(3, id="other", sampling={"max_tokens": 2}),
    )
    with fake_engine(Uneven) as engine:
        engine.log = tmp_path / "log"
        summary = run(fake_job(source, tmp_path / "out", sampling={"n": 2}))
    assert summary.rollouts_committed == 6
    found = table(tmp_path / "out").sort("prompt_id", "sample_index")
    assert found["prompt_id"].to_list() == ["long"] * 2 + ["other"] * 2 + ["short"] * 2
    assert found["num_tokens"].to_list() == [2000] * 2 + [2] * 4
    assert found["rollout_id"].n_unique() == 6


_REPLICA = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(TESTS)!r})
from fake_engine import fake_engine, fake_job
from rollout.pipeline import generate

with fake_engine() as engine:
    engine.step_seconds = float(sys.argv[3])
    job = fake_job(
        Path(sys.argv[1]), sys.argv[2], output={{"unit_prompts": 1}}, sampling={{"n": 2}}
    )
    print(json.dumps(generate(job, show_progress=False).as_dict()))
"""


def test_u24_more_replicas_than_prompts_and_one_is_killed(tmp_path: Path) -> None:
    # processes of their own, as many as there are, none of them told of the others
    source, output = write_ids(tmp_path / "p.jsonl", 5), tmp_path / "out"

    def replica(seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _REPLICA, str(source), str(output), str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    doomed = replica(600.0)
    deadline = time.monotonic() + 60
    while not list(output.glob("_lease/*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    others = [replica(0.01) for _ in range(7)]
    os.kill(doomed.pid, signal.SIGKILL)
    results = [other.communicate(timeout=120)[0] for other in others]
    doomed.communicate()
    assert [other.returncode for other in others] == [0] * 7
    committed = [json.loads(result)["rollouts_committed"] for result in results]
    assert sum(committed) == 10
    found = table(output)
    assert (found.height, found["rollout_id"].n_unique()) == (10, 10)
