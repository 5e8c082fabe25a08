"""Breakable captures: cut at breaks, bodies see real and live data, results reach the next segment."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gapless.errors import CaptureError, GraphError
from gapless.graphs.breakable import eager_break
from gapless.graphs.capture import capture_program
from gapless.graphs.context import ForwardContext, get_forward_context, use_forward_context
from gapless.graphs.device.emulated import EmulatedDevice
from gapless.graphs.modes import Strategy
from gapless.graphs.program import GraphStep


@eager_break
def scale(x: Tensor) -> Tensor:
    return x * 10


@eager_break
def write_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 10)


def capture(
    device: EmulatedDevice, fn: Callable[[], object], *, strategy: Strategy = Strategy.BREAKABLE, pool=None
):
    return capture_program(fn, device=device, pool=pool or device.new_pool(), strategy=strategy)


def kinds(program) -> str:
    return "".join("g" if isinstance(step, GraphStep) else "e" for step in program.steps)


FORWARDS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "no_break": (lambda x: x + 1, "g"),
    "middle": (lambda x: scale(x + 1) - 1, "geg"),
    "first": (lambda x: scale(x) - 1, "eg"),
    "last": (lambda x: scale(x + 1), "ge"),
    "only": (lambda x: scale(x), "e"),
    "twice_in_a_row": (lambda x: scale(scale(x + 1)) - 1, "geeg"),
    "loop": (lambda x: [x := scale(x + 1) for _ in range(4)][-1] * 2, "gegegegeg"),
    "used_much_later": (lambda x: (a := scale(x + 1), b := scale(a * 2), a + b)[-1], "gegeg"),
    "result_view": (lambda x: scale(x + 1)[1:].t() * 2, "geg"),
    "result_unused": (lambda x: (scale(x + 1), x * 3)[1], "geg"),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_replay_equals_eager_on_fresh_inputs(name, device):
    forward, shape = FORWARDS[name]
    x = torch.randn(3, 4)
    program, out = capture(device, lambda: forward(x))
    assert kinds(program) == shape
    for _ in range(3):
        x.normal_()
        program.replay()
        assert torch.equal(out, forward(x))


@pytest.mark.parametrize("name", FORWARDS)
def test_full_capture_records_through_breaks(name, device):
    forward, _ = FORWARDS[name]
    x = torch.randn(3, 4)
    program, out = capture(device, lambda: forward(x), strategy=Strategy.FULL)
    assert kinds(program) == "g"
    x.normal_()
    program.replay()
    assert torch.equal(out, forward(x))


def test_outside_a_capture_a_break_is_the_function_itself():
    x = torch.randn(3)
    assert torch.equal(scale(x), x * 10)
    assert scale.__name__ == "scale"


def test_outside_a_capture_a_break_costs_next_to_nothing():
    def nothing() -> None:
        return None

    marked, calls = eager_break(nothing), 2000

    def seconds(fn: Callable[[], None]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        return time.perf_counter() - start

    marked()
    extra = min(seconds(marked) for _ in range(7)) - min(seconds(nothing) for _ in range(7))
    assert extra / calls < 3e-6, "an eager launch costs the CPU more than twice that"


def test_a_caller_owned_output_needs_no_slot(device):
    x = torch.randn(4)

    def forward() -> Tensor:
        h = x + 1
        out = torch.empty_like(h)
        write_into(h, out)
        return out * 2

    program, out = capture(device, forward)
    x.normal_()
    program.replay()
    assert torch.equal(out, (x + 1) * 10 * 2)
    assert kinds(program) == "geg"


def test_during_capture_the_body_sees_the_data_of_the_segments_before_it(device):
    x, seen = torch.full((2,), 3.0), []

    @eager_break
    def look(*tensors: Tensor) -> Tensor:
        seen.append([tensor.tolist() for tensor in tensors])
        return tensors[0] + 1

    def forward() -> Tensor:
        first = look(x * 2)
        return look(first * 10, first)

    capture(device, forward)
    assert seen == [[[6.0, 6.0]], [[70.0, 70.0], [7.0, 7.0]]]


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda h: (h + 1, h - 1), lambda r: r[0] * r[1]),
        (lambda h: [h + 1], lambda r: r[0] * 2),
        (lambda h: {"a": h + 1, "b": [h - 1, None]}, lambda r: r["a"] * r["b"][0]),
        (lambda h: (None, h.to(torch.int32)), lambda r: r[1] * 2),
        (lambda h: h.t(), lambda r: r @ r.t()),
        (lambda h: h[:1].expand(3, 4), lambda r: r * 2),
        (lambda h: h.sum(), lambda r: r * 2),
        (lambda h: h[:0], lambda r: torch.cat([r, r])),
    ],
    ids=["tuple", "list", "dict", "none_and_int", "transposed", "expanded", "scalar", "empty"],
)
def test_any_nesting_of_tensors_may_be_returned(make, use, device):
    body = eager_break(make)
    x = torch.randn(3, 4)
    program, out = capture(device, lambda: use(body(x * 3)))
    x.normal_()
    program.replay()
    assert torch.equal(out, use(make(x * 3)))


def test_body_reads_the_live_batch_from_the_forward_context(device):
    @eager_break
    def read_batch(h: Tensor) -> Tensor:
        return h * get_forward_context().batch

    x = torch.ones(2)
    with use_forward_context(ForwardContext(batch=2)):
        program, out = capture(device, lambda: read_batch(x + 1) + 1)
    for batch in (5, 7):
        with use_forward_context(ForwardContext(batch=batch)):
            program.replay()
        assert out.tolist() == [2 * batch + 1] * 2


def test_python_arguments_are_kept_and_keyword_arguments_work(device):
    @eager_break
    def scaled(h: Tensor, *, factor: float, names: list[str]) -> Tensor:
        return h * factor * len(names)

    x = torch.ones(2)
    program, out = capture(device, lambda: scaled(x + 1, factor=0.5, names=["a", "b", "c"]) + 0)
    x.fill_(3)
    program.replay()
    assert out.tolist() == [6.0, 6.0]


def test_tensors_inside_containers_are_arguments_too(device):
    @eager_break
    def total(parts: list[Tensor], named: dict[str, Tensor]) -> Tensor:
        return sum(parts) + named["w"]

    x = torch.ones(2)
    pool = device.new_pool()
    program, out = capture(device, lambda: total([x * 2, x * 3], {"w": x}) + 1, pool=pool)
    x.fill_(2)
    program.replay()
    assert out.tolist() == [13.0, 13.0]


def test_pool_arguments_are_not_owned_and_other_arguments_are(device):
    pool = device.new_pool()
    x = torch.ones(1000)
    weights = [torch.full((1000,), 4.0)]

    @eager_break
    def combine(h: Tensor, weight: Tensor) -> Tensor:
        return h + weight

    program, out = capture(device, lambda: combine(x * 2, weights[0]) + 1, pool=pool)
    weights.clear()
    assert pool.bytes_in_use == 4096  # the output alone: neither the argument nor the slot is held
    program.replay()
    assert out[0] == 7


def test_nested_breaks_run_inline(device):
    @eager_break
    def outer(h: Tensor) -> Tensor:
        return scale(h) + scale(h + 1)

    x = torch.randn(3)
    program, out = capture(device, lambda: outer(x * 2) + 1)
    x.normal_()
    program.replay()
    assert program.break_names == (f"{__name__}.{outer.__qualname__}",)
    assert torch.equal(out, x * 20 + (x * 2 + 1) * 10 + 1)


def test_body_may_hand_back_its_own_argument_without_a_copy(device):
    @eager_break
    def in_place(h: Tensor, static: Tensor) -> tuple[Tensor, Tensor]:
        return h.mul_(3), static

    x, static = torch.ones(4), torch.ones(4)

    def forward() -> Tensor:
        h = x + 1
        same, weight = in_place(h, static)
        assert same is h
        assert weight is static
        return same + weight

    program, out = capture(device, forward)
    x.fill_(5)
    static.fill_(100)
    program.replay()
    assert out.tolist() == [118.0] * 4


def test_method_as_break(device):
    class Layer:
        def __init__(self, weight: float) -> None:
            self.weight = weight

        @eager_break
        def forward(self, h: Tensor) -> Tensor:
            return h * self.weight

    layers, x = [Layer(2.0), Layer(3.0)], torch.ones(2)
    program, out = capture(device, lambda: layers[1].forward(layers[0].forward(x + 1)))
    layers[0].weight = 10.0  # a body is ordinary Python: it sees the change
    program.replay()
    assert out.tolist() == [60.0, 60.0]


def returns_view(h: Tensor) -> Tensor:
    return h[:, :2]


def returns_itself_twice(h: Tensor) -> list[Tensor]:
    same = h + 1
    return [same, same]


def returns_base_and_view(h: Tensor) -> list[Tensor]:
    base = h + 1
    return [base, base.t()[1:]]


@pytest.mark.parametrize(
    ("make", "use", "shares"),
    [
        (returns_view, lambda h, r: (r.add_(1), h)[1], "result 0 .* an argument"),
        (returns_view, lambda h, r: (torch.mul(h[:, :2], 2, out=r), h)[1], "result 0 .* an argument"),
        (lambda h: h.chunk(2, -1), lambda h, r: (r[1].mul_(2), h)[1], "result 1 .* an argument"),
        (returns_itself_twice, lambda h, r: (r[0].mul_(3), r[1])[1], "result 0 .* another result"),
        (
            returns_itself_twice,
            lambda h, r: (r[1].view(-1)[2:].zero_(), r[0])[1],
            "result 1 .* another result",
        ),
        (returns_base_and_view, lambda h, r: (r[1].mul_(3), r[0])[1], "result 1 .* another result"),
    ],
    ids=["view", "view_by_out", "part", "twice", "through_a_view", "base_and_view"],
)
def test_writing_into_a_result_that_shares_memory_is_refused(make, use, shares, device):
    """The forward holds copies: the write would not be seen through the other one, as it is in eager."""
    body, x = eager_break(make), torch.randn(3, 4)

    def forward() -> Tensor:
        h = x * 2
        return use(h, body(h)) + 1

    with pytest.raises(CaptureError, match=rf"{shares} and is written in place"):
        capture(device, forward)
    full, out = capture(device, forward, strategy=Strategy.FULL)
    full.replay()
    assert torch.equal(out, forward())


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (returns_view, lambda h, r: h[:, :2] + r * 2),
        (lambda h: (h + 1).chunk(2, -1), lambda h, r: r[0].add_(1) * r[1].mul_(2)),
        (lambda h: (h + 1)[:0], lambda h, r: torch.cat([r.add_(1), h])),
        (lambda h: h[int(h[:, 0].argmax())].clone(), lambda h, r: r.add_(1) * h),
        (lambda h: h[int(h[:, 0].argmax())], lambda h, r: r * h),
    ],
    ids=["read", "parts_of_one_split", "nothing", "clone", "live_row"],
)
def test_results_that_share_memory_may_be_read_and_parts_of_a_split_written(make, use, device):
    body, x = eager_break(make), torch.randn(3, 4)

    def forward() -> Tensor:
        h = x * 2
        return use(h, body(h)) + 1

    program, out = capture(device, forward)
    for _ in range(3):
        x.normal_()
        program.replay()
        assert torch.equal(out, forward())


def test_result_of_another_shape_at_replay_is_an_error_naming_the_break(device):
    rows = itertools.chain([2], itertools.repeat(3))

    @eager_break
    def uneven(h: Tensor) -> Tensor:
        return h[: next(rows)]

    x = torch.ones(4)
    program, _ = capture(device, lambda: uneven(x * 2) + 1)
    with pytest.raises(GraphError, match=r"uneven.*\(3,\).*\(2,\)"):
        program.replay()


def test_break_that_raises_is_named_and_leaves_nothing_behind(device):
    pool = device.new_pool()

    @eager_break
    def broken(h: Tensor) -> Tensor:
        raise ValueError("no such batch")

    x = torch.ones(3)
    with pytest.raises(CaptureError, match="segment 1: ValueError: no such batch") as raised:
        capture(device, lambda: broken(x + 1), pool=pool)
    assert isinstance(raised.value.__cause__, ValueError)
    assert "aten.add.Tensor" in str(raised.value)
    program, out = capture(device, lambda: scale(x + 1), pool=pool)
    program.replay()
    assert out.tolist() == [20.0] * 3


def test_swallowing_a_break_failure_is_an_error(device):
    @eager_break
    def broken(h: Tensor) -> Tensor:
        raise ValueError("no such batch")

    def forward() -> Tensor:
        try:
            return broken(x + 1)
        except ValueError:
            return x * 2

    x = torch.ones(3)
    with pytest.raises(CaptureError, match=r"broken raised and the forward went on"):
        capture(device, forward)


def test_a_second_break_after_a_swallowed_failure_is_an_error(device):
    @eager_break
    def broken(h: Tensor) -> Tensor:
        raise ValueError("no such batch")

    def forward() -> Tensor:
        try:
            return broken(x + 1)
        except ValueError:
            return scale(x)

    x = torch.ones(3)
    with pytest.raises(CaptureError, match=r"scale was reached after break .*broken had raised"):
        capture(device, forward)


def test_break_returning_a_number_is_refused(device):
    counted = eager_break(lambda h: h.numel())
    x = torch.ones(3)
    with pytest.raises(CaptureError, match="returned a int"):
        capture(device, lambda: x * counted(x + 1))


def test_break_inside_the_users_own_modes(device):
    """A mode the user enters around a break stays on the stack; ours must not be popped in its place."""
    x = torch.ones(3)

    def forward() -> Tensor:
        with torch.device("cpu"):
            h = scale(x + 1)
            with torch.device("cpu"):
                h = scale(h + torch.ones(3))
            h = h + 1
        return scale(h * 2) + torch.zeros(3)

    program, out = capture(device, forward)
    x.fill_(2)
    program.replay()
    assert torch.equal(out, forward())
    assert program.num_breaks == 3
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_breaks_of_other_threads_are_not_recorded(device):
    x, from_thread = torch.ones(3), []

    @eager_break
    def body(h: Tensor) -> Tensor:
        return h + 1

    def forward() -> Tensor:
        thread = threading.Thread(target=lambda: from_thread.append(scale(torch.ones(2)).tolist()))
        thread.start()
        thread.join()
        return body(x * 2)

    program, _ = capture(device, forward)
    assert program.num_breaks == 1
    assert from_thread == [[10.0, 10.0]]


def test_replay_with_a_second_arena_for_eager_tensors(device):
    """Eager results come from an allocator that recycles at once; slots make their addresses irrelevant."""
    x = torch.randn(64)

    def forward() -> Tensor:
        first = scale(x + 1)
        second = scale(first * 2)
        return first + second

    with device.eager_arena() as arena:
        program, out = capture(device, forward)
        held = []
        for _ in range(3):
            x.normal_()
            held.append(torch.empty(96).fill_(-1.0))  # shifts what the next eager result gets
            program.replay()
            held.append(torch.zeros(32))
            expected = (x + 1) * 10
            assert torch.equal(out, expected + expected * 2 * 10)
        assert arena.num_bytes > 0
