"""What stands in the stitching graph after compilation: pieces, split parts, and the graph around them.

A piece lives in three stages. *Compile*: it runs the general code (also the warm-up of each size). *Capture*:
while a capture is open, running it records it into the open segment; on the emulated device compiled code is
one node. *Replay*: its segment belongs to a ``Program`` and runs without it. A split part runs eagerly: a
piecewise capture breaks there (without running it: fake kernels tell the shapes), a full capture records
straight through. What a split op returns is copied
into a slot of the pool before the next piece reads it, so a piece never depends on where an eager op found
memory. Read ``breakable.py`` and ``handoff.py`` for breaks and slots, ``backend.py`` for who puts this
together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from gapless.errors import CaptureError, StaleAddressError
from gapless.graphs.breakable import active_recorder, deferred_break
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.device.shapes import ResultSpec, ShapeInference, leaves_of, nest_like
from gapless.graphs.ops import implementation_of
from gapless.graphs.piecewise.compilers import CompiledPiece, function_of


class Piece:
    """A child that may be captured. ``compiled`` is shared with the identical pieces of other layers."""

    def __init__(
        self, name: str, compiled: CompiledPiece, device: GraphDevice, *, numbers: tuple[int, ...] = ()
    ) -> None:
        """``numbers``: what this piece passes to the shared code where others pass something else."""
        self.name, self.compiled, self.numbers = name, compiled, numbers
        self.num_runs = 0
        self.num_captures = 0
        self._device = device

    def __call__(self, *args: Any) -> Any:
        args += self.numbers
        if not self._device.is_recording():
            self.num_runs += 1
            return self.compiled.run(*args)
        self.num_captures += 1
        if not self.compiled.is_opaque:
            return self.compiled.run(*args)
        name = f"compiled piece {self.name}"
        return self._device.record_call(name, self.compiled.run, args, abstract=self.compiled.graph)


class SplitPart:
    """A child that runs eagerly: one or more split ops in a row."""

    def __init__(
        self, name: str, graph: fx.GraphModule, ops: tuple[str, ...], torch_device: torch.device
    ) -> None:
        self.name, self.ops = name, ops
        self._torch_device = torch_device
        self._returns_nothing = graph.graph.output_node().args[0] == ()
        self._abstract = function_of(graph)
        self._inference = ShapeInference()
        run = function_of(_past_dispatcher(graph))

        def body(*args: Any) -> Any:
            return run(*args)

        body.__module__, body.__qualname__ = name, "+".join(ops)
        self._run = deferred_break(body, self._shapes)

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def _shapes(self, *args: Any) -> Any:
        """Results as the ops' fake kernels describe them, with anything in them."""
        if self._returns_nothing:
            return ()
        specs = self._inference.infer_call(self._abstract, args)

        def make(spec: Any) -> Any:
            if not isinstance(spec, ResultSpec):
                return spec
            return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=self._torch_device)

        return nest_like(specs, [make(spec) for spec in leaves_of(specs)])


@dataclass(kw_only=True, slots=True)
class AddressCheck:
    """The addresses one captured call of a forward depends on, and what is needed to ask for them again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    addresses: tuple[int | None, ...] = ()
    outputs: Any = None
    is_complete: bool = field(default=False)


class Handover:
    """What the caller of compiled code tells the stitching graph past the guards in between, for one call."""

    def __init__(self) -> None:
        self.check: AddressCheck | None = None
        """To be filled by a captured call, or compared with the call if complete."""
        self.originals: dict[int, Tensor] = {}
        """By the identity of stand-ins among the arguments: what to record in their place."""

    def take(self) -> tuple[AddressCheck | None, dict[int, Tensor]]:
        taken = self.check, self.originals
        self.check, self.originals = None, {}
        return taken


class Stitched:
    """The stitching graph with its children replaced: what ``torch.compile`` calls.

    It is entered with recording paused (guards do not work under a dispatch mode) and resumes it.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        *,
        inputs: tuple[str, ...],
        num_breaks: int,
        device: GraphDevice,
        handover: Handover,
    ) -> None:
        self._run, self._handover = run, handover
        self._inputs, self._num_breaks, self._device = inputs, num_breaks, device

    def __call__(self, *args: Any) -> Any:
        check, originals = self._handover.take()
        if check is not None and check.is_complete:
            self._compare(check, args)
            return check.outputs
        with self._device.resume_recording():
            if originals and self._device.is_recording():
                args = tuple(originals.get(id(arg), arg) for arg in args)
            recorder = active_recorder()
            breaks_before = recorder.num_breaks if recorder is not None else 0
            outputs = self._run(*args)
            if recorder is not None and recorder.num_breaks - breaks_before != self._num_breaks:
                raise CaptureError(
                    f"{recorder.num_breaks - breaks_before} split parts ran as breaks, but the forward has "
                    f"{self._num_breaks}: an op that needs live data would be frozen in a graph"
                )
            if check is not None:
                check.addresses = _addresses(args)
                check.outputs = [self._device.alias(x) if isinstance(x, Tensor) else x for x in outputs]
                check.is_complete = True
            return outputs

    def _compare(self, check: AddressCheck, args: tuple[Any, ...]) -> None:
        # A forward that had to be traced again may have other inputs, which its caller finds out.
        pairs = zip(self._inputs, check.addresses, _addresses(args), strict=False)
        moved = [name for name, before, now in pairs if before != now]
        if moved:
            raise StaleAddressError(
                f"{', '.join(moved)} moved to another address after the capture, so the graphs read memory "
                "that is no longer theirs; update tensors in place (copy_), or capture again"
            )


def replace_child(stitching: fx.GraphModule, name: str, child: Callable[..., Any]) -> None:
    """Let ``stitching`` call ``child`` where it called its submodule ``name``."""
    delattr(stitching, name)
    stitching.__dict__[name] = child


def input_names(graph: fx.GraphModule) -> tuple[str, ...]:
    """A readable name for each input of a traced graph: ``model.blocks.0.qkv.weight``."""
    return tuple(_readable(node) for node in graph.graph.nodes if node.op == "placeholder")


def _addresses(args: tuple[Any, ...]) -> tuple[int | None, ...]:
    return tuple(arg.data_ptr() if isinstance(arg, Tensor) else None for arg in args)


def _past_dispatcher(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph with direct calls of our own ops, so that a full capture records what they do inside."""
    direct = fx.Graph()
    output = direct.graph_copy(graph.graph, {})
    direct.output(output)
    for node in direct.nodes:
        target: Any = node.target
        overload = target.default if isinstance(target, torch._ops.OpOverloadPacket) else target
        implementation = implementation_of(overload) if node.op == "call_function" else None
        if implementation is not None:
            node.target = implementation
    return fx.GraphModule(graph, direct)


def _readable(node: fx.Node) -> str:
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    if source is None:
        return str(node.target)
    name = (
        source.name() if callable(source.name) else source.name
    )  # a method up to some torch, then a property
    name = re.sub(r"(\._modules|\._parameters|\._buffers)?\['([^']*)'\]", r".\2", str(name))
    return name.removeprefix("L.").removeprefix("G.").replace("self.", "", 1)
