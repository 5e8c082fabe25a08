"""Custom ops that are methods: each object's own state, opaque to compile and graphs, no other object's."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gapless.errors import ConfigError, GraphError
from gapless.graphs.capture import capture_program
from gapless.graphs.method_ops import register_custom_op_method
from gapless.graphs.modes import Strategy
from gapless.graphs.ops import direct, register_custom_op


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.calls: list[int] = []

    @register_custom_op_method(out_shape=0)
    def scaled(self, x: Tensor, extra: Tensor | None = None, *, power: int = 1) -> Tensor:
        self.calls.append(power)
        result = x * self.factor**power
        return result if extra is None else result + extra

    @register_custom_op_method(mutates_args=["out"])
    def scale_into(self, x: Tensor, out: Tensor) -> None:
        torch.mul(x, self.factor, out=out)

    @register_custom_op_method(fake=lambda self, x: x.new_empty(x.shape[0], int(self.factor)))
    def widened(self, x: Tensor) -> Tensor:
        return x[:, :1].expand(-1, int(self.factor)).clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x + 1, power=2) - 1


class Shifted(Scale):
    def __init__(self, factor: float) -> None:
        super().__init__(factor)
        self.shift = 100.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


X = torch.arange(6.0).view(2, 3)


def test_each_object_has_its_own_state() -> None:
    two, three = Scale(2.0), Scale(3.0)
    assert torch.equal(two.scaled(X), 2 * X)
    assert torch.equal(three.scaled(X, torch.ones(2, 3), power=2), 9 * X + 1)
    assert (two.calls, three.calls) == ([1], [2])
    out = torch.empty(2, 3)
    assert three.scale_into(X, out) is None
    assert torch.equal(out, 3 * X)
    assert torch.equal(Shifted(2.0)(X), 4 * (X + 1) + 99)
    assert two.widened(X).shape == (2, 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_keeps_it_as_one_operation_of_its_object(backend: str) -> None:
    torch._dynamo.reset()
    modules = [Scale(2.0), Scale(3.0), Shifted(5.0)]
    for module in modules:
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        assert torch.equal(compiled(X), module(X))
        assert torch.equal(compiled(X + 7), module(X + 7))
    wide = torch.compile(lambda x: modules[1].widened(x) + 1, backend=backend, fullgraph=True)
    assert torch.equal(wide(X), modules[1].widened(X) + 1)


def test_a_graph_replays_the_method_of_its_object(device: Any) -> None:
    two, three = Scale(2.0), Scale(3.0)
    x = X.clone()
    program, out = capture_program(
        lambda: three.scaled(two.scaled(x)), device=device, pool=device.new_pool(), strategy=Strategy.FULL
    )
    assert program.num_nodes == 2
    x.copy_(X + 4)
    program.replay()
    assert torch.equal(out, 6 * (X + 4))


@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_is_an_object_of_its_own(make: Any) -> None:
    first = Scale(2.0)
    first.scaled(X)
    second = make(first)
    second.factor = 5.0
    for _ in range(2):
        assert torch.equal(second.scaled(X), 5 * X)
        assert torch.equal(first.scaled(X), 2 * X)


@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy])
def test_a_copy_that_was_never_called_is_not_compiled_as_its_origin(make: Any) -> None:
    torch._dynamo.reset()
    first = Scale(2.0)
    second = make(first)
    second.factor = 5.0
    compiled = torch.compile(second, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"has gone|no handle"):
        compiled(X)
    second(X)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(second, backend="eager", fullgraph=True)(X), 25 * (X + 1) - 1)


def test_a_call_for_an_object_that_has_gone_is_an_error() -> None:
    number = Scale(2.0)._gapless_handle.number
    gc.collect()
    with pytest.raises(GraphError, match="has gone"):
        Scale.scaled.op(number, X)


def test_direct_calls_go_past_the_dispatcher() -> None:
    module = Scale(4.0)
    with torch.no_grad():
        assert torch.equal(direct(Scale.scaled.op)(module._gapless_handle.number, X), 4 * X)


def test_functions_outside_of_a_class_and_objects_without_room_are_refused() -> None:
    def loose(self, x: Tensor) -> Tensor:
        return x

    with pytest.raises(ConfigError, match="not registered in the body of a class"):
        register_custom_op_method(loose, out_shape=0)(None, X)
    with pytest.raises(ConfigError, match="is no method"):
        register_custom_op_method(lambda: None)
    with pytest.raises(ConfigError, match="register_custom_op_method"):
        register_custom_op(loose, out_shape=0)

    class Slotted:
        __slots__ = ("x",)

        @register_custom_op_method(out_shape=0, name="slotted_op_of_a_test")
        def run(self, x: Tensor) -> Tensor:
            return x + 1

    with pytest.raises(ConfigError, match=r"need a __dict__"):
        Slotted()
