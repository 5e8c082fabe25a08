"""Piecewise graphs on the emulated device: they equal the forward whatever size, order and churn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gapless.errors import CaptureClosedError, CaptureError, GraphError, StaleAddressError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.breakable import eager_break
from gapless.graphs.capture import capture_program
from gapless.graphs.device.emulated import EmulatedDevice
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.piecewise import PiecewiseConfig, PiecewiseForward, install
from gapless.graphs.store import GraphKey, GraphStore
from gapless.graphs.wrapper import GraphWrapper
from piecewise_ops import ATTEND, FRESH, ROUTE, RUNS, Stack, pw_attend, step

NONE, PIECEWISE, FULL = RuntimeMode.NONE, RuntimeMode.PIECEWISE, RuntimeMode.FULL
SIZES = (8, 4, 2, 1)
OPS = (ATTEND, FRESH, ROUTE)


class Rig:
    """A model with a piecewise forward, static inputs for every size, and graphs of it."""

    def __init__(self, device, *, op=ATTEND, sizes=SIZES, wrap=None, **facts) -> None:
        self.device, self.sizes = device, sizes
        self.model = Stack(op=op, **facts)
        config = PiecewiseConfig(split_ops=(op,))
        self.forward = PiecewiseForward(self.model.forward, config=config, device=device)
        self.store = GraphStore(device)
        self.ids = {n: torch.arange(n, dtype=torch.int32) % 16 for n in sizes}
        self.out = self.store.output("out", (max(sizes), 8), torch.float32)
        self.graphs = GraphWrapper(
            wrap or self.run,
            runtime_mode=PIECEWISE,
            phase=Phase.PREFILL,
            strategy=Strategy.TC_PIECEWISE,
            store=self.store,
        )

    def run(self, ids: Tensor) -> Tensor:
        return self.out[: len(ids)].copy_(self.forward(ids))

    def trace(self) -> Rig:
        with torch.no_grad(), step(NONE, 2):
            self.graphs(self.ids[2])
        return self

    def capture(self) -> Rig:
        self.trace()
        with torch.no_grad(), self.store.capturing():
            for n in self.sizes:
                with step(PIECEWISE, n):
                    self.graphs(self.ids[n])
        return self

    def replay(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """New input through the graph of size ``n``, and through the plain forward."""
        self.ids[n].copy_(torch.randint(16, (n,), generator=torch.Generator().manual_seed(seed)))
        with torch.no_grad(), step(PIECEWISE, n):
            got = self.graphs(self.ids[n]).clone()
        return got, self.model(self.ids[n])

    def entry(self, n: int):
        return self.store.get(GraphKey(Phase.PREFILL, PIECEWISE, BatchDescriptor(n, 1)))


@pytest.fixture(scope="module", params=OPS)
def rig(request) -> Rig:
    """Captured once per kind of op: into the caller's buffer, one new tensor, two new tensors."""
    return Rig(EmulatedDevice(poison_freed=True), op=request.param).capture()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", range(2))
def test_a_replay_equals_the_forward_on_new_inputs(rig, n, seed):
    got, expected = rig.replay(n, seed)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("seed", range(4))
def test_sizes_interleave_under_allocator_churn(rig, seed):
    """What an eager op returns lies elsewhere at every replay, and every size reuses the others' memory."""
    with rig.device.eager_arena():
        kept = []
        for i, n in enumerate([8, 1, 4, 8, 2, 1, 8]):
            kept.append(torch.full((n, 8), float("nan")))
            got, expected = rig.replay(n, seed * 100 + i)
            assert torch.equal(got, expected)
            del kept[::2]


def test_padded_eager_takes_the_compiled_path_and_equals_the_graph(rig):
    for n in SIZES:
        got, _ = rig.replay(n, 5)
        with torch.no_grad(), step(NONE, n):
            assert torch.equal(rig.graphs(rig.ids[n]), got)
    assert rig.forward.stats.num_recompilations == 0


@pytest.mark.parametrize("n", SIZES)
def test_a_program_alternates_segments_and_split_parts(rig, n):
    row = rig.entry(n).row
    assert (row.num_segments, row.num_breaks) == (4, 3)
    assert all("gapless::pw_" in name for name in rig.entry(n).program.break_names)


