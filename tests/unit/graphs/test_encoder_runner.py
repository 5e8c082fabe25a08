"""The encoder runner on encoders of its own: images of one shape, and a toy with segments of any length."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gapless.attention.varlen import Segments, TorchReferenceVarlen
from gapless.errors import ConfigError, GraphError
from gapless.graphs.buffers import InputField
from gapless.graphs.capture import capture_pass
from gapless.graphs.device import get_device
from gapless.graphs.encoder import (
    EncoderFallback,
    EncoderMode,
    EncoderOptions,
    EncoderRunner,
    ImageBatch,
    encoder_graphs,
)
from gapless.graphs.encoder_adapter import Bounds, EncoderRun, Values, Workspace
from gapless.graphs.encoder_budgets import Sizes
from gapless.graphs.encoder_exact import ExactGraphs
from gapless.graphs.modes import Phase, Strategy
from gapless.graphs.runner import OutputField
from gapless.graphs.store import StoreState

CPU = get_device("cpu")
WIDTH = 8


class ToyEncoder:
    """Items are ``[n, WIDTH]`` tensors; one attention over each, and a linear map. Nothing merges."""

    symbol, granule = "tokens", 1
    fields = (
        InputField(
            name="rows", dims=("tokens", WIDTH), dtype=torch.float32, poison=float("nan"), on_device=True
        ),
        InputField(name="cu", dims=("segments+1",), pad="last"),
        InputField(name="lens", dims=("segments",)),
    )
    outputs = (OutputField(name="block_output", dim="tokens", row_shape=(WIDTH,)),)
    workspaces = (Workspace(name="block_ws", dims=("tokens", 2, WIDTH // 2), dtype=torch.float32),)

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.backend = TorchReferenceVarlen()
        self.num_forwards = 0

    def sizes_of(self, item: Tensor) -> Sizes:
        return {"tokens": len(item), "segments": 1}

    def most(self, count: int) -> Sizes:
        return {"tokens": count, "segments": count}

    def bounds_of(self, items: Sequence[Tensor]) -> Bounds:
        return Bounds(limits={"max_len": max(map(len, items))})

    def worst_bounds(self, count: int) -> Bounds:
        return Bounds(limits={"max_len": count})

    def prepare(self, items: Sequence[Tensor]) -> Values:
        lens = np.array([len(item) for item in items], np.int32)
        return {"rows": torch.cat(list(items)), "cu": np.cumsum([0, *lens], dtype=np.int32), "lens": lens}

    def dummy(self, sizes: Sizes) -> Values:
        return self.prepare([torch.ones(sizes["tokens"], WIDTH)])

    def forward(self, run: EncoderRun) -> tuple[Tensor, ...]:
        self.num_forwards += 1
        heads = run["rows"].view(-1, 2, WIDTH // 2)
        limit = run.bounds.limits["max_len"]
        segments = Segments(cu_seqlens=run["cu"], cu_seqlens_kk=run["lens"], max_len=limit)
        arguments = self.backend.arguments(segments)
        self.backend.attend(heads, heads, heads, run["block_ws"], arguments, scale=1.0)
        return (self.linear(run["block_ws"].view(-1, WIDTH)),)


def runner_of(encoder: ToyEncoder | None = None, mode: str = "budget", **options) -> EncoderRunner:
    options = {"max_tokens": 32, "smallest_budget": 8, **options}
    chosen = EncoderOptions(mode=EncoderMode(mode), **options)
    return EncoderRunner(encoder or ToyEncoder(), device=CPU, options=chosen)


def rows(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, WIDTH, generator=generator) for n in lengths]


def assert_same(got, expected, *, atol: float = 0.0) -> None:
    for (mine,), (theirs,) in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=0)


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


def test_exact_graphs_are_made_at_first_sight_and_replayed_after() -> None:
    encoder = ToyEncoder()
    runner = runner_of(encoder, "exact")
    runner.run(rows(5))
    after_first = encoder.num_forwards
    for seed in range(3):
        items = rows(5, seed=seed)
        assert_same(runner.run(items), runner.eager(items))
        after_first += 1  # the oracle's
    assert encoder.num_forwards == after_first
    assert (runner.summary()["captures"], runner.summary()["hits"]) == (1, 3)
    assert runner.generation is not None
    assert runner.generation.store.state is StoreState.BUILDING  # the one store that stays open


def test_the_number_of_exact_graphs_is_bounded_by_closing_the_generation() -> None:
    runner = runner_of(mode="exact", max_graphs=2)
    stores = set()
    for length in (3, 4, 5, 3, 6):
        items = rows(length)
        assert_same(runner.run(items), runner.eager(items))
        assert runner.generation is not None
        stores.add(id(runner.generation.store))
        assert len(runner.report()["graphs"]) <= 2
    summary = runner.summary()
    assert (summary["captures"], summary["evictions"], summary["evicted_graphs"]) == (5, 2, 4)


def test_the_bytes_of_exact_graphs_are_bounded() -> None:
    free = runner_of(mode="exact")
    free.run(rows(8))
    one = free.report()["memory"]["pool_bytes"]
    runner = runner_of(mode="exact", max_bytes=one)
    for length in (8, 7, 6, 8):
        items = rows(length)
        assert_same(runner.run(items), runner.eager(items))
        assert runner.report()["memory"]["pool_bytes"] <= one
    assert runner.summary()["captures"] >= 3
    assert not runner.log.eager


def test_a_graph_that_alone_exceeds_the_bytes_is_eager_for_good() -> None:
    runner = runner_of(mode="exact", max_bytes=1)
    for _ in range(3):
        items = rows(6)
        assert_same(runner.run(items), runner.eager(items))
    assert dict(runner.log.eager) == {(Phase.ENCODER, EncoderFallback.GRAPH_TOO_LARGE): 3}
    assert runner.summary()["captures"] == 1
    assert runner.report()["memory"]["pool_bytes"] == 0


def test_an_exact_capture_that_fails_is_not_tried_again_and_hinders_no_other(monkeypatch) -> None:
    encoder = ToyEncoder()
    forward, attempts = encoder.forward, []

    def fails_at_7(run: EncoderRun) -> tuple[Tensor, ...]:
        if run.sizes["tokens"] == 7 and CPU.is_recording():
            attempts.append(1)
            run["rows"].sum().item()
        return forward(run)

    monkeypatch.setattr(encoder, "forward", fails_at_7)
    runner = runner_of(encoder, "exact")
    for length in (7, 6, 7, 5):
        items = rows(length)
        assert_same(runner.run(items), runner.eager(items))
    assert len(attempts) == 1
    assert dict(runner.log.eager) == {(Phase.ENCODER, EncoderFallback.CAPTURE_FAILED): 2}
    assert len(runner.report()["failures"]) == 1
    assert runner.summary()["captures"] == 2


def test_an_encoder_that_raises_at_first_sight_leaves_nothing_behind(monkeypatch) -> None:
    """Neither the item's rows nor a place in the cache: it is tried again."""
    encoder = ToyEncoder()
    forward, fails = encoder.forward, [True]

    def may_fail(run: EncoderRun) -> tuple[Tensor, ...]:
        if fails[0]:
            raise ValueError("no such kernel")
        return forward(run)

    monkeypatch.setattr(encoder, "forward", may_fail)
    runner = runner_of(encoder, "exact")
    items = rows(7)
    for _ in range(3):
        with pytest.raises(ValueError, match="no such kernel"):
            runner.run(items)
    assert runner.generation is not None
    assert not runner.generation._runs
    assert sys.getrefcount(items[0]) <= 3
    fails[0] = False
    assert_same(runner.run(items), runner.eager(items))
    assert runner.summary()["captures"] == 1


