"""An engine over traced forwards: the same tokens as without, few pieces, no new trace while it serves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import BatchMaker, open_tiny, write_config

from gapless.attention.base import ATTENTION_OP
from gapless.config import EngineConfig
from gapless.engine.build import OpenedEngine, _Build, open_engine
from gapless.errors import CompileError, ConfigError
from gapless.graphs.piecewise import FuseOutputCast, register_pass, unregister_pass
from gapless.models.decoder import Decoder

BOTH = {"cuda_graph_backend_prefill": "tc_piecewise", "cuda_graph_backend_decode": "tc_piecewise"}
SIZES = {"cuda_graph_bs_prefill": [8, 32], "cuda_graph_bs_decode": [1, 4]}
LIMITS = {"max_running_requests": 2, "chunked_prefill_size": 8, "kv_cache_tokens": 64}
MODE_3 = {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}


def greedy(opened: OpenedEngine, *, steps: int = 6) -> list[list[int]]:
    """Prompts of several lengths and chunks, then decodes with a batch that shrinks."""
    maker = BatchMaker()
    prompts = [[5, 6, 7], [1], list(range(2, 21)), [90, 3, 8, 8, 1]]
    sequences = [maker.sequence(prompt) for prompt in prompts]
    work = [(s, min(8, len(s.token_ids) - s.num_computed_tokens)) for s in sequences]
    made: dict[int, list[int]] = {id(s): [] for s in sequences}
    for step in range(steps + 3):
        batch = maker.batch([(s, n) for s, n in work if n])
        result = opened.runner.execute(batch)
        for entry, token in zip(batch.sampled_entries, result.token_ids, strict=True):
            entry.sequence.token_ids.append(token)
            made[id(entry.sequence)].append(token)
        left = sequences[: 4 - step // 3]
        work = [(s, min(8, len(s.token_ids) - s.num_computed_tokens)) for s in left]
    return list(made.values())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return greedy(open_tiny(tmp_path_factory.mktemp("eager"), enforce_eager=True))


@pytest.mark.parametrize(
    "options",
    [
        BOTH,
        {"compilation_config": MODE_3},
        {"compilation_config": {"mode": 3, "cudagraph_mode": "FULL"}},
        {"cuda_graph_backend_prefill": "breakable", "cuda_graph_backend_decode": "tc_piecewise"},
        {"cuda_graph_backend_prefill": "tc_piecewise", "cuda_graph_backend_decode": "disabled"},
        {"compilation_config": {"mode": 3, "cudagraph_mode": "FULL", "splitting_ops": []}},
        {**BOTH, "compilation_config": {"splitting_ops": ["aten::mm"]}},
    ],
    ids=["both", "mode_3", "full", "decode_only", "prefill_only", "no_splits", "own_splits"],
)
def test_greedy_tokens_are_those_of_eager_and_of_padded_eager(
    tmp_path: Path, options: dict[str, Any], expected: list[list[int]]
) -> None:
    opened = open_tiny(tmp_path, **SIZES, **options)
    assert greedy(opened) == expected
    with opened.runner.padded_eager():
        assert greedy(opened) == expected
    compiled = opened.runner.report()["compile"]
    assert compiled["recompilations"] == 0
    assert compiled["traces"] == 1
    assert compiled["distinct_pieces"] <= 4


def test_the_report_says_what_was_compiled_and_what_ran(tmp_path: Path) -> None:
    opened = open_tiny(tmp_path, **SIZES, **BOTH)
    greedy(opened)
    report = opened.runner.report()
    assert report["compile"]["split_ops"] == 2
    assert report["compile"]["pieces"] == 3
    assert report["plan"]["tc_compiler"] == "eager"
    assert {row["strategy"] for row in report["graphs"] if row["phase"] == "prefill"} == {"tc_piecewise"}
    assert {row["breaks"] for row in report["graphs"] if row["phase"] == "prefill"} == {2}
    steps = {(step["phase"], step["strategy"]) for step in report["steps"]}
    assert {("prefill", "tc_piecewise"), ("decode", "tc_piecewise")} <= steps
    assert report["eager"] == []
    assert report["startup"]["seconds"]["compile"] > 0


def test_compilation_is_a_stage_of_the_start_up_before_the_captures(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    config = EngineConfig.from_sources(
        python={"model": write_config(tmp_path), "load_format": "dummy", "device": "cpu", **LIMITS, **BOTH}
    )
    open_engine(config, lambda stage, done, total: seen.append((stage, done, total)))
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages[-2:] == ["compile", "capture"]
    assert [event for event in seen if event[0] == "compile"] == [("compile", 0, 1), ("compile", 1, 1)]


def test_seconds_of_a_stage_are_without_those_of_stages_inside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU the forward is traced and kernels are compiled while the cache is sized."""
    now = [100.0]
    monkeypatch.setattr("gapless.engine.build.time.perf_counter", lambda: now[0])
    build = _Build.__new__(_Build)
    build.seconds = {"load": 5.0}
    with build._stage("cache"):
        now[0] += 1
        for name, seconds in (("compile", 3), ("kernels", 4)):
            with build._stage(name):
                now[0] += seconds
        now[0] += 2
    assert build.seconds == {"load": 5.0, "compile": 3.0, "kernels": 4.0, "cache": 3.0}


