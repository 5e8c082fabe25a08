"""Compiling pieces once: two compilers, and the fingerprint by which identical pieces are shared.

The layers of a model give the same piece over and over, with other parameters. Parameters are inputs of a
piece, so the compiled code of the first serves all: a model compiles as many pieces as it has kinds of
layers, plus the first and the last. Two pieces are identical when their ops, constants, symbolic shapes,
strides, dtypes and the aliasing among their inputs are. Invariant: compiled code is for every number of
tokens, from zero on. Read ``piece.py`` for how it is captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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
    """Compiles pieces by ``eager`` (the traced ops as they are) or ``inductor``, each kind once."""

    def __init__(self, compiler: TcCompiler) -> None:
        self.compiler = compiler
        self.compile_s = 0.0
        self._compiled: dict[Any, CompiledPiece] = {}

    @property
    def num_compiled(self) -> int:
        """Distinct pieces so far."""
        return len(self._compiled)

    def compile(self, graph: fx.GraphModule) -> CompiledPiece:
        """The code for ``graph``. Must run inside a ``torch.compile`` backend, whose fake tensors it uses."""
        key = fingerprint(graph)
        found = self._compiled.get(key)
        if found is None:
            start = time.perf_counter()
            if self.compiler == "inductor":
                found = CompiledPiece(run=compile_by_inductor(graph), graph=graph.forward, is_opaque=True)
            else:
                found = traced(graph)
            self._compiled[key] = found
            self.compile_s += time.perf_counter() - start
        return found


def traced(graph: fx.GraphModule) -> CompiledPiece:
    """The ops of the graph as they are."""
    return CompiledPiece(run=graph.forward, graph=graph.forward, is_opaque=False)


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


def fingerprint(graph: fx.GraphModule) -> Any:
    """A hashable value that is equal for pieces which the same code can serve."""
    index = {node: i for i, node in enumerate(graph.graph.nodes)}
    storages: dict[int, int] = {}
    rows: list[tuple[Any, ...]] = []
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
        rows.append((node.op, target, _freeze(node.args, index), _freeze(node.kwargs, index)))
    return tuple(rows)


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
    if isinstance(value, slice):
        return ("slice", _freeze((value.start, value.stop, value.step), index))
    is_plain = value is None or isinstance(
        value,
        bool | int | float | str | complex | torch.dtype | torch.device | torch.layout | torch.memory_format,
    )
    return (type(value).__name__, str(value) if is_plain else id(value))  # 1 == 1.0 == True
