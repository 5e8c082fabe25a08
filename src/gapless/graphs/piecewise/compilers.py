"""Compiling pieces once: two compilers, and the fingerprint by which identical pieces are shared.

The layers of a model give the same piece over and over, with other parameters. Parameters are inputs of a
piece, so the compiled code of the first serves all: a model compiles as many pieces as it has kinds of
layers, plus the first and the last. Two pieces are identical when their ops, constants, symbolic shapes,
strides, dtypes and the aliasing among their inputs are; integers given to custom ops (a handle of a layer's
weights) may differ and become inputs too. Invariant: compiled code is for every number of
tokens, from zero on. Read ``piece.py`` for how it is captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gapless.errors import ConfigError
from gapless.graphs.capabilities import TcCompiler


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CompiledPiece:
    """Code shared by identical pieces. ``graph`` is the traced form, which also tells shapes from fake
    tensors; ``is_opaque``: ``run`` launches kernels that no dispatcher sees."""

    run: Callable[..., Any]
    graph: Callable[..., Any]
    is_opaque: bool


class PieceCompiler:
    """Compiles pieces by ``eager`` (the traced ops as they are) or ``inductor``, each kind once.

    A piece that writes into one of several inputs which share memory stays as it was traced: compiled code
    would find the base they had while tracing, which views made by compiled code do not have.
    """

    def __init__(self, compiler: TcCompiler) -> None:
        self.compiler = compiler
        self.compile_s = 0.0
        self.num_compiled = 0
        self.num_left_as_traced = 0

    def compile_all(self, graphs: Sequence[fx.GraphModule]) -> list[tuple[CompiledPiece, tuple[int, ...]]]:
        """For each graph its code and the numbers to call it with after its own arguments.

        Must run inside a ``torch.compile`` backend, whose fake tensors it uses. Graphs may be changed.
        """
        start = time.perf_counter()
        groups: dict[Any, list[tuple[int, list[_Number]]]] = {}
        for i, graph in enumerate(graphs):
            key, numbers = fingerprint(graph)
            groups.setdefault(key, []).append((i, numbers))
        results: dict[int, tuple[CompiledPiece, tuple[int, ...]]] = {}
        for members in groups.values():
            values = [[number.value for number in numbers] for _, numbers in members]
            differing = [j for j, column in enumerate(zip(*values, strict=True)) if len(set(column)) > 1]
            first, numbers = members[0]
            compiled = self._compile(graphs[first], [numbers[j] for j in differing])
            for (i, _), own in zip(members, values, strict=True):
                results[i] = (compiled, tuple(own[j] for j in differing))
        self.num_compiled += len(groups)
        self.compile_s += time.perf_counter() - start
        return [results[i] for i in range(len(graphs))]

    def _compile(self, graph: fx.GraphModule, inputs: list[_Number]) -> CompiledPiece:
        _make_inputs(graph, inputs)
        is_opaque = self.compiler == "inductor" and not writes_shared_inputs(graph)
        self.num_left_as_traced += self.compiler == "inductor" and not is_opaque
        ops = function_of(graph)
        run = compile_by_inductor(graph) if is_opaque else ops
        return CompiledPiece(run=run, graph=ops, is_opaque=is_opaque)


def function_of(graph: fx.GraphModule) -> Callable[..., Any]:
    """The ops of ``graph`` as a function, without the detour by which a module generates its code late."""
    assert graph.code  # asking for the code generates it
    return graph.forward


def compile_by_inductor(graph: fx.GraphModule, *, partition_at: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Inductor code for any size of the symbolic dimensions.

    ``partition_at``: Inductor partitions the graph, and no partition holds one of these ops. Raises
    ``ConfigError`` where it cannot do that (a CPU, an older torch).
    """
    import torch._inductor
    from torch._inductor import config

    examples = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    # Graphs are ours to make: Inductor's own would be captured inside them.
    options: dict[str, Any] = {"triton.cudagraphs": False}
    if partition_at:
        _check_can_partition(examples)
        options.update(graph_partition=True, custom_should_partition_ops=list(partition_at))
    with config.patch(options), _partition_wrappers(wanted=bool(partition_at)):
        return torch._inductor.standalone_compile(
            graph, examples, dynamic_shapes="from_tracing_context", options={}
        )


@dataclass(frozen=True, slots=True)
class _Number:
    """An integer argument of a custom op, such as the handle of a layer's weights."""

    node: fx.Node
    position: int | str
    value: int


