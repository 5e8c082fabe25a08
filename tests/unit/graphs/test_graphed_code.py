"""Code that a capture ran and replays do not: hooks, swapped submodules, counters, graphs inside graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gapless.errors import GraphError
from gapless.graphs.graphed import Graphed, Input, graphed

KEPT: list[Tensor] = []
COUNTS = {"hooks": 0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


def count(*args: Any) -> None:
    COUNTS["hooks"] += 1


def keep(module: nn.Module, args: Any, result: Tensor) -> None:
    KEPT.append(result)


def capture(fn: Any, **options: Any) -> Graphed:
    options = {"inputs": {"x": Input(dims={0: "rows"})}, "sizes": [2, 4], **options}
    return graphed(fn, **options).capture(torch.randn(3, 4))


def lost_effects(made: Graphed) -> list[str]:
    return [d["reason"] for d in made.report()["plan"]["decisions"] if d["rule"] == "side effect"]


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_what_a_hook_changes_is_a_lost_side_effect(kind: str) -> None:
    block = Block().eval()
    getattr(block.linear, kind)(count)
    made = capture(block)
    assert any("COUNTS['hooks']" in reason for reason in lost_effects(made))
    assert {f.check for f in made.verify().failures} == {"side effects"}


def test_a_hook_that_keeps_graph_memory_is_refused() -> None:
    block = Block().eval()
    block.linear.register_forward_hook(keep)
    with pytest.raises(GraphError, match=r"KEPT\[\d\], .*was made during a capture and kept"):
        capture(block)
    KEPT.clear()


def swap_activation(block: Block) -> None:
    block.act = nn.Tanh().eval()


def add_hook(block: Block) -> None:
    block.linear.register_forward_hook(lambda module, args, result: result * 0)


def replace_forward(block: Block) -> None:
    block.act.forward = torch.tanh  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_activation, r"Block.act: torch.*ReLU → torch.*Tanh"),
        (add_hook, r"Block.linear: torch.*Linear → torch.*Linear with 1 forward hooks"),
        (replace_forward, r"Block.act: torch.*ReLU → torch.*ReLU and another forward"),
    ],
)
def test_other_code_than_at_the_capture_is_named(change: Any, message: str) -> None:
    block = Block().eval()
    made = capture(block)
    change(block)
    with pytest.raises(GraphError, match=message):
        made(torch.randn(2, 4))
    made.revalidate()
    x = torch.randn(3, 4)
    torch.testing.assert_close(made(x), block(x))


class Counting:
    calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return x * 2


def test_a_counter_of_a_class_is_a_lost_side_effect() -> None:
    assert any("Counting.calls" in reason for reason in lost_effects(capture(Counting())))


def test_weights_of_a_graphed_callable_inside_another_belong_to_both() -> None:
    inner = capture(Block().eval())

    def outer(x: Tensor) -> Tensor:
        return inner(x) + 1

    made = capture(outer)
    x = torch.randn(2, 4)
    assert torch.equal(made(x), made.padded_eager(x))
    inner.fn.linear.weight = nn.Parameter(torch.zeros(4, 4))
    assert [change.name for change in made.audit()] == ["outer.inner.linear.weight"]
    assert [change.name for change in inner.audit()] == ["Block.linear.weight"]


def test_no_way_to_run_is_left_while_paused() -> None:
    made = capture(Block().eval())
    made.pause()
    x = torch.randn(2, 4)
    for run in (made, made.eager, made.padded_eager, lambda x: made.verify()):
        with pytest.raises(GraphError, match="is paused"):
            run(x)
    made.resume()
    assert made.verify().is_ok
