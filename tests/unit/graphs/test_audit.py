"""The audit: everything reachable has a name, what moved is named, and machinery is left alone."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import logging
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gapless.graphs import audit
from gapless.graphs.audit import Snapshot
from gapless.graphs.breakable import eager_break
from gapless.graphs.op_log import OpLog

GLOBAL_TABLE = torch.ones(3)
GLOBAL_LOG: list[int] = []


class Colour(enum.Enum):
    RED = 1


class Slotted:
    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table = torch.ones(2)


@dataclasses.dataclass
class Record:
    table: Tensor
    names: dict[str, Any]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.register_buffer("mask", torch.ones(2))
        self.slotted = Slotted()
        self.record = Record(torch.ones(2), {"deep": [torch.ones(1), {"er": torch.ones(1)}]})
        self.queue = collections.deque([torch.ones(1)])
        self.flag, self.colour, self.nothing = True, Colour.RED, None
        self.layers[0].weight.scale = torch.ones(1)
        self.lock, self.logger = threading.Lock(), logging.getLogger("x")
        self.me = self  # a cycle

    def forward(self, x: Tensor) -> Tensor:
        return x * GLOBAL_TABLE.sum()


def names_of(root: object, **options: Any) -> tuple[set[str], dict[str, Any]]:
    snapshot = Snapshot({"r": root}, **options)
    return set(snapshot.tensors), snapshot.values


def test_tensors_in_modules_slots_dataclasses_containers_and_attributes_of_tensors_are_found() -> None:
    tensors, values = names_of(Deep())
    assert {
        "r.layers.0.weight",
        "r.layers.0.weight.scale",
        "r.layers.0.bias",
        "r.mask",
        "r.slotted.table",
        "r.record.table",
        "r.record.names['deep'][0]",
        "r.record.names['deep'][1]['er']",
        "r.queue[0]",
        f"{__name__}.GLOBAL_TABLE",
    } == tensors
    assert values["r.flag"] is True
    assert values["r.colour"] is Colour.RED
    assert values["len(r.queue)"] == 1


def test_functions_are_followed_into_closures_defaults_partials_and_globals() -> None:
    table, scale = torch.ones(2), 3

    def inner(x: Tensor, default: Tensor = table) -> Tensor:
        GLOBAL_LOG.append(1)
        return x * scale

    @functools.wraps(inner)
    def outer(x: Tensor) -> Tensor:
        return inner(x)

    tensors, values = names_of(functools.partial(outer, torch.ones(1)))
    assert any(name.endswith("defaults[0]") for name in tensors)
    assert "r.args[0]" in tensors
    assert 3 in values.values()
    assert f"len({__name__}.GLOBAL_LOG)" in values


def test_bound_methods_are_followed_to_their_object() -> None:
    assert "r.mask" in names_of(Deep().forward)[0]


def test_bodies_of_eager_breaks_can_be_left_out() -> None:
    hidden, plain = torch.ones(1), torch.ones(1)

    @eager_break
    def body() -> Tensor:
        return hidden

    def fn() -> Tensor:
        return body() + plain

    assert {n.rpartition(".")[2] for n in names_of(fn)[0]} == {"hidden", "plain"}
    assert {n.rpartition(".")[2] for n in names_of(fn, enters_breaks=False)[0]} == {"plain"}


def test_a_walk_that_is_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Snapshot({"r": Deep()}).is_complete
    monkeypatch.setattr(audit, "MAX_OBJECTS", 10)
    assert not Snapshot({"r": Deep()}).is_complete


@pytest.mark.parametrize(
    "strange",
    [torch.eye(2).to_sparse(), torch.ones(1, device="meta"), logging, int, object(), threading.Event()],
)
def test_what_has_no_address_is_passed_over(strange: object) -> None:
    assert names_of({"x": strange})[0] == set()


def test_nan_is_no_change() -> None:
    holder = {"x": float("nan")}
    before = Snapshot({"r": holder})
    holder["x"] = float("nan")
    assert before.changes_to(Snapshot({"r": holder})) == []


def test_changes_are_of_four_kinds() -> None:
    holder: dict[str, Any] = {
        "moves": torch.ones(2),
        "goes": torch.ones(2),
        "value": 1,
        "stays": torch.ones(2),
    }
    before = Snapshot({"r": holder})
    holder["stays"].add_(1)
    holder["moves"], holder["value"], holder["comes"] = torch.ones(2), 2, torch.ones(2)
    del holder["goes"]
    now = Snapshot({"r": holder})
    kinds = {change.name: change.kind for change in before.changes_to(now)}
    assert kinds == {
        "r['moves']": "moved",
        "r['goes']": "gone",
        "r['comes']": "new",
        "r['value']": "value",
    }
    assert before.written(now) == ["r['stays']"]


def test_owning_keeps_memory_alive_and_forgetting_lets_it_go() -> None:
    holder = [torch.ones(1000)]
    snapshot = Snapshot({"r": holder}, own=True)
    storage = holder[0].untyped_storage()
    references = storage._weak_ref()
    holder.clear()
    del storage
    assert not torch.UntypedStorage._expired(references)
    snapshot.forget()
    assert torch.UntypedStorage._expired(references)
    torch.UntypedStorage._free_weak_ref(references)


def test_memory_is_counted_once_per_address() -> None:
    weight = torch.ones(100)
    assert Snapshot({"a": weight, "b": weight[:], "c": torch.ones(1)}).num_bytes == 404


# --- the log of ops ----------------------------------------------------------------------------------------


def log_of(fn: Any) -> OpLog:
    log = OpLog()
    with torch.no_grad(), log:
        fn()
    return log


X = torch.arange(6.0).reshape(2, 3)


@eager_break
def broken(h: Tensor) -> Tensor:
    return h.clamp(max=float(h.max()) / 2)


def test_ops_are_logged_with_their_host_arguments_and_breaks_are_left_out() -> None:
    log = log_of(lambda: broken(X * 2).sum(0, keepdim=True))
    assert [op.name for op in log.ops] == ["aten.mul.Tensor", "aten.sum.dim_IntList"]
    assert log.num_breaks == 1
    assert log.break_names == [f"{__name__}.broken"]
    assert {(v.argument, v.value) for v in log.frozen_values()} == {
        ("other", "2"),
        ("dim", "(0,)"),
        ("keepdim", "True"),
    }


DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "number": (lambda: X * 2, lambda: X * 3, "argument other: 2 once and 3 the other time"),
    "list": (lambda: X.sum(0), lambda: X.sum(1), r"argument dim: \(0,\) once"),
    "op": (lambda: X.sin(), lambda: X.cos(), "ran aten.sin.default once and aten.cos.default"),
    "slice": (lambda: X[:1] * 1, lambda: X[1:] * 1, "at offset 0 once and .* at offset 3"),
    "shape": (lambda: X[:1] * 1, lambda: X[:2] * 1, r"a tensor \(1, 3\)"),
    "more_ops": (lambda: X.sin(), lambda: X.sin().cos(), "1 ops once and 2 the other time, from aten.cos"),
    "constant": (lambda: X + torch.tensor([1.0]), lambda: X + torch.tensor([2.0]), r"data: \(1.0,\) once"),
    "breaks": (lambda: X.sin(), lambda: (X.sin(), broken(X)), "0 breaks once and 1"),
    "arguments": (lambda: X.sum(), lambda: X.sum(dtype=torch.float64), "called with other arguments"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_differences_between_two_runs_are_named(name: str) -> None:
    one, other, message = DIFFERENT[name]
    (found, *_) = log_of(one).differences_to(log_of(other))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found.detail)
    assert log_of(one).differences_to(log_of(one)) == []


def test_only_a_few_differences_are_listed() -> None:
    def run(factor: float) -> None:
        for _ in range(100):
            X.mul(factor)

    assert len(log_of(lambda: run(2)).differences_to(log_of(lambda: run(3)))) == 20
