"""GraphRunner: one callable over static inputs, captured for every size of one phase.

It warms up (in mode NONE, on the capture stream), captures largest first, and runs a step: load the batch
into the bucket's views, set the forward context, call the wrapper, hand out the real rows. From its second
replay on, a size whose program is one graph and no Python is launched without context and wrapper: nothing
would read the one, and the other has said all it has to say. The same call with mode NONE is *padded eager*,
the oracle graphs must equal bit for bit. A size whose capture fails stays eager; the rest go on. Which graph
serves a batch is the dispatcher's business, decided before anything is staged here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gapless.errors import CaptureError, GraphError, RankError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.buffers import InputViews, StaticInputs, Value
from gapless.graphs.capture import warm_up
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.input_field import dim_size
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.store import GraphEntry, GraphKey, GraphStore, LedgerRow, PaddingTiming
from gapless.graphs.wrapper import GraphWrapper

logger = logging.getLogger(__name__)

WARM_UP_OUT_OF_MEMORY = "there is too little memory even for an eager run of this size, before its capture"
"""Cause of such a failed capture."""

Values = Mapping[str, Value]
Amend = Callable[[InputViews], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputField:
    """One output: a tensor of shape ``(dim, *row_shape)``, sizes or symbols as in ``InputField.dims``; copied
    into the store's buffer ``name``."""

    name: str
    dim: str | int
    row_shape: tuple[str | int, ...] = ()
    dtype: torch.dtype = torch.float32

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(dim_size(dim, sizes) for dim in (self.dim, *self.row_shape))


