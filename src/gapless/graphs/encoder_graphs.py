"""What both modes of the encoder runner stand on: static memory, and one generation of graphs over it.

``EncoderMemory`` is made once, at the largest size that may run in a graph: inputs and workspaces.
``Generation`` is a store with its pool, its outputs and a ``GraphRunner`` over that memory; whoever drops one
drops all its graphs (fence, reset, pool), never single ones (cuBLAS workspaces are shared between graphs,
PyTorch 193402). Invariant: what a graph reads outlives it. Read ``encoder.py`` for who uses them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.buffers import InputViews, StaticInputs
from gapless.graphs.context import get_forward_context
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.encoder_adapter import (
    Bounds,
    EncoderAdapter,
    EncoderRun,
    StaticMemory,
    Values,
    fresh_run,
)
from gapless.graphs.encoder_budgets import Sizes
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.runner import GraphRunner
from gapless.graphs.store import GraphKey, GraphStore, SharedPool

logger = logging.getLogger(__name__)

_LONG_S = 5e-3


class EncoderMemory:
    """Static inputs and workspaces for runs of up to ``max_sizes``."""

    def __init__(self, adapter: EncoderAdapter[Any], *, max_sizes: Sizes, device: GraphDevice) -> None:
        self.adapter, self.device = adapter, device
        self.max_sizes = dict(max_sizes)
        self.inputs = StaticInputs(adapter.fields, max_sizes=self.max_sizes, torch_device=device.torch_device)
        self.scratch = StaticMemory(
            adapter.workspaces, max_sizes=self.max_sizes, torch_device=device.torch_device
        )

    @property
    def num_bytes(self) -> int:
        return self.inputs.num_bytes + self.scratch.num_bytes

    def buffers(self) -> dict[str, Tensor]:
        """Every input and workspace by name, at its largest: static memory."""
        return self.inputs.views(self.max_sizes).tensors | self.scratch.buffers


class Generation:
    """Graphs of one encoder that live and go together."""

    def __init__(
        self, memory: EncoderMemory, *, pool: SharedPool | None = None, stays_open: bool = False
    ) -> None:
        self.memory = memory
        self.store = GraphStore(memory.device, pool=pool, stays_open=stays_open)
        self._adapter = memory.adapter
        self._runs: dict[BatchDescriptor, _Planned] = {}
        self._runner = GraphRunner(
            self._forward,
            phase=Phase.ENCODER,
            strategy=Strategy.FULL,
            inputs=memory.inputs,
            outputs=self._adapter.outputs,
            store=self.store,
            sizes_of=lambda descriptor: self._runs[descriptor].sizes,
            make_dummy=lambda descriptor: self._runs[descriptor].make_dummy(),
            make_batch=lambda views, descriptor: self._runs[descriptor].bounds,
        )

    @property
    def outputs(self) -> dict[str, Tensor]:
        """The buffers that every graph leaves its results in."""
        return {field.name: self._runner.output_buffer(field.name) for field in self._adapter.outputs}

    @property
    def output_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.outputs.values())

    @property
    def num_graphs(self) -> int:
        return len(self.store.ledger)

    def plan(
        self, descriptor: BatchDescriptor, *, sizes: Sizes, bounds: Bounds, make_dummy: Callable[[], Values]
    ) -> None:
        """Say what ``descriptor`` stands for, before it is captured or run. ``make_dummy`` gives the batch it
        is captured with."""
        self._runs[descriptor] = _Planned(dict(sizes), bounds, make_dummy)

    def compile(self, descriptors: Iterable[BatchDescriptor]) -> None:
        """Run planned descriptors once, before any capture, within ``CompilesAhead.compiling_ahead``. What
        goes wrong (too little memory) is left to the captures, which know what to do."""
        for descriptor in descriptors:
            try:
                self._runner.compile(descriptor)
            except Exception as error:
                logger.info("kernels of encoder %s are compiled later: %s", descriptor, error)

    def capture(
        self,
        descriptors: Iterable[BatchDescriptor],
        *,
        on_done: Callable[[BatchDescriptor], None] | None = None,
    ) -> list[BatchDescriptor]:
        """Capture planned descriptors, largest first, under the capture lock; returns those that failed and
        so stay eager."""
        with self.store.capturing():
            failed = self._runner.capture(descriptors, on_done=on_done)
        for planned in self._runs.values():
            planned.make_dummy = _no_dummy  # the batch may be an item's data
        return failed

    def forget(self, descriptor: BatchDescriptor) -> None:
        """It was planned, but there is no graph of it and will be none."""
        del self._runs[descriptor]
        self._runner.forget(descriptor)

    def run(
        self, descriptor: BatchDescriptor, mode: RuntimeMode, values: Values, *, num_real: Sizes
    ) -> tuple[Tensor, ...]:
        """Replay, or with mode NONE run padded eager; the real rows, in static memory."""
        return self._runner.run(descriptor, mode, values, num_real=num_real)

    def time(self, descriptor: BatchDescriptor, *, repeats: int) -> float:
        """Seconds of a replay alone, on the batch it was captured with: the median of ``repeats``, or of one
        that takes so long that nothing else shows. It is no traffic and leaves no trace in the ledger."""
        entry = self.store.get(GraphKey(Phase.ENCODER, RuntimeMode.FULL, descriptor))
        assert entry is not None, "only captured sizes are timed"
        sizes, device = self._runs[descriptor].sizes, self.memory.device
        with device.stream_scope():
            # Other sizes lie in the same static memory by other layouts: what they left there is no batch.
            self.run(descriptor, RuntimeMode.FULL, self._adapter.dummy(sizes), num_real=sizes)
            seconds = device.time(entry.program.replay, repeats=1)
            if seconds < _LONG_S:
                seconds = device.time(entry.program.replay, repeats=repeats)
        entry.row.replays = entry.row.tokens = entry.row.padding = 0
        return seconds

    def release(self) -> None:
        """Fence, reset every graph, drop pool and outputs. Safe to call twice."""
        self.store.release()
        self.memory.inputs.forget_views()
        self._runs.clear()

    def _forward(self, views: InputViews) -> tuple[Tensor, ...]:
        run = EncoderRun(
            tensors=views.tensors,
            sizes=views.sizes,
            bounds=get_forward_context().batch,
            workspaces=self.memory.scratch.views(views.sizes),
        )
        return self._adapter.forward(run)


class _Planned:
    """What a descriptor stands for."""

    __slots__ = ("bounds", "make_dummy", "sizes")

    def __init__(self, sizes: dict[str, int], bounds: Bounds, make_dummy: Callable[[], Values]) -> None:
        self.sizes, self.bounds, self.make_dummy = sizes, bounds, make_dummy


def owned_rows(
    outputs: Sequence[Tensor], adapter: EncoderAdapter[Any], sizes: Sequence[Mapping[str, int]]
) -> list[tuple[Tensor, ...]]:
    """Each item's rows of ``outputs``, as copies: nothing that is handed out lies in a graph's memory."""
    if len(sizes) == 1:
        (item,) = sizes
        fields = zip(outputs, adapter.outputs, strict=True)
        return [tuple(tensor[: item[str(field.dim)]].clone() for tensor, field in fields)]
    columns: list[list[Tensor]] = []
    for tensor, field in zip(outputs, adapter.outputs, strict=True):
        counts = [item[str(field.dim)] for item in sizes]
        parts = tensor[: sum(counts)].split(counts)
        # Memory of its own for every item, which lives as long as that, but one kernel for all.
        copies = [torch.empty_like(part) for part in parts]
        torch._foreach_copy_(copies, parts)
        columns.append(copies)
    return list(zip(*columns, strict=True))


def run_fresh(
    adapter: EncoderAdapter[Any], items: Sequence[Any], sizes: Sizes, device: torch.device
) -> tuple[Tensor, ...]:
    """Plain eager at the real size, in memory of its own."""
    run = fresh_run(
        adapter, adapter.prepare(items), sizes=sizes, bounds=adapter.bounds_of(items), device=device
    )
    return adapter.forward(run)


def _no_dummy() -> Values:
    raise AssertionError("a captured size is not captured again")
