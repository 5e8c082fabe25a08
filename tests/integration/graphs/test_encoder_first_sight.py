"""Graphs of encoders that are made at first sight, bounded and evicted, and threads that meet in a runner."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import tracemalloc

import pytest
import torch
from torch import Tensor
from toy_encoder import CPU, WIDTH, ToyEncoder, assert_same, rows, runner_of

from gapless.graphs.capture import capture_pass
from gapless.graphs.encoder import EncoderFallback
from gapless.graphs.encoder_adapter import EncoderRun
from gapless.graphs.encoder_exact import ExactGraphs
from gapless.graphs.modes import Phase
from gapless.graphs.store import StoreState


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
        """Of allocations made below this package: other threads of the process allocate too."""
        for number in range(num_runs):
            runner.run(items[number % len(items)])
        gc.collect()
        # As tracemalloc's own filter by "*/gapless/*" in all frames, which takes three times as long.
        return sum(
            trace.size
            for trace in tracemalloc.take_snapshot().traces
            if any("/gapless/" in frame.filename for frame in trace.traceback)
        )

    for item in items:  # what the first captures import is not to be traced: that takes six times as long
        runner.run(item)
    tracemalloc.start(25)
    try:
        # What is kept once (a table that doubled, a cache) is no leak: that grows in every round.
        held = [traced_bytes_after(len(items))]
        while len(held) < 12 and (len(held) == 1 or held[-1] - held[-2] >= len(items) * 400):
            held.append(traced_bytes_after(len(items)))
        assert held[-1] - held[-2] < len(items) * 400, held
    finally:
        tracemalloc.stop()
    assert runner.summary()["captures"] == (1 + len(held)) * len(items), "no run found its graph"


def test_evicting_by_hand_frees_the_pool_and_results_stay() -> None:
    runner = runner_of(mode="exact")
    items = rows(6)
    kept = runner.run(items)
    assert isinstance(runner.graphs, ExactGraphs)
    runner.graphs.evict()
    assert runner.report()["memory"]["pool_bytes"] == 0
    assert_same(runner.run(items), kept)
    assert_same(kept, runner.eager(items))


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
