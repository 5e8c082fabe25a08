"""The order of calls the CUDA device makes, on a fake backend: what a CPU can check about captures on a GPU.

The fake keeps the books of PyTorch's allocator and generator (routing, use counts, "is capturing"), with the
behaviour of torch 2.11 after a failed capture, and records every call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch

from gapless.errors import CaptureError, GraphError
from gapless.graphs.breakable import eager_break
from gapless.graphs.capture import capture_program, warm_up
from gapless.graphs.device.cuda import CudaDevice
from gapless.graphs.device.memset_nodes import MemsetCount
from gapless.graphs.modes import Strategy


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.is_idle = True

    def query(self) -> bool:
        return self.is_idle

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, runtime: FakeRuntime, number: int) -> None:
        self.runtime, self.number = runtime, number
        self.handle: tuple[int, int] | None = None
        self.ended_well = False
        self.is_editable = self.is_instantiated = False
        self.num_resets = 0

    def replay(self) -> None:
        assert self.ended_well
        assert self.is_instantiated
        assert self.num_resets == 0
        self.runtime.log.append(f"replay {self.number}")

    def reset(self) -> None:
        self.num_resets += 1
        if self.ended_well:  # as in PyTorch, only then is the pool's use given back
            self.runtime.uses[self.handle] -= 1
            self.ended_well = False


class FakeRuntime:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.outer = FakeStream(self.log, "outer")
        self.stream = self.outer
        self.is_current = True
        self.uses: dict[tuple[int, int], int] = {}
        self.routed: set[tuple[int, int]] = set()
        self.graphs: list[FakeGraph] = []
        self.capturing: FakeGraph | None = None
        self.generator_believes_capturing = False
        self.offset = 0
        """Of the random generator."""
        self.end_error: str | None = None
        self.begin_error: str | None = None
        self.has_work = True
        self.nodes = 5
        self.memsets_left = 0
        self.edit_error: Exception | None = None
        self.instantiate_error: str | None = None
        self.ranges: list[tuple[int, int]] = []
        self.num_snapshots = 0
        self.pinned_recording: set[tuple[int, int]] = set()
        """Handles that the pinned-memory allocator records to for good, after a capture that did not end."""

    def new_stream(self) -> FakeStream:
        self.log.append("new stream")
        return FakeStream(self.log, "side")

    def current_stream(self) -> FakeStream:
        return self.stream

    @contextmanager
    def use_stream(self, stream: FakeStream):
        previous, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = previous

    def set_stream(self, stream: FakeStream) -> None:
        self.stream = stream

    def is_current_device(self) -> bool:
        return self.is_current

    def random_state(self) -> int:
        assert self.capturing is None
        return self.offset

    def set_random_state(self, state: int) -> None:
        if self.generator_believes_capturing:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::set_current_seed during CUDA graph capture")
        self.offset = state

    def synchronize(self) -> None:
        assert self.capturing is None
        self.log.append("sync")

    def new_pool_handle(self) -> tuple[int, int]:
        return (0, len(self.uses) + 1)

    def new_graph(self) -> FakeGraph:
        graph = FakeGraph(self, len(self.graphs))
        self.graphs.append(graph)
        return graph

    def new_editable_graph(self) -> FakeGraph:
        graph = self.new_graph()
        graph.is_editable = True
        return graph

    def replace_memsets(self, graph: FakeGraph) -> MemsetCount:
        assert graph.ended_well
        assert graph.is_editable
        assert not graph.is_instantiated, "an edit after it would not be seen"
        if self.edit_error is not None:
            error, self.edit_error = self.edit_error, None
            raise error
        self.log.append(f"edit {graph.number}")
        return MemsetCount(2, self.memsets_left)

    def instantiate(self, graph: FakeGraph) -> None:
        assert graph.ended_well
        assert graph.is_editable, "as in PyTorch, others do it themselves"
        if self.instantiate_error is not None:
            message, self.instantiate_error = self.instantiate_error, None
            raise RuntimeError(message)
        graph.is_instantiated = True
        self.log.append(f"instantiate {graph.number}")

    def begin(self, graph: FakeGraph, handle: tuple[int, int]) -> None:
        assert self.capturing is None
        assert self.stream is not self.outer
        assert self.uses.get(handle) != 0, "reopened a pool whose last graph had gone"
        if handle in self.pinned_recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.uses[handle] = self.uses.get(handle, 0) + 1
        self.routed.add(handle)
        if self.begin_error is not None:
            message, self.begin_error = self.begin_error, None
            raise RuntimeError(message)
        self.capturing, graph.handle = graph, handle
        self.generator_believes_capturing = True
        self.log.append(f"begin {graph.number}")

    def end(self, graph: FakeGraph) -> bool:
        assert self.capturing is graph
        assert self.stream is not self.outer
        self.capturing = None
        if self.end_error is not None:
            message, self.end_error = self.end_error, None
            assert graph.handle is not None
            self.pinned_recording.add(graph.handle)
            self.log.append(f"end {graph.number} fails")
            raise RuntimeError(message)  # torch 2.11: routing, use count and generator stay as they were
        self.routed.discard(graph.handle)
        self.generator_believes_capturing = False
        graph.ended_well = True
        self.log.append(f"end {graph.number}")
        return self.has_work

    def launch_of(self, graph: FakeGraph) -> Callable[[], None]:
        return graph.replay

    def count_nodes(self, stream: FakeStream) -> int:
        assert self.capturing is not None
        return self.nodes

    def stop_pool_routing(self, handle: tuple[int, int]) -> None:
        if handle not in self.routed:
            raise RuntimeError("not currently recording to this pool")
        self.routed.discard(handle)

    def release_pool_use(self, handle: tuple[int, int]) -> None:
        self.uses[handle] -= 1

    def pool_ranges(self, handle: tuple[int, int]) -> list[tuple[int, int]]:
        self.num_snapshots += 1
        return self.ranges

    def empty_cache(self) -> None:
        self.log.append("empty cache")

    def memory_allocated(self) -> int:
        return 100

    def free_memory(self) -> int:
        return 1000

    def load_tiny_kernels(self) -> None:
        self.log.append("load kernels")

    def do_some_work(self) -> None:
        assert self.capturing is not None

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def cuda(runtime) -> CudaDevice:
    device = CudaDevice(torch.device("cuda", 0), runtime=runtime)
    device.torch_device = torch.device("cpu")  # tensors of these tests are on the CPU
    return device


def capture(cuda: CudaDevice, fn, pool=None, strategy: Strategy = Strategy.FULL):
    return capture_program(fn, device=cuda, pool=pool or cuda.new_pool(), strategy=strategy)


def check_clean(runtime: FakeRuntime, *, uses: dict) -> None:
    assert runtime.capturing is None
    assert not runtime.routed
    assert not runtime.generator_believes_capturing
    assert runtime.stream is runtime.outer
    assert {handle: count for handle, count in runtime.uses.items() if handle in uses} == uses


def test_order_is_warm_up_then_synchronise_then_begin_then_end(cuda, runtime):
    def forward() -> None:
        runtime.log.append("forward")

    warm_up(forward, cuda, cuda.num_warmups)
    capture(cuda, forward)
    assert runtime.log == [
        "new stream",
        "load kernels",
        "side waits for outer",
        "forward",
        "forward",
        "outer waits for side",
        "sync",
        "side waits for outer",
        "begin 0",
        "end 0",  # the anchor that keeps the pool's handle open
        "begin 1",
        "forward",
        "end 1",
        "edit 1",
        "instantiate 1",
        "outer waits for side",
    ]


def test_warm_up_and_capture_run_on_the_same_stream(cuda, runtime):
    streams = []
    warm_up(lambda: streams.append(runtime.stream), cuda, 2)
    capture(cuda, lambda: streams.append(runtime.stream))
    assert len(set(streams)) == 1
    assert streams[0] is not runtime.outer


def test_breakable_replays_each_segment_outside_any_capture(cuda, runtime):
    @eager_break
    def body() -> None:
        assert runtime.capturing is None
        runtime.log.append("body")

    def forward() -> None:
        body()
        body()

    program, _ = capture(cuda, forward, strategy=Strategy.BREAKABLE)
    after_anchor = runtime.log[runtime.log.index("end 0") + 1 :]
    assert after_anchor == [
        "begin 1", "end 1", "edit 1", "instantiate 1", "replay 1", "body",
        "begin 2", "end 2", "edit 2", "instantiate 2", "replay 2", "body",
        "begin 3", "end 3", "edit 3", "instantiate 3", "outer waits for side",
    ]  # fmt: skip
    runtime.log.clear()
    program.replay()
    assert runtime.log == ["replay 1", "body", "replay 2", "body", "replay 3"]
    assert program.num_nodes == 15


@pytest.mark.parametrize("end_error", [None, "operation failed due to a previous error during capture"])
def test_draws_of_a_failed_capture_are_undone(cuda, runtime, end_error):
    runtime.offset = 3

    def forward() -> None:
        runtime.offset += 4  # what a replayed segment draws
        runtime.end_error = end_error
        raise LookupError

    with pytest.raises(CaptureError):
        capture(cuda, forward, strategy=Strategy.BREAKABLE)
    assert runtime.offset == 3


@pytest.mark.parametrize("how", ["warning", "count"])
def test_empty_segments_are_left_out(cuda, runtime, how):
    if how == "warning":
        runtime.has_work, runtime.nodes = False, -1
    else:
        runtime.nodes = 0
    program, _ = capture(cuda, lambda: None)
    assert (program.num_segments, program.num_nodes) == (0, 0)


def test_unknown_node_count_does_not_look_empty(cuda, runtime):
    runtime.nodes = -1
    program, _ = capture(cuda, lambda: None)
    assert (program.num_segments, program.num_nodes) == (1, -1)


@pytest.mark.parametrize(("left", "total"), [(0, 0), (3, 6), (-1, -1)])
def test_memset_nodes_that_stay_are_counted(cuda, runtime, left, total):
    runtime.memsets_left = left

    def forward() -> None:
        eager_break(lambda: None)()

    program, _ = capture(cuda, forward, strategy=Strategy.BREAKABLE)
    assert (program.num_segments, program.num_memsets) == (2, total)


@pytest.mark.parametrize("what", ["edit", "instantiate"])
def test_a_captured_graph_that_cannot_be_made_ready_fails_its_capture_alone(cuda, runtime, what):
    """The capture has ended well: its pool's use is given back by the graph's reset, and by nobody before."""
    pool = cuda.new_pool()
    first, _ = capture(cuda, lambda: None, pool)
    if what == "edit":
        runtime.edit_error = GraphError("on purpose")
    else:
        runtime.instantiate_error = "on purpose"
    with pytest.raises(CaptureError, match="cannot be made ready for replays: on purpose"):
        capture(cuda, lambda: None, pool)
    check_clean(runtime, uses={pool.handle: 3})  # anchor, the first graph, the one of no use
    assert not runtime.graphs[-1].is_instantiated
    capture(cuda, lambda: None, pool)[0].reset()
    first.replay()
    first.reset()
    pool.release()
    assert runtime.uses[(0, 1)] == 0


def fail(message: str = "from the forward") -> None:
    raise ValueError(message)


def test_exception_in_a_valid_capture_ends_it_and_keeps_the_pool_usable(cuda, runtime):
    pool = cuda.new_pool()
    with pytest.raises(CaptureError, match="ValueError: from the forward"):
        capture(cuda, fail, pool)
    check_clean(runtime, uses={pool.handle: 2})  # anchor and the retired graph
    capture(cuda, lambda: None, pool)


def test_capture_made_invalid_by_the_forward_is_cleaned_up(cuda, runtime):
    """As after ``.item()``: the original error is reported, and ``capture_end`` fails too."""
    pool = cuda.new_pool()

    def forward() -> None:
        runtime.end_error = "operation failed due to a previous error during capture"
        fail("not permitted when stream is capturing")

    with pytest.raises(CaptureError, match="ValueError: not permitted"):
        capture(cuda, forward, pool)
    check_clean(runtime, uses={pool.handle: 1})  # the anchor alone: the failed capture's use was given back
    capture(cuda, lambda: None, pool)


def test_routing_that_pytorch_has_stopped_itself_is_no_error(cuda, runtime):
    def forward() -> None:
        runtime.end_error = "invalid"
        runtime.routed.clear()
        fail()

    pool = cuda.new_pool()
    with pytest.raises(CaptureError, match="from the forward"):
        capture(cuda, forward, pool)
    check_clean(runtime, uses={pool.handle: 1})


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("capturing stream has unjoined work", "forked inside the segment was not joined"),
        ("some other reason", "the capture is invalid: some other reason"),
    ],
)
def test_capture_that_cannot_end_is_explained_and_cleaned_up(cuda, runtime, message, expected):
    pool = cuda.new_pool()
    runtime_end_error = message

    def forward() -> None:
        runtime.end_error = runtime_end_error

    with pytest.raises(CaptureError, match=expected):
        capture(cuda, forward, pool)
    check_clean(runtime, uses={pool.handle: 1})
    capture(cuda, lambda: None, pool)


def test_failing_begin_is_undone(cuda, runtime):
    pool = cuda.new_pool()
    capture(cuda, lambda: None, pool)
    runtime.begin_error = "cannot begin"
    with pytest.raises(CaptureError, match="cannot begin"):
        capture(cuda, lambda: None, pool)
    check_clean(runtime, uses={pool.handle: 2})
    capture(cuda, lambda: None, pool)


def test_failure_in_a_break_body_has_no_open_capture_to_end(cuda, runtime):
    broken = eager_break(fail)
    pool = cuda.new_pool()
    with pytest.raises(CaptureError, match="from the forward"):
        capture(cuda, broken, pool, Strategy.BREAKABLE)
    check_clean(runtime, uses={pool.handle: 2})


def test_no_graph_is_destroyed_before_its_pool_is_released(cuda, runtime):
    """Destroying one graph may free the cuBLAS workspace that others on its stream were captured with."""
    pool = cuda.new_pool()
    first, _ = capture(cuda, lambda: None, pool)
    second, _ = capture(cuda, lambda: None, pool)
    with pytest.raises(CaptureError):
        capture(cuda, fail, pool)
    first.reset()
    assert not any(graph.num_resets for graph in runtime.graphs)
    second.replay()
    second.reset()
    pool.release()
    assert all(graph.num_resets == 1 for graph in runtime.graphs)
    assert runtime.uses[(0, 1)] == 0
    assert runtime.log[-2:] == ["sync", "empty cache"]


def test_pool_stays_open_although_all_its_programs_were_reset(cuda):
    pool = cuda.new_pool()
    program, _ = capture(cuda, lambda: None, pool)
    program.reset()
    capture(cuda, lambda: None, pool)


def test_pool_in_use_cannot_be_released_and_a_released_pool_cannot_be_used(cuda):
    pool = cuda.new_pool()
    program, _ = capture(cuda, lambda: None, pool)
    with pytest.raises(GraphError, match="1 segments of this pool are still in use"):
        pool.release()
    program.reset()
    pool.release()
    pool.release()
    assert pool.num_bytes == 0
    with pytest.raises(CaptureError, match="was released"):
        capture(cuda, lambda: None, pool)


def test_reset_segment_cannot_replay(cuda):
    program, _ = capture(cuda, lambda: None)
    segment = program.steps[0].segment
    program.reset()
    with pytest.raises(GraphError, match="was reset"):
        segment.replay()


def test_a_program_of_one_graph_is_launched_without_python_until_its_reset(cuda, runtime):
    program, _ = capture(cuda, lambda: None)
    segment = program.steps[0].segment
    runtime.log.clear()
    program.launch()
    assert runtime.log == ["replay 1"]
    program.reset()
    assert (program.launch, segment.launch) == (None, None)


def test_segments_begin_only_on_the_capture_stream(cuda):
    with pytest.raises(GraphError, match=r"stream_scope\(\)"):
        cuda.begin_segment(cuda.new_pool())


def test_stream_scope_is_restored_after_an_exception_and_nests(cuda, runtime):
    with pytest.raises(ValueError), cuda.stream_scope(), cuda.stream_scope():
        fail()
    assert runtime.stream is runtime.outer
    assert runtime.log.count("side waits for outer") == runtime.log.count("outer waits for side") == 1


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_step_waits_for_the_work_around_it_only_if_there_is_any(cuda, runtime, is_idle):
    runtime.outer.is_idle = is_idle
    with cuda.step_scope():
        assert runtime.stream is not runtime.outer
    assert runtime.stream is runtime.outer
    assert runtime.log.count("side waits for outer") == (not is_idle)
    assert runtime.log.count("outer waits for side") == 0


def test_step_scope_is_restored_after_an_exception_and_nests_in_either_scope(cuda, runtime):
    with pytest.raises(ValueError), cuda.step_scope(), cuda.step_scope():
        fail()
    assert runtime.stream is runtime.outer
    with cuda.stream_scope():
        inside = runtime.stream
        with cuda.step_scope():
            assert runtime.stream is inside
        assert runtime.stream is inside
    assert runtime.stream is runtime.outer


def test_a_step_on_a_device_that_is_not_current_waits_both_ways(cuda, runtime):
    runtime.is_current = False
    with cuda.step_scope():
        assert runtime.stream is not runtime.outer
    assert runtime.log.count("side waits for outer") == runtime.log.count("outer waits for side") == 1


def test_pool_knows_its_tensors_with_few_snapshots(cuda, runtime):
    pool = cuda.new_pool()
    inside, outside = torch.ones(4), torch.ones(4)
    runtime.ranges = [(inside.data_ptr(), inside.data_ptr() + 16), (1, 2)]
    assert [pool.owns(inside) for _ in range(5)] == [True] * 5
    assert [pool.owns(outside) for _ in range(5)] == [False] * 5
    assert runtime.num_snapshots == 2
    assert pool.num_bytes == 17


def test_memory_reading(cuda, runtime):
    pool = cuda.new_pool()
    runtime.ranges = [(0, 512)]
    reading = cuda.memory(pool)
    assert (reading.pool_bytes, reading.allocated_bytes, reading.free_bytes) == (512, 100, 1000)
    assert cuda.memory().pool_bytes == 0
