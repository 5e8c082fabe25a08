"""Store, wrapper and runner on the emulated device, with a plain module instead of a language model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gapless.errors import CaptureClosedError, CaptureError, GraphError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.breakable import eager_break
from gapless.graphs.buffers import InputViews, StaticInputs
from gapless.graphs.context import (
    ForwardContext,
    get_forward_context,
    in_short_warm_up,
    use_forward_context,
)
from gapless.graphs.device.emulated import EmulatedDevice
from gapless.graphs.input_field import InputField
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.report import StepLog, build_report
from gapless.graphs.runner import GraphRunner, OutputField
from gapless.graphs.store import GraphKey, GraphStore, StoreState
from gapless.graphs.wrapper import GraphWrapper

SIZES = (4, 8, 16)


@eager_break
def live_scale(x: Tensor) -> Tensor:
    return x * get_forward_context().batch["scale"]


class Net(nn.Module):
    """Rows are independent, so padding may not matter."""

    def __init__(self, *, breaks: bool = False, fails_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 5)
        self.breaks, self.fails_at = breaks, fails_at
        self.requires_grad_(False)

    def forward(self, views: InputViews) -> tuple[Tensor, ...]:
        x = self.first(views["x"]).relu()
        if x.shape[0] == self.fails_at:
            x.sum().item()
        if self.breaks:
            x = live_scale(x)
        return (self.second(x) + views["bias"][:, None],)


def make_runner(
    device: EmulatedDevice,
    store: GraphStore,
    net: Net,
    *,
    strategy: Strategy = Strategy.FULL,
    phase: Phase = Phase.PREFILL,
    name: str = "out",
) -> GraphRunner:
    fields = (InputField(name="bias", dims=("rows",), dtype=torch.float32, pad=0.0, poison=1e30),)
    x_field = InputField(
        name="x", dims=("rows", 6), dtype=torch.float32, pad=0.0, poison=float("nan"), on_device=True
    )
    inputs = StaticInputs(
        (*fields, x_field), max_sizes={"rows": max(SIZES)}, torch_device=device.torch_device
    )
    return GraphRunner(
        net,
        phase=phase,
        strategy=strategy,
        inputs=inputs,
        outputs=(OutputField(name=name, dim="rows", row_shape=(5,)),),
        store=store,
        sizes_of=lambda d: {"rows": d.num_tokens},
        make_dummy=lambda d: {"bias": np.ones(d.num_tokens, np.float32)},
        make_batch=lambda views, d: SCALE,
        prologue=lambda views, real: {"x": X[: real["rows"]]},
    )


X = torch.randn(max(SIZES), 6)
SCALE: dict[str, Any] = {"scale": 1.0}


def key(size: int) -> BatchDescriptor:
    return BatchDescriptor(num_tokens=size, num_reqs=size)


def run(runner: GraphRunner, size: int, num_real: int, mode: RuntimeMode) -> Tensor:
    values = {"bias": np.arange(num_real, dtype=np.float32)}
    return runner.run(key(size), mode, values, num_real={"rows": num_real})[0].clone()


@pytest.fixture
def store(device: EmulatedDevice) -> GraphStore:
    return GraphStore(device)


def capture_all(store: GraphStore, *runners: GraphRunner) -> list[BatchDescriptor]:
    with store.capturing():
        return [failed for runner in runners for failed in runner.capture([key(size) for size in SIZES])]


@pytest.mark.parametrize("strategy", [Strategy.FULL, Strategy.BREAKABLE])
@pytest.mark.parametrize("num_real", range(1, 17))
@pytest.mark.parametrize("poison", [False, True])
def test_replay_equals_padded_eager_and_ignores_padding(
    device: EmulatedDevice, store: GraphStore, strategy: Strategy, num_real: int, poison: bool
) -> None:
    global X
    runner = make_runner(device, store, Net(breaks=True), strategy=strategy)
    assert capture_all(store, runner) == []
    X = torch.randn(max(SIZES), 6)
    size = next(s for s in SIZES if s >= num_real)
    clean = run(runner, size, num_real, RuntimeMode.NONE)
    runner.inputs.poison = poison
    assert torch.equal(run(runner, size, num_real, strategy.runtime_mode), clean)


def test_live_batch_reaches_breaks_but_is_frozen_in_full_graphs(
    device: EmulatedDevice, store: GraphStore
) -> None:
    net = Net(breaks=True)
    full = make_runner(device, store, net, strategy=Strategy.FULL)
    broken = make_runner(device, store, net, strategy=Strategy.BREAKABLE, phase=Phase.DECODE)
    capture_all(store, full, broken)
    SCALE["scale"] = 3.0
    try:
        eager = run(full, 8, 5, RuntimeMode.NONE)
        assert torch.equal(run(broken, 8, 5, RuntimeMode.PIECEWISE), eager)
        assert not torch.equal(run(full, 8, 5, RuntimeMode.FULL), eager)
    finally:
        SCALE["scale"] = 1.0


def test_interleaved_sizes_and_runners_share_one_pool_without_disturbing_each_other(
    device: EmulatedDevice, store: GraphStore
) -> None:
    a = make_runner(device, store, Net(breaks=True), strategy=Strategy.BREAKABLE, name="a")
    b = make_runner(device, store, Net(), phase=Phase.DECODE, name="b")
    capture_all(store, a, b)
    modes = {a: RuntimeMode.PIECEWISE, b: RuntimeMode.FULL}
    for runner, size in [(a, 16), (b, 4), (a, 4), (b, 16), (a, 16), (b, 8), (a, 8), (a, 16)]:
        churn = [torch.full((n,), float("nan")) for n in (10, 1000, 50)]
        expected = run(runner, size, size - 1, RuntimeMode.NONE)
        assert torch.equal(run(runner, size, size - 1, modes[runner]), expected)
        del churn


def test_capturing_largest_first_needs_no_more_pool_than_the_largest(
    device: EmulatedDevice, store: GraphStore
) -> None:
    capture_all(store, make_runner(device, store, Net()))
    assert [row.key.descriptor.num_tokens for row in store.ledger] == [16, 8, 4]
    assert [row.pool_bytes > 0 for row in store.ledger] == [True, False, False]


def test_a_size_that_cannot_be_captured_stays_out_and_the_rest_works(
    device: EmulatedDevice, store: GraphStore
) -> None:
    runner = make_runner(device, store, Net(fails_at=8))
    assert capture_all(store, runner) == [key(8)]
    (failure,) = store.failures
    assert failure.key == GraphKey(Phase.PREFILL, RuntimeMode.FULL, key(8))
    assert failure.message.startswith("capture of prefill size 8, 8 requests failed in segment 0: Tensor.it")
    assert "test_runner.py" in failure.message, "the message names the line that read from the host"
    for size in (4, 16):
        eager = run(runner, size, size, RuntimeMode.NONE)
        assert torch.equal(run(runner, size, size, RuntimeMode.FULL), eager)
    with pytest.raises(CaptureClosedError, match="must run eagerly"):
        run(runner, 8, 8, RuntimeMode.FULL)


def test_outputs_are_valid_until_the_next_run_and_live_outside_the_pool(
    device: EmulatedDevice, store: GraphStore
) -> None:
    runner = make_runner(device, store, Net())
    capture_all(store, runner)
    values = {"bias": np.zeros(4, np.float32)}
    (first,) = runner.run(key(4), RuntimeMode.FULL, values, num_real={"rows": 4})
    kept = first.clone()
    (second,) = runner.run(key(4), RuntimeMode.FULL, {"bias": np.ones(4, np.float32)}, num_real={"rows": 4})
    assert first.data_ptr() == second.data_ptr() == runner.output_buffer("out").data_ptr()
    assert not torch.equal(first, kept)


def test_plain_eager_runs_at_the_real_size(device: EmulatedDevice, store: GraphStore) -> None:
    runner = make_runner(device, store, Net())
    capture_all(store, runner)
    (out,) = runner.run_eager(key(7), {"bias": np.arange(7, dtype=np.float32)})
    assert out.shape == (7, 5)
    torch.testing.assert_close(out, run(runner, 8, 7, RuntimeMode.FULL), atol=1e-5, rtol=0)


def test_ledger_counts_replays_and_padding(device: EmulatedDevice, store: GraphStore) -> None:
    runner = make_runner(device, store, Net())
    capture_all(store, runner)
    for num_real in (5, 8, 6):
        run(runner, 8, num_real, RuntimeMode.FULL)
    run(runner, 8, 8, RuntimeMode.NONE)
    row = next(row for row in store.ledger if row.key.descriptor == key(8))
    assert (row.replays, row.tokens, row.padding) == (3, 19, 5)
    shown = row.to_dict()
    assert (shown["tokens"], shown["padding"], shown["mean_padding"]) == (19, 5, 1.667)
    assert {graph.to_dict()["mean_padding"] for graph in store.ledger if graph is not row} == {0.0}
    assert row.num_nodes > 0
    assert row.num_segments == 1


def test_store_goes_from_building_to_sealed_to_released(device: EmulatedDevice, store: GraphStore) -> None:
    runner = make_runner(device, store, Net())
    assert store.state is StoreState.BUILDING
    capture_all(store, runner)
    assert store.state is StoreState.SEALED
    with pytest.raises(CaptureClosedError, match="sealed"):
        capture_all(store, runner)
    with pytest.raises(GraphError, match="reserved before the first capture"):
        store.output("late", (4,), torch.float32)
    store.release()
    store.release()
    assert store.state is StoreState.RELEASED
    assert store.pool_bytes == 0
    assert store.ledger == []


def test_an_error_in_the_pass_leaves_the_store_open_for_another(
    device: EmulatedDevice, store: GraphStore
) -> None:
    with pytest.raises(RuntimeError, match="loader"):
        with store.capturing():
            raise RuntimeError("loader failed")
    runner = make_runner(device, store, Net())
    assert capture_all(store, runner) == []


@pytest.mark.parametrize(
    ("shape", "dtype"), [((32, 5), torch.float32), ((16, 6), torch.float32), ((16, 5), torch.float64)]
)
def test_shared_output_that_would_have_to_move_is_refused(
    store: GraphStore, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    store.output("out", (16, 5), torch.float32)
    assert store.output("out", (8, 5), torch.float32).shape == (16, 5)
    with pytest.raises(GraphError, match="Reserve the largest size first"):
        store.output("out", shape, dtype)


def test_wrapper_of_another_mode_calls_straight_through(device: EmulatedDevice, store: GraphStore) -> None:
    calls = []
    inner = GraphWrapper(
        lambda x: calls.append("inner") or x + 1,
        runtime_mode=RuntimeMode.PIECEWISE,
        phase=Phase.PREFILL,
        strategy=Strategy.BREAKABLE,
        store=store,
    )
    outer = GraphWrapper(
        lambda x: calls.append("outer") or inner(x) * 2,
        runtime_mode=RuntimeMode.FULL,
        phase=Phase.PREFILL,
        strategy=Strategy.FULL,
        store=store,
    )
    x = torch.ones(4)
    with use_forward_context(ForwardContext(mode=RuntimeMode.NONE, descriptor=key(4))):
        assert outer(x).tolist() == [4.0] * 4
    assert calls == ["outer", "inner"]

    with store.capturing(), torch.no_grad():
        for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
            with use_forward_context(ForwardContext(mode=mode, descriptor=key(4))):
                outer(x)
    # FULL captured the outer wrapper with the inner one inside; PIECEWISE the inner one alone.
    assert [row.key.mode for row in store.ledger] == [RuntimeMode.FULL, RuntimeMode.PIECEWISE]
    calls.clear()
    x.fill_(3.0)
    with use_forward_context(ForwardContext(mode=RuntimeMode.FULL, descriptor=key(4))):
        assert outer(x).tolist() == [8.0] * 4
    assert calls == [], "a replay runs no Python of the model"
    with use_forward_context(ForwardContext(mode=RuntimeMode.PIECEWISE, descriptor=key(4))):
        assert outer(x).tolist() == [8.0] * 4
    assert calls == ["outer"]


def test_wrapper_needs_a_mode_in_which_it_acts(store: GraphStore) -> None:
    with pytest.raises(GraphError, match="PIECEWISE or FULL"):
        GraphWrapper(
            abs,
            runtime_mode=RuntimeMode.NONE,
            phase=Phase.PREFILL,
            strategy=Strategy.FULL,
            store=store,
        )


def test_timing_a_size_that_was_not_captured_is_an_error(device: EmulatedDevice, store: GraphStore) -> None:
    runner = make_runner(device, store, Net())
    with pytest.raises(GraphError, match="nothing to time"):
        runner.time_padding(key(8), key(1))


def test_report_schema(device: EmulatedDevice, store: GraphStore) -> None:
    runner = make_runner(device, store, Net(fails_at=8))
    capture_all(store, runner)
    log = StepLog()
    log.count_replay(Phase.PREFILL, Strategy.FULL, 16, 10)
    log.count_replay(Phase.PREFILL, Strategy.FULL, 16, 16)
    log.count_eager(Phase.DECODE, "capture_failed")
    report = build_report(plan={"mode": "FULL"}, store=store, log=log)
    assert report["steps"] == [
        {"phase": "prefill", "strategy": "full", "bucket": 16, "count": 2, "tokens": 26, "padding": 6}
    ]
    assert report["eager"] == [{"phase": "decode", "reason": "capture_failed", "count": 1}]
    assert [g["num_tokens"] for g in report["graphs"]] == [16, 4]
    assert [g["memsets"] for g in report["graphs"]] == [0, 0]
    assert [f["graph"] for f in report["failures"]] == ["prefill size 8, 8 requests"]
    log.clear()
    assert build_report(plan={}, store=store, log=log)["steps"] == []


def test_capture_error_is_raised_by_a_direct_capture_and_stores_nothing(store: GraphStore) -> None:
    bad_key = GraphKey(Phase.PREFILL, RuntimeMode.FULL, key(4))
    with store.capturing(), pytest.raises(CaptureError):
        store.capture(bad_key, lambda: torch.ones(4).sum().item(), Strategy.FULL)
    assert store.get(bad_key) is None


@pytest.mark.parametrize("num_warmups", [0, 1, 2, 3])
def test_only_the_first_size_captured_is_warmed_up_in_full(num_warmups: int) -> None:
    device = EmulatedDevice(num_warmups=num_warmups)
    net, store, rows = Net(fails_at=16), GraphStore(device), []
    forward = net.forward

    def counted(views: InputViews) -> tuple[Tensor, ...]:
        rows.append(views.sizes["rows"])
        return forward(views)

    net.forward = counted  # type: ignore[method-assign]
    runner = make_runner(device, store, net)
    with store.capturing():
        assert runner.capture([key(size) for size in SIZES]) == [key(16)]
    once = min(num_warmups, 1)
    # One run more of each is the capture itself. What failed has warmed up nothing for the others.
    assert [rows.count(size) for size in (16, 8)] == [num_warmups + 1] * 2
    assert rows.count(4) == once + 1 + (num_warmups == 0)


def test_later_sizes_are_warmed_up_by_one_layer_of_each_kind() -> None:
    device = EmulatedDevice(num_warmups=1)
    net, store, seen = Net(), GraphStore(device), []
    forward = net.forward

    def watched(views: InputViews) -> tuple[Tensor, ...]:
        seen.append((views.sizes["rows"], get_forward_context().mode, in_short_warm_up()))
        return forward(views)

    net.forward = watched  # type: ignore[method-assign]
    runner = make_runner(device, store, net)
    with store.capturing():
        assert runner.capture([key(size) for size in SIZES]) == []
    warm_ups = [(rows, is_short) for rows, mode, is_short in seen if mode is RuntimeMode.NONE]
    assert warm_ups == [(16, False), (8, True), (4, True)]
    assert not any(is_short for _, mode, is_short in seen if mode is not RuntimeMode.NONE)
    assert not in_short_warm_up(), "outside of a step"