def test_smaller_sizes_live_in_the_memory_of_the_largest(rig):
    largest, *others = [rig.entry(n).row.pool_bytes for n in SIZES]
    assert largest > 0
    assert others == [0, 0, 0]


def test_sizes_zero_one_and_many_need_one_trace(device):
    rig = Rig(device).trace()
    for n in (8, 1, 0, 2, 16, 3, 1, 0):
        ids = torch.arange(n, dtype=torch.int32) % 16
        with torch.no_grad(), step(NONE, n):
            assert torch.equal(rig.forward(ids), rig.model(ids))
    assert rig.forward.stats.num_traces == 1


def test_views_at_any_offset_of_a_buffer_need_one_trace(device):
    rig = Rig(device).trace()
    packed = torch.arange(64, dtype=torch.int32) % 16
    for start, n in ((0, 4), (1, 4), (2, 8), (8, 8), (33, 1)):
        with torch.no_grad(), step(NONE, n):
            got = rig.forward(packed[start : start + n])
        assert torch.equal(got, rig.model(packed[start : start + n]))
    assert rig.forward.stats.num_traces == 1


def test_outside_a_piecewise_context_the_plain_forward_runs(device):
    rig = Rig(device)
    ids = torch.arange(4)
    assert torch.equal(rig.forward(ids), rig.model(ids))
    with step(NONE, 4, compiled=False):
        rig.forward(ids)
    assert not rig.forward.is_compiled


