"""The graph device on real hardware: the emulated device's main cases, and what only a GPU can show."""

from __future__ import annotations

import functools
import gc
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gapless.errors import CaptureError, GraphError
from gapless.graphs.breakable import eager_break
from gapless.graphs.capture import capture_pass, capture_program, warm_up
from gapless.graphs.context import ForwardContext, get_forward_context, use_forward_context
from gapless.graphs.device import destructors, get_device
from gapless.graphs.device.destructors import wait_for_destructors
from gapless.graphs.modes import Strategy

pytestmark = pytest.mark.gpu

WIDTH = 64


def capture(cuda, pool, fn: Callable[[], object], *, strategy: Strategy = Strategy.FULL):
    warm_up(fn, cuda, cuda.num_warmups)
    return capture_program(fn, device=cuda, pool=pool, strategy=strategy)


def new(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


@eager_break
def scale(h: Tensor) -> Tensor:
    return h * 10


@eager_break
def write_into(h: Tensor, out: Tensor) -> None:
    torch.mul(h, 3, out=out)


@eager_break
def host_read(h: Tensor) -> Tensor:
    return h * (2.0 if h.sum().item() > 0 else 3.0)


@eager_break
def times_batch(h: Tensor) -> Tensor:
    return h * get_forward_context().batch


@eager_break
def scale_and_more(h: Tensor) -> Tensor:
    return scale(h) + 1


@functools.cache
def side_streams() -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream() for _ in range(3)]


def on_three_streams(x: Tensor) -> Tensor:
    """Forked one from another, joined in another order."""
    main, (first, second, third) = torch.cuda.current_stream(), side_streams()
    first.wait_stream(main)
    with torch.cuda.stream(first):
        a = x * 2
        second.wait_stream(first)
        with torch.cuda.stream(second):
            b = a + 1
        c = a - 1
    third.wait_stream(main)
    with torch.cuda.stream(third):
        d = x.cos()
    for side in (second, third, first):
        main.wait_stream(side)
    return b * c + d


def mlp(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.nn.functional.silu(x @ w) @ w.t() * 0.1 + x, -1)


FORWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mlp": mlp,
    "break_in_the_middle": lambda x, w: scale(x @ w) + 1,
    "break_first_and_last": lambda x, w: scale(scale(x) @ w * 0.01),
    "two_breaks_in_a_row": lambda x, w: scale(scale(x + 1)) @ w,
    "loop": lambda x, w: [x := scale(x @ w * 0.01) - 1 for _ in range(6)][-1],
    "used_much_later": lambda x, w: (a := scale(x @ w), b := scale(a * 0.1), a + b)[-1],
    "nested_break": lambda x, w: scale_and_more(x @ w) + 1,
    "streams": lambda x, w: on_three_streams(x @ w * 0.01),
    "streams_beside_breaks": lambda x, w: on_three_streams(scale(on_three_streams(x) @ w * 0.01)) + 1,
    "host_read_in_a_break": lambda x, w: host_read(x @ w) + 1,
}


@pytest.mark.parametrize("strategy", [Strategy.FULL, Strategy.BREAKABLE])
@pytest.mark.parametrize("name", FORWARDS)
def test_replay_equals_eager_on_fresh_inputs(name, strategy, cuda, pool):
    if strategy is Strategy.FULL and name == "host_read_in_a_break":
        pytest.skip("a full capture cannot read the device")
    x, w = new(8, WIDTH), new(WIDTH, WIDTH)
    program, out = capture(cuda, pool, lambda: FORWARDS[name](x, w), strategy=strategy)
    for _ in range(3):
        x.normal_()
        program.replay()
        with torch.no_grad():
            assert torch.equal(out, FORWARDS[name](x, w))


def test_caller_owned_outputs_and_the_live_batch(cuda, pool):
    x = new(4)

    def forward() -> Tensor:
        h = x + 1
        out = torch.empty_like(h)
        write_into(h, out)
        return times_batch(out) - 1

    with use_forward_context(ForwardContext(batch=2)):
        program, out = capture(cuda, pool, forward, strategy=Strategy.BREAKABLE)
    for batch in (5, 7):
        x.normal_()
        with use_forward_context(ForwardContext(batch=batch)):
            program.replay()
        assert torch.equal(out, (x + 1) * 3 * batch - 1)


