"""Start-up when sizes cannot be captured: they stay eager, are tried once, and explained once per cause."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_model import VOCAB_SIZE, BatchMaker, open_tiny

from gapless.config import EngineConfig
from gapless.engine import build
from gapless.engine.graph_set import GraphSet
from gapless.engine.runner import ModelRunner
from gapless.errors import MemoryLimitError
from gapless.graphs.device import get_device

PREFILL_SIZES = (4, 8, 12, 16, 20, 24, 28, 32)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is measured before the cache is made, as on a GPU; the emulated device gives the numbers."""
    defaults = EngineConfig.with_device_defaults

    def without_cache_size(config: EngineConfig, device_type: str) -> EngineConfig:
        return dataclasses.replace(defaults(config, device_type), kv_cache_tokens=None)

    monkeypatch.setattr(EngineConfig, "with_device_defaults", without_cache_size)
    monkeypatch.setattr(build, "num_blocks_on_gpu", lambda *args, **kwargs: 33)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**40))
    monkeypatch.setattr(cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda device: None)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A runner all of whose sizes could be captured: what it draws is expected of the others."""
    return open_tiny(tmp_path_factory.mktemp("healthy")).runner


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often a forward of each number of tokens was recorded with a host read in it."""
    return Counter()


def break_sizes(monkeypatch: pytest.MonkeyPatch, attempts: Counter[int], bad: set[int]) -> None:
    """Forwards of ``bad`` numbers of tokens read from the host, which only an eager run can do."""
    forward = GraphSet._hidden_states

    def reads_from_host(self: GraphSet, views, *more):  # type: ignore[no-untyped-def]
        hidden_TE = forward(self, views, *more)
        if views.sizes["tokens"] in bad:
            if self.store.device.is_recording():
                attempts[views.sizes["tokens"]] += 1
            hidden_TE.sum().item()
        return hidden_TE

    monkeypatch.setattr(GraphSet, "_hidden_states", reads_from_host)


def tokens_of(runner: ModelRunner, num_tokens: int) -> list[int]:
    maker = BatchMaker()
    prompt = [(7 * i + 3) % VOCAB_SIZE for i in range(num_tokens)]
    return list(runner.execute(maker.batch([(maker.sequence(prompt), num_tokens)])).token_ids)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    "bad",
    [{32}, {28}, {32, 28, 8}, set(PREFILL_SIZES)],
    ids=lambda bad: "+".join(map(str, sorted(bad))),
)
def test_sizes_that_fail_while_memory_is_measured_stay_eager_and_are_tried_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    healthy: ModelRunner,
    attempts: Counter[int],
    bad: set[int],
) -> None:
    expected = {n: tokens_of(healthy, n) for n in (3, 27, 32)}
    break_sizes(monkeypatch, attempts, bad)
    caplog.set_level(logging.WARNING)
    runner = open_tiny(
        tmp_path, cuda_graph_backend_prefill="full", cuda_graph_backend_decode="full", max_running_requests=2
    ).runner
    # Decode of two requests has at most 2 tokens, so nothing but prefill is hit.
    assert attempts == dict.fromkeys(bad, 1)
    report = runner.report()
    assert {row["num_tokens"] for row in report["graphs"] if row["phase"] == "prefill"} == {
        *PREFILL_SIZES
    } - bad
    assert len(report["failures"]) == len(bad)
    warnings = [record.getMessage() for record in caplog.records if "stays eager" in record.getMessage()]
    assert len(warnings) == len(bad)
    assert sum("usual causes" in warning for warning in warnings) == 1
    assert sum("usual causes" in failure["message"] for failure in report["failures"]) == 1
    assert all("\n" not in warning for warning in warnings[1:])
    assert {n: tokens_of(runner, n) for n in expected} == expected
    eager = {row["reason"] for row in runner.report()["eager"] if row["phase"] == "prefill"}
    assert eager == ({"capture_failed"} if 32 in bad else set())
    assert runner.report()["startup"]["memory"]["estimate"]["pool_bytes"] > 0


@pytest.mark.usefixtures("measured")
def test_a_phase_without_any_graph_runs_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, healthy: ModelRunner, attempts: Counter[int]
) -> None:
    expected = [tokens_of(healthy, n) for n in (1, 2, 31, 32)]
    break_sizes(monkeypatch, attempts, set(range(1, 33)))
    runner = open_tiny(tmp_path, cuda_graph_backend_prefill="full", cuda_graph_backend_decode="full").runner
    assert {row["phase"] for row in runner.report()["graphs"]} == {"head", "sample", "sample_filtered"}
    assert [tokens_of(runner, n) for n in (1, 2, 31, 32)] == expected
    assert runner.report()["eager"] == [  # one token is a decode step
        {"phase": "decode", "reason": "capture_failed", "count": 1},
        {"phase": "prefill", "reason": "capture_failed", "count": 3},
    ]


@pytest.mark.parametrize("bad", [{32}, {32, 16, 4}, set(PREFILL_SIZES)], ids=len)
def test_without_a_measurement_the_hints_are_shown_once_too(
    tmp_path: Path, monkeypatch, caplog, attempts, bad: set[int]
) -> None:
    break_sizes(monkeypatch, attempts, bad)
    caplog.set_level(logging.WARNING)
    open_tiny(tmp_path, cuda_graph_backend_prefill="full", max_running_requests=2)
    warnings = [record.getMessage() for record in caplog.records if "stays eager" in record.getMessage()]
    assert ["usual causes" in warning for warning in warnings] == [True] + [False] * (len(bad) - 1)
    assert all(f"as size {max(bad)}: " in warning for warning in warnings[1:])
    assert all("test_capture_failures.py" in warning for warning in warnings)


def run_out_of_memory(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    """In every eager forward of so many tokens while graphs are captured; each size is warmed up."""
    forward = GraphSet._hidden_states

    def too_large(self: GraphSet, views, *more):  # type: ignore[no-untyped-def]
        if views.sizes["tokens"] == num_tokens and self.store.is_capturing:
            raise torch.OutOfMemoryError("out of memory")
        return forward(self, views, *more)

    monkeypatch.setattr(GraphSet, "_hidden_states", too_large)
    monkeypatch.setattr(get_device(torch.device("cpu")), "num_warmups", 1)


def test_a_size_whose_warm_up_runs_out_of_memory_stays_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, healthy: ModelRunner
) -> None:
    expected = tokens_of(healthy, 32)
    run_out_of_memory(monkeypatch, 32)
    runner = open_tiny(tmp_path, cuda_graph_backend_prefill="full").runner
    (failure,) = runner.report()["failures"]
    assert "too little memory even for an eager run" in failure["message"]
    assert tokens_of(runner, 32) == expected
    assert [row["reason"] for row in runner.report()["eager"]] == ["capture_failed"]


@pytest.mark.usefixtures("measured")
def test_a_largest_step_that_does_not_fit_while_memory_is_measured_ends_the_start(
    tmp_path: Path, monkeypatch
) -> None:
    run_out_of_memory(monkeypatch, 32)
    with pytest.raises(MemoryLimitError, match="--chunked-prefill-size"):
        open_tiny(tmp_path, cuda_graph_backend_prefill="full")
