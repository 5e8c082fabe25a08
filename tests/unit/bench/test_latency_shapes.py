"""Which shapes fit a model, how lengths shrink, and what padding a report shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.bench.graphs import GraphsOptions, padding_by_phase
from gapless.bench.latency import LatencyOptions, decode_shape, measure_latency, timed_generate
from gapless.bench.meta import command_text
from gapless.bench.throughput import ThroughputOptions, fitting_lengths, offline_runs, summary
from gapless.bench.workload import Lengths, PromptSource
from gapless.errors import ConfigError


def test_decode_has_the_shape_of_the_scripts_for_other_engines() -> None:
    shape = decode_shape(8192, LatencyOptions())
    assert (shape.prompt, shape.short, shape.more) == (64, 8, 200)


@given(st.integers(3, 400))
@settings(max_examples=50, deadline=None)
def test_decode_always_fits_and_has_something_to_measure(max_model_len: int) -> None:
    shape = decode_shape(max_model_len, LatencyOptions())
    assert shape.total <= max_model_len
    assert min(shape.prompt, shape.short, shape.more) >= 1


@pytest.mark.parametrize("max_model_len", [1, 2])
def test_a_model_without_room_for_decode_is_refused(max_model_len: int) -> None:
    with pytest.raises(ConfigError, match="3 positions"):
        decode_shape(max_model_len, LatencyOptions())
    decode_shape(max_model_len, LatencyOptions(decode_batches=()))


@pytest.mark.parametrize(
    ("max_model_len", "lengths", "notes"), [(2048, "128:1024", 0), (1152, "128:1024", 0), (628, "128:500", 1)]
)
def test_prompt_lengths_leave_room_for_the_answer(max_model_len: int, lengths: str, notes: int) -> None:
    found, said = fitting_lengths(max_model_len, ThroughputOptions())
    assert (str(found), len(said)) == (lengths, notes)


def test_an_answer_that_ended_early_is_not_timed() -> None:
    choice = SimpleNamespace(token_ids=(1,), error=None, finish_reason="stop")
    output = SimpleNamespace(request_id="0-0", outputs=[choice])
    llm: Any = SimpleNamespace(generate=lambda prompts, params: [output])
    with pytest.raises(RuntimeError, match="ended after 1 of 5 tokens: stop"):
        timed_generate(llm, [[1]], 5)


def test_decode_that_is_lost_in_noise_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SimpleNamespace(vocab_size=50, max_model_len=64, max_num_reqs=4, block_size=16)
    core = SimpleNamespace(scheduler=SimpleNamespace(allocator=SimpleNamespace(capacity_tokens=128)))
    llm: Any = SimpleNamespace(runner=runner, core=core, reset_report=lambda: None)
    seconds = {8: 2.0, 48: 1.0}  # the long run was faster
    monkeypatch.setattr("gapless.bench.latency.timed_generate", lambda llm, prompts, tokens: seconds[tokens])
    options = LatencyOptions(prefill_tokens=(), decode_batches=(1, 4, 5))
    found = measure_latency(llm, options)
    assert [row["tokens_per_s"] for row in found["rows"]] == [None]
    assert "decode of 1 requests is lost in noise" in found["notes"][1]
    assert "4 requests left out: they need 256 tokens of cache and there are 128" in found["notes"][2]
    assert "5 requests left out: a step holds 4" in found["notes"][3]


def test_offline_runs_of_any_engine_get_the_same_prompts_and_a_warm_up() -> None:
    seen: list[list[list[list[int]]]] = []
    for _ in range(2):
        calls: list[list[list[int]]] = []

        def run(prompts: list[list[int]], tokens: int, calls: list[list[list[int]]] = calls) -> float:
            assert tokens == 4
            calls.append(prompts)
            return 2.0

        options = ThroughputOptions(requests=3, output_tokens=4, repeats=2)
        rows = offline_runs(run, PromptSource(100), Lengths.parse("5:9"), options)
        assert [row["output_tokens_per_s"] for row in rows] == [6.0, 6.0]
        assert summary(rows)["requests_per_s"]["median"] == 1.5
        seen.append(calls)
    assert [len(prompts) for prompts in seen[0]] == [8, 3, 3]
    assert seen[0] == seen[1]
    assert seen[0][1] != seen[0][2]


def test_padding_is_the_part_of_computed_rows_that_was_not_asked_for() -> None:
    steps = [
        {"phase": "decode", "bucket": 4, "count": 10, "padding": 10},
        {"phase": "decode", "bucket": 1, "count": 10, "padding": 0},
        {"phase": "prefill", "bucket": 64, "count": 1, "padding": 4},
    ]
    assert padding_by_phase(steps) == {"decode": 0.2, "prefill": 0.0625}
    assert padding_by_phase([]) == {}


def test_unknown_strategies_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="tc_piecewise"):
        GraphsOptions(strategies=("full", "quick"))


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["gapless", "bench", "latency"], "gapless bench latency"),
        (["/opt/x/gapless", "--model", "/data/m/qwen3-0.6b"], "gapless --model qwen3-0.6b"),
        (["gapless", "--output=/tmp/x.json", "--prefill", "1,2"], "gapless --output=x.json --prefill 1,2"),
        (["gapless", "--base-url", "https://host:8/v1"], "gapless --base-url https://host:8/v1"),
    ],
)
def test_commands_name_no_folders(argv: list[str], text: str) -> None:
    assert command_text(argv) == text
