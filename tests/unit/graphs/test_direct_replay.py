"""The short way of a replay, on an emulated device whose segments say that they run no Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import CaptureClosedError, GraphError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.buffers import InputViews, StaticInputs
from gapless.graphs.device.emulated import EmulatedDevice, EmulatedSegment
from gapless.graphs.input_field import InputField
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.program import Program
from gapless.graphs.runner import GraphRunner, OutputField
from gapless.graphs.store import GraphStore, LedgerRow

SIZES = (4, 8)


@pytest.fixture(autouse=True)
def segments_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedSegment, "launch", property(lambda segment: segment.replay))


@pytest.fixture
def store() -> GraphStore:
    return GraphStore(EmulatedDevice())


def key(rows: int) -> BatchDescriptor:
    return BatchDescriptor(num_tokens=rows, num_reqs=rows)


def forward(views: InputViews) -> tuple[torch.Tensor, ...]:
    return (views["x"] * 2 + views["x"].sum() * 0,)


def make_runner(store: GraphStore, strategy: Strategy = Strategy.FULL) -> GraphRunner:
    inputs = StaticInputs(
        (InputField(name="x", dims=("rows",), dtype=torch.float32, pad=0.0),),
        max_sizes={"rows": max(SIZES)},
        torch_device=torch.device("cpu"),
    )
    runner = GraphRunner(
        forward,
        phase=Phase.DECODE,
        strategy=strategy,
        inputs=inputs,
        outputs=(OutputField(name="out", dim="rows"),),
        store=store,
        sizes_of=lambda descriptor: {"rows": descriptor.num_reqs},
        make_dummy=lambda descriptor: {"x": np.ones(descriptor.num_reqs, np.float32)},
    )
    with store.capturing():
        assert runner.capture([key(size) for size in SIZES]) == []
    return runner


def run(runner: GraphRunner, rows: int, real: int, first: float = 1.0) -> list[float]:
    values = {"x": np.arange(first, first + real, dtype=np.float32)}
    (out,) = runner.run(key(rows), runner.strategy.runtime_mode, values, num_real={"rows": real})
    return out.tolist()


def row_of(store: GraphStore, rows: int) -> LedgerRow:
    return next(row for row in store.ledger if row.key.descriptor == key(rows))


def programs_replayed(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    replayed: list[Program] = []
    replay = Program.replay
    monkeypatch.setattr(Program, "replay", lambda program: (replayed.append(program), replay(program)))
    return replayed


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SIZES), st.integers(0, 8), st.booleans()), max_size=20))
def test_any_runs_give_their_own_rows_and_are_counted(runs: list[tuple[int, int, bool]]) -> None:
    store = GraphStore(EmulatedDevice())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedSegment, "launch", property(lambda segment: segment.replay))
        runner = make_runner(store)
        counted = {size: [0, 0, 0] for size in SIZES}
        for number, (size, real, is_replay) in enumerate(runs):
            real = min(real, size)
            mode = RuntimeMode.FULL if is_replay else RuntimeMode.NONE
            values = {"x": np.arange(number, number + real, dtype=np.float32)}
            (out,) = runner.run(key(size), mode, values, num_real={"rows": real})
            assert out.tolist() == [2.0 * (number + i) for i in range(real)]
            if is_replay:
                counted[size] = [n + m for n, m in zip(counted[size], (1, real, size - real), strict=True)]
    for size in SIZES:
        row = row_of(store, size)
        assert [row.replays, row.tokens, row.padding] == counted[size]


def test_the_second_replay_of_a_size_goes_straight_to_its_graph(store, monkeypatch) -> None:
    runner, replayed = make_runner(store), programs_replayed(monkeypatch)
    for number in range(3):
        assert run(runner, 4, 3, first=number) == [2.0 * (number + i) for i in range(3)]
        assert len(replayed) == 1
    run(runner, 8, 8)
    assert len(replayed) == 2


def test_pieces_are_left_to_their_wrapper(store, monkeypatch) -> None:
    runner, replayed = make_runner(store, Strategy.TC_PIECEWISE), programs_replayed(monkeypatch)
    for _ in range(3):
        run(runner, 4, 3)
    assert len(replayed) == 3
    store.state = store.state.CAPTURING
    with pytest.raises(GraphError, match="pieces replay only after the capture stage"):
        run(runner, 4, 3)


def test_after_a_release_the_error_is_that_of_a_graph_that_is_not_there(store) -> None:
    runner = make_runner(store)
    run(runner, 4, 3)
    run(runner, 4, 3)
    store.release()
    with pytest.raises(CaptureClosedError, match="released: this step must run eagerly"):
        run(runner, 4, 3)


def test_a_batch_that_does_not_fit_is_refused_before_its_rows_are_looked_for(store) -> None:
    runner = make_runner(store)
    for _ in range(2):
        run(runner, 4, 3)
        with pytest.raises(GraphError, match="does not fit its static view"):
            run(runner, 4, 5)
    assert row_of(store, 4).replays == 2


def test_inputs_are_amended_before_the_graph_reads_them(store) -> None:
    runner, values = make_runner(store), {"x": np.ones(3, np.float32)}
    for _ in range(3):
        (out,) = runner.run(
            key(4), RuntimeMode.FULL, values, num_real={"rows": 3}, amend=lambda views: views["x"].add_(1)
        )
        assert out.tolist() == [4.0] * 3


def test_counts_that_change_in_the_callers_mapping_are_noticed(store) -> None:
    runner, real = make_runner(store), {"rows": 4}
    for rows in (4, 2, 3):
        real["rows"] = rows
        (out,) = runner.run(key(4), RuntimeMode.FULL, {"x": np.ones(rows, np.float32)}, num_real=real)
        assert out.tolist() == [2.0] * rows