def test_buckets_of_one_pool_interleave_with_allocator_churn(cuda, pool):
    w = new(WIDTH, WIDTH)
    inputs = [new(256, WIDTH), new(64, WIDTH), new(1, WIDTH)]
    results = torch.empty(256, WIDTH, device="cuda")

    def forward(x: Tensor) -> Tensor:
        h = x @ w
        for _ in range(4):
            h = (scale(h + 1) - scale(h.relu())) @ w * 0.001
        return h

    programs = []
    with capture_pass(cuda):
        for x in inputs:
            fn = lambda x=x: results[: len(x)].copy_(forward(x))  # noqa: E731
            programs.append(capture(cuda, pool, fn, strategy=Strategy.BREAKABLE)[0])
    held: list[Tensor] = []
    for step, i in enumerate([0, 1, 2, 0, 0, 2, 1, 0, 1, 2, 2, 0]):
        inputs[i].normal_()
        held.append(torch.full((1000 * (step % 5 + 1),), float("nan"), device="cuda"))
        programs[i].replay()
        held[:] = held[-2:]
        with torch.no_grad():
            assert torch.equal(results[: len(inputs[i])], forward(inputs[i]))


def test_smaller_buckets_live_in_the_memory_of_larger_ones(cuda, pool):
    results = torch.empty(4096, WIDTH, device="cuda")

    def bucket(n: int) -> None:
        x = results[:n].clone()
        kept.append(capture(cuda, pool, lambda: results[:n].copy_(mlp(x, w)))[0])
        kept.append(x)

    kept: list[object] = []
    w = new(WIDTH, WIDTH)
    bucket(4096)
    grown = pool.num_bytes
    assert grown > 0
    for n in (2048, 512, 64, 1):
        bucket(n)
    assert pool.num_bytes == grown


def test_released_pool_returns_its_memory_to_the_driver(cuda):
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    pool = cuda.new_pool()
    inputs = [new(1 << 20)]
    program, out = capture(cuda, pool, lambda: inputs[0] * 2 + 1)
    assert pool.num_bytes >= 1 << 22
    del out
    program.reset()
    pool.release()
    inputs.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_pool_stays_usable_after_all_its_programs_were_reset(cuda, pool):
    x = new(16)
    for _ in range(3):
        program, out = capture(cuda, pool, lambda: x * 2)
        program.replay()
        assert torch.equal(out, x * 2)
        program.reset()
        del out


def read_the_device(x: Tensor) -> Tensor:
    return x * x.sum().item()


def synchronise(x: Tensor) -> Tensor:
    y = x + 1
    torch.cuda.synchronize()
    return y


def make_shapes_of_data(x: Tensor) -> Tensor:
    return torch.nonzero(x)


@eager_break
def read_no_list(h: Tensor) -> Tensor:
    return h * [][h.dim()]


def fail_in_a_break(x: Tensor) -> Tensor:
    return read_no_list(x + 1)


def fork_across_a_break(x: Tensor) -> Tensor:
    main, side = torch.cuda.current_stream(), side_streams()[0]
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x * 2
    z = scale(x)
    main.wait_stream(side)
    return y + z


def raise_error(x: Tensor) -> Tensor:
    raise LookupError(f"on purpose, after {(x * 2).shape}")


def leave_a_stream_unjoined(x: Tensor) -> Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(1.0)
    return x + 1


def allocate_too_much(x: Tensor) -> Tensor:
    return x.repeat(1 << 36)


def break_then_allocate_too_much(x: Tensor) -> Tensor:
    return allocate_too_much(scale(x + 1))


def break_then_read(x: Tensor) -> Tensor:
    return read_the_device(scale(x + 1))


