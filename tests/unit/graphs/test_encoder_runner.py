"""The encoder runner on encoders of its own: images of one shape, and a toy with segments of any length."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from toy_encoder import CPU, WIDTH, ToyEncoder, assert_same, rows, runner_of

from gapless.errors import ConfigError, GraphError
from gapless.graphs.encoder import (
    EncoderFallback,
    ImageBatch,
    encoder_graphs,
)
from gapless.graphs.encoder_budgets import Pack, plan_packs
from gapless.graphs.encoder_packed import BudgetGraphs
from gapless.graphs.modes import Phase, Strategy
from gapless.graphs.store import StoreState


@pytest.mark.parametrize("mode", ["budget", "exact", "off"])
@pytest.mark.parametrize("lengths", [(5,), (4, 6), (5, 5), (1, 1, 1), (9, 30, 2), (32, 32)], ids=str)
def test_every_mode_gives_each_item_its_rows_in_order(mode: str, lengths: tuple[int, ...]) -> None:
    runner = runner_of(mode=mode)
    items = rows(*lengths)
    assert_same(runner.run(items), runner.eager(items), atol=1e-5)
    assert_same(runner.run(items), runner.eager(items), atol=1e-5)


@pytest.mark.parametrize("mode", ["budget", "exact", "off"])
def test_no_items_are_no_work(mode: str) -> None:
    runner = runner_of(mode=mode)
    assert runner.run([]) == []
    assert not runner.log.eager
    assert not runner.log.replays


def test_budgets_are_captured_once_at_start_and_then_no_python_of_the_encoder_runs() -> None:
    encoder = ToyEncoder()
    runner = runner_of(encoder).capture()
    before = encoder.num_forwards
    runner.run(rows(4, 6, 20, 8))
    runner.capture()
    assert encoder.num_forwards == before
    assert runner.generation is not None
    assert runner.generation.store.state is StoreState.SEALED
    assert [row["num_tokens"] for row in runner.report()["graphs"]] == [32, 16, 8]


def test_the_first_run_captures_where_nobody_did() -> None:
    runner = runner_of()
    runner.run(rows(4))
    assert len(runner.report()["graphs"]) == 3


def test_progress_of_the_capture_is_told() -> None:
    seen: list[tuple[int, int]] = []
    runner_of().capture(on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


class CompilingEncoder(ToyEncoder):
    """Notes how many tokens its forwards have: in the block before and after compiling begins, and later."""

    def __init__(self, *, failing: int | None = None) -> None:
        super().__init__()
        self.failing = failing
        self.seen: dict[str, list[int]] = {"ahead": [], "meanwhile": [], "later": []}
        self.stage = "later"

    @contextmanager
    def compiling_ahead(self) -> Iterator[Callable[[], None]]:
        self.stage = "ahead"
        yield lambda: setattr(self, "stage", "meanwhile")
        self.stage = "later"

    def forward(self, run):
        self.seen[self.stage].append(run.sizes["tokens"])
        if self.stage != "later" and run.sizes["tokens"] == self.failing:
            raise torch.OutOfMemoryError("too large")
        return super().forward(run)


@pytest.mark.parametrize("failing", [None, 32, 8])
def test_kernels_are_compiled_ahead_for_the_smallest_and_the_largest_budget(failing: int | None) -> None:
    encoder = CompilingEncoder(failing=failing)
    runner = runner_of(encoder).capture()
    assert encoder.seen["ahead"] == [8, 32]
    assert encoder.seen["meanwhile"] == [32, 16, 8]
    assert set(encoder.seen["later"]) == {32, 16, 8}
    assert len(runner.report()["graphs"]) == 3
    assert_same(runner.run(rows(4, 6)), runner.eager(rows(4, 6)), atol=1e-5)


def test_nothing_is_compiled_ahead_where_the_device_has_nothing_to_compile(monkeypatch) -> None:
    monkeypatch.setattr(CompilingEncoder, "compiling_ahead", lambda self: None)
    encoder = CompilingEncoder()
    runner_of(encoder).capture()
    assert encoder.seen["ahead"] == encoder.seen["meanwhile"] == []


def test_seconds_of_the_start_are_reported_by_stage() -> None:
    """They add up to what ``capture`` takes, and what graphs took to capture is none of the warm-up."""
    runner = runner_of(CompilingEncoder())
    begun = time.perf_counter()
    runner.capture()
    seconds = time.perf_counter() - begun
    stages = runner.report()["encoder"]["start_up_s"]
    assert list(stages) == ["launches", "compile", "warm_up", "capture", "price", "trim"]
    assert all(stage >= 0 for stage in stages.values())
    assert sum(stages.values()) <= seconds + 1e-2
    assert stages["capture"] == pytest.approx(runner.report()["memory"]["capture_s"], abs=2e-3)


@pytest.mark.parametrize(("seconds", "expected"), [(1e-3, [1, 3]), (6e-3, [1])])
def test_a_replay_that_takes_long_is_timed_once(seconds: float, expected: list[int], monkeypatch) -> None:
    runner = runner_of().capture()
    assert runner.generation is not None
    descriptor = next(iter(runner.generation.store.ledger)).key.descriptor
    asked: list[int] = []

    def time_of(fn, *, repeats: int) -> float:
        asked.append(repeats)
        return seconds

    monkeypatch.setattr(runner.device, "time", time_of)
    assert runner.generation.time(descriptor, repeats=3) == seconds
    assert asked == expected


def test_padding_is_counted_and_its_share_reported() -> None:
    runner = runner_of().capture()
    runner.run(rows(5))
    runner.run(rows(8, 4, 4))
    assert {key: (c.count, c.tokens, c.padding) for key, c in runner.log.replays.items()} == {
        (Phase.ENCODER, Strategy.FULL, 8): (1, 5, 3),
        (Phase.ENCODER, Strategy.FULL, 16): (1, 16, 0),
    }
    summary = runner.report()["encoder"]
    assert (summary["tokens"], summary["padding"]) == (21, 3)
    assert summary["padding_share"] == pytest.approx(3 / 24)
    ledger = {row["num_tokens"]: row for row in runner.report()["graphs"]}
    assert [(ledger[n]["replays"], ledger[n]["padding"]) for n in (8, 16, 32)] == [(1, 3), (1, 0), (0, 0)]


def test_kept_plans_are_those_that_would_be_made_anew() -> None:
    """The sizes of a call come again; the budgets change with a capture and a release."""
    runner = runner_of()
    graphs = runner.graphs
    assert isinstance(graphs, BudgetGraphs)
    generator = random.Random(0)
    calls = [
        [{"tokens": generator.choice((3, 8, 20, 40)), "segments": 1} for _ in range(n)] for n in range(50)
    ]
    assert graphs.plan(calls[2]) == [Pack(0, 1, None), Pack(1, 1, None)], "nothing is captured yet"
    runner.capture()
    for sizes in calls * 2:
        assert graphs.plan(sizes) == plan_packs(sizes, graphs.budgets)
    for tokens in range(1000):
        graphs.plan([{"tokens": tokens + 1, "segments": 1}])
    assert len(graphs._plans) <= 256
    runner.release()
    assert graphs.plan(calls[2]) == [Pack(0, 1, None), Pack(1, 1, None)]


def test_explicit_budgets_replace_the_ladder() -> None:
    runner = runner_of(budgets=(12, 24)).capture()
    assert runner.ladder == (12, 24)
    runner.run(rows(13))
    assert next(iter(runner.log.replays))[2] == 24


def test_a_budget_is_timed_on_a_legal_batch_and_the_timing_is_no_traffic() -> None:
    """Sizes share static memory: what another one left there would be boundaries far out of range."""
    runner = runner_of().capture()
    assert runner.generation is not None
    generation = runner.generation
    descriptor = next(
        row.key.descriptor for row in generation.store.ledger if row.key.descriptor.num_tokens == 32
    )
    runner.run(rows(3, seed=1))
    assert generation.time(descriptor, repeats=2) > 0
    timed = runner.buffers()["block_output"].clone()
    expected = runner.adapter.linear(torch.ones(32, WIDTH))
    torch.testing.assert_close(timed, expected, atol=1e-5, rtol=0)
    assert {row["num_tokens"]: row["replays"] for row in runner.report()["graphs"]} == {32: 0, 16: 0, 8: 1}


def test_budgets_that_exceed_the_bytes_are_given_up_largest_first() -> None:
    sizes = {}
    for largest in (8, 16, 32):
        with runner_of(budgets=tuple(n for n in (8, 16, 32) if n <= largest)).capture() as runner:
            sizes[largest] = runner.report()["memory"]["pool_bytes"]
    assert sizes[16] < sizes[32]
    runner = runner_of(max_bytes=sizes[32] - 1).capture()
    assert [row["num_tokens"] for row in runner.report()["graphs"]] == [16, 8]
    assert runner.report()["memory"]["pool_bytes"] <= sizes[32] - 1
    items = rows(20, 7)
    assert_same(runner.run(items), runner.eager(items), atol=1e-5)
    assert dict(runner.log.eager) == {(Phase.ENCODER, EncoderFallback.GRAPH_TOO_LARGE): 1}


def test_more_budgets_than_graphs_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 token budgets exceed max_graphs=2"):
        runner_of(max_graphs=2)


@pytest.mark.parametrize("lengths", [(4,), (4, 3)], ids=str)
def test_inside_a_capture_of_somebody_else_the_encoder_becomes_part_of_it(lengths: tuple[int, ...]) -> None:
    runner = runner_of().capture()
    items, outs = rows(*lengths), [torch.zeros(n, WIDTH) for n in lengths]
    expected = runner.eager(items)
    CPU.begin_segment(CPU.new_pool())
    try:
        for out, (made,) in zip(outs, runner.run(items), strict=True):
            out.copy_(made)
        segment = CPU.end_segment()
    finally:
        CPU.abandon_segment()
    segment.replay()
    assert_same([(out,) for out in outs], expected, atol=1e-5)
    assert list(runner.log.eager) == [(Phase.ENCODER, EncoderFallback.INSIDE_CAPTURE)]


def test_the_report_has_one_schema_in_every_mode_and_after_a_release() -> None:
    """That of a decoder's graphs, as JSON, with the same keys for every encoder."""
    reports = []
    for mode in ("budget", "exact", "off"):
        runner = runner_of(mode=mode)
        runner.run(rows(4, 40))
        reports.append(runner.report())
        runner.release()
        reports.append(runner.report())
    own = {"mode", "max_tokens", "static_bytes", "tokens", "padding", "padding_share"}
    for report in reports:
        assert json.loads(json.dumps(report)).keys() == reports[0].keys()
        assert report["encoder"].keys() >= own
    assert {row["phase"] for report in reports for row in report["graphs"] + report["steps"]} == {"encoder"}