def test_a_plain_forward_warms_up_before_the_trace(device):
    seen = []

    def forward(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        out = torch.empty_like(x)
        pw_attend(x, out, "w")
        return out + 1

    made = PiecewiseForward(forward, config=PiecewiseConfig(split_ops=(ATTEND,)), device=device)
    with torch.no_grad(), step(NONE, 4):
        made(torch.ones(4, 2))
    assert seen[0] is False


@pytest.mark.parametrize("rows", [0, 1])
def test_a_trace_with_too_few_rows_is_refused(device, rows):
    rig = Rig(device)
    with step(NONE, rows), pytest.raises(GraphError, match=rf"has {rows} rows .* at least 2"):
        rig.forward(torch.zeros(rows, dtype=torch.int32))


def test_tracing_while_a_capture_is_open_is_refused_and_names_the_way_out(device):
    rig = Rig(device)
    with torch.no_grad(), rig.store.capturing(), step(PIECEWISE, 4):
        with pytest.raises(CaptureError, match=r"traced before it is captured.*outside the capture"):
            rig.graphs(rig.ids[4])
    rig.trace()
    assert rig.forward.is_compiled


def test_no_replay_before_the_capture_stage_has_ended(device):
    rig = Rig(device).trace()
    with torch.no_grad(), rig.store.capturing(), step(PIECEWISE, 4):
        rig.graphs(rig.ids[4])
        with pytest.raises(GraphError, match="only after the capture stage has ended"):
            rig.graphs(rig.ids[4])


def test_a_size_that_was_not_captured_is_refused_once_the_store_is_sealed(device):
    rig = Rig(device, sizes=(4, 2)).capture()
    with step(PIECEWISE, 3), pytest.raises(CaptureClosedError):
        rig.graphs(torch.zeros(3, dtype=torch.int32))


def test_capturing_runs_no_split_op(device):
    rig = Rig(device, op=ROUTE).trace()
    RUNS.clear()
    with torch.no_grad(), rig.store.capturing():
        for n in SIZES:
            with step(PIECEWISE, n):
                rig.graphs(rig.ids[n])
    assert RUNS["route"] == 0
    rig.replay(4, 0)
    assert RUNS["route"] == 6  # three in the replay, three in the plain forward


def test_a_break_of_the_caller_sees_real_data_during_the_capture(device):
    """Nothing is run for the split parts, but what a break of the model reads must have been computed."""
    seen = []

    @eager_break
    def look(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return x * 2

    rig = Rig(device, sizes=(4, 2), wrap=lambda ids: rig.run(ids).copy_(look(rig.run(ids) + 1) + 1))
    rig.capture()
    assert all(x.isfinite().all() for x in seen)
    assert torch.equal(seen[-2], rig.model(rig.ids[4]) + 1)
    got, expected = rig.replay(4, 3)
    assert torch.equal(got, (expected + 1) * 2 + 1)


def test_pieces_are_warmed_up_then_captured_for_every_size(device):
    rig = Rig(device).capture()
    pieces = rig.forward.backend.pieces
    assert len(pieces) == 4
    assert {piece.num_runs for piece in pieces} == {1}
    assert {piece.num_captures for piece in pieces} == {len(SIZES)}


# --- addresses ---


@pytest.mark.parametrize("level", ["DEBUG", "ERROR"])
def test_a_parameter_that_moved_is_named_at_the_first_replay(device, level, caplog):
    caplog.set_level(level, logger="gapless")
    rig = Rig(device, sizes=(4, 2)).capture()
    layer = rig.model.layers[1]
    old = layer.gain
    layer.gain = torch.nn.Parameter(old.clone(), requires_grad=False)
    with pytest.raises(StaleAddressError, match=r"layers\.1\.gain moved .*capture again"):
        rig.replay(4, 0)
    with pytest.raises(StaleAddressError):
        rig.replay(4, 0)  # nor later
    layer.gain = old
    got, expected = rig.replay(4, 0)
    assert torch.equal(got, expected)


def test_parameters_updated_in_place_are_followed(device):
    rig = Rig(device, sizes=(4, 2)).capture()
    rig.model.layers[0].weight.mul_(1.25)
    got, expected = rig.replay(4, 0)
    assert torch.equal(got, expected)


def test_an_argument_that_is_another_tensor_is_refused(device):
    rig = Rig(device, sizes=(4, 2)).capture()
    with step(PIECEWISE, 4), pytest.raises(StaleAddressError, match="copy the new values into"):
        rig.graphs(rig.ids[4].clone())


def test_a_buffer_that_the_forward_rebinds_is_found(device):
    """The assignment would happen once, at the capture, and never in a replay."""

    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.seen = self.seen + 1
            out = torch.empty_like(x)
            pw_attend(x, out, "c")
            return out + self.seen

    model = Counter()
    forward = PiecewiseForward(model.forward, config=PiecewiseConfig(split_ops=(ATTEND,)), device=device)
    x = torch.ones(4, 2)
    with torch.no_grad(), step(NONE, 4):
        forward(x)
    with step(PIECEWISE, 4):
        program, _ = capture_program(
            lambda: forward(x), device=device, pool=device.new_pool(), strategy=Strategy.TC_PIECEWISE
        )
        with pytest.raises(StaleAddressError, match="seen moved"):
            program.replay()


def test_checking_addresses_computes_nothing(device):
    rig = Rig(device, sizes=(4, 2)).capture()
    RUNS.clear()
    with torch.no_grad(), step(PIECEWISE, 4):
        rig.graphs(rig.ids[4])
    assert RUNS["attend"] == 3


def test_something_that_forces_a_new_trace_is_an_error_at_the_first_replay(device):
    rig = Rig(device, sizes=(4, 2)).capture()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(GraphError, match="had to be traced again"):
            rig.replay(4, 0)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_parameter_of_another_dtype_is_named_although_it_forces_a_new_trace(device):
    rig = Rig(device, sizes=(4, 2)).capture()
    layer = rig.model.layers[2]
    layer.gain = torch.nn.Parameter(layer.gain.double(), requires_grad=False)
    with pytest.raises(StaleAddressError, match=r"layers\.2\.gain moved"):
        rig.replay(4, 0)


def test_forwards_are_compiled_without_autograd_whoever_calls(device):
    rig = Rig(device).trace()
    with torch.enable_grad(), step(NONE, 4):
        assert not rig.forward(rig.ids[4]).requires_grad
    assert rig.forward.stats.num_traces == 1


# --- nesting ---


def test_a_full_graph_wraps_the_same_pieces_and_each_wrapper_acts_in_its_mode_only(device):
    rig = Rig(device, sizes=(4, 2))
    total = rig.store.output("total", (4,), torch.float32)

    def whole(ids: Tensor) -> Tensor:
        return total[: len(ids)].copy_(rig.graphs(ids).sum(-1))

    outer = GraphWrapper(
        whole, runtime_mode=FULL, phase=Phase.DECODE, strategy=Strategy.FULL, store=rig.store
    )
    rig.trace()
    with torch.no_grad(), rig.store.capturing():
        for n in (4, 2):
            for mode in (PIECEWISE, FULL):
                with step(mode, n):
                    outer(rig.ids[n])
    by_mode = {(row.key.mode, row.key.descriptor.num_tokens): row for row in rig.store.ledger}
    assert {key: (row.num_segments, row.num_breaks) for key, row in by_mode.items()} == {
        (PIECEWISE, 4): (4, 3),
        (FULL, 4): (1, 0),
        (PIECEWISE, 2): (4, 3),
        (FULL, 2): (1, 0),
    }
    for n, mode, seed in ((4, FULL, 0), (2, PIECEWISE, 1), (4, PIECEWISE, 2), (2, FULL, 3), (4, NONE, 4)):
        rig.ids[n].copy_(torch.randint(16, (n,), generator=torch.Generator().manual_seed(seed)))
        with torch.no_grad(), step(mode, n):
            assert torch.equal(outer(rig.ids[n]), rig.model(rig.ids[n]).sum(-1))
    assert rig.forward.stats.num_traces == 1


def test_a_full_graph_records_what_a_split_op_does_inside(device):
    rig = Rig(device, sizes=(4, 2)).trace()
    program, _ = _capture_full(rig)
    names = [name for step_ in program.steps for name in step_.segment.op_names]
    assert "gapless.pw_attend.default" not in names
    assert names.count("aten.copy_.default") == 3  # the last thing that each of the three does


def _capture_full(rig: Rig):
    with step(FULL, 4):
        return capture_program(
            lambda: rig.forward(rig.ids[4]),
            device=rig.device,
            pool=rig.device.new_pool(),
            strategy=Strategy.FULL,
        )


# --- failures inside a capture ---


def test_a_split_op_that_fails_at_replay_does_not_break_the_next_replay(device):
    rig = Rig(device, sizes=(4, 2)).capture()
    rig.ids[4].fill_(99)  # no such row in the table
    with torch.no_grad(), step(PIECEWISE, 4), pytest.raises(IndexError):
        rig.graphs(rig.ids[4])
    got, expected = rig.replay(4, 1)
    assert torch.equal(got, expected)


def test_a_failed_capture_leaves_the_forward_usable(device):
    rig = Rig(device, sizes=(4, 2)).trace()
    honest, calls = rig.forward.backend.pieces[2].compiled, []

    class Broken:
        is_opaque = False

        def run(self, *args):
            calls.append(len(args))
            raise LookupError("boom")

    rig.forward.backend.pieces[2].compiled = Broken()
    with torch.no_grad(), rig.store.capturing():
        with step(PIECEWISE, 4), pytest.raises(CaptureError, match="boom"):
            rig.graphs(rig.ids[4])
        rig.forward.backend.pieces[2].compiled = honest
        with step(PIECEWISE, 4):
            rig.graphs(rig.ids[4])
    assert calls
    got, expected = rig.replay(4, 1)
    assert torch.equal(got, expected)


def test_a_mode_of_the_caller_on_top_of_the_recording_is_refused(device):
    rig = Rig(device, sizes=(4, 2))

    def forward(ids: Tensor) -> Tensor:
        with torch.device("cpu"):
            return rig.run(ids)

    rig.graphs.fn = forward
    rig.trace()
    with torch.no_grad(), rig.store.capturing(), step(PIECEWISE, 4):
        with pytest.raises(CaptureError, match="enter such modes inside the compiled forward"):
            rig.graphs(rig.ids[4])


def test_a_first_replay_under_a_mode_of_the_caller_checks_addresses_all_the_same(device):
    """PyTorch skips compiled code under a dispatch mode, in that call and in all later ones."""
    rig = Rig(device, sizes=(4, 2)).capture()
    with device.eager_arena():
        for n in (4, 2):
            got, expected = rig.replay(n, n)
            assert torch.equal(got, expected)
        with step(NONE, 4), pytest.raises(GraphError, match="under a dispatch mode that the caller entered"):
            rig.graphs(rig.ids[4])
    with step(NONE, 4):
        rig.graphs(rig.ids[4])
    assert rig.forward.stats.num_traces == 1


def test_install_swaps_the_forward_of_a_module_once(device):
    model = Stack()
    config = PiecewiseConfig(split_ops=(ATTEND,))
    forward = install(model, config=config, device=device)
    with pytest.raises(GraphError, match="has a piecewise forward already"):
        install(model, config=config, device=device)
    ids = torch.arange(4)
    with torch.no_grad(), step(NONE, 4):
        compiled = model(ids)
    assert forward.is_compiled
    assert torch.equal(compiled, model(ids))
