"""Undeclared arguments: whatever is not as it was at the capture is refused by name, in every call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gapless.errors import GraphError
from gapless.graphs.graphed import Graphed, Input, graphed

ROWS = {"x": Input(dims={0: "rows"})}


class Settings:
    def __init__(self) -> None:
        self.scale, self.table = 2.0, torch.ones(3)


@dataclasses.dataclass
class Record:
    scale: float
    names: list[str]


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


def scaled(x: Tensor, how: Any) -> Tensor:
    return x * getattr(how, "scale", 1.0)


def capture(value: Any, fn: Callable[..., Tensor] = scaled) -> Graphed:
    made = graphed(fn, inputs=ROWS, sizes=[2, 4]).capture(torch.randn(3, 3), value)
    for n in (2, 3):  # every size has been audited before its first replay
        made(torch.randn(n, 3), value)
    return made


def grow(array: np.ndarray) -> None:
    array[0] = 9.0


CHANGES: dict[str, tuple[Any, Callable[[Any], object], str]] = {
    "attribute": (Settings(), lambda s: setattr(s, "scale", 3.0), r"how.scale: 2.0 → 3.0"),
    "tensor in an attribute": (Settings(), lambda s: setattr(s, "table", torch.ones(3)), r"how.table: moved"),
    "dataclass": (Record(2.0, ["a"]), lambda r: setattr(r, "scale", 3.0), r"how.scale: 2.0 → 3.0"),
    "list in a dataclass": (Record(2.0, ["a"]), lambda r: r.names.append("b"), r"len\(how.names\): 1 → 2"),
    "slot": (Slotted(), lambda s: setattr(s, "scale", 3.0), r"how.scale: 2.0 → 3.0"),
    "set": ({1, 2}, lambda s: s.add(5), r"was \{1, 2\} .* is \{1, 2, 5\} now"),
    "bytes": (bytearray(b"ab"), lambda b: b.append(99), "argument 'how' was bytearray"),
    "array": (np.zeros(2), grow, "argument 'how' was array"),
    "list": ([1, 2], lambda a: a.__setitem__(0, 7), r"argument 'how\[0\]' was 1 .* is 7 now"),
    "dict": ({"k": 1}, lambda d: d.update(k=7), r"how\['k'\].* was 1 .* is 7 now"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_that_changes_in_place_is_refused_in_the_next_call(name: str) -> None:
    value, change, message = CHANGES[name]
    made = capture(value)
    change(value)
    with pytest.raises(GraphError, match=message):
        made(torch.randn(2, 3), value)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (float("inf"), float("-inf")),
        ("a", "b"),
        (None, 0),
        ((1, 2), (1, 3)),
    ],
    ids=str,
)
def test_values_are_equal_only_with_type_and_sign(before: Any, after: Any) -> None:
    made = capture(before)
    with pytest.raises(GraphError, match="argument 'how"):
        made(torch.randn(2, 3), after)
    made(torch.randn(2, 3), before)


def test_nan_is_itself() -> None:
    made = capture(float("nan"))
    assert made(torch.ones(2, 3), float("nan")).shape == (2, 3)


SEEN_OTHERWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda w: w.t(),
    "part": lambda w: w[:2],
    "conjugated": lambda w: w.conj(),
    "bits": lambda w: w.view(torch.float32).view(4, 8)[:, :4],
}


@pytest.mark.parametrize("view", SEEN_OTHERWISE)
def test_the_same_memory_seen_in_another_way_is_another_tensor(view: str) -> None:
    weight = torch.randn(4, 4, dtype=torch.complex64)
    made = capture(weight, fn=lambda x, how: x + how.real.sum())
    with pytest.raises(GraphError, match=r"argument 'how' is another tensor .*the same memory as"):
        made(torch.randn(2, 3), SEEN_OTHERWISE[view](weight))
    made(torch.randn(2, 3), weight.view(4, 4))


def test_what_every_run_changes_inside_an_object_is_no_news() -> None:
    class Counting(Settings):
        calls = 0

    def fn(x: Tensor, how: Counting) -> Tensor:
        how.calls += 1
        return x * how.scale

    value = Counting()
    made = capture(value, fn=fn)
    made.eager(torch.randn(2, 3), value)
    assert torch.equal(made(torch.ones(2, 3), value), torch.full((2, 3), 2.0))
    value.scale = 5.0
    with pytest.raises(GraphError, match=r"how.scale: 2.0 → 5.0"):
        made(torch.ones(2, 3), value)
    made.recapture(torch.ones(2, 3), value)
    assert torch.equal(made(torch.ones(2, 3), value), torch.full((2, 3), 5.0))


def test_an_object_that_came_back_after_a_pause_is_compared_from_then_on() -> None:
    value = Settings()
    made = capture(value)
    made.pause()
    made.resume()
    value.scale = 4.0
    with pytest.raises(GraphError, match=r"how.scale"):
        made(torch.ones(2, 3), value)


def test_a_module_as_an_argument_is_left_to_the_audit() -> None:
    net = nn.Linear(3, 3)
    made = capture(net, fn=lambda x, how: how(x))
    net.weight = nn.Parameter(torch.zeros(3, 3))
    assert [change.name for change in made.audit()] == ["how.weight"]


@pytest.mark.parametrize("layout", ["to_sparse", "to_mkldnn"])
def test_an_input_without_plain_memory_is_refused_by_name(layout: str) -> None:
    made = graphed(lambda x: x * 2, inputs=ROWS, sizes=[2]).capture(torch.ones(2, 3))
    with pytest.raises(GraphError, match=r"input 'x' is a torch.* tensor; graphs need dense ones"):
        made(getattr(torch.ones(2, 3), layout)())


@pytest.mark.parametrize("change", [lambda tensor: tensor.t_(), lambda tensor: tensor.resize_(4, 2)])
def test_the_same_tensor_seen_in_another_way_is_refused(change: Any) -> None:
    rows, weight = torch.randn(3, 4), torch.randn(4, 4)
    made = graphed(lambda x, w: x @ w, inputs={"x": Input(dims={0: "rows"})}, sizes=[4]).capture(rows, weight)
    assert torch.equal(made(rows, weight), rows @ weight)
    change(weight)
    with pytest.raises(GraphError, match=r"argument 'w' is another tensor .*the same memory as"):
        made(rows, weight)
