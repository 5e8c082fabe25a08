"""Captures are transactions: after a failure all is as before, the message says where, the next one works."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gapless.errors import CaptureError, ConfigError, GraphError
from gapless.graphs.breakable import eager_break
from gapless.graphs.capture import capture_pass, capture_program, garbage_set_aside, warm_up
from gapless.graphs.device import get_device
from gapless.graphs.device.emulated import EmulatedDevice
from gapless.graphs.modes import Strategy

X = torch.ones(4)


@eager_break
def double(h: Tensor) -> Tensor:
    return h * 2


@eager_break
def raise_in_break(h: Tensor) -> Tensor:
    raise LookupError("from the break body")


def fails_at_once() -> Tensor:
    raise LookupError("at once")


def fails_after_ops() -> Tensor:
    h = X * 2 + 1
    raise LookupError(f"after ops on {h.shape}")


def fails_on_host_read() -> Tensor:
    return X * (X + 1).sum().item()


def fails_in_second_segment() -> Tensor:
    return double(X + 1) * X.tolist()[0]


def fails_in_break_body() -> Tensor:
    return raise_in_break(X + 1)


def fails_on_shapes() -> Tensor:
    return (X * 3) @ torch.zeros(5)


def fails_to_allocate() -> Tensor:
    return X.repeat(1 << 40)


def fails_to_allocate_in_a_later_segment() -> Tensor:
    return double(X + 1).repeat(1 << 40)


FAILURES: list[tuple[Callable[[], Tensor], int, str]] = [
    (fails_at_once, 0, "LookupError: at once"),
    (fails_after_ops, 0, "LookupError: after ops"),
    (fails_on_host_read, 0, "Tensor.item"),
    (fails_in_second_segment, 1, "Tensor.tolist"),
    (fails_in_break_body, 1, "LookupError: from the break body"),
    (fails_on_shapes, 0, "aten.dot.default"),
    (fails_to_allocate, 0, "aten.repeat.default"),
    (fails_to_allocate_in_a_later_segment, 1, "aten.repeat.default"),
]
by_failure = pytest.mark.parametrize(
    ("fn", "segment", "reason"), FAILURES, ids=lambda v: getattr(v, "__name__", None)
)


def try_capture(device: EmulatedDevice, fn: Callable[[], object], pool=None) -> CaptureError:
    with pytest.raises(CaptureError) as raised:
        capture_program(fn, device=device, pool=pool or device.new_pool(), strategy=Strategy.BREAKABLE)
    return raised.value


@by_failure
def test_failure_names_segment_reason_and_source_line(fn, segment, reason, device):
    message = str(try_capture(device, fn))
    assert f"segment {segment}" in message
    assert reason in message
    lines, start = inspect.getsourcelines(raise_in_break if fn is fails_in_break_body else fn)
    reported = message.split("source line: ")[1].split(" ")[0]
    path, line = reported.rsplit(":", 1)
    assert path == __file__
    assert start < int(line) < start + len(lines) + 1


@pytest.mark.parametrize("hint", ["host read", "warm up", "another thread", "tensors of another device"])
def test_failure_lists_the_usual_causes(hint, device):
    assert hint in str(try_capture(device, fails_after_ops))


def test_failure_names_the_last_recorded_op(device):
    assert "last recorded op: aten.add.Tensor" in str(try_capture(device, fails_after_ops))


def test_failure_names_the_call_that_raised_as_the_source_has_it(device):
    def reads() -> Tensor:
        x = torch.ones(3)
        return x + x.sum().item()

    def reads_on_many_lines() -> Tensor:
        return torch.full(
            (2, 2),
            float(torch.ones(3).sum()),
        )

    assert "failing op: x.sum().item()\n" in str(try_capture(device, reads))
    assert "failing op: float(torch.ones(3).sum())\n" in str(try_capture(device, reads_on_many_lines))


def test_without_source_the_call_is_unknown_and_the_line_is_not(device):
    scope = {"torch": torch}
    exec(compile("def fails():\n    return torch.ones(3).sum().item()\n", "made_up.py", "exec"), scope)
    message = str(try_capture(device, scope["fails"]))
    assert "failing op: unknown" in message
    assert "source line: made_up.py:2 in fails" in message


@by_failure
def test_failure_keeps_the_original_error_as_its_cause(fn, segment, reason, device):
    cause = try_capture(device, fn).__cause__
    assert cause is not None
    assert not isinstance(cause, CaptureError) or "cannot be captured" in str(cause)


@by_failure
def test_after_a_failure_everything_is_as_before(fn, segment, reason, device):
    pool = device.new_pool()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    error = try_capture(device, fn, pool)  # held on purpose: its traceback must not pin pool memory
    assert pool.bytes_in_use == 0
    assert not device.is_recording()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    assert gc.isenabled()
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert (X * 2).tolist() == [2.0] * 4  # eager works
    program, out = capture_program(
        lambda: double(X + 1) - 1, device=device, pool=pool, strategy=Strategy.BREAKABLE
    )
    program.replay()
    assert out.tolist() == [3.0] * 4
    assert error.args


@by_failure
def test_older_programs_survive_a_failed_capture_in_their_pool(fn, segment, reason, device):
    pool = device.new_pool()
    x = torch.randn(4)
    program, out = capture_program(
        lambda: double(x + 1) - 1, device=device, pool=pool, strategy=Strategy.BREAKABLE
    )
    try_capture(device, fn, pool)
    x.normal_()
    program.replay()
    assert torch.equal(out, (x + 1) * 2 - 1)


def test_random_draws_of_a_failed_breakable_capture_are_undone(device):
    def forward() -> Tensor:
        h = double(torch.rand(4))
        raise LookupError(str(h.shape))

    torch.manual_seed(5)
    try_capture(device, forward)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_failure_after_the_forward_names_the_line_that_asked_for_the_capture(device):
    def forward() -> Tensor:
        try:
            return X * X.sum().item()
        except CaptureError:
            return X * 2

    message = str(try_capture(device, forward))
    assert f"source line: {__file__}:" in message
    assert "(asked for this capture)" in message


def test_interrupts_pass_through_unwrapped(device):
    def forward() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_program(forward, device=device, pool=device.new_pool(), strategy=Strategy.FULL)
    assert not device.is_recording()


def test_strategy_disabled_is_refused(device):
    with pytest.raises(ConfigError, match="disabled"):
        capture_program(lambda: X, device=device, pool=device.new_pool(), strategy=Strategy.DISABLED)


@pytest.mark.parametrize("strategy", [Strategy.FULL, Strategy.BREAKABLE])
def test_capture_runs_without_autograd_even_on_trainable_weights(strategy, device):
    layer = torch.nn.Linear(4, 4)
    program, out = capture_program(
        lambda: double(layer(X[None])), device=device, pool=device.new_pool(), strategy=strategy
    )
    program.replay()
    assert not out.requires_grad
    assert torch.equal(out, double(layer(X[None])).detach())


@pytest.mark.parametrize(
    "structure", [lambda a, b: (a, b), lambda a, b: {"a": a, "b": [b]}, lambda a, b: None]
)
def test_outputs_are_what_the_function_returned(structure, device):
    program, out = capture_program(
        lambda: structure(X + 1, X + 2), device=device, pool=device.new_pool(), strategy=Strategy.FULL
    )
    program.replay()
    assert str(out) == str(structure(X + 1, X + 2))


@pytest.mark.parametrize("was_enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_collector_is_off_during_a_pass_and_restored_to_what_it_was(was_enabled, fails, device):
    seen = []
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(LookupError) if fails else _nothing(), capture_pass(device):
            seen.append(gc.isenabled())
            if fails:
                raise LookupError
        assert seen == [False]
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()


def test_a_pass_collects_once_before_and_once_after_for_any_number_of_captures(device, monkeypatch):
    collections = []
    monkeypatch.setattr(gc, "collect", lambda *args: collections.append(args) or 0)
    with capture_pass(device):
        for _ in range(3):
            capture_program(lambda: X + 1, device=device, pool=device.new_pool(), strategy=Strategy.FULL)
        assert len(collections) == 1
    assert len(collections) == 2


class Node:
    """A cycle by itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen():
    had_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if had_frozen:
        gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_with_garbage_set_aside_collections_look_at_what_is_new_alone():
    before, kept = weakref.ref(Node()), Node()
    with garbage_set_aside():
        assert before() is None, "it begins with everything"
        assert gc.get_freeze_count() > 1000
        old, new = weakref.ref(kept), weakref.ref(Node())
        del kept
        gc.collect()
        assert (old() is None, new() is None) == (False, True)
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_leaves_nothing_set_aside_and_frees_what_it_left(fails, device):
    with pytest.raises(LookupError) if fails else _nothing(), capture_pass(device):
        left = weakref.ref(Node())
        assert left() is not None
        if fails:
            raise LookupError
    assert left() is None
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_what_others_have_frozen_stays_so():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with garbage_set_aside(), garbage_set_aside():
        pass
    assert gc.get_freeze_count() >= frozen - 10 > 0
    gc.unfreeze()


