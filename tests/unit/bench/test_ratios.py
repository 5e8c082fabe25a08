"""Merging parts of several engines, ratios, and targets; on made-up figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from ratios import TARGETS, UNITS, compare, figures_of, merge_parts, table_lines, unmeasured


def part(engine: str, model: str = "qwen3-0.6b", **values: Any) -> dict[str, Any]:
    return {"engine": engine, "model": model, **values}


def rate(value: float) -> dict[str, Any]:
    return {"output_tokens_per_s": {"median": value}}


def only(rows: list[dict[str, Any]], shape: str, peer: str | None) -> dict[str, Any]:
    (row,) = [row for row in rows if (row["shape"], row["peer"]) == (shape, peer)]
    return row


def test_a_ratio_is_ours_over_theirs() -> None:
    rows = compare([part("gapless", prefill_ms={64: 2.0}), part("vllm", prefill_ms={64: 10.0})])
    row = only(rows, "prefill 64", "vllm")
    assert (row["ours"], row["theirs"], row["ratio"]) == (2.0, 10.0, 0.2)
    assert (row["target"], row["met"], row["unit"]) == ("≤ 0.25", True, "ms")


def test_sizes_meet_whether_they_are_numbers_or_came_from_json() -> None:
    parts = [part("gapless", decode_ms={8: 1.0}), part("vllm", decode_ms={"8": 4.0})]
    assert compare(parts) == compare(json.loads(json.dumps(parts)))
    assert only(compare(parts), "decode 8", "vllm")["ratio"] == 0.25


@pytest.mark.parametrize(
    ("model", "ours", "theirs", "met"),
    [
        ("qwen3-0.6b", 1500.0, 1000.0, True),
        ("qwen3-0.6b", 1499.0, 1000.0, False),
        ("llama-3.1-8b", 1050.0, 1000.0, True),
        ("llama-3.1-8b", 1040.0, 1000.0, False),
    ],
)
def test_more_tokens_per_second_are_better(model: str, ours: float, theirs: float, met: bool) -> None:
    parts = [part("gapless", model, throughput=rate(ours)), part("vllm", model, throughput=rate(theirs))]
    row = only(compare(parts), "throughput", "vllm")
    assert row["met"] is met
    assert row["target"].startswith("≥")


@pytest.mark.parametrize(
    ("model", "shape", "values", "met"),
    [
        ("qwen3-0.6b", "prefill 128", {"prefill_ms": {128: 1.9}}, True),
        ("qwen3-0.6b", "prefill 128", {"prefill_ms": {128: 1.91}}, False),
        ("qwen3-0.6b", "prefill 4096", {"prefill_ms": {4096: 10.8}}, True),
        ("qwen3-0.6b", "decode 1", {"decode_ms": {1: 1.10}}, True),
        ("qwen3-0.6b", "decode 1", {"decode_ms": {1: 1.11}}, False),
        ("qwen3-0.6b", "start", {"start_s": 9.5}, False),
        ("llama-3.1-8b", "start", {"start_s": 14.9}, True),
        ("llama-3.1-8b", "decode 128", {"decode_ms": {128: 6.5}}, False),
    ],
)
def test_limits_need_no_peer(model: str, shape: str, values: dict[str, Any], met: bool) -> None:
    row = only(compare([part("gapless", model, **values)]), shape, None)
    assert row["met"] is met
    assert row["theirs"] is None
    assert row["ratio"] is None


def test_a_model_without_targets_gets_ratios_all_the_same() -> None:
    rows = compare([part("gapless", "own", start_s=1.0), part("vllm", "own", start_s=2.0)])
    assert [(row["ratio"], row["target"], row["met"]) for row in rows] == [(0.5, None, None)]


def test_figures_that_one_side_lacks_give_no_row() -> None:
    parts = [
        part("gapless", "own", prefill_ms={16: 1.0, 64: 2.0}),
        part("vllm", "own", prefill_ms={64: 3.0, 99: 4.0}, throughput=None, start_s=None),
        part("transformers-batch", "own", error="out of memory"),
        part("sglang", "other", prefill_ms={16: 1.0}),
    ]
    assert [(row["shape"], row["peer"]) for row in compare(parts)] == [("prefill 64", "vllm")]


def test_every_target_is_listed_until_it_is_measured() -> None:
    everything = unmeasured([part("gapless")], [])
    assert len(everything) == sum(len(target.shapes) for target in TARGETS["qwen3-0.6b"])
    parts = [part("gapless", start_s=1.0), part("vllm", start_s=9.0)]
    left = unmeasured(parts, compare(parts))
    assert set(everything) - set(left) == {
        "qwen3-0.6b: start against vllm",
        "qwen3-0.6b: start against its limit",
    }


@pytest.mark.parametrize("model", sorted(TARGETS.keys() - {"qwen3-30b-a3b"}))
def test_targets_cover_every_shape_that_is_measured(model: str) -> None:
    shapes = {shape for target in TARGETS[model] for shape in target.shapes}
    sizes = {f"prefill {n}" for n in (16, 64, 128, 256, 512, 1024, 2048, 4096)}
    assert shapes == sizes | {f"decode {n}" for n in (1, 8, 32, 128)} | {"start", "throughput"}
    assert {shape.split()[0] for shape in shapes} == UNITS.keys()


def test_merging_keeps_the_last_part_of_an_engine_and_model() -> None:
    first = {"parts": [part("gapless", start_s=1.0), part("vllm", start_s=9.0)]}
    second = {"parts": [part("gapless", start_s=2.0), part("gapless", "llama-3.1-8b", start_s=5.0)]}
    parts, notes = merge_parts([first, second])
    assert [(p["engine"], p["model"], p["start_s"]) for p in parts] == [
        ("gapless", "qwen3-0.6b", 2.0),
        ("vllm", "qwen3-0.6b", 9.0),
        ("gapless", "llama-3.1-8b", 5.0),
    ]
    assert notes == []


def test_merging_says_when_parts_are_of_different_machines_or_days() -> None:
    parts = [
        part("gapless", meta={"device": "H200", "date": "2026-11-29"}),
        part("vllm", meta={"device": "H100", "date": "2026-11-29"}),
    ]
    _, notes = merge_parts([{"parts": parts}])
    assert notes == ["parts were not measured in one run: device is H100 and H200"]


def test_figures_have_one_name_each() -> None:
    found = figures_of(part("vllm", prefill_ms={"16": 1}, decode_ms={1: 2}, start_s=3, throughput=rate(4)))
    assert found == {"prefill 16": 1.0, "decode 1": 2.0, "start": 3.0, "throughput": 4.0}


def test_table_shows_what_was_missed() -> None:
    parts = [part("gapless", prefill_ms={128: 3.0}), part("vllm", prefill_ms={128: 6.0})]
    lines = table_lines(compare(parts))
    assert "peer" in lines[0]
    assert sum("MISSED" in line for line in lines) == 2
    assert any("0.500" in line and "vllm" in line for line in lines)
    assert any("(limit)" in line for line in lines)