def test_evictions_leave_no_memory_behind() -> None:
    runner = runner_of(mode="exact", max_graphs=2)
    items = [rows(length) for length in range(2, 9)]

    def traced_bytes_after(num_runs: int) -> int:
        for number in range(num_runs):
            runner.run(items[number % len(items)])
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = traced_bytes_after(35)
        assert traced_bytes_after(70) - before < 70 * 400
    finally:
        tracemalloc.stop()
    assert runner.summary()["captures"] == 105


def test_evicting_by_hand_frees_the_pool_and_results_stay() -> None:
    runner = runner_of(mode="exact")
    items = rows(6)
    kept = runner.run(items)
    assert isinstance(runner.graphs, ExactGraphs)
    runner.graphs.evict()
    assert runner.report()["memory"]["pool_bytes"] == 0
    assert_same(runner.run(items), kept)
    assert_same(kept, runner.eager(items))


def test_inside_a_capture_of_somebody_else_the_encoder_becomes_part_of_it() -> None:
    runner = runner_of().capture()
    item, out = rows(4)[0], torch.zeros(4, WIDTH)
    expected = runner.eager([item])
    CPU.begin_segment(CPU.new_pool())
    try:
        out.copy_(runner.run([item])[0][0])
        segment = CPU.end_segment()
    finally:
        CPU.abandon_segment()
    segment.replay()
    assert_same([(out,)], expected, atol=1e-5)
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


