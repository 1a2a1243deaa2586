"""A bar on a terminal, plain lines elsewhere."""

import io

import pytest

from rollout.progress import Progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


class Clock:
    """A clock that stands still until it is set."""

    now = 1000.0

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self.now


def update(progress: Progress, rollouts: int, tokens: int) -> None:
    progress.update(
        rollouts=rollouts, total=512, tokens=tokens, entries=3 * tokens, largest=rollouts * 10
    )


def test_plain_lines_every_ten_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream=stream, clock=clock)
    clock.now += 500  # the engine starts
    update(progress, 0, 0)
    for second in range(1, 26):
        clock.now += 1
        update(progress, second, second * 100)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "10/512 rollouts, 100 tokens/s, mean support 3.0, largest step 100",
        "20/512 rollouts, 100 tokens/s, mean support 3.0, largest step 200",
        "25/512 rollouts, 100 tokens/s, mean support 3.0, largest step 250",
    ]


def test_a_short_job_still_says_what_it_did() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream=stream, clock=clock)
    update(progress, 0, 0)
    clock.now += 2
    update(progress, 8, 100)
    progress.close()
    progress.close()
    assert stream.getvalue() == "8/512 rollouts, 50 tokens/s, mean support 3.0, largest step 80\n"


def test_nothing_to_show_shows_nothing() -> None:
    stream = io.StringIO()
    Progress(stream=stream).close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_run_that_has_nothing_to_do_shows_nothing(kind: type[io.StringIO]) -> None:
    stream, clock = kind(), Clock()
    progress = Progress(stream=stream, clock=clock)
    for _ in range(3):
        progress.update(rollouts=0, total=0, tokens=0, entries=0, largest=0)
        clock.now += 11
    progress.close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_what_others_did_leaves_no_line_standing(kind: type[io.StringIO]) -> None:
    stream, clock = kind(), Clock()
    progress = Progress(stream=stream, clock=clock)
    progress.update(rollouts=0, total=512, tokens=0, entries=0, largest=0)
    clock.now += 1
    progress.update(rollouts=0, total=0, tokens=0, entries=0, largest=0)
    progress.close()
    # on a terminal the bar is wiped
    assert stream.getvalue().rstrip("\r").split("\r")[-1].strip() == ""
    assert not stream.getvalue().endswith("\n")


def test_the_first_counts_have_no_rate() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream=stream, clock=clock)
    update(progress, 1, 100)
    progress.close()
    assert "1/512 rollouts, 0 tokens/s" in stream.getvalue()


def test_a_bar_on_a_terminal() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream=stream, clock=clock)
    update(progress, 0, 0)
    for second in range(1, 5):
        clock.now += 1
        update(progress, second * 64, second * 100)
    progress.close()
    text = stream.getvalue()
    assert "\r" in text
    last = text.rstrip("\n").split("\r")[-1]
    assert "256/512" in last
    assert "50%" in last
    assert "100 tokens/s, mean support 3.0, largest step 2560" in last
    assert text.endswith("\n")