def test_passes_of_two_threads_do_not_overlap(device):
    inside, overlaps = [], []
    barrier = threading.Barrier(2)

    def run() -> None:
        barrier.wait()
        for _ in range(5):
            with capture_pass(device):
                inside.append(1)
                overlaps.append(len(inside) > 1)
                inside.pop()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(overlaps) == 10
    assert not any(overlaps)


def test_captures_of_two_threads_wait_for_each_other(device):
    results = {}

    def run(value: float) -> None:
        x = torch.full((3,), value)
        own = EmulatedDevice()
        program, out = capture_program(
            lambda: double(x + 1), device=own, pool=own.new_pool(), strategy=Strategy.BREAKABLE
        )
        program.replay()
        results[value] = out.tolist()

    threads = [threading.Thread(target=run, args=(float(k),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {float(k): [2.0 * (k + 1)] * 3 for k in range(4)}


def test_only_one_segment_may_be_open_in_the_process(device):
    other = EmulatedDevice()
    device.begin_segment(device.new_pool())
    try:
        with pytest.raises(GraphError, match="already being recorded"):
            other.begin_segment(other.new_pool())
        with pytest.raises(GraphError, match="already being recorded"):
            device.begin_segment(device.new_pool())
    finally:
        device.abandon_segment()
    other.begin_segment(other.new_pool())
    other.end_segment()


def test_no_segment_can_replay_while_one_is_recorded(device):
    program, _ = capture_program(lambda: X + 1, device=device, pool=device.new_pool(), strategy=Strategy.FULL)
    error = try_capture(device, program.replay)
    assert "cannot replay while another one is being recorded" in str(error)


def test_end_without_begin_is_an_error_and_abandon_is_not(device):
    device.abandon_segment()
    with pytest.raises(GraphError, match="no segment is open"):
        device.end_segment()


def test_other_threads_compute_normally_while_a_segment_records(device):
    results = []

    def forward() -> Tensor:
        thread = threading.Thread(target=lambda: results.append((X * 3).sum().item()))
        thread.start()
        thread.join()
        return X + 1

    program, _ = capture_program(forward, device=device, pool=device.new_pool(), strategy=Strategy.FULL)
    assert results == [12.0]
    assert program.num_nodes == 1


@pytest.mark.parametrize("times", [0, 1, 3])
def test_warm_up_runs_without_autograd_and_then_synchronises(times, monkeypatch, device):
    log = []
    monkeypatch.setattr(device, "synchronize", lambda: log.append("sync"))
    warm_up(lambda: log.append("grad" if torch.is_grad_enabled() else "run"), device, times)
    assert log == ["run"] * times + ["sync"]


def test_released_pool_takes_no_more_captures(device):
    pool = device.new_pool()
    program, out = capture_program(lambda: X + 1, device=device, pool=pool, strategy=Strategy.FULL)
    program.reset()
    pool.release()
    pool.release()
    assert pool.num_bytes == 0
    assert "was released" in str(try_capture(device, lambda: X + 1, pool))
    assert out.shape == (4,)


def test_get_device_gives_one_device_per_torch_device():
    assert get_device("cpu") is get_device(torch.device("cpu"))
    assert get_device("cpu").supports_graphs
    with pytest.raises(ConfigError, match="meta"):
        get_device("meta")


def test_memory_reading_follows_the_pool(device):
    pool = device.new_pool()
    program, out = capture_program(
        lambda: torch.ones(1024) + 1, device=device, pool=pool, strategy=Strategy.FULL
    )
    reading = device.memory(pool)
    assert (reading.pool_bytes, reading.allocated_bytes) == (8192, 4096)
    assert reading.free_bytes > 0
    assert device.memory().pool_bytes == 0
    del out
    assert device.memory(pool).allocated_bytes == 0
    assert program.num_nodes == 2


def test_time_is_the_median_of_the_repeats(device):
    calls = []
    seconds = device.time(lambda: calls.append(1), repeats=5)
    assert len(calls) == 5
    assert 0 <= seconds < 1


class _nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *args: object) -> None:
        return None