@pytest.mark.parametrize("mode", ["budget", "exact"])
def test_released_runners_run_eagerly_and_give_everything_back(mode: str) -> None:
    with runner_of(mode=mode) as runner:
        items = rows(4, 6)
        expected = runner.run(items)
    runner.release()
    assert_same(runner.run(items), expected, atol=1e-5)
    assert dict(runner.log.eager) == {(Phase.ENCODER, EncoderFallback.RELEASED): 1}
    assert runner.buffers() == {}
    with pytest.raises(GraphError, match="released"):
        _ = runner.graphs
    assert runner.report()["graphs"] == []


def test_a_runner_that_is_off_has_no_graphs() -> None:
    runner = runner_of(mode="off")
    with pytest.raises(GraphError, match="mode off"):
        _ = runner.graphs
    assert runner.buffers() == {}


def test_eager_runs_join_items_as_far_as_the_limit_reaches() -> None:
    runner = runner_of(mode="off")
    runner.run(rows(20, 10, 8, 30))
    assert dict(runner.log.eager) == {(Phase.ENCODER, EncoderFallback.DISABLED): 3}


def test_static_memory_is_made_once_and_survives_generations() -> None:
    runner = runner_of(mode="exact", max_graphs=1)
    before = {name: buffer.data_ptr() for name, buffer in runner.buffers().items() if name != "block_output"}
    assert set(before) == {"rows", "cu", "lens", "block_ws"}
    for length in (3, 30, 4):
        runner.run(rows(length))
    after = runner.buffers()
    assert {name: after[name].data_ptr() for name in before} == before
    assert runner.report()["encoder"]["static_bytes"] >= sum(b.nbytes for b in after.values()) // 2


