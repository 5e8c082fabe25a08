"""The report page: self-contained, escaped, with a plot per question; the same facts as text."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gapless.graphs.check_report import CheckReport
from gapless.graphs.graphed import Graphed, Input, graphed
from gapless.graphs.report_html import render_html, render_text
from gapless.graphs.svg import Series, bar_chart
from gapless.graphs.timeline import NUM_BINS, Timeline


@pytest.fixture(scope="module")
def made() -> Graphed:
    made = graphed(lambda x: x * 2, inputs={"x": Input(dims={0: "rows"})}, sizes=[2, 4, 8])
    made.capture(torch.randn(3, 2))
    for n in (1, 2, 3, 3, 9):
        made(torch.randn(n, 2))
    return made


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.S)]


def bars(svg: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in svg.iter("title")]


def test_the_page_is_self_contained(made: Graphed) -> None:
    page = render_html(made.report())
    assert page.startswith("<!doctype html>")
    for outside in ("http://", "https://", "<script", "<link", "@import", "url(", "src="):
        assert outside not in page


def test_there_is_a_plot_for_coverage_waste_memory_time_and_history(made: Graphed) -> None:
    page = render_html(made.report())
    for caption in (
        "Ladder coverage",
        "Padding waste",
        "Memory per size",
        "Capture time per size",
        "Over time",
    ):
        assert caption in page
    coverage, waste, memory, seconds, history = svgs(page)
    assert bars(coverage) == ["2: replays 2", "4: replays 2", "larger_than_largest: eager, by reason 1"]
    assert bars(waste) == ["2: real 3", "2: padding 1", "4: real 6", "4: padding 2"]
    assert bars(memory)[0].startswith("8: pool growth")
    assert len(bars(seconds)) == 3
    assert bars(history) == ["0 s: replays 4", "0 s: eager 1"]


def test_totals_tables_and_decisions_are_shown(made: Graphed) -> None:
    page = html.unescape(render_html(made.report(), title="My graphs"))
    assert "<h1>My graphs</h1>" in page
    for text in ("<b>3</b>graphs", "<b>4</b>replays", "<b>1</b>eager steps", "<b>25.0%</b>padding"):
        assert text in page
    assert "<td>larger_than_largest</td>" in page
    assert "it has no eager break" in page


def test_text_says_the_same(made: Graphed) -> None:
    text = render_text(made.report())
    assert text.splitlines()[0].startswith("graphs 3, replays 4, eager steps 1, padding 25.0%")
    assert "forward 2: 2 replays, 25% padding" in text
    assert "forward 8: 0 replays, not used" in text
    assert "eager forward: 1 larger_than_largest" in text


def test_names_and_messages_are_escaped(made: Graphed) -> None:
    report = made.report()
    report["plan"]["callable"] = "<b>&"
    report["failures"] = [{"graph": "<i>", "message": "a < b"}]
    page = render_html(report)
    assert "<h1>Graphs of &lt;b&gt;&amp;</h1>" in page
    assert "<td>a &lt; b</td>" in page
    assert "<i>" not in page


def test_a_report_without_steps_or_graphs_is_a_page_too() -> None:
    made = graphed(lambda x: x, inputs={"x": Input(dims={0: "rows"})}, strategy="disabled", sizes=2)
    page = render_html(made.report())
    assert "No step has run yet." in page
    assert svgs(page) == []


def test_verification_is_part_of_the_page(made: Graphed) -> None:
    report = CheckReport(name="x")
    report.add("lookup", "full", "", None)
    report.add("frozen values", "full", "rows=2", "a < b")
    page = render_html(made.report(), check=report.to_dict())
    assert "Some checks failed." in page
    assert "<td>a &lt; b</td>" in page
    assert "All checks passed." in render_html(made.report(), check=made.verify().to_dict())


def test_two_dynamic_dimensions_are_counted_in_cells() -> None:
    made = graphed(
        lambda x: x * 2, inputs={"x": Input(dims={0: "b", 1: "s"})}, sizes={"b": [2], "s": [4, 8]}
    ).capture(torch.randn(2, 3))
    made(torch.randn(2, 5))
    coverage, *_ = svgs(render_html(made.report()))
    assert bars(coverage) == ["16: replays 1"]


# --- charts ------------------------------------------------------------------------------------------------


@example([(5e-324, 0.0)])
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)), max_size=60))
def test_bars_lie_inside_the_plot_and_their_heights_add_up(values: list[tuple[float, float]]) -> None:
    series = [Series("a", [v for v, _ in values]), Series("b", [v for _, v in values])]
    text = bar_chart([str(i) for i in range(len(values))], series, label="l", axis="x")
    svg = ElementTree.fromstring(text[: text.index("</svg>") + 6])
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for rect in svg.iter("rect"):
        x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0
        assert x + w <= width
        assert y >= 0
        assert y + h <= height
        assert h <= height
    lines = [float(line.attrib["y1"]) for line in svg.iter("line")]
    assert 2 <= len(lines) <= 8
    assert all(float(rect.attrib["y"]) >= min(lines) - 0.06 for rect in svg.iter("rect"))


@pytest.mark.parametrize("count", [1, 18, 19, 58, 120])
def test_labels_are_thinned_out(count: int) -> None:
    text = bar_chart([f"c{i}" for i in range(count)], [Series("a", [1] * count)], label="l", axis="x")
    shown = re.findall(r">c\d+</text>", text)
    assert 1 <= len(shown) <= 18
    assert shown[0] == ">c0</text>"


# --- the history -------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5000), st.booleans()), max_size=80))
def test_history_keeps_every_count_in_a_bounded_number_of_bins(steps: list[tuple[float, bool]]) -> None:
    clock = Clock()
    timeline = Timeline(clock=clock)
    for pause, is_replay in steps:
        clock.now += pause
        timeline.count(is_replay=is_replay)
    found: dict[str, Any] = timeline.to_dict()
    assert sum(found["replays"]) == sum(is_replay for _, is_replay in steps)
    assert sum(found["eager"]) == sum(not is_replay for _, is_replay in steps)
    assert len(found["replays"]) == len(found["eager"]) <= NUM_BINS
    elapsed = sum(pause for pause, _ in steps[1:])
    assert found["bin_s"] * NUM_BINS > elapsed


def test_history_places_steps_in_time_and_can_be_cleared() -> None:
    clock = Clock()
    timeline = Timeline(clock=clock)
    for second in (0, 1, 1.5, 3):
        clock.now = 100 + second
        timeline.count(is_replay=second != 3)
    assert timeline.to_dict() == {"bin_s": 1.0, "replays": [1, 2, 0, 0], "eager": [0, 0, 0, 1]}
    timeline.clear()
    assert timeline.to_dict()["replays"] == []
