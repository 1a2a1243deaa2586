"""`rollout report`: its numbers, that it is one safe file, and that a browser shows it."""

from __future__ import annotations

import math
import re
import resource
import shutil
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from prepared_runs import (
    TOKENS,
    PreparedRun,
    complete_run,
    damaged_run,
    half_run,
    make_job_record,
    make_model,
    make_rows,
    plan_of,
)
from synthetic import make_record, make_row, plan

from rollout.cli import main
from rollout.dataset import DatasetWriter, read_dataset
from rollout.errors import OutputError
from rollout.html_report import build_page, write_report
from rollout.inspect import inspect_view
from rollout.report_data import SIZE_EDGES, TAIL_EDGES, collect
from rollout.storage import Storage

CHARTS = (
    "completeness",
    "progress",
    "rewards over the run",
    "rewards by group",
    "lengths and finish reasons",
    "support sizes",
    "tail mass",
    "entropy over position",
    "largest step against capacity",
    "set aside by reason",
)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return complete_run(tmp_path_factory.mktemp("complete"))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return damaged_run(tmp_path_factory.mktemp("damaged"))


@pytest.fixture(scope="module")
def complete_page(complete: PreparedRun, tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(complete, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def damaged_page(damaged: PreparedRun, tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(damaged, tmp_path_factory.mktemp("page"))


class Page(HTMLParser):
    """The text of a page, what it points at, and its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.links.append(str(value))


def page_of(run: PreparedRun, folder: Path) -> str:
    out = folder / "report [1] \u00e9.html"
    result = CliRunner().invoke(main, ["report", str(run.path), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert [path for path in folder.iterdir() if "report" in path.name] == [out]
    return out.read_text(encoding="utf-8")


def test_the_sums_equal_the_rows(complete: PreparedRun) -> None:
    data = collect(read_dataset(Storage.open(complete.path)), full=True)
    rows = complete.rows
    assert (data.rollouts, data.shards, data.bad) == (80, 4, ())
    frame = data.reward_frame()
    assert frame is not None
    assert sorted(frame["reward"]) == sorted(np.float32(row.reward) for row in rows)
    assert frame["part"].to_list() == [index // 20 for index in range(80)]
    assert data.lengths == {("length", TOKENS): 20, ("stop", TOKENS): 60}
    for kind in ("kept", "top"):
        sizes = [
            int(size)
            for row in rows
            if row.support_kind == kind and row.support_offsets is not None
            for size in np.diff(row.support_offsets)
        ]
        assert data.sizes[kind][0] == sizes.count(1)
        for low, high, count in zip(SIZE_EDGES, SIZE_EDGES[1:], data.sizes[kind], strict=False):
            assert count == sum(low <= size < high for size in sizes)
    tails = sum(row.token_ids.size for row in rows if row.support_kind == "top")
    (at,) = np.flatnonzero(data.tails)
    assert TAIL_EDGES[at] <= 0.1001
    assert TAIL_EDGES[at + 1] >= 0.0999
    assert data.tails[at] == tails
    assert data.tokens.tolist() == [80] * TOKENS
    for position in range(TOKENS):
        mean = statistics.fmean(-float(row.sampled_logprobs[position]) for row in rows)
        assert data.surprisal[position] / 80 == pytest.approx(mean)


def test_the_page_is_one_file_that_asks_for_nothing(complete_page: str, damaged_page: str) -> None:
    # where nothing was set aside, no chart of it is drawn
    for text, drawn in ((complete_page, 8), (damaged_page, 9)):
        page = Page(text)
        assert all(link.startswith("#") for link in page.links)
        assert not {"script", "link", "img", "iframe", "object", "embed", "form"} & set(page.tags)
        assert "url(http" not in text
        assert "@import" not in text
        assert len(text) < 400_000
        assert "content=\"default-src 'none'; style-src 'unsafe-inline'\"" in text
        charts = re.findall(r"<svg.*?</svg>", text, re.S)
        assert len(charts) == drawn
        ids = []
        for chart in charts:
            root = ET.fromstring(chart)
            ids += [node.get("id") for node in root.iter() if node.tag.endswith("clipPath")]
        assert len(ids) == len(set(ids))
        titles = re.findall(r"<figcaption>([^<]*)", text)
        assert all(any(title.startswith(name) for title in titles) for name in CHARTS)
        assert "mathdefault" not in text


def test_the_page_answers_the_questions(complete_page: str, damaged_page: str) -> None:
    words = " ".join(Page(complete_page).words)
    assert "of models/m, 1,920 tokens, mean ratio 1.00001 (1: they agree)" in words
    assert "complete" in words
    assert "--prompt 'task 00' --sample 0 --token 0" in words
    words = " ".join(Page(damaged_page).words)
    for expected in (
        "INCOMPLETE: 1 shard unreadable with 20 rollouts; 1 prompt and 1 rollout set aside",
        "token 17: NaN or infinite logits",
        "901 tokens, the model takes 512",
        "1 NaN or infinite",
        "were not compared: `rollout agree --save` does it",
        "bfloat16, vllm 0.32.0",
        "n 4, temperature 1.0, top_p 0.9, max_tokens 64",
        "capture: bad_numerics",
        "ab" * 32,
        "the records of this run do not hold it",
    ):
        assert expected in words, expected


def test_what_others_wrote_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record = make_job_record(make_model(tmp_path / "<img src=x>"))
    writer = DatasetWriter.open(Storage.open(path), record)
    writer.engine = {
        "engine": "<b>",
        "engine_version": "1",
        "largest_step": 9,
        "support_capacity": 5,
    }
    writer.append_plan([plan_of(0)])
    rows = make_rows(0)
    for row in rows:
        row.finish_reason = "$x_1$ <script>alert(1)</script>"
        row.prompt_id = "<script>alert(2)</script>"
    writer.commit_part("u000000", rows)
    run = PreparedRun(path=path, rows=rows)
    text = page_of(run, tmp_path)
    assert "script" not in Page(text).tags
    assert "<img" not in text
    assert "$x_1$" in text
    assert "the records of this run do not hold it" not in text


def test_long_lists_say_how_many_they_leave_out(damaged: PreparedRun) -> None:
    view = read_dataset(Storage.open(damaged.path))
    found = inspect_view(view, damaged.path, full=True)
    many = replace(found, rejected=found.rejected * 150, bad_shards=found.bad_shards * 207)
    page = Page(build_page(view, many, collect(view, full=True)))
    text = " ".join(page.words)
    assert "and 100 more: rollout inspect --json names all" in text
    assert "and 7 more: rollout inspect --json names all" in text
    assert text.count("901 tokens, the model takes 512") == 100
    assert text.count(found.bad_shards[0].file) == 200


def test_the_page_says_how_the_run_is_and_how_much_of_it_was_read(
    complete: PreparedRun,
    complete_page: str,
    damaged_page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert '<div class="status good">complete' in complete_page
    assert '<div class="status bad">INCOMPLETE' in damaged_page
    # a lost shard is no sample
    assert "evenly spread" not in complete_page + damaged_page
    monkeypatch.setattr("rollout.report_data.MAX_SHARDS", 2)
    page = page_of(complete, tmp_path)
    assert "Charts are drawn from 40 rollouts of 2 shards, evenly spread over the run." in page


def test_a_page_that_can_not_be_written_is_said_before_the_run_is_read(
    complete: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: Any) -> None:
        raise AssertionError("the run was read")

    monkeypatch.setattr("rollout.html_report.read_dataset", read)
    with pytest.raises(OutputError, match="can't write"):
        write_report(complete.path, tmp_path / "nothing" / "report.html")


def test_small_tails_and_rewards_that_are_no_number_are_counted_apart(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = DatasetWriter.open(Storage.open(path), make_record())
    writer.append_plan(plan("u000000", "a"))
    rows = [make_row("a", i, kind="top", lengths=[4, 4]) for i in range(3)]
    for row, tail, reward in zip(rows, (1e-9, 0.5, 0.0), (float("inf"), 0.5, None), strict=True):
        row.tail_mass = np.array([tail, 0.25], np.float32)
        row.reward = reward
    writer.commit_part("u000000", rows)
    data = collect(read_dataset(Storage.open(path)), full=True)
    assert data.small_tails == 2
    assert int(data.tails.sum()) == 4
    frame = data.reward_frame()
    assert frame is not None
    assert frame.rows() == [(0, "user a", 0.5)]


def test_runs_without_rollouts_rewards_or_supports(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = DatasetWriter.open(Storage.open(path), make_job_record(make_model(tmp_path / "m")))
    words = " ".join(Page(page_of(PreparedRun(path=path, rows=[]), tmp_path)).words)
    assert "empty: nothing is planned" in words
    assert "no rollout has a reward" in words
    writer.append_plan([plan_of(0)])
    rows = make_rows(0)[:1]
    for row in rows:
        row.reward = None
        row.support_kind, row.support_offsets, row.support_entries = "none", None, None
    writer.commit_part("u000000", rows)
    words = " ".join(Page(page_of(PreparedRun(path=path, rows=rows), tmp_path)).words)
    assert "no rollout has a support" in words
    assert "3 rollouts not sampled" in words


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [("nothing/report.html", 4, "can't write"), ("out.html", 7, "is not a dataset")],
)
def test_what_does_not_work_is_one_sentence(
    tmp_path: Path, complete: PreparedRun, target: str, code: int, said: str
) -> None:
    path = complete.path if code == 4 else tmp_path
    result = CliRunner().invoke(main, ["report", str(path), "-o", str(tmp_path / target)])
    assert (result.exit_code, len(result.output.splitlines())) == (code, 1)
    assert said in result.output
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_says_what_to_install(
    complete: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(main, ["report", str(complete.path), "-o", str(tmp_path / "x")])
    assert result.exit_code == 2
    assert "pip install rollout[report]" in result.output


def test_memory_stays_small(complete: PreparedRun, tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "rollout"
    subprocess.run([script, "report", complete.path, "-o", tmp_path / "x.html"], check=True)
    # kilobytes, of the largest child so far
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2_000_000


@pytest.mark.browser
def test_a_browser_shows_every_chart(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    assert browser is not None, "install Chromium: make test-browser"
    run = half_run(tmp_path / "run")
    page = tmp_path / "report.html"
    write_report(run.path, page)
    common = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}",
        # nothing can be looked up: a page that needs the network would come out incomplete
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--window-size=1250,2600",
    ]
    shot = tmp_path / "shot.png"
    subprocess.run([*common, f"--screenshot={shot}", page.as_uri()], check=True, timeout=120)
    found = subprocess.run(
        [*common, "--dump-dom", page.as_uri()],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    ).stdout
    assert found.count("</svg>") == 8
    assert "INCOMPLETE: 38 rollouts not sampled" in found
    import matplotlib.image

    pixels = matplotlib.image.imread(shot)[..., :3]
    assert pixels.shape[:2] == (2600, 1250)
    # each chart left ink in its own colours
    for colour in ((0x3B, 0x6E, 0xA8), (0xD9, 0x80, 0x32), (0x4C, 0x9A, 0x5B), (0xC0, 0x45, 0x3E)):
        close = np.abs(pixels * 255 - np.array(colour)).max(axis=-1) < 12
        assert int(close.sum()) > 300, colour
    assert math.isclose(float(pixels[-1, 0].min()), 1.0)
