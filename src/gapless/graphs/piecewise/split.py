"""Cutting a traced graph at its split ops, and proving that the cut is right.

The result is a *stitching graph* that calls the children ``submod_0``, ``submod_1``, ... in the original
order: pieces, which may be captured, between split parts, which run eagerly. Consecutive split ops form one
part. A ``getitem`` of an op with several results goes wherever the op is, so tuples never cross a border and
no cycle can arise. A piece that only allocates or makes views is *trivial*: it is kept in its place (its
memory comes from the graph pool) but is neither compiled nor a graph of its own. Order is never changed, so
in-place ops and the aliases they are seen through stay right. Read ``piece.py`` for what replaces the
children.
"""

from __future__ import annotations

import enum
import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gapless.errors import CompileError, ConfigError, GraphError


class PartKind(enum.Enum):
    PIECE = enum.auto()
    TRIVIAL = enum.auto()
    """A piece without device work."""
    SPLIT = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One child of the stitching graph. ``ops`` are the split ops in it, in order."""

    name: str
    kind: PartKind
    graph: fx.GraphModule
    ops: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitGraph:
    """``stitching`` calls ``parts`` in order. ``unmatched`` are split ops that the graph does not contain."""

    stitching: fx.GraphModule
    parts: tuple[Part, ...]
    unmatched: tuple[str, ...]

    @property
    def split_ops(self) -> tuple[str, ...]:
        """Every split op, in the order in which they run."""
        return tuple(op for part in self.parts for op in part.ops)


def split_graph(graph: fx.GraphModule, split_ops: Iterable[str]) -> SplitGraph:
    """Cut ``graph`` (which may be changed) at every call of an op named in ``split_ops``; none: one piece.

    Names are ``namespace::op`` or ``namespace::op.overload``. Raises ``CompileError`` when there are names
    and none of them occurs: that would silently capture the whole model as one piece.
    """
    wanted = tuple(dict.fromkeys(split_ops))
    found = {name for name, _ in split_ops_of(graph, wanted)}
    _move_getitems(graph)
    part_of = _assign(graph, set(wanted))
    stitching = _split_module(graph, part_of)
    parts = tuple(_part(name, child, set(wanted)) for name, child in _children(stitching))
    _check(graph, stitching, parts, set(wanted))
    unmatched = tuple(name for name in wanted if name not in found)
    return SplitGraph(stitching=stitching, parts=parts, unmatched=unmatched)


def split_ops_of(graph: fx.GraphModule, split_ops: Iterable[str]) -> list[tuple[str, torch._ops.OpOverload]]:
    """The calls of split ops in order: name as given, and op. Raises ``CompileError`` as ``split_graph``
    does."""
    wanted = tuple(split_ops)
    calls = [
        (name, _overload_of(node.target))
        for node in graph.graph.nodes
        for name in _names_of(node)
        if name in wanted
    ]
    if wanted and not calls:
        raise CompileError(_nothing_matched(graph, wanted))
    return calls


class HostReadError(Exception):
    """The traced forward needs device data on the host, which no capture can hold."""


def refuse_host_reads(graph: fx.GraphModule) -> None:
    """Raise ``HostReadError`` naming the first op whose result or size only the data could tell.

    A trace without graph breaks contains such ops (``item``, ``nonzero``) and leaves the value symbolic.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for node in filter(_is_call, graph.graph.nodes):
        value = node.meta.get("example_value")
        is_symbolic = isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
        if is_symbolic and free_unbacked_symbols(value):
            raise HostReadError(
                f"a value is needed on the host while the forward runs (target: {node.target})\n"
                f"{node.meta.get('stack_trace', '')}"
            )


def check_op_names(names: Iterable[str]) -> None:
    """Raise ``ConfigError`` for a split op that is not registered with PyTorch in this process."""
    for name in names:
        namespace, separator, op = name.partition("::")
        op, _, overload = op.partition(".")
        packet = getattr(getattr(torch.ops, namespace, None), op, None) if separator and op else None
        if packet is None or (overload and overload not in packet.overloads()):
            raise ConfigError(
                f"splitting_ops names {name!r}, and there is no such operator; give names of registered "
                "operators as 'namespace::op' (is the module that registers it imported?)"
            )


def _names_of(node: fx.Node) -> tuple[str, ...]:
    target: Any = node.target
    if node.op != "call_function":
        return ()
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return (name, f"{name}.{target._overloadname}")
    if isinstance(target, torch._ops.OpOverloadPacket):
        return (target._qualified_op_name, f"{target._qualified_op_name}.default")
    return ()


def _overload_of(target: Any) -> torch._ops.OpOverload:
    return target.default if isinstance(target, torch._ops.OpOverloadPacket) else target


def _is_split(node: fx.Node, wanted: set[str]) -> bool:
    return any(name in wanted for name in _names_of(node))