FAILURES = {
    "host_read": (read_the_device, "segment 0"),
    "synchronisation": (synchronise, "failing op: torch.cuda.synchronize()"),
    "unsupported_op": (make_shapes_of_data, r"failing op: torch.nonzero\("),
    "exception": (raise_error, "LookupError: on purpose"),
    "unjoined_stream": (leave_a_stream_unjoined, "not joined"),
    "stream_forked_across_a_break": (fork_across_a_break, "not joined"),
    "after_a_break": (break_then_read, "segment 1"),
    "in_a_break": (fail_in_a_break, r"failing op: \[\]\[h.dim\(\)\]"),
    "allocation": (allocate_too_much, "OutOfMemoryError"),
    "allocation_after_a_break": (break_then_allocate_too_much, "segment 1"),
}
"""Forward, and what its message has."""
WITHOUT_BREAKS = (
    "host_read",
    "synchronisation",
    "unsupported_op",
    "exception",
    "allocation",
    "unjoined_stream",
)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, Strategy.BREAKABLE) for name in FAILURES), *((name, Strategy.FULL) for name in WITHOUT_BREAKS)],
)
def test_after_a_failed_capture_everything_works_again(name, strategy, cuda, pool):
    """Older graphs (with random numbers too), eager random numbers, and a later capture in the same pool."""
    fn, expected = FAILURES[name]
    x = new(512)
    program, out = capture(cuda, pool, lambda: torch.rand_like(x) + x)
    program.replay()
    with pytest.raises(CaptureError, match=expected) as raised:
        capture_program(lambda: fn(x), device=cuda, pool=pool, strategy=strategy)
    assert "test_cuda_device.py:" in str(raised.value)
    assert not cuda.is_recording()
    assert gc.isenabled()
    assert new(4).isfinite().all()
    program.replay()
    assert (out - x).min() >= -1e-6
    later, later_out = capture(cuda, pool, lambda: scale(x + 1) - 1, strategy=Strategy.BREAKABLE)
    x.normal_()
    later.replay()
    assert torch.equal(later_out, (x + 1) * 10 - 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_current_device_is_what_it_was_after_a_failed_capture(cuda, pool):
    x = new(8)

    def forward() -> Tensor:
        torch.cuda.set_device(1)
        return x * x.sum().item()

    assert torch.cuda.current_device() == 0
    capture_fails(cuda, pool, forward)
    assert torch.cuda.current_device() == 0


def test_draws_of_a_failed_capture_are_undone(cuda, pool):
    """A segment behind which a break comes is replayed while the rest is captured."""
    x = new(64)

    def forward() -> Tensor:
        return read_no_list(torch.rand_like(x) + x)

    torch.manual_seed(5)
    torch.rand(3, device="cuda")
    expected = torch.rand(64, device="cuda")
    torch.manual_seed(5)
    torch.rand(3, device="cuda")
    with pytest.raises(CaptureError):
        capture_program(forward, device=cuda, pool=pool, strategy=Strategy.BREAKABLE)
    assert torch.equal(torch.rand(64, device="cuda"), expected)


def test_memory_of_failed_captures_comes_back_with_their_pool(cuda):
    """Until then each keeps its own: its handle cannot be used again, nor its graph destroyed."""
    x = new(1 << 20)
    cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    pool = cuda.new_pool()

    def forward() -> Tensor:
        h = x * 2
        return h * h.sum().item()

    for _ in range(6):
        capture_fails(cuda, pool, forward)
    assert pool.num_bytes <= 7 * (20 << 20), "one large block of the allocator for each handle"
    pool.release()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved + (4 << 20)


def capture_fails(cuda, pool, forward: Callable[[], Tensor]) -> None:
    with pytest.raises(CaptureError):
        capture_program(forward, device=cuda, pool=pool, strategy=Strategy.FULL)


def test_stream_forked_and_joined_inside_a_segment(cuda, pool):
    x, side = new(WIDTH, WIDTH), torch.cuda.Stream()

    def forward() -> Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            left = x @ x
        right = x + x
        main.wait_stream(side)
        return left + right

    program, out = capture(cuda, pool, forward)
    x.normal_()
    program.replay()
    assert torch.equal(out, x @ x + (x + x))


def test_empty_segments_are_left_out_without_a_warning(cuda, pool):
    x = new(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program, out = capture(cuda, pool, lambda: scale(scale(x)), strategy=Strategy.BREAKABLE)
    assert (program.num_segments, program.num_breaks) == (0, 2)
    program.replay()
    assert out.shape == (4,)


def test_nodes_are_counted(cuda, pool):
    x = new(4)
    program, _ = capture(cuda, pool, lambda: (x * 2).cos().sin())
    assert program.num_nodes in (3, -1)


def test_default_generator_advances_with_replays_and_reseeding_repeats(cuda, pool):
    program, out = capture(cuda, pool, lambda: torch.rand(64, device="cuda"))
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        for _ in range(2):
            program.replay()
            draws.append(out.clone())
    assert torch.equal(draws[0], draws[2])
    assert torch.equal(draws[1], draws[3])
    assert not torch.equal(draws[0], draws[1])


def test_other_threads_may_use_the_device_during_a_capture(cuda, pool):
    stop, errors = threading.Event(), []

    def disturb() -> None:
        try:
            while not stop.is_set():
                torch.empty(1 << 16, device="cuda").copy_(torch.ones(1 << 16))
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        x, w = new(8, WIDTH), new(WIDTH, WIDTH)
        for _ in range(20):
            program, out = capture(cuda, pool, lambda: mlp(x, w))
            program.replay()
            assert torch.equal(out, mlp(x, w))
    finally:
        stop.set()
        thread.join()
    assert not errors


def test_garbage_that_owns_a_graph_is_not_collected_during_a_capture(cuda, pool):
    class Owner:
        pass

    def garbage() -> None:
        owner = Owner()
        owner.me = owner
        owner.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            owner.graph.capture_begin()
            torch.ones(4, device="cuda").mul_(2)
            owner.graph.capture_end()

    garbage()
    x = new(4)

    def forward() -> Tensor:
        for _ in range(2000):
            [{} for _ in range(5)]
        return x * 2

    program, out = capture(cuda, pool, forward)
    program.replay()
    assert torch.equal(out, x * 2)


def test_replay_runs_on_the_stream_that_is_current(cuda, pool):
    x = new(4)
    program, out = capture(cuda, pool, lambda: x * 2)
    for scope in (cuda.stream_scope(), torch.cuda.stream(torch.cuda.Stream())):
        torch.cuda.synchronize()
        with scope:
            x.normal_()
            program.replay()
            result = out.clone()
        torch.cuda.synchronize()
        assert torch.equal(result, x * 2)


def test_stream_scope_orders_its_work_with_the_work_around_it(cuda):
    x = torch.zeros(1 << 22, device="cuda")
    for _ in range(20):
        x.add_(1)
        with cuda.stream_scope():
            x.mul_(2)
        x.sub_(1)
    expected = 0
    for _ in range(20):
        expected = (expected + 1) * 2 - 1
    assert bool((x == expected).all())


def test_alias_shares_memory_and_owns_nothing(cuda):
    tensor = torch.arange(24.0, device="cuda").view(4, 6)
    for view in (tensor, tensor.t(), tensor[1:, ::2], tensor[:0]):
        alias = cuda.alias(view)
        assert (alias.shape, alias.stride(), alias.dtype) == (view.shape, view.stride(), view.dtype)
        assert torch.equal(alias, view)
    alias = cuda.alias(tensor)
    allocated = torch.cuda.memory_allocated()
    del tensor, view
    assert torch.cuda.memory_allocated() < allocated
    assert alias.shape == (4, 6)


def test_pool_knows_which_tensors_are_its_own(cuda, pool):
    x = new(4)
    _, out = capture(cuda, pool, lambda: x * 2)
    assert pool.owns(out)
    assert not pool.owns(x)
    assert not cuda.new_pool().owns(out)


def test_segments_begin_only_on_the_capture_stream(cuda, pool):
    with pytest.raises(GraphError, match="stream_scope"):
        cuda.begin_segment(pool)
    assert not cuda.is_recording()


def test_memory_reading_and_time(cuda, pool):
    x = new(1 << 20)
    program, _ = capture(cuda, pool, lambda: x * 2)
    reading = cuda.memory(pool)
    assert reading.pool_bytes >= 1 << 22
    assert reading.allocated_bytes > 0
    assert reading.free_bytes > 0
    assert 0 < cuda.time(program.replay, repeats=5) < 0.1


def test_one_device_object_per_gpu():
    assert get_device("cuda") is get_device(f"cuda:{torch.cuda.current_device()}")


def test_the_end_of_graphs_can_be_waited_for(cuda, pool):
    program, _ = capture(cuda, pool, lambda: torch.ones(8, device="cuda"))
    program.reset()
    pool.release()
    assert wait_for_destructors(10.0)
    assert not destructors._waiting