class GraphRunner:
    """Runs ``fn(views) -> tuple of tensors`` (one per output field) as graphs of one phase and strategy.

    ``sizes_of`` maps a descriptor to the symbols of the input schema. ``make_dummy`` gives a legal batch that
    takes the same branches as real ones; ``make_batch`` builds what the forward context carries, from the
    bucket's views.
    ``prologue`` runs eagerly on the real rows after the batch is loaded and returns the on-device inputs (a
    breakable graph's embeddings).
    ``is_compiled``: ``fn`` calls a ``PiecewiseForward``, whose compiled path every run of a bucket takes, so
    that padded eager has the kernels of the graphs; eager steps of other sizes take the plain one.
    """

    def __init__(
        self,
        fn: Callable[[InputViews], tuple[Tensor, ...]],
        *,
        phase: Phase,
        strategy: Strategy,
        inputs: StaticInputs,
        outputs: tuple[OutputField, ...],
        store: GraphStore,
        sizes_of: Callable[[BatchDescriptor], dict[str, int]],
        make_dummy: Callable[[BatchDescriptor], Values],
        make_batch: Callable[[InputViews, BatchDescriptor], Any] = lambda views, descriptor: None,
        prologue: Callable[[InputViews, Mapping[str, int]], Mapping[str, Tensor]] | None = None,
        is_compiled: bool = False,
    ) -> None:
        self.phase, self.strategy = phase, strategy
        self.is_compiled = is_compiled
        self.inputs, self.store = inputs, store
        self._fn, self._outputs = fn, outputs
        self._sizes_of, self._make_dummy, self._make_batch = sizes_of, make_dummy, make_batch
        self._prologue = prologue
        self._mode = strategy.runtime_mode
        self._loads_from_host = prologue is None and not inputs.device_names
        self._buffers = [store.output(o.name, o.shape(inputs.max_sizes), o.dtype) for o in outputs]
        self._buckets: dict[BatchDescriptor, _Bucket] = {}
        self._is_warm = False
        """A size has been warmed up in full and captured."""
        self._call: Callable[[InputViews], tuple[Tensor, ...]] = self._run_and_store
        if strategy is not Strategy.DISABLED:
            self._call = GraphWrapper(
                self._run_and_store,
                runtime_mode=strategy.runtime_mode,
                phase=phase,
                strategy=strategy,
                store=store,
            )

    def compile(self, descriptor: BatchDescriptor) -> None:
        """Run the dummy batch of ``descriptor`` once, before the store opens, for what happens at a first
        run: a compiled forward is traced, kernels are compiled."""
        self._warm_up(descriptor, times=1)

    def capture(
        self,
        descriptors: Iterable[BatchDescriptor],
        *,
        on_done: Callable[[BatchDescriptor], None] | None = None,
    ) -> list[BatchDescriptor]:
        """Warm up and capture every descriptor, largest first; returns those whose capture failed.

        The store must be open (``store.capturing()``). A failure is recorded in the store and the size stays
        eager.
        """
        failed: list[BatchDescriptor] = []
        largest_first = sorted(descriptors, reverse=True)
        if largest_first and self.store.device.num_warmups == 0:
            # Recording needs none here, but what the model makes lazily must exist before the first capture.
            self._warm_up(largest_first[-1], times=1)
        for descriptor in largest_first:
            try:
                self._capture_one(descriptor)
                self._is_warm = True
            except CaptureError as error:
                failed.append(descriptor)
                failure = self.store.record_failure(self._key(descriptor), error)
                logger.warning("%s stays eager: %s", failure.key.text, failure.message)
            if on_done is not None:
                on_done(descriptor)
        return failed

    def forget(self, descriptor: BatchDescriptor) -> None:
        """Let go of what was made for a size that no graph was captured of."""
        self._buckets.pop(descriptor, None)

    def run(
        self,
        descriptor: BatchDescriptor,
        mode: RuntimeMode,
        values: Values,
        *,
        num_real: Mapping[str, int],
        amend: Amend | None = None,
    ) -> tuple[Tensor, ...]:
        """Load ``values`` and run the bucket; returns each output's real rows (``num_real`` per symbol).

        ``amend(views)`` changes loaded inputs on the device, before anything reads them.

        Outputs are static memory, valid until the next run that writes the same output: copy what must live
        longer.
        ``mode`` NONE runs padded eager.
        """
        bucket = self._buckets.get(descriptor) or self._bucket(descriptor)
        launch = bucket.launch
        entry = bucket.entry
        if launch is not None and entry is not None and mode is self._mode and entry.outputs is not None:
            # The graph that served last, not released since: a short way, because caches are cold here.
            if amend is None and self._loads_from_host:
                self.inputs.load(bucket.views, values)
            else:
                self._load(bucket.views, values, num_real, amend)
            launch()
        else:
            results = self._run(bucket.views, bucket.contexts[mode], values, num_real, amend)
            if mode is RuntimeMode.NONE:
                return self._real_rows(results, num_real)
            self._note_graph(bucket)
        known = bucket.last
        if known is None or known.num_real != num_real:
            known = self._find_known(bucket, num_real)
        row = known.row
        row.replays += 1
        row.tokens += known.num_counted
        row.padding += known.num_padding
        return known.real_rows

    def run_eager(
        self, descriptor: BatchDescriptor, values: Values, *, amend: Amend | None = None
    ) -> tuple[Tensor, ...]:
        """Plain eager at the real size; ``descriptor`` holds real counts and no graph is looked for."""
        sizes = self._sizes_of(descriptor)
        views = self.inputs.transient_views(sizes)
        batch = self._make_batch(views, descriptor)
        context = ForwardContext(mode=RuntimeMode.NONE, descriptor=descriptor, batch=batch)
        return self._real_rows(self._run(views, context, values, sizes, amend), sizes)

    def observe(
        self,
        descriptor: BatchDescriptor,
        values: Values,
        *,
        num_real: Mapping[str, int],
        scope: AbstractContextManager[Any],
    ) -> tuple[Tensor, ...]:
        """Padded eager with ``scope`` around the call alone, for what watches ops; loading is left out."""
        bucket = self._bucket(descriptor)
        views = bucket.views
        self._load(views, values, num_real)
        context = ForwardContext(mode=RuntimeMode.NONE, descriptor=descriptor, batch=bucket.batch)
        with torch.no_grad(), use_forward_context(context), scope:
            results = self._fn(views)
        return tuple(results)

    def sizes_of(self, descriptor: BatchDescriptor) -> dict[str, int]:
        """The symbols of the input schema for a descriptor."""
        return self._sizes_of(descriptor)

    def dummy(self, descriptor: BatchDescriptor) -> Values:
        """The batch that ``descriptor`` is captured with."""
        return self._make_dummy(descriptor)

    def time_padding(self, descriptor: BatchDescriptor, fewest: BatchDescriptor) -> PaddingTiming:
        """Time a replay of ``descriptor`` against an eager step of ``fewest`` (both with dummy batches) and
        note it in the ledger.
        """
        entry = self.store.get(self._key(descriptor))
        if entry is None:
            raise GraphError(f"{descriptor} of {self.phase} was not captured, so there is nothing to time")
        device = self.store.device
        padded, plain = self._make_dummy(descriptor), self._make_dummy(fewest)
        sizes = self._sizes_of(descriptor)
        mode = self.strategy.runtime_mode
        with device.stream_scope():
            timing = PaddingTiming(
                graph_s=device.time(lambda: self.run(descriptor, mode, padded, num_real=sizes), repeats=5),
                eager_s=device.time(lambda: self.run_eager(fewest, plain), repeats=5),
                eager_tokens=fewest.num_tokens,
            )
        entry.row.padding_timing = timing
        entry.row.replays = entry.row.tokens = entry.row.padding = 0  # the timing is no traffic
        return timing

    def output_buffer(self, name: str) -> Tensor:
        """The whole shared buffer of an output (static)."""
        return self._buffers[[o.name for o in self._outputs].index(name)]

    def _run(
        self,
        views: InputViews,
        context: ForwardContext,
        values: Values,
        num_real: Mapping[str, int],
        amend: Amend | None,
    ) -> tuple[Tensor, ...]:
        self._load(views, values, num_real, amend)
        if not torch.is_grad_enabled():  # as in every step of an engine; entering the mode again is not free
            with use_forward_context(context):
                return self._call(views)
        with torch.no_grad(), use_forward_context(context):
            return self._call(views)

    def _real_rows(self, results: tuple[Tensor, ...], num_real: Mapping[str, int]) -> tuple[Tensor, ...]:
        return tuple(
            prefix_of(result, field.shape(num_real))
            for result, field in zip(results, self._outputs, strict=True)
        )

    def _load(
        self,
        views: InputViews,
        values: Values,
        num_real: Mapping[str, int],
        amend: Amend | None = None,
    ) -> None:
        on_device = self.inputs.device_names
        if self._prologue is None and amend is None and not on_device:
            self.inputs.load(views, values)
            return
        if self._prologue is not None or amend is not None:
            self.inputs.load(views, values)
            if amend is not None:
                amend(views)
                self.inputs.forget_loaded()
            if self._prologue is None:
                return
            with torch.no_grad():
                self.inputs.load_on_device(views, self._prologue(views, num_real))
            return
        if len(on_device) == len(self.inputs.fields):
            self.inputs.load_on_device(views, values)
            return
        with nullcontext() if not torch.is_grad_enabled() else torch.no_grad():
            self.inputs.load_all(views, values)

    def _capture_one(self, descriptor: BatchDescriptor) -> None:
        num_warmups = self.store.device.num_warmups
        # What is made lazily for all sizes exists now, in every layer; what a size makes for itself, its one
        # run of each kind of layer makes.
        times = min(num_warmups, 1) if self._is_warm else num_warmups
        try:
            bucket = self._warm_up(descriptor, times=times, is_short=self._is_warm)
        except torch.OutOfMemoryError as error:
            if self.store.peers is not None:
                # Others may wait on the device, in a sum of their own warm-up: they cannot be asked.
                raise RankError(
                    f"{WARM_UP_OUT_OF_MEMORY} ({self.phase}, {descriptor.num_tokens} tokens): lower "
                    "--chunked-prefill-size or --max-running-requests"
                ) from error.with_traceback(None)
            raise CaptureError(
                f"{WARM_UP_OUT_OF_MEMORY}: {error}", cause=WARM_UP_OUT_OF_MEMORY
            ) from error.with_traceback(None)  # its frames own the memory that later sizes need
        with torch.no_grad(), use_forward_context(bucket.contexts[self.strategy.runtime_mode]):
            self._call(bucket.views)

    def _warm_up(self, descriptor: BatchDescriptor, *, times: int, is_short: bool = False) -> _Bucket:
        """Load the dummy batch and run it ``times`` in mode NONE."""
        bucket = self._bucket(descriptor)
        self._load(bucket.views, self._make_dummy(descriptor), bucket.views.sizes)
        with use_forward_context(replace(bucket.contexts[RuntimeMode.NONE], is_short_warm_up=is_short)):
            warm_up(lambda: self._call(bucket.views), self.store.device, times)
        return bucket

    def _run_and_store(self, views: InputViews) -> tuple[Tensor, ...]:
        results = self._fn(views)
        stored = []
        for result, output, buffer in zip(results, self._outputs, self._buffers, strict=True):
            shape = output.shape(views.sizes)
            if result.shape != shape:
                raise GraphError(
                    f"output {output.name!r} has shape {tuple(result.shape)} where {shape} was declared"
                )
            target = prefix_of(buffer, shape)
            if not _is_same_memory(result, target):
                target.copy_(result)
            stored.append(target)
        return tuple(stored)

    def _bucket(self, descriptor: BatchDescriptor) -> _Bucket:
        found = self._buckets.get(descriptor)
        if found is None:
            found = self._buckets[descriptor] = self._make_bucket(descriptor)
        return found

    def _make_bucket(self, descriptor: BatchDescriptor) -> _Bucket:
        views = self.inputs.views(self._sizes_of(descriptor))
        batch = self._make_batch(views, descriptor)
        counted = ("tokens",) if "tokens" in views.sizes else tuple(views.sizes)
        return _Bucket(
            key=self._key(descriptor),
            views=views,
            batch=batch,
            contexts={
                mode: ForwardContext(
                    mode=mode, descriptor=descriptor, batch=batch, use_compiled=self.is_compiled
                )
                for mode in RuntimeMode
            },
            counted=counted,
            num_counted=math.prod(views.sizes[symbol] for symbol in counted),
        )

    def _key(self, descriptor: BatchDescriptor) -> GraphKey:
        return GraphKey(self.phase, self.strategy.runtime_mode, descriptor)

    def _note_graph(self, bucket: _Bucket) -> None:
        """The bucket was served by a graph."""
        entry = self.store.get(bucket.key)
        assert entry is not None  # the wrapper would have raised
        if entry is not bucket.entry:
            bucket.entry, bucket.last = entry, None
            bucket.known.clear()
        # Whether a piece may replay is for the wrapper to say.
        bucket.launch = None if self.strategy is Strategy.TC_PIECEWISE else entry.program.launch

    def _find_known(self, bucket: _Bucket, num_real: Mapping[str, int]) -> _KnownCounts:
        counts = tuple(num_real.items())
        known = bucket.known.get(counts)
        if known is None:
            if len(bucket.known) >= _MAX_KEPT:
                bucket.known.clear()
            known = bucket.known[counts] = self._make_known(bucket, num_real)
        bucket.last = known
        return known

    def _make_known(self, bucket: _Bucket, num_real: Mapping[str, int]) -> _KnownCounts:
        entry = bucket.entry
        assert entry is not None
        num_counted = math.prod([num_real[symbol] for symbol in bucket.counted])
        return _KnownCounts(
            num_real=dict(num_real),
            real_rows=self._real_rows(entry.outputs, num_real),
            row=entry.row,
            num_counted=num_counted,
            num_padding=bucket.num_counted - num_counted,
        )


