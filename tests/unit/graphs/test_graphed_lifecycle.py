"""Life cycle of graphs: weights reloaded under them, release, recapture, pause, shared memory, teardown."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gapless.errors import CaptureClosedError, GraphError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.breakable import eager_break
from gapless.graphs.device import get_device
from gapless.graphs.device.emulated import EmulatedPool
from gapless.graphs.graphed import Graphed, Input, SharedPool, State, graphed
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.store import GraphKey, GraphStore

ROWS = Input(dims={0: "rows"})


class Packed(nn.Module):
    """A weight and what was derived from it, hidden in a plain object."""

    class Holder:
        def __init__(self, tensor: Tensor) -> None:
            self.items = {"packed": [tensor]}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.register_buffer("bias", torch.randn(6))
        self.holder = self.Holder(self.weight.t().contiguous())
        self.limit = 3

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.holder.items["packed"][0] + self.bias + x @ self.weight


def rows(n: int) -> Tensor:
    return torch.randn(n, 6)


def capture(module: Any = None, **options: Any) -> Graphed:
    return graphed(
        module or Packed(), inputs={"x": ROWS}, **{"sizes": [2, 4], "audit": "never", **options}
    ).capture(rows(3))


def reload_in_place(net: Packed) -> None:
    for tensor in (net.weight, net.bias, net.holder.items["packed"][0]):
        tensor.copy_(torch.randn_like(tensor))


def rebind_parameter(net: Packed) -> None:
    net.weight = nn.Parameter(torch.randn(6, 6), requires_grad=False)


def exchange_data(net: Packed) -> None:
    net.weight.data = torch.randn(6, 6)


def rebind_buffer(net: Packed) -> None:
    net.bias = torch.randn(6)


def rebind_derived(net: Packed) -> None:
    net.holder.items["packed"][0] = torch.randn(6, 6)


def rebuild_holder(net: Packed) -> None:
    net.holder = Packed.Holder(torch.randn(6, 6))


def change_dtype(net: Packed) -> None:
    net.double()


def change_value(net: Packed) -> None:
    net.limit = 6


def drop_buffer(net: Packed) -> None:
    net.bias = None


MOVES = {
    rebind_parameter: "Packed.weight: moved",
    exchange_data: "Packed.weight: moved",
    rebind_buffer: "Packed.bias: moved",
    rebind_derived: r"Packed.holder.items\['packed'\]\[0\]: moved",
    rebuild_holder: r"Packed.holder.items\['packed'\]\[0\]: moved",
    change_dtype: "Packed.weight: is now torch.float64 instead of torch.float32",
    change_value: "Packed.limit: 3 → 6",
    drop_buffer: "Packed.bias: the tensor is no longer there",
}
by_move = pytest.mark.parametrize("move", MOVES, ids=lambda m: m.__name__)


def test_weights_copied_in_place_are_live_and_pass_the_audit() -> None:
    net = Packed()
    made = capture(net)
    x = rows(3)
    before = made(x)
    reload_in_place(net)
    assert made.audit() == []
    assert made.revalidate() == []
    assert not torch.equal(made(x), before)
    assert torch.equal(made(x), made.padded_eager(x))


@by_move
def test_what_moved_names_itself(move: Any) -> None:
    net = Packed()
    made = capture(net)
    move(net)
    changes = made.audit()
    assert len(changes) >= 1
    with pytest.raises(GraphError, match=MOVES[move]):
        made.revalidate(on_change="raise")


@pytest.mark.parametrize("move", [rebind_parameter, exchange_data, rebind_buffer, rebind_derived])
def test_until_then_graphs_read_the_old_memory_never_someone_elses(move: Any) -> None:
    net = Packed()
    made = capture(net)
    x = rows(3)
    before = made(x)
    move(net)
    gc.collect()
    churn = [torch.full((6, 6), float("nan")) for _ in range(200)]
    assert torch.equal(made(x), before)
    del churn


@pytest.mark.parametrize(
    "move", [rebind_parameter, exchange_data, rebind_buffer, rebind_derived, change_value]
)
def test_revalidate_captures_again_where_something_moved(move: Any) -> None:
    net = Packed()
    made = capture(net)
    move(net)
    changes = made.revalidate()
    assert changes
    assert made.audit() == []
    x = rows(3)
    torch.testing.assert_close(made(x), net(x))


@pytest.mark.parametrize("audit", ["first", "always", "never"])
def test_audit_at_the_first_replay_of_a_size_or_at_every_call(audit: Any) -> None:
    net = Packed()
    made = capture(net, audit=audit)
    made(rows(4))
    rebind_parameter(net)
    if audit == "always":
        with pytest.raises(GraphError, match=r"Packed\.weight: moved"):
            made(rows(4))
    else:
        made(rows(4))
    if audit == "never":
        made(rows(2))
    else:
        with pytest.raises(GraphError, match=r"Packed\.weight: moved"):
            made(rows(2))


def test_frozen_tensor_arguments_are_kept_alive() -> None:
    table = torch.randn(6)
    expected = table.clone()
    made = graphed(lambda x, table: x + table, inputs={"x": ROWS}, sizes=[4]).capture(rows(2), table)
    template, address = made.generation.template, table.data_ptr()
    del table
    gc.collect()
    alive = template.frozen_tensors[0].tensor
    assert alive is not None
    assert alive.data_ptr() == address
    assert torch.equal(made(torch.zeros(1, 6), alive)[0], expected)


# --- release and recapture ---------------------------------------------------------------------------------


def test_release_gives_everything_back_and_calls_go_on_eagerly() -> None:
    net = Packed()
    made = capture(net)
    generation = made.generation
    watched = [weakref.ref(generation.runner.inputs), weakref.ref(generation.runner)]
    assert made.report()["memory"]["pool_bytes"] > 0
    del generation
    made.release()
    made.release()
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    assert made.report()["memory"]["pool_bytes"] == 0
    x = rows(3)
    assert torch.equal(made(x), net(x))
    assert made.report()["eager"] == [{"phase": "forward", "reason": "released", "count": 1}]


def test_release_lets_go_of_the_weights() -> None:
    net = Packed()
    made = capture(net)
    weight = weakref.ref(net.weight)
    made.release()
    made.fn = None
    del net
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("how", ["same", "example", "after_release"])
def test_recapture(how: str) -> None:
    net = Packed()
    made = capture(net, sizes=None)
    rebind_parameter(net)
    if how == "after_release":
        made.release()
    made.recapture(*([] if how == "same" else [rows(5)]))
    assert made.state is State.READY
    assert made.report()["plan"]["sizes"]["rows"][-1] == {"same": 3}.get(how, 5)
    x = rows(3)
    torch.testing.assert_close(made(x), net(x))


def test_recapture_with_other_frozen_arguments() -> None:
    made = graphed(lambda x, gain: x * gain, inputs={"x": ROWS}, sizes=4).capture(rows(2), 2.0)
    made.recapture(rows(2), 5.0)
    x = rows(3)
    assert torch.equal(made(x, 5.0), x * 5)
    with pytest.raises(GraphError, match=r"argument 'gain' was 5\.0"):
        made(x, 2.0)


def test_recapture_many_times_does_not_grow() -> None:
    made = capture()
    sizes = set()
    for _ in range(5):
        made.recapture()
        sizes.add(made.report()["memory"]["pool_bytes"])
    assert len(sizes) == 1


def test_context_manager_releases() -> None:
    with capture() as made:
        made(rows(2))
    assert made.state is State.RELEASED


def test_a_failed_capture_leaves_nothing_and_can_be_repeated() -> None:
    class Moody(nn.Module):
        bad = True

        def forward(self, x: Tensor) -> Tensor:
            if self.bad:
                raise LookupError("not today")
            return x * 2

    net = Moody()
    made = graphed(net, inputs={"x": ROWS}, sizes=4)
    with pytest.raises(LookupError):
        made(rows(2))
    assert made.state is State.NEW
    net.bad = False
    x = rows(3)
    assert torch.equal(made(x), x * 2)


# --- pause and resume --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_graphs", [True, False])
def test_nothing_runs_while_paused(keep_graphs: bool) -> None:
    made = capture()
    made.pause(keep_graphs=keep_graphs)
    assert made.state is State.PAUSED
    with pytest.raises(GraphError, match="is paused"):
        made(rows(2))
    with pytest.raises(GraphError, match="only a captured one can be paused"):
        made.pause()
    assert (made.report()["memory"]["pool_bytes"] > 0) is keep_graphs
    made.resume()
    x = rows(3)
    assert torch.equal(made(x), made.padded_eager(x))
    with pytest.raises(GraphError, match="not paused"):
        made.resume()


def test_pause_lets_weights_be_freed_and_resume_captures_where_they_moved() -> None:
    net = Packed()
    made = capture(net)
    contents = net.weight.clone()
    storage, address = weakref.ref(net.weight.untyped_storage()), net.weight.data_ptr()
    made.pause()
    net.weight.data = torch.empty(0)
    gc.collect()
    assert storage() is None or net.weight.numel() == 0
    copies = [contents.clone()]
    while copies[-1].data_ptr() == address:  # the memory that has just come free
        copies.append(contents.clone())
    net.weight.data = copies[-1]
    changes = made.resume()
    assert [change.name for change in changes] == ["Packed.weight"]
    x = rows(3)
    torch.testing.assert_close(made(x), net(x))
    assert made.audit() == []


def test_resume_keeps_graphs_of_weights_that_came_back_in_place() -> None:
    net = Packed()
    made = capture(net)
    generation = made.generation
    made.pause()
    reload_in_place(net)
    assert made.resume() == []
    assert made.generation is generation
    x = rows(3)
    assert torch.equal(made(x), made.padded_eager(x))


def test_resume_asks_for_frozen_tensors_that_were_let_go() -> None:
    table = torch.randn(6)
    made = graphed(lambda x, table: x + table, inputs={"x": ROWS}, sizes=4).capture(rows(2), table)
    made.pause()
    with pytest.raises(GraphError, match="needs an example call: table was let go"):
        made.resume()
    assert made.resume(rows(2), table) == []
    x = rows(3)
    assert torch.equal(made(x, table), x + table)
    made.pause()
    other = torch.randn(6)
    made.resume(rows(2), other)
    assert torch.equal(made(x, other), x + other)


# --- several runtimes, shared memory, teardown -------------------------------------------------------------


def test_two_runtimes_in_one_process_do_not_disturb_each_other() -> None:
    nets = [Packed(), Packed()]
    rebind_parameter(nets[1])
    both = [capture(net) for net in nets]
    for _ in range(3):
        for made, net in zip(both, nets, strict=True):
            x = rows(3)
            torch.testing.assert_close(made(x), net(x))
    both[0].release()
    x = rows(4)
    torch.testing.assert_close(both[1](x), nets[1](x))


@eager_break
def scaled(h: Tensor) -> Tensor:
    return h * 3


class Broken(Packed):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(super().forward(x)) + x


@pytest.mark.parametrize("release_first", [0, 1])
@pytest.mark.parametrize("kinds", [(Packed, Packed), (Packed, Broken), (Broken, Broken)])
def test_two_models_share_one_pool(kinds: tuple[type[Packed], type[Packed]], release_first: int) -> None:
    pool = SharedPool.on("cpu")
    nets = [kind() for kind in kinds]
    rebind_derived(nets[1])
    both = [capture(net, pool=pool) for net in nets]
    alone = capture(nets[0]).report()["memory"]["pool_bytes"]
    assert pool.num_users == 2
    assert pool.num_bytes < 2 * alone + 4096
    batches = [rows(n) for n in (3, 4, 1, 2)]
    expected = [[net(x) for x in batches] for net in nets]
    for _ in range(2):
        for x, *wanted in zip(batches, *expected, strict=True):
            for made, want in zip(both, wanted, strict=True):
                torch.testing.assert_close(made(x), want)
    both[release_first].release()
    assert pool.num_users == 1
    survivor, net = both[1 - release_first], nets[1 - release_first]
    for x in batches:
        torch.testing.assert_close(survivor(x), net(x))
    survivor.release()
    assert pool.num_bytes == 0


def test_a_shared_pool_whose_last_graph_has_gone_starts_afresh() -> None:
    pool = SharedPool.on("cpu")
    made = capture(pool=pool)
    first = pool._pool
    made.release()
    assert isinstance(first, EmulatedPool)
    assert first.is_released
    again = capture(pool=pool)
    assert pool._pool is not first
    again(rows(2))


def test_graphs_and_weights_can_be_dropped_in_any_order() -> None:
    for order in ("graphs", "weights"):
        net = Packed()
        made: Graphed | None = capture(net)
        generation = weakref.ref(made.generation)  # type: ignore[union-attr]
        if order == "graphs":
            del made
            gc.collect()
            assert generation() is None
            net(rows(2))
        else:
            assert made is not None
            made.fn = net = None  # type: ignore[assignment]
            gc.collect()
            made.release()


def test_a_pool_of_another_device_is_refused() -> None:
    class OtherDevice:
        torch_device = torch.device("meta")

    with pytest.raises(GraphError, match="cannot serve cpu"):
        GraphStore(get_device("cpu"), pool=SharedPool(OtherDevice()))  # type: ignore[arg-type]


def test_stores_that_share_a_pool_stay_closed_to_each_other() -> None:
    pool = SharedPool.on("cpu")
    stores = [GraphStore(pool.device, pool=pool) for _ in range(2)]
    x = torch.ones(4)
    key = GraphKey(Phase.FORWARD, RuntimeMode.FULL, BatchDescriptor(4, 1))
    with stores[0].capturing():
        stores[0].capture(key, lambda: x * 2, Strategy.FULL)
    with pytest.raises(CaptureClosedError):
        stores[0].capture(key, lambda: x * 2, Strategy.FULL)
    with stores[1].capturing():
        stores[1].capture(key, lambda: x * 3, Strategy.FULL)
    assert stores[1].get(key) is not None
    for store in stores:
        store.release()
    assert pool.num_users == 0


def test_releasing_from_within_a_step_is_refused() -> None:
    holder: dict[str, Graphed] = {}

    @eager_break
    def release_it(h: Tensor) -> None:
        if "made" in holder:
            holder["made"].release()

    def fn(x: Tensor) -> Tensor:
        release_it(x)
        return x * 2

    made = graphed(fn, inputs={"x": ROWS}, sizes=4).capture(rows(2))
    holder["made"] = made
    with pytest.raises(GraphError, match="in use by the step that is running"):
        made(rows(2))
    holder.clear()
    x = rows(2)
    assert torch.equal(made(x), x * 2)


# --- state -------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return x + self.steps


@pytest.mark.parametrize("strategy", ["full", "breakable"])
def test_captures_leave_no_trace_in_the_state_and_replays_advance_it(strategy: str) -> None:
    net = Counting()
    made = capture(net, strategy=strategy)
    assert net.steps.item() == 0
    x = rows(3)
    for step in (1, 2, 3):
        assert torch.equal(made(x), x + step)
    assert net.steps.item() == 3
    assert made.verify().is_ok
    assert net.steps.item() == 3, "verification leaves no trace either"


def test_a_python_counter_is_reported_as_a_lost_side_effect() -> None:
    class PythonCounter(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(x.shape[0])
            return x * 2

    made = capture(PythonCounter())
    reasons = [d["reason"] for d in made.report()["plan"]["decisions"] if d["rule"] == "side effect"]
    assert any("PythonCounter.calls" in reason for reason in reasons)
    assert any("len(PythonCounter.seen)" in reason for reason in reasons)
    failed = {
        f.detail.split(": ", 1)[1].split(":")[0] for f in made.verify().failures if f.check == "side effects"
    }
    assert {"PythonCounter.calls", "len(PythonCounter.seen)"} <= failed


@pytest.mark.parametrize("kind", ["rebound_buffer", "stashed_result", "cache_replaced"])
def test_attributes_rebound_in_the_forward_are_refused(kind: str) -> None:
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(6))
            self.cache: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if kind == "rebound_buffer":
                self.steps = self.steps + 1
            elif kind == "stashed_result":
                self.steps = x.sum(0)
            else:  # one slot, keyed by size: replaced when another size comes
                self.cache["table"] = torch.arange(x.shape[0]).float()
            return x * 2

    with pytest.raises(GraphError, match=r"a run rebinds tensors: Writer\.(steps|cache\['table'\])"):
        capture(Writer())


def test_a_cache_with_an_entry_per_size_is_filled_before_the_captures() -> None:
    class PerSize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[0]
            if n not in self.tables:
                self.tables[n] = torch.arange(n, dtype=torch.float32)[:, None]
            return x + self.tables[n]

    net = PerSize()
    made = capture(net)
    assert {2, 4} <= net.tables.keys()
    for n in (1, 2, 3, 4, 2, 4):
        x = rows(n)
        assert torch.equal(made(x), net(x))
    assert made.verify().is_ok


def test_a_tensor_that_a_capture_leaves_in_graph_memory_is_refused() -> None:
    class Lazy(nn.Module):
        """Makes its table only while recording, as a cache keyed by something else may."""

        def __init__(self) -> None:
            super().__init__()
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if get_device("cpu").is_recording() and self.table is None:
                self.table = torch.ones(6)
            return x + (0 if self.table is None else self.table)

    with pytest.raises(GraphError, match=r"Lazy.table was made during a capture and kept"):
        capture(Lazy())


def test_breaks_may_change_what_they_like() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            return _remember(self, x + 1) * 2

    net = Stateful()
    made = capture(net, strategy="auto")
    assert made.strategy is Strategy.BREAKABLE
    calls = net.calls
    x = rows(3)
    assert torch.equal(made(x), (x + 1) * 2)
    assert net.calls == calls + 1
    assert made.audit() == []
    assert made.verify().is_ok


@eager_break
def _remember(net: Any, h: Tensor) -> Tensor:
    net.calls += 1
    net.last = h.clone()
    return h