def test_threads_take_turns() -> None:
    runner = runner_of().capture()
    items = [rows(5, seed=seed) for seed in range(6)]
    expected = [runner.run(item) for item in items]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(10):
            if not torch.equal(runner.run(items[index])[0][0], expected[index][0][0]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("mode", ["budget", "exact"])
def test_a_first_sight_and_a_capture_around_the_encoder_do_not_wait_for_each_other(mode: str) -> None:
    """One thread holds the lock of captures and calls the encoder; another holds the encoder and captures."""
    runner = runner_of(mode=mode)
    item, out = rows(4)[0], torch.zeros(4, WIDTH)
    expected = runner.eager([item])
    is_inside, is_waiting = threading.Event(), threading.Event()
    first_sight: list[list[tuple[Tensor, ...]]] = []

    def captures_around() -> None:
        with capture_pass(CPU):
            is_inside.set()
            is_waiting.wait(5)
            time.sleep(0.05)  # the other one is at the lock by now
            out.copy_(runner.run([item])[0][0])

    def sees_first() -> None:
        is_inside.wait(5)
        is_waiting.set()
        first_sight.append(runner.run([item]))

    threads = [threading.Thread(target=work, daemon=True) for work in (captures_around, sees_first)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert_same([(out,)], expected, atol=1e-5)
    assert_same(first_sight[0], expected, atol=1e-5)


def test_threads_see_first_evict_and_hit_at_the_same_time() -> None:
    runner = runner_of(mode="exact", max_graphs=2)
    items = [rows(length) for length in (3, 5, 7, 9)]
    expected = [runner.eager(item) for item in items]
    wrong: list[object] = []

    def work(offset: int) -> None:
        try:
            for number in range(12):
                index = (number + offset) % 4
                if not torch.equal(runner.run(items[index])[0][0], expected[index][0][0]):
                    wrong.append(index)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(runner.report()["graphs"]) <= 2


def test_a_release_while_others_run_turns_them_eager() -> None:
    runner = runner_of(mode="exact", max_graphs=2)
    items = [rows(length) for length in (3, 5, 7)]
    expected = [runner.eager(item) for item in items]
    wrong: list[object] = []

    def work() -> None:
        try:
            for number in range(30):
                index = number % 3
                if not torch.equal(runner.run(items[index])[0][0], expected[index][0][0]):
                    wrong.append(index)
        except Exception as error:
            wrong.append(error)

    def watch() -> None:
        try:
            for _ in range(30):
                json.dumps(runner.report())
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=target) for target in (work, work, watch)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    runner.release()
    for thread in threads:
        thread.join()
    assert wrong == []


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
