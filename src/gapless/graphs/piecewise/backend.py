"""The ``torch.compile`` backend: passes, split, compile, stitch.

``PiecewiseBackend`` gets the traced graph of a whole forward. It runs the registered passes, cuts the graph
at the split ops, compiles each piece once for every size (identical ones share their code), and hands back a
stitching graph of pieces and split parts. With ``use_inductor_graph_partition`` the graph stays whole until
Inductor has compiled it, and is cut at the same ops when Inductor's code calls them. Invariant: it is called
once per forward; every further call is a recompilation, counted and logged. Read ``split.py``,
``compilers.py`` and ``piece.py`` for the steps, ``compile.py`` for the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.errors import ConfigError
from gapless.graphs.breakable import active_recorder, eager_break
from gapless.graphs.capabilities import TcCompiler
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.ops import implementation_of
from gapless.graphs.piecewise.compilers import PieceCompiler, compile_by_inductor, function_of
from gapless.graphs.piecewise.passes import GraphPass
from gapless.graphs.piecewise.piece import Handover, Piece, SplitPart, Stitched, input_names, replace_child
from gapless.graphs.piecewise.split import (
    PartKind,
    SplitGraph,
    check_op_names,
    refuse_host_reads,
    split_graph,
    split_ops_of,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PiecewiseConfig:
    """How a forward is compiled. ``split_ops`` empty: one piece. Raises ``ConfigError`` for op names that do
    not exist and for passes that need a whole graph beside split ops."""

    split_ops: tuple[str, ...]
    compiler: TcCompiler = "eager"
    use_inductor_graph_partition: bool = False
    passes: tuple[GraphPass, ...] = ()
    off_switch: str = "--cuda-graph-backend-prefill=disabled"
    """What turns this strategy off, for the message of a failure at start-up."""

    def __post_init__(self) -> None:
        check_op_names(self.split_ops)
        whole = [p.name for p in self.passes if p.needs_whole_graph]
        if whole and self.split_ops:
            raise ConfigError(
                f"the pass {', '.join(whole)} needs the whole graph, but there are split ops: "
                f"{', '.join(self.split_ops)}; pass split_ops=() or leave the pass out"
            )


@dataclass(slots=True)
class CompileStats:
    """What compilation came to; ``to_dict`` is part of the report."""

    num_traces: int = 0
    num_pieces: int = 0
    num_trivial: int = 0
    num_splits: int = 0
    trace_s: float = 0.0
    """Tracing and splitting; the compilation of pieces is not in it."""
    compile_s: float = 0.0
    num_distinct: int = 0
    num_left_as_traced: int = 0
    """Distinct pieces that ``inductor`` was not given (see ``PieceCompiler``)."""
    unmatched: tuple[str, ...] = ()
    changes_by_pass: tuple[tuple[str, int], ...] = ()

    @property
    def num_recompilations(self) -> int:
        return max(0, self.num_traces - 1)

    def to_dict(self) -> dict[str, Any]:
        return {
            "traces": self.num_traces,
            "recompilations": self.num_recompilations,
            "pieces": self.num_pieces,
            "distinct_pieces": self.num_distinct,
            "left_as_traced": self.num_left_as_traced,
            "trivial_pieces": self.num_trivial,
            "split_ops": self.num_splits,
            "unmatched_split_ops": list(self.unmatched),
            "passes": dict(self.changes_by_pass),
            "trace_s": round(self.trace_s, 3),
            "compile_s": round(self.compile_s, 3),
        }


class PiecewiseBackend:
    """See the module docstring. One per forward."""

    def __init__(self, config: PiecewiseConfig, device: GraphDevice) -> None:
        self.stats = CompileStats()
        self.handover = Handover()
        self.pieces: list[Piece] = []
        self._config, self._device = config, device
        self._compiler = PieceCompiler(config.compiler)

    def __call__(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.stats.num_traces += 1
        if self.stats.num_traces > 1:
            logger.warning(
                "a compiled forward was traced again (%d times now): sizes, dtypes or global settings differ "
                "from those at start-up; TORCH_LOGS=recompiles names the reason",
                self.stats.num_traces,
            )
        refuse_host_reads(graph)
        names = input_names(graph)
        self.stats.changes_by_pass = tuple((p.name, p(graph)) for p in self._config.passes)
        if self._config.use_inductor_graph_partition:
            run, num_breaks = self._whole(graph)
        else:
            run, num_breaks = self._pieces(split_graph(graph, self._config.split_ops))
        self.stats.compile_s = self._compiler.compile_s
        self.stats.num_distinct = self._compiler.num_compiled
        self.stats.num_left_as_traced = self._compiler.num_left_as_traced
        return Stitched(run, inputs=names, num_breaks=num_breaks, device=self._device, handover=self.handover)

    def _pieces(self, split: SplitGraph) -> tuple[Callable[..., Any], int]:
        """The stitching graph of compiled pieces, and how many breaks it has."""
        if split.unmatched:
            logger.warning("the forward calls no %s: not split there", ", ".join(split.unmatched))
        for part in split.parts:
            if part.kind is PartKind.SPLIT:
                child = SplitPart(part.name, part.graph, part.ops, self._device.torch_device)
                replace_child(split.stitching, part.name, child)
            elif part.kind is PartKind.TRIVIAL:
                replace_child(split.stitching, part.name, function_of(part.graph))
        pieces = [part for part in split.parts if part.kind is PartKind.PIECE]
        compiled = self._compiler.compile_all([part.graph for part in pieces])
        for part, (code, numbers) in zip(pieces, compiled, strict=True):
            piece = Piece(part.name, code, self._device, numbers=numbers)
            self.pieces.append(piece)
            replace_child(split.stitching, part.name, piece)
        kinds = [part.kind for part in split.parts]
        self.stats.num_pieces = kinds.count(PartKind.PIECE)
        self.stats.num_trivial = kinds.count(PartKind.TRIVIAL)
        self.stats.num_splits = len(split.split_ops)
        self.stats.unmatched = split.unmatched
        return function_of(split.stitching), kinds.count(PartKind.SPLIT)

    def _whole(self, graph: fx.GraphModule) -> tuple[Callable[..., Any], int]:
        """One compiled graph, cut where its code calls a split op."""
        ops = split_ops_of(graph, self._config.split_ops)
        overloads = {op for _, op in ops}
        code = compile_by_inductor(graph, partition_at=tuple(dict.fromkeys(name for name, _ in ops)))
        self.stats.num_pieces = len(ops) + 1
        self.stats.num_splits = len(ops)
        return cut_at_calls(code, overloads), len(ops)


def cut_at_calls(code: Callable[..., Any], ops: set[torch._ops.OpOverload]) -> Callable[..., Any]:
    """``code`` with each call of one of ``ops`` turned into a break, wherever compiled code makes it."""
    mode = _CutMode(ops)

    def run(*args: Any) -> Any:
        if active_recorder() is None:
            return code(*args)
        with mode:
            return code(*args)

    return run


class _CutMode(TorchDispatchMode):
    def __init__(self, ops: set[torch._ops.OpOverload]) -> None:
        super().__init__()
        self._breaks = {op: eager_break(implementation_of(op) or op) for op in ops}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._breaks.get(func, func)(*args, **(kwargs or {}))