@pytest.mark.parametrize("mode", ["budget", "exact"])
def test_images_of_one_shape_run_through_any_module(mode: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.GELU()).requires_grad_(False)
    encoder = ImageBatch(forward_images=module, item_shape=(3, 2, 2), device=torch.device("cpu"))
    runner = encoder_graphs(
        encoder, mode=mode, max_tokens=4, **({"smallest_budget": 1} if mode == "budget" else {})
    )
    images = list(torch.randn(7, 3, 2, 2))
    got = runner.run(images)
    assert [row.shape for (row,) in got] == [(1, 5)] * 7
    assert_same(got, runner.eager(images), atol=1e-6)
    assert sum(c.count for c in runner.log.replays.values()) == (3 if mode == "budget" else 7)


def test_several_outputs_of_an_image_encoder_come_as_a_tuple() -> None:
    encoder = ImageBatch(
        forward_images=lambda images: (images.sum((1, 2)), images * 2),
        item_shape=(2, 3),
        device=torch.device("cpu"),
    )
    runner = encoder_graphs(encoder, max_tokens=2, smallest_budget=1)
    image = torch.randn(2, 3)
    total, doubled = runner.run([image])[0]
    assert torch.equal(doubled, image[None] * 2)
    assert torch.equal(total, image.sum()[None])


@pytest.mark.parametrize(
    "result", [torch.zeros(()), torch.zeros(3, 2), "text"], ids=["scalar", "rows", "text"]
)
def test_an_image_encoder_with_other_results_is_refused(result) -> None:
    with pytest.raises(ConfigError, match="one row per image"):
        ImageBatch(forward_images=lambda images: result, item_shape=(2,), device=torch.device("cpu"))


def test_an_image_of_another_shape_is_refused() -> None:
    encoder = ImageBatch(forward_images=lambda x: x, item_shape=(2,), device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="takes \\(2,\\)"):
        encoder_graphs(encoder, max_tokens=2).run([torch.zeros(3)])


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget, exact, off"):
        encoder_graphs(ToyEncoder(), mode="sometimes")
