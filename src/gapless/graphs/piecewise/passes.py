"""Passes over the traced graph, before it is split. One real pass ships: ``FuseOutputCast``.

A pass changes the graph in place and says how often it did. One that has to see what lies on both sides of a
split op is registered with ``needs_whole_graph``: the plan then empties the split list, and what would have
been piecewise becomes full. Passes act on every forward that is compiled after their registration; the order
is that of registration. Read ``backend.py`` for where they run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from gapless.errors import ConfigError


class GraphPass(Protocol):
    name: str
    needs_whole_graph: bool

    def __call__(self, graph: fx.GraphModule) -> int:
        """Change the graph in place; returns the number of changes."""


def register_pass(graph_pass: GraphPass) -> None:
    """Add a pass for everything compiled from now on. Raises ``ConfigError`` when its name is taken."""
    if graph_pass.name in _registered:
        raise ConfigError(f"a pass called {graph_pass.name!r} is registered already; unregister it first")
    _registered[graph_pass.name] = graph_pass


def unregister_pass(name: str) -> None:
    """Raises ``ConfigError`` for a name that is not registered."""
    if _registered.pop(name, None) is None:
        raise ConfigError(f"no pass is called {name!r}; registered: {', '.join(_registered) or 'none'}")


def registered_passes() -> tuple[GraphPass, ...]:
    return tuple(_registered.values())


def whole_graph_passes() -> tuple[str, ...]:
    """Names of the registered passes that empty the split list."""
    return tuple(p.name for p in _registered.values() if p.needs_whole_graph)


@dataclass(frozen=True, kw_only=True, slots=True)
class FuseOutputCast:
    """Let an op write its result in the dtype its only reader casts it to.

    ``ops`` write into an argument called ``out_argument`` and may be given one of any floating dtype (paged
    attention is such an op: it computes in float32 and rounds once, when it stores). Where the buffer is
    float32 and its only other use is a cast to a narrower dtype, the buffer is allocated in that dtype and
    the cast goes away; both versions round once, so results are the same bit for bit. A cast from a narrower
    dtype stays: leaving it out would skip a rounding. The pattern spans a split op, so this pass needs the
    whole graph.
    """

    ops: tuple[str, ...]
    out_argument: str
    name: str = "fuse_output_cast"
    needs_whole_graph: bool = True

    def __call__(self, graph: fx.GraphModule) -> int:
        count = 0
        for node in list(graph.graph.nodes):
            out = self._output_of(node)
            if out is not None:
                count += _fuse(graph.graph, node, out)
        if count:
            graph.graph.lint()
            graph.recompile()
        return count

    def _output_of(self, node: fx.Node) -> fx.Node | None:
        """The buffer that ``node`` writes, if it is one of the ops."""
        target: Any = node.target
        if isinstance(target, torch._ops.OpOverloadPacket):
            target = target.default
        if not isinstance(target, torch._ops.OpOverload) or target._schema.name not in self.ops:
            return None
        names = [argument.name for argument in target._schema.arguments]
        index = names.index(self.out_argument)
        out = node.args[index] if index < len(node.args) else node.kwargs.get(self.out_argument)
        return out if isinstance(out, fx.Node) else None


_registered: dict[str, GraphPass] = {}


def _fuse(graph: fx.Graph, op: fx.Node, out: fx.Node) -> int:
    cast = _only(user for user in out.users if user is not op)
    views: list[fx.Node] = []
    while cast is not None and _is_view(cast):  # the cast may come after a reshape of the result
        views.append(cast)
        cast = _only(cast.users)
    dtype = _cast_dtype(cast) if cast is not None else None
    value = out.meta.get("example_value")
    is_fresh = out.op == "call_function" and out.target is torch.empty_like and "dtype" not in out.kwargs
    if cast is None or dtype is None or not is_fresh or not isinstance(value, Tensor):
        return 0
    if value.dtype != torch.float32 or not dtype.is_floating_point or dtype.itemsize >= 4:
        return 0
    out.kwargs = {**out.kwargs, "dtype": dtype}
    for node in (out, *views):
        node.meta["example_value"] = node.meta["example_value"].to(dtype)
    source = cast.args[0]
    assert isinstance(source, fx.Node)
    cast.replace_all_uses_with(source)
    graph.erase_node(cast)
    return 1


def _only(nodes: Iterable[fx.Node]) -> fx.Node | None:
    found = list(nodes)
    return found[0] if len(found) == 1 else None


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in (
        "flatten",
        "view",
        "reshape",
        "unflatten",
        "transpose",
    )


def _cast_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype if ``node`` is ``x.to(dtype)`` or a method named after one; None otherwise."""
    if node.op != "call_method":
        return None
    named = {"half": torch.float16, "bfloat16": torch.bfloat16}.get(str(node.target))
    if named is not None:
        return named
    has_one = node.target == "to" and len(node.args) == 2 and not node.kwargs
    return node.args[1] if has_one and isinstance(node.args[1], torch.dtype) else None
