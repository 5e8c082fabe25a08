"""Probe: a few eager runs of a callable before it is captured, to learn what its graphs must know and refuse.

The same real rows run once padded and once at their own size. That tells which dimensions of the results are
dynamic, whether padding changes real rows, which eager breaks are met, and what the callable does beside
returning results: attributes it rebinds (a graph would go on using the old tensor), inputs it writes (a graph
writes its own copy), Python values it changes (a replay runs no Python), state it updates in place (fine, and
``check.py`` needs to know). The largest size runs first, so that whatever is made lazily is made large.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapless.errors import GraphError
from gapless.graphs.audit import Change, Snapshot
from gapless.graphs.breakable import activate
from gapless.graphs.buffers import InputViews, StaticInputs
from gapless.graphs.call_template import CallTemplate
from gapless.graphs.compare import bounded_mismatch, tolerance_for
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.outputs import Observed, OutputDims, OutputPlan
from gapless.graphs.real_sizes import RealSizes
from gapless.graphs.runner import prefix_of
from gapless.graphs.samples import Samples, smaller_than

logger = logging.getLogger(__name__)

MAX_SAVED_BYTES = 256 << 20
"""State up to this size is put back as it was after the probe and the captures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What the probe learned."""

    outputs: OutputPlan
    break_names: tuple[str, ...]
    reads_real_sizes: bool
    draws_random_numbers: bool
    state: tuple[str, ...]
    """Reachable tensors that the callable writes in place."""
    side_effects: tuple[str, ...]
    """Python values that a run changed: they will not change at a replay."""
    tolerance: float
    """Relative bound for comparing results of different sizes."""
    live_names: frozenset[str]
    """Names of values that runs or eager breaks change: another value later is no news."""
    fills_caches: bool
    """A new size makes tensors that stay: each size must run once before its capture, or they would lie in
    the graph's memory."""


class Probe:
    """Runs ``fn`` eagerly on static memory of its own."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        template: CallTemplate,
        samples: Samples,
        device: GraphDevice,
        max_sizes: Mapping[str, int],
        roots: Mapping[str, object],
        state: KeptState,
        enters_breaks: bool,
    ) -> None:
        """``state`` is put back before each run, so that all of them start alike. ``enters_breaks``: a full
        graph records the bodies of eager breaks like other code."""
        self._fn, self._template, self._samples = fn, template, samples
        self._device, self._roots, self._state = device, roots, state
        self._enters_breaks = enters_breaks
        # Two sizes are needed to see what is dynamic, also where only size 1 is captured.
        self._padded = {symbol: max(size, 2) for symbol, size in max_sizes.items()}
        self._inputs = StaticInputs(template.fields, max_sizes=self._padded, torch_device=device.torch_device)
        self._breaks = _BreakNames()
        self._reads_real_sizes = False

    def run(self, *, declared: Sequence[OutputDims] | None, checks_padding: bool) -> Findings:
        """Raises ``GraphError`` for what graphs cannot do right."""
        real = smaller_than(self._padded)
        values = self._samples.repeated(real)
        with torch.no_grad(), self._device.stream_scope():
            random_before = random_state(self._device)
            padded = self._observe(values, self._padded, real)
            draws = not torch.equal(random_before, random_state(self._device))
            at_largest = self._snapshot()
            runs = [padded, *self._between(values, real)]
            runs.append(plain := self._observe(values, real, real))
            # What a second run of one size still changes is no cache that was filled.
            self._state.restore()
            before = self._snapshot()
            self._observe(values, real, real, restores=False)
            after = self._snapshot()
            changes = [*at_largest.changes_to(before), *before.changes_to(after)]
            live = self._names_changed_by_breaks(values, real) if changes else frozenset()
        _refuse_rebinding([change for change in changes if change.name not in live])
        outputs = OutputPlan.infer(runs, declared)
        state = tuple(before.written(after))
        # Runs that start from different states cannot be compared.
        if checks_padding and not draws and (self._state.is_kept or not state):
            _check_padding(outputs, padded, plain, tolerance_for(self._dtypes(before)))
        effects = [c for c in before.changes_to(after) if c.kind == "value" and c.name not in live]
        return Findings(
            outputs=outputs,
            break_names=tuple(self._breaks.names),
            reads_real_sizes=self._reads_real_sizes,
            draws_random_numbers=draws,
            state=state,
            side_effects=tuple(map(str, effects)),
            tolerance=tolerance_for(self._dtypes(before)),
            live_names=live | {change.name for change in effects},
            fills_caches=any(c.kind == "new" for c in at_largest.changes_to(before)),
        )

    def _dtypes(self, reachable: Snapshot) -> set[torch.dtype]:
        """Types that take part: of inputs, of everything reachable, and of autocast."""
        device_type = self._device.torch_device.type
        found = {field.dtype for field in self._template.fields} | reachable.dtypes
        if torch.is_autocast_enabled(device_type):
            found.add(torch.get_autocast_dtype(device_type))
        return found

    def _names_changed_by_breaks(
        self, values: Mapping[str, Tensor], real: Mapping[str, int]
    ) -> frozenset[str]:
        """What the bodies of eager breaks change themselves may change: they run at every replay."""
        if self._enters_breaks or not self._breaks.names:
            return frozenset()
        self._breaks.watch = self._snapshot
        try:
            self._observe(values, real, real)
        finally:
            self._breaks.watch = None
        return frozenset(self._breaks.changed)

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._roots, enters_breaks=self._enters_breaks)

    def _between(self, values: Mapping[str, Tensor], real: Mapping[str, int]) -> list[Observed]:
        """With two symbols, the run in which only the first has its real size."""
        if len(real) < 2:
            return []
        first = next(iter(real))
        return [self._observe(values, {**self._padded, first: real[first]}, real)]

    def _observe(
        self,
        values: Mapping[str, Tensor],
        sizes: Mapping[str, int],
        real: Mapping[str, int],
        *,
        restores: bool = True,
    ) -> Observed:
        if restores:
            self._state.restore()
        views = self._inputs.transient_views(sizes)
        self._inputs.load_on_device(views, values)
        versions = {name: view._version for name, view in views.tensors.items()}
        real_sizes = RealSizes(tuple(real), sizes=real, device=self._device.torch_device)
        args, kwargs = self._template.fill(views.tensors)
        self._breaks.names.clear()
        with use_forward_context(ForwardContext(batch=real_sizes)), activate(self._breaks):  # type: ignore[arg-type]
            result = self._fn(*args, **kwargs)
        self._device.synchronize()
        self._reads_real_sizes |= real_sizes.was_read
        _refuse_written_inputs(views, versions)
        observed = Observed.of(sizes, result)
        # The static memory is used again by the next run, and results may be views of it.
        leaves = tuple(leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in observed.leaves)
        return Observed(observed.sizes, leaves, observed.structure)


class KeptState:
    """Contents of the reachable tensors that are no parameters, to be put back after runs that do not count.

    Nothing is kept when they are larger than ``MAX_SAVED_BYTES``.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        snapshot = Snapshot(roots)
        tensors = {snapshot.tensors[name].address: snapshot.tensor(name) for name in snapshot.tensors}
        state = [
            t for t in tensors.values() if not isinstance(t, torch.nn.Parameter) and not t.is_inference()
        ]
        self.is_kept = sum(tensor.nbytes for tensor in state) <= MAX_SAVED_BYTES
        self._saved = [(tensor, tensor.detach().clone()) for tensor in state] if self.is_kept else []

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, contents in self._saved:
                if tensor.shape == contents.shape:
                    tensor.detach().copy_(contents)