def _is_call(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output")


def _is_mode(node: fx.Node) -> bool:
    """Begins or ends a region of autocast or without gradients."""
    modes = (torch.amp._enter_autocast, torch.amp._exit_autocast, torch._C._set_grad_enabled)
    return node.op == "call_function" and node.target in modes


def _is_unpacking(node: fx.Node) -> bool:
    """A ``getitem`` that takes one value out of several, as opposed to indexing a tensor."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and isinstance(source.meta.get("example_value"), tuple | list)


def _move_getitems(graph: fx.GraphModule) -> None:
    """Put each unpacking right behind the op whose results it unpacks."""
    last: dict[fx.Node, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if _is_unpacking(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            last.get(source, source).append(node)
            last[source] = node
    graph.graph.lint()


def _assign(graph: fx.GraphModule, wanted: set[str]) -> dict[fx.Node, int]:
    part_of: dict[fx.Node, int] = {}
    index, in_split = -1, None
    for node in filter(_is_call, graph.graph.nodes):
        if _is_unpacking(node):
            part_of[node] = part_of[node.args[0]] if node.args[0] in part_of else max(index, 0)
            continue
        is_split = _is_split(node, wanted)
        if is_split is not in_split:
            index, in_split = index + 1, is_split
        part_of[node] = index
    return part_of


def _split_module(graph: fx.GraphModule, part_of: dict[fx.Node, int]) -> fx.GraphModule:
    from torch.fx.passes.split_module import split_module

    return split_module(graph, None, part_of.__getitem__, keep_original_order=True)  # type: ignore[arg-type]


def _children(stitching: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    children = [
        (name, child) for name, child in stitching.named_children() if isinstance(child, fx.GraphModule)
    ]
    return sorted(children, key=lambda named: int(named[0].rpartition("_")[2]))


def _part(name: str, graph: fx.GraphModule, wanted: set[str]) -> Part:
    nodes = [node for node in graph.graph.nodes if _is_call(node)]
    ops = tuple(_names_of(node)[0] for node in nodes if _is_split(node, wanted))
    if ops:
        return Part(name=name, kind=PartKind.SPLIT, graph=graph, ops=ops)
    is_trivial = all(_is_free(node) for node in nodes)
    return Part(name=name, kind=PartKind.TRIVIAL if is_trivial else PartKind.PIECE, graph=graph)


_FREE_FUNCTIONS: set[Any] = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.transpose,
    torch.permute,
    torch.unsqueeze,
    torch.squeeze,
    torch.narrow,
    torch.ops.aten.sym_size.int,
    torch.sym_int,
}
_FREE_METHODS = {
    *("new_empty", "size", "stride", "numel", "dim", "view", "view_as", "transpose", "permute", "t"),
    *("unsqueeze", "squeeze", "expand", "expand_as", "narrow", "unflatten", "detach", "chunk", "split"),
}


def _is_free(node: fx.Node) -> bool:
    """Allocations, views and sizes: nothing runs on the device."""
    if node.op == "call_method":
        return node.target in _FREE_METHODS
    if node.op != "call_function":
        return False
    value = node.meta.get("example_value")
    if node.target in _FREE_FUNCTIONS or _is_unpacking(node) or _is_mode(node):
        return True
    return isinstance(value, int | torch.SymInt)


def _check(
    graph: fx.GraphModule, stitching: fx.GraphModule, parts: tuple[Part, ...], wanted: set[str]
) -> None:
    """Nothing lost, nothing moved across a border, everything defined before it is used."""
    stitching.graph.lint()
    for part in parts:
        part.graph.graph.lint()
    called = [node.target for node in stitching.graph.nodes if node.op == "call_module"]
    names = [part.name for part in parts]
    if called != names or names != [f"submod_{i}" for i in range(len(parts))]:
        raise GraphError(f"split graph calls {called}, but its parts are {names}")
    before = _count_targets([graph])
    after = _count_targets([part.graph for part in parts])
    if before != after:
        raise GraphError(
            f"ops were lost or doubled by the split: {before - after} lost, {after - before} new"
        )
    for part in parts:
        calls = [node for node in part.graph.graph.nodes if _is_call(node) and not _is_mode(node)]
        is_mixed = any(_is_split(node, wanted) for node in calls) and not all(
            _is_split(node, wanted) or _is_unpacking(node) for node in calls
        )
        if is_mixed:
            raise GraphError(f"{part.name} mixes split ops {part.ops} with ops that may be captured")
        for node in part.graph.graph.nodes:
            value = node.meta.get("example_value")
            if node.op == "placeholder" and isinstance(value, tuple | list) and _holds_tensors(value):
                raise GraphError(f"several tensors cross the border into {part.name} as one value, {node}")


def _count_targets(graphs: Iterable[fx.GraphModule]) -> Counter[str]:
    """Calls by target. Regions of a mode (autocast, grad) are entered again in each part, so they do not
    count."""
    nodes = (node for graph in graphs for node in graph.graph.nodes if _is_call(node))
    return Counter(str(node.target) for node in nodes if not _is_mode(node))


def _holds_tensors(values: Any) -> bool:
    return any(isinstance(value, Tensor) for value in values)


def _nothing_matched(graph: fx.GraphModule, wanted: tuple[str, ...]) -> str:
    present = sorted({names[0] for node in graph.graph.nodes if (names := _names_of(node))})
    return (
        f"the split list names {', '.join(wanted)}, and the traced forward calls none of them, so the whole "
        "model would become one piece with its attention inside. Registered operators that it does call: "
        f"{', '.join(present) or 'none'}. Name one of them in splitting_ops, or pass an empty list for one "
        "graph without splits"
    )
