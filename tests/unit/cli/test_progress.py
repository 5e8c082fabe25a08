"""Progress on a terminal and in a log."""

import io

import pytest

from gapless.cli.progress import PlainProgress, show_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_one_line_when_a_stage_ends(clock):
    out = io.StringIO()
    progress = PlainProgress(out, clock)
    for done in range(4):
        progress("graphs", done, 3)
        clock.now += 0.5
    assert out.getvalue() == "graphs: 3/3 (1.5 s)\n"


def test_long_stage_reports_every_five_seconds(clock):
    out = io.StringIO()
    progress = PlainProgress(out, clock)
    for done in range(13):
        progress("graphs", done, 12)
        clock.now += 1
    assert out.getvalue().splitlines() == ["graphs: 5/12", "graphs: 10/12", "graphs: 12/12 (12.0 s)"]


def test_stages_are_timed_apart(clock):
    out = io.StringIO()
    progress = PlainProgress(out, clock)
    progress("weights", 0, 1)
    clock.now += 2
    progress("weights", 1, 1)
    progress("graphs", 0, 2)
    clock.now += 1
    progress("graphs", 2, 2)
    assert out.getvalue().splitlines() == ["weights: 1/1 (2.0 s)", "graphs: 2/2 (1.0 s)"]


def test_stage_that_comes_twice_starts_anew(clock):
    out = io.StringIO()
    progress = PlainProgress(out, clock)
    progress("graphs", 1, 1)
    clock.now += 60
    progress("graphs", 1, 1)
    assert out.getvalue().splitlines() == ["graphs: 1/1 (0.0 s)"] * 2


def test_bytes_are_shown_in_percent(clock):
    out = io.StringIO()
    PlainProgress(out, clock)("weights", 98_000_000, 98_000_000)
    assert out.getvalue() == "weights: 100% (0.0 s)\n"


def test_empty_stage_is_a_line_and_no_division_by_zero(clock):
    out = io.StringIO()
    PlainProgress(out, clock)("graphs", 0, 0)
    assert out.getvalue() == "graphs: 0/0 (0.0 s)\n"


def test_pipe_gets_no_control_characters():
    out = io.StringIO()
    with show_progress(stream=out) as progress:
        progress("weights", 1, 2)
        progress("weights", 2, 2)
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().startswith("weights: 2/2")


def test_terminal_gets_a_bar_per_stage():
    out = Terminal()
    with show_progress(stream=out) as progress:
        for stage in ("weights", "graphs"):
            progress(stage, 0, 4)
            progress(stage, 4, 4)
    text = out.getvalue()
    assert "weights" in text
    assert "graphs" in text
    assert text.count("4/4") >= 2


def test_bars_are_closed_when_the_block_fails():
    out = Terminal()

    def load():
        with show_progress(stream=out) as progress:
            progress("weights", 1, 4)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        load()
    assert out.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_disabled_progress_is_silent():
    out = io.StringIO()
    with show_progress(enabled=False, stream=out) as progress:
        progress("weights", 4, 4)
    assert out.getvalue() == ""
