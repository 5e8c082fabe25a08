"""Generation: one set of captured graphs of a callable, from the probe to the release.

``graphed.py`` decides when a generation begins and ends; this file makes one. The order matters: the probe
runs first (it may refuse), static memory and outputs are made at their largest sizes, every bucket is
captured, each captured key is looked up once through the path that calls take, and last a snapshot takes
ownership of everything the graphs read. A capture that fails leaves its size eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gapless.errors import GraphError
from gapless.graphs.audit import Change, Snapshot
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.buckets import Buckets
from gapless.graphs.buffers import InputViews, StaticInputs
from gapless.graphs.call_template import Call, CallTemplate
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.graphed_compiled import CompileOptions, make_compiled, trace, trace_rows
from gapless.graphs.input_field import InputField
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.outputs import OutputDims
from gapless.graphs.piecewise import PiecewiseForward
from gapless.graphs.probe import Findings, KeptState, Probe
from gapless.graphs.real_sizes import RealSizes
from gapless.graphs.runner import GraphRunner
from gapless.graphs.samples import Samples
from gapless.graphs.store import GraphKey, GraphStore, SharedPool

REAL_SIZES = "(real sizes)"
"""The static input behind ``num_real``; no argument can have this name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One thing that was decided at capture, and why."""

    rule: str
    before: str
    after: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "phase": None,
            "rule": self.rule,
            "before": self.before,
            "after": self.after,
            "reason": self.reason,
        }


class Generation:
    """Graphs of ``fn`` for every bucket."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        template: CallTemplate,
        samples: Samples,
        buckets: Buckets,
        device: GraphDevice,
        compile: CompileOptions,
        pool: SharedPool,
    ) -> None:
        self.fn, self.template, self.samples, self.buckets = fn, template, samples, buckets
        self.device, self.pool = device, pool
        self.strategy = Strategy.DISABLED
        self.decisions: list[Decision] = []
        self.findings: Findings | None = None
        self.store = GraphStore(device, pool=pool)
        self._compile_options = compile
        self._compiled: PiecewiseForward | None = None
        self._runner: GraphRunner | None = None
        self._snapshot: Snapshot | None = None

    @property
    def runner(self) -> GraphRunner:
        if self._runner is None:
            raise GraphError("nothing was captured")
        return self._runner

    @property
    def roots(self) -> dict[str, object]:
        """Where everything that the callable reads is reachable from: itself and its frozen arguments."""
        name = type(self.fn).__name__ if isinstance(self.fn, torch.nn.Module) else ""
        roots: dict[str, object] = {name or getattr(self.fn, "__name__", type(self.fn).__name__): self.fn}
        roots |= {leaf.name: leaf.tensor for leaf in self.template.frozen_tensors}
        return roots | {leaf.name: leaf.value for leaf in self.template.frozen_values}

    def capture(
        self,
        strategy: Strategy | None,
        *,
        outputs: Sequence[OutputDims] | None,
        checks_padding: bool,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Probe, capture every bucket, take ownership. ``strategy`` None chooses by whether there are breaks.

        Raises ``GraphError`` for a callable that graphs cannot run right, with nothing left behind.
        """
        try:
            with torch.inference_mode(False):
                state = KeptState(self.roots)
                try:
                    self._capture(strategy, outputs, checks_padding, on_progress, state)
                finally:
                    state.restore()
        except BaseException:
            self.release()
            raise

    def compile_stats(self) -> dict[str, Any] | None:
        """What tracing came to; None where nothing is traced."""
        return self._compiled.stats.to_dict() if self._compiled is not None else None

    def find(self, sizes: Mapping[str, int]) -> BatchDescriptor | None:
        return self.buckets.find(sizes)

    def run(self, descriptor: BatchDescriptor, mode: RuntimeMode, call: Call) -> tuple[Tensor, ...]:
        """Replay a bucket, or run it padded without a graph (mode NONE): static memory, valid until the next
        run."""
        return self.runner.run(descriptor, mode, self.values_of(call), num_real=call.sizes)

    def values_of(self, call: Call) -> dict[str, np.ndarray | Tensor]:
        """The static inputs of a call."""
        values: dict[str, np.ndarray | Tensor] = dict(call.values)
        if self.findings is not None and self.findings.reads_real_sizes:
            values[REAL_SIZES] = np.fromiter(call.sizes.values(), np.int32, len(call.sizes))
        return values

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """What ``fn`` would have returned."""
        assert self.findings is not None
        return self.findings.outputs.unflatten(tensors)

    def changes(self) -> list[Change]:
        """What moved or changed since the capture, of everything that graphs read."""
        if self._snapshot is None:
            return []
        live = self.findings.live_names if self.findings is not None else frozenset()
        found = self._snapshot.changes_to(self._take_snapshot())
        # A container that grew (a cache of other sizes) is no change to what graphs read.
        return [c for c in found if c.kind != "new" and c.name not in live and not c.name.startswith("len(")]

    def state_tensors(self) -> list[Tensor]:
        """The memory outside the graphs that a run writes in place."""
        assert self.findings is not None
        now = Snapshot(self.roots)
        return [now.tensor(name) for name in self.findings.state]

    def disown(self) -> None:
        """Stop keeping alive what the graphs read. They must not run until ``changes`` has been asked."""
        if self._snapshot is not None:
            self._snapshot.forget()

    def own(self) -> None:
        """Keep alive what the graphs read, as it is now."""
        self._snapshot = self._take_snapshot(own=True)
        for value in self.template.frozen_values:
            value.settle(self.findings.live_names if self.findings is not None else ())

    def release(self) -> None:
        """Give all memory back: graphs, pool, static inputs, outputs. Safe to call twice."""
        self._runner = self._compiled = None
        self._snapshot = None
        self.store.release()

    def _capture(
        self,
        strategy: Strategy | None,
        outputs: Sequence[OutputDims] | None,
        checks_padding: bool,
        on_progress: Callable[[int, int], None] | None,
        state: KeptState,
    ) -> None:
        findings = Probe(
            self.fn,
            template=self.template,
            samples=self.samples,
            device=self.device,
            max_sizes=self.buckets.max_sizes,
            roots=self.roots,
            state=state,
            enters_breaks=strategy is Strategy.FULL,
        ).run(declared=outputs, checks_padding=checks_padding)
        self.findings = findings
        self.strategy = self._choose(strategy, findings)
        if findings.state and not state.is_kept:
            reason = "it writes more in place than can be saved: warm-up shows in it, padding is not compared"
            self._decide("state", "restored", "advanced", reason)
        for effect in findings.side_effects:
            self._decide("side effect", "every call", "capture only", f"{effect}; a replay runs no Python")
        if self.strategy is Strategy.TC_PIECEWISE:
            self._compiled = self._trace()
        self._runner = self._make_runner(findings)
        descriptors = self.buckets.descriptors()
        if findings.fills_caches:
            for descriptor in descriptors:
                self._warm_up(descriptor)
        before = self._take_snapshot()
        done = 0

        def count(_: BatchDescriptor) -> None:
            nonlocal done
            done += 1
            if on_progress is not None:
                on_progress(done, len(descriptors))

        with self.store.capturing():
            for failed in self._runner.capture(descriptors, on_done=count):
                self.buckets.drop(failed)
        self._check_lookup()
        self._refuse_leaks(before)
        self.own()

    def _take_snapshot(self, *, own: bool = False) -> Snapshot:
        return Snapshot(self.roots, own=own, enters_breaks=self.strategy is Strategy.FULL)

    def _choose(self, strategy: Strategy | None, findings: Findings) -> Strategy:
        if strategy is not None:
            return strategy
        if findings.break_names:
            breaks = ", ".join(dict.fromkeys(findings.break_names))
            reason = f"it reaches {len(findings.break_names)} eager breaks, of {breaks}"
            self._decide("auto", "auto", "breakable", reason)
            return Strategy.BREAKABLE
        self._decide("auto", "auto", "full", "it has no eager break")
        return Strategy.FULL

    def _trace(self) -> PiecewiseForward:
        options, (symbol,) = self._compile_options, self.buckets.symbols
        compiled = make_compiled(
            self.fn, options, template=self.template, device=self.device, buckets=self.buckets
        )
        sizes = {symbol: trace_rows(options, self.buckets.max_sizes[symbol])}
        trace(compiled, self.template.fill(self.samples.repeated(sizes)), sizes, self.device)
        return compiled

    def _make_runner(self, findings: Findings) -> GraphRunner:
        symbols = self.buckets.symbols
        fields = self.template.fields
        if findings.reads_real_sizes:
            fields = (*fields, InputField(name=REAL_SIZES, dims=(len(symbols),)))
        inputs = StaticInputs(fields, max_sizes=self.buckets.max_sizes, torch_device=self.device.torch_device)

        forward = self._compiled or self.fn

        def fn(views: InputViews) -> tuple[Tensor, ...]:
            args, kwargs = self.template.fill(views.tensors)
            return findings.outputs.flatten(forward(*args, **kwargs))

        def make_batch(views: InputViews, descriptor: BatchDescriptor) -> RealSizes:
            return RealSizes(symbols, counts=views.tensors.get(REAL_SIZES))

        return GraphRunner(
            fn,
            phase=Phase.FORWARD,
            strategy=self.strategy,
            inputs=inputs,
            outputs=findings.outputs.fields,
            store=self.store,
            sizes_of=self.buckets.sizes_of,
            make_dummy=self.dummy,
            make_batch=make_batch,
            is_compiled=self._compiled is not None,
        )

    def dummy(self, descriptor: BatchDescriptor) -> dict[str, np.ndarray | Tensor]:
        """The batch a bucket is captured with: the example's rows."""
        sizes = self.buckets.sizes_of(descriptor)
        return self.values_of(Call(self.samples.repeated(sizes), sizes))

    def _warm_up(self, descriptor: BatchDescriptor) -> None:
        with self.device.stream_scope():
            sizes = self.buckets.sizes_of(descriptor)
            self.runner.run(descriptor, RuntimeMode.NONE, self.dummy(descriptor), num_real=sizes)

    def _check_lookup(self) -> None:
        """Every captured key must be what a call of exactly that size finds."""
        for row in self.store.ledger:
            descriptor = row.key.descriptor
            found = self.find(self.buckets.sizes_of(descriptor))
            if found != descriptor or self.store.get(_key(found, self.strategy)) is None:
                raise GraphError(f"captured {descriptor}, but a call of that size is served by {found}")

    def _refuse_leaks(self, before: Snapshot) -> None:
        """Graph memory that the callable kept (a cache filled in a capture) would be recycled under it."""
        after = self._take_snapshot()
        # Asking a pool costs a snapshot of the allocator on a GPU, so only what is new is asked about.
        new = [name for name, record in after.tensors.items() if before.tensors.get(name) != record]
        kept = [name for name in new if self.pool.owns(after.tensor(name))]
        if kept:
            raise GraphError(
                f"{', '.join(kept[:5])} was made during a capture and kept, so it lies in graph memory that "
                "other graphs overwrite; make it before (in __init__, or in a first eager call), or return it"
            )

    def _decide(self, rule: str, before: str, after: str, reason: str) -> None:
        self.decisions.append(Decision(rule=rule, before=before, after=after, reason=reason))


def _key(descriptor: BatchDescriptor, strategy: Strategy) -> GraphKey:
    return GraphKey(Phase.FORWARD, strategy.runtime_mode, descriptor)