def fingerprint(graph: fx.GraphModule) -> tuple[Any, list[_Number]]:
    """A hashable value that is equal for pieces which the same code can serve, apart from the numbers."""
    index = {node: i for i, node in enumerate(graph.graph.nodes)}
    storages: dict[int, int] = {}
    rows: list[tuple[Any, ...]] = []
    numbers: list[_Number] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            rows.append(("input", _describe(node.meta.get("example_value"), storages)))
            continue
        target: Any = node.target
        if node.op == "get_attr":
            target = id(getattr(graph, str(target), None))
        elif node.op == "call_module":
            target = id(graph.get_submodule(str(target)))
        elif not isinstance(target, str):
            target = (id(target), str(target))
        args, kwargs = dict(enumerate(node.args)), dict(node.kwargs)
        if _is_custom(node.target):
            for position, value in {**args, **kwargs}.items():
                if type(value) is int:
                    numbers.append(_Number(node, position, value))
                    (args if position in args else kwargs)[position] = ...
        rows.append((node.op, target, _freeze(args, index), _freeze(kwargs, index)))
    return tuple(rows), numbers


def writes_shared_inputs(graph: fx.GraphModule) -> bool:
    """Whether inputs share memory and some op of ``graph`` writes in place."""
    values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    storages = [value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)]
    return len(set(storages)) < len(storages) and any(map(_writes_in_place, graph.graph.nodes))


def _writes_in_place(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_method":
        return str(target).endswith("_") and not str(target).endswith("__")
    if node.op != "call_function":
        return False
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = getattr(target, "__name__", "")
    is_operator = getattr(target, "__module__", "") == "_operator"
    if is_operator:
        return name in _IN_PLACE_OPERATORS
    return name.endswith("_") or node.kwargs.get("out") is not None


_IN_PLACE_OPERATORS = frozenset(
    ("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub")
) | {"itruediv", "ixor", "setitem"}


def _is_custom(target: Any) -> bool:
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return not packet._qualified_op_name.startswith(("aten::", "prims::", "prim::"))


def _make_inputs(graph: fx.GraphModule, numbers: list[_Number]) -> None:
    """Turn numbers that differ between pieces into inputs behind the others."""
    if not numbers:
        return
    last = [node for node in graph.graph.nodes if node.op == "placeholder"]
    with graph.graph.inserting_after(last[-1] if last else None):
        for i, number in reversed(list(enumerate(numbers))):
            value = graph.graph.placeholder(f"number_{i}")
            value.meta["example_value"] = _symbol_for(number.value, graph)
            if isinstance(number.position, int):
                number.node.update_arg(number.position, value)
            else:
                number.node.update_kwarg(number.position, value)
    graph.graph.lint()
    graph.recompile()


def _symbol_for(value: int, graph: fx.GraphModule) -> Any:
    """A symbolic integer, so that compiled code does not hold the value of the first piece."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fake_mode is None or context.fake_mode.shape_env is None:
        return value
    shapes = context.fake_mode.shape_env
    with shapes.ignore_fresh_unbacked_symbols():  # no op of the graph makes this one
        return shapes.create_unbacked_symint()


def _check_can_partition(examples: list[Any]) -> None:
    from torch._inductor import config

    if not all(hasattr(config, name) for name in ("graph_partition", "custom_should_partition_ops")):
        raise ConfigError("use_inductor_graph_partition: this torch has no graph partition; leave it off")
    if any(example.device.type == "cpu" for example in examples if isinstance(example, Tensor)):
        raise ConfigError(
            "use_inductor_graph_partition needs a CUDA device: Inductor partitions GPU code only. Leave it "
            "off here; the graph is then cut before it is compiled"
        )


@contextmanager
def _partition_wrappers(*, wanted: bool) -> Iterator[None]:
    """Inductor makes partitions only if someone wants to wrap them; ours need no wrapping."""
    if not wanted:
        yield
        return
    from torch._inductor import utils

    utils.set_customized_partition_wrappers(lambda fn, metadata: fn)
    try:
        yield
    finally:
        utils.set_customized_partition_wrappers(None)  # type: ignore[arg-type]


def _describe(value: Any, storages: dict[int, int]) -> Any:
    """An input as compiled code depends on it: no values, but which inputs share memory."""
    if not isinstance(value, Tensor):
        return (type(value).__name__, str(value))
    storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
    return (
        *(str(value.dtype), str(value.device), str(value.layout), value.requires_grad),
        *(str(tuple(value.shape)), str(value.stride()), str(value.storage_offset()), storage),
    )


def _freeze(value: Any, index: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return ("node", index[value])
    if isinstance(value, tuple | list):
        return (type(value).__name__, *(_freeze(item, index) for item in value))
    if isinstance(value, dict):
        return ("dict", *((name, _freeze(item, index)) for name, item in value.items()))
    if value is ...:
        return ...
    if isinstance(value, slice):
        return ("slice", _freeze((value.start, value.stop, value.step), index))
    is_plain = value is None or isinstance(
        value,
        bool | int | float | str | complex | torch.dtype | torch.device | torch.layout | torch.memory_format,
    )
    return (type(value).__name__, str(value) if is_plain else id(value))  # 1 == 1.0 == True
