"""Plans and reports as text."""

import copy
import io

import pytest
from cli_fakes import REPORT

from gapless.cli.render import capture_line, make_console, plan_lines, print_report, sizes_text, startup_line


@pytest.fixture
def text_of():
    def render(report):
        out = io.StringIO()
        print_report(make_console(out), report)
        return out.getvalue()

    return render


def test_table_has_one_row_per_kind_of_step_in_the_order_of_a_request(text_of):
    lines = text_of(REPORT).splitlines()
    rows = [
        line.split() for line in lines if line.split() and line.split()[0] in ("prefill", "head", "decode")
    ]
    assert [(row[0], row[1]) for row in rows] == [
        ("prefill", "breakable"),
        ("head", "full"),
        ("decode", "full"),
        ("decode", "full"),
        ("prefill", "eager:"),
    ]


@pytest.mark.parametrize(
    "expected",
    [
        "64 tokens",
        "4 requests",
        "25%",
        "6%",
        "0%",
        "eager: larger_than_largest_size",
        "14 graph replays, 2 eager",
    ],
)
def test_table_says_bucket_padding_and_why_eager(text_of, expected):
    assert expected in text_of(REPORT)


def test_report_without_any_step_is_a_table_of_zeros(text_of):
    report = {**REPORT, "steps": [], "eager": [], "graphs": []}
    assert "0 graph replays, 0 eager" in text_of(report)
    assert "no graphs captured" in text_of(report)


def test_what_the_prefix_cache_found_is_shown_where_there_is_one(text_of):
    cache = {"queries": 64, "hits": 16, "hit_rate": 0.25, "blocks": 7}
    assert "prefix cache: 16 of 64 prompt tokens (25%)" in text_of({**REPORT, "prefix_cache": cache})
    assert "prefix cache" not in text_of({**REPORT, "prefix_cache": None})
    assert "prefix cache" not in text_of(REPORT)


def test_failed_captures_are_shown(text_of):
    report = {**REPORT, "failures": [{"graph": "prefill 64", "message": "aten.nonzero reads [data]"}]}
    assert "prefill 64: aten.nonzero reads [data]" in text_of(report)


def test_brackets_in_reasons_are_printed(text_of):
    report = {**REPORT, "eager": [{"phase": "prefill", "reason": "[odd]", "count": 1}]}
    assert "[odd]" in text_of(report)


def test_pipe_output_has_no_control_characters_and_no_folded_rows(text_of):
    text = text_of(
        {**REPORT, "eager": [{"phase": "prefill", "reason": "a_rather_long_reason_" * 3, "count": 1}]}
    )
    assert "\x1b" not in text
    assert "a_rather_long_reason_" * 3 in text


def test_capture_line_names_driver_memory_only_where_there_is_some():
    assert capture_line(REPORT) == "3 graphs captured in 1.2 s, pool 3.0 MiB"
    memory = {**REPORT["memory"], "driver_bytes": 2**20}
    assert capture_line({**REPORT, "memory": memory}).endswith("driver 1.0 MiB")


def test_the_stages_of_the_start_are_shown_where_an_engine_started(text_of):
    seconds = {"load": 1.157, "kernels": 0.725, "cache": 0.545, "capture": 4.264}
    line = "started in 6.7 s: load 1.2, kernels 0.7, cache 0.5, capture 4.3"
    assert startup_line(seconds) == line
    assert "started in 2.1 s: load 0.5, cache 0.1, capture 1.5" in text_of(REPORT)
    without = {name: value for name, value in REPORT.items() if name != "startup"}
    assert "started in" not in text_of(without)


def test_plan_shows_what_changed_and_keeps_the_defaults_quiet():
    text = "\n".join(plan_lines(REPORT["plan"]))
    assert "full → breakable (attention_support: attention backend x supports UNIFORM_BATCH)" in text
    assert "the default mode" not in text
    assert "size 99 dropped: above the reachable 4" in text
    assert "16 sizes, 4 to 64 tokens" in text
    assert "1, 2, 4 requests" in text


def test_plan_shows_every_decision_when_asked():
    assert "the default mode" in "\n".join(plan_lines(REPORT["plan"], every_decision=True))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"mode": None}, "set per phase"),
        ({"decode": {"strategy": "disabled", "sizes": [], "dropped": []}}, "every step runs eagerly"),
        ({"decode": {"strategy": "full", "sizes": [], "dropped": []}}, "in the graphs of prefill"),
        ({"uniform_query_len": 3}, "requests of 3 tokens"),
    ],
)
def test_plan_variants(change, expected):
    assert expected in "\n".join(plan_lines({**copy.deepcopy(REPORT["plan"]), **change}))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1], "1"),
        ([1, 2], "1, 2"),
        (list(range(1, 9)), "1, 2, 3, 4, 5, 6, 7, 8"),
        (list(range(1, 10)), "9 sizes, 1 to 9"),
    ],
)
def test_long_lists_of_sizes_are_shortened(sizes, expected):
    assert sizes_text(sizes) == expected