def test_nothing_is_compiled_by_default(tmp_path: Path) -> None:
    assert open_tiny(tmp_path).runner.report()["compile"] is None


def test_one_request_of_one_token_at_a_time(tmp_path: Path) -> None:
    opened = open_tiny(tmp_path, max_running_requests=1, chunked_prefill_size=1, kv_cache_tokens=64, **BOTH)
    maker = BatchMaker()
    sequence = maker.sequence([3, 4, 5])
    for _ in range(3):
        result = opened.runner.execute(maker.batch([(sequence, 1)]))
    assert len(result.token_ids) == 1
    assert opened.runner.report()["compile"]["recompilations"] == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_inductor_gives_the_same_tokens(tmp_path: Path, expected: list[list[int]]) -> None:
    opened = open_tiny(tmp_path, cuda_graph_tc_compiler="inductor", **SIZES, **BOTH)
    assert greedy(opened) == expected
    with opened.runner.padded_eager():
        assert greedy(opened) == expected
    report = opened.runner.report()
    assert report["plan"]["tc_compiler"] == "inductor"
    assert report["compile"]["distinct_pieces"] <= 4
    assert report["compile"]["recompilations"] == 0
    # One node per piece, and the copy of the hidden states to where the head reads them.
    assert {row["nodes"] for row in report["graphs"] if row["phase"] == "prefill"} == {4}


def test_partition_by_inductor_is_refused_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        open_tiny(tmp_path, compilation_config={"use_inductor_graph_partition": True})


@pytest.mark.parametrize(
    ("names", "message"),
    [(["gapless::no_such_op"], "no such operator"), (["attention"], "'attention', and there is no such")],
)
def test_split_ops_that_do_not_exist_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_tiny(tmp_path, compilation_config={"splitting_ops": names}, **BOTH)


@pytest.mark.parametrize(
    ("options", "switch"),
    [
        (BOTH, "--cuda-graph-backend-prefill=disabled --cuda-graph-backend-decode=disabled"),
        ({"compilation_config": MODE_3}, "--cuda-graph-backend-prefill=disabled"),
    ],
)
def test_a_model_that_cannot_be_traced_fails_at_start_and_names_the_flags_that_help(
    tmp_path: Path, options: dict[str, Any], switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Decoder.embed

    def embed(self: Decoder, input_ids_T: torch.Tensor) -> torch.Tensor:
        return honest(self, input_ids_T) * (1 if input_ids_T.sum().item() >= 0 else 2)

    monkeypatch.setattr(Decoder, "embed", embed)
    with pytest.raises(CompileError, match=r"test_piecewise_engine\.py:\d+ in embed") as caught:
        open_tiny(tmp_path, **options)
    assert f"start with {switch}\n" in str(caught.value)
    flags = {"cuda_graph_backend_prefill": "disabled", "cuda_graph_backend_decode": "disabled"}
    open_tiny(tmp_path / "off", **flags)


def test_a_whole_graph_pass_makes_piecewise_full_and_keeps_the_tokens(
    tmp_path: Path, expected: list[list[int]]
) -> None:
    register_pass(FuseOutputCast(ops=(ATTENTION_OP,), out_argument="out_THD"))
    try:
        opened = open_tiny(tmp_path, compilation_config={"mode": 3}, **SIZES)
    finally:
        unregister_pass("fuse_output_cast")
    assert greedy(opened) == expected
    report = opened.runner.report()
    assert report["plan"]["prefill"]["strategy"] == "full"
    assert report["plan"]["is_split"] is False
    assert (report["compile"]["pieces"], report["compile"]["split_ops"]) == (1, 0)
    assert report["compile"]["passes"] == {"fuse_output_cast": 0}
    reasons = [d["reason"] for d in report["plan"]["decisions"] if d["rule"] == "whole_graph"]
    assert any("fuse_output_cast" in reason for reason in reasons)