_MAX_KEPT = 256


@dataclass(kw_only=True, slots=True)
class _Bucket:
    """What every run of one descriptor needs. All of it is made of static views, so it is made once."""

    launch: Callable[[], None] | None = None
    """All that its replay is (``Program.launch``); found at its first replay, with ``entry``."""
    entry: GraphEntry | None = None
    last: _KnownCounts | None = None
    """Of the replay before."""
    key: GraphKey
    views: InputViews
    batch: Any
    contexts: Mapping[RuntimeMode, ForwardContext]
    counted: tuple[str, ...]
    """Dimensions whose product the ledger counts as tokens, of which the bucket has ``num_counted``."""
    num_counted: int
    known: dict[tuple[tuple[str, int], ...], _KnownCounts] = field(default_factory=dict)
    """By real counts (at most ``_MAX_KEPT``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _KnownCounts:
    """What follows from the real counts of a replay."""

    num_real: dict[str, int]
    real_rows: tuple[Tensor, ...]
    row: LedgerRow
    num_counted: int
    num_padding: int


def prefix_of(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The corner of ``tensor`` that has ``shape``."""
    for dim, size in enumerate(shape):
        if tensor.shape[dim] != size:
            tensor = tensor.narrow(dim, 0, size)
    return tensor


def _is_same_memory(result: Tensor, target: Tensor) -> bool:
    """Whether ``fn`` has written its result where it belongs."""
    return (
        result.data_ptr() == target.data_ptr()
        and result.dtype == target.dtype
        and result.stride() == target.stride()
    )