@contextmanager
def saved_contents(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the contents of ``tensors`` after the block."""
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, contents in saved:
                tensor.detach().copy_(contents)


def random_state(device: GraphDevice) -> Tensor:
    """State of the generator that ops on the device draw from."""
    if device.torch_device.type == "cuda":
        return torch.cuda.get_rng_state(device.torch_device)
    return torch.get_rng_state()


class _BreakNames:
    """Stands where a recorder would: notes eager breaks and runs them inline."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.watch: Callable[[], Snapshot] | None = None
        """Where set, what bodies change is collected in ``changed``."""
        self.changed: set[str] = set()

    def run_break(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(f"{body.__module__}.{body.__qualname__}")
        with activate(None):
            if self.watch is None:
                return body(*args, **kwargs)
            before = self.watch()
            result = body(*args, **kwargs)
            self.changed |= {change.name for change in before.changes_to(self.watch())}
            return result


def _refuse_rebinding(changes: Sequence[Change]) -> None:
    moved = [change for change in changes if change.kind == "moved"]
    if moved:
        names = "; ".join(map(str, moved[:5]))
        raise GraphError(
            f"a run rebinds tensors: {names}. A replay runs no Python and keeps the old address: update in "
            "place (buffer.copy_(...), buffer.add_(...)), or keep it out of the graph with an eager break"
        )


def _refuse_written_inputs(views: InputViews, versions: Mapping[str, int]) -> None:
    for name, view in views.tensors.items():
        if view._version != versions[name]:
            raise GraphError(
                f"input {name!r} is written in place: a graph would write its own copy, and the caller's "
                "tensor would stay as it was. Return the new value, or leave the argument undeclared (its "
                "memory must then stay the same)"
            )


def _check_padding(outputs: OutputPlan, padded: Observed, plain: Observed, tolerance: float) -> None:
    real_rows = [
        prefix_of(t.reshape(1) if t.ndim == 0 else t, field.shape(plain.sizes))
        for t, field in zip(padded.tensors, outputs.fields, strict=True)
    ]
    expected = [t.reshape(1) if t.ndim == 0 else t for t in plain.tensors]
    mismatch = bounded_mismatch(real_rows, expected, tolerance=tolerance)
    if mismatch is None:
        return
    raise GraphError(
        f"padding changes real rows: result {outputs.names[mismatch.output]} at {dict(plain.sizes)} padded "
        f"to {dict(padded.sizes)}: {mismatch.detail}. Give every input a pad value that means 'skip', use "
        "gapless.num_real(...) where rows are mixed, or pass check_padding=False if this difference is meant"
    )
