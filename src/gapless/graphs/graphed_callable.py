"""Graphed: the object that ``graphed`` returns. What a call goes through, and the life cycle of its graphs.

A call is read and checked, a bucket is chosen before anything is staged, then it is replayed, or run eagerly
and counted with its reason. One *generation* of graphs exists at a time; ``recapture`` and ``resume`` make
the next. Whoever runs graphs of a pool holds it, so a call from within a step of the same pool runs eagerly.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from gapless.errors import ConfigError, GraphError
from gapless.graphs.arguments import Ambient, Arguments, Input
from gapless.graphs.audit import Change
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.breakable import active_recorder
from gapless.graphs.buckets import Buckets, check_symbols, make_buckets
from gapless.graphs.call_template import Call, CallTemplate
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.device import get_device
from gapless.graphs.device.exclusive import is_recording_here
from gapless.graphs.generation import Generation
from gapless.graphs.graphed_options import Fallback, GraphedOptions, State
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.real_sizes import RealSizes
from gapless.graphs.report import StepLog, build_report
from gapless.graphs.samples import Samples
from gapless.graphs.store import SharedPool

if TYPE_CHECKING:
    from gapless.graphs.check_report import CheckReport

logger = logging.getLogger(__name__)


class Graphed:
    """A callable with graphs. Make one with ``graphed``. Usable as a context manager that releases."""

    is_graphed: ClassVar[bool] = True
    """An audit looks at ``fn`` in its place."""

    def __init__(
        self, fn: Callable[..., Any], *, inputs: Mapping[str, Input], options: GraphedOptions
    ) -> None:
        if options.audit not in ("first", "always", "never"):
            raise ConfigError(f"audit={options.audit!r}: choose first, always or never")
        self.fn = fn
        self.options = options
        self.log = StepLog()
        self._inputs = dict(inputs)
        self._arguments = Arguments(fn, inputs)
        check_symbols(self._arguments.symbols)
        options.compile.check(options.strategy, self._arguments.symbols)
        self._lock = threading.RLock()
        """Held while graphs are made; calls of captured ones do not take it."""
        self._state = State.NEW
        self._template: CallTemplate | None = None
        self._samples: Samples | None = None
        self._generation: Generation | None = None
        self._ambient: Ambient | None = None
        self._audited: set[BatchDescriptor] = set()
        if not isinstance(fn, torch.nn.Module):
            functools.update_wrapper(self, fn)

    @property
    def state(self) -> State:
        return self._state

    @property
    def strategy(self) -> Strategy:
        """How it runs; before the capture of ``auto`` that is not known and ``disabled``."""
        if self._generation is not None:
            return self._generation.strategy
        return self.options.strategy or Strategy.DISABLED

    @property
    def generation(self) -> Generation:
        """The current set of graphs. Raises ``GraphError`` where there is none."""
        if self._generation is None:
            raise GraphError(
                f"{self._name} has no graphs: it is {self._state}; call capture() or recapture()"
            )
        return self._generation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run as a graph where one serves, else eagerly. Raises ``GraphError`` for arguments that differ from
        what was captured, and while paused."""
        if self._is_inside_capture():
            return self._run_plain(args, kwargs, Fallback.INSIDE_CAPTURE)
        if self._state in (State.NEW, State.CAPTURING):
            with self._lock:  # other threads wait here; on this one it is a call from within the capture
                if self._state is State.CAPTURING:
                    return self._run_plain(args, kwargs, Fallback.INSIDE_CAPTURE)
                if self._state is State.NEW:
                    self._capture(args, kwargs, None)
        self._refuse_if_paused()
        if self._state is State.RELEASED or self._generation is None:
            released = self._state is State.RELEASED
            return self._run_plain(args, kwargs, Fallback.RELEASED if released else Fallback.DISABLED)
        call = self._read(args, kwargs)
        descriptor, reason = self._choose(call)
        if descriptor is None:
            assert reason is not None
            return self._run_plain(args, kwargs, reason)
        return self._run_bucket(descriptor, self._generation.strategy.runtime_mode, call)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The callable itself, at the real size, without gradients. Not counted. Raises ``GraphError`` while
        paused."""
        self._refuse_if_paused()
        return self._plain(args, kwargs, keeps_grad=False)

    def padded_eager(self, *args: Any, **kwargs: Any) -> Any:
        """The bucket that a call would replay, run without its graph: what a replay equals bit for bit.

        Raises ``GraphError`` for a call larger than every captured size, and as ``__call__`` does.
        """
        self._refuse_if_paused()
        generation = self.generation
        call = self._read(args, kwargs)
        descriptor = generation.find(call.sizes)
        if descriptor is None:
            raise GraphError(
                f"no captured size holds {call.sizes}; the largest is {generation.buckets.max_sizes}"
            )
        return self._run_bucket(descriptor, RuntimeMode.NONE, call)

    def capture(
        self, *args: Any, on_progress: Callable[[int, int], None] | None = None, **kwargs: Any
    ) -> Self:
        """Capture every size, with an example call (any size). Without arguments ``make_inputs`` makes one.

        A size whose capture fails stays eager and is in the report. Raises ``GraphError`` when there are
        graphs already, and for what graphs cannot do right (see ``probe.py``).
        """
        with self._lock:
            if self._state is not State.NEW:
                raise GraphError(f"{self._name} is {self._state}: its graphs exist. Use recapture()")
            self._capture(args, kwargs, on_progress)
        return self

    def recapture(
        self, *args: Any, on_progress: Callable[[int, int], None] | None = None, **kwargs: Any
    ) -> Self:
        """Drop all graphs and capture again, with the arguments of the first capture or with new ones."""
        with self._lock:
            self._drop_generation()
            if args or kwargs or self._template is None or self._template.lacks_tensors:
                self._capture(args, kwargs, on_progress)
            else:
                self._build(on_progress)
        return self

    def audit(self) -> list[Change]:
        """What moved or changed since the capture: parameters, buffers, derived tensors, plain values."""
        return self._generation.changes() if self._generation is not None else []

    def revalidate(self, *, on_change: Literal["recapture", "raise"] = "recapture") -> list[Change]:
        """After weights were reloaded: keep the graphs if everything is where it was, else act.

        Contents that were copied in place need nothing. Returns the changes. Raises ``GraphError`` naming
        them where asked to.
        """
        changes = self.audit()
        if not changes:
            return []
        if on_change == "raise":
            raise GraphError(_changes_text(self._name, changes))
        logger.info("%s is captured again: %s", self._name, "; ".join(map(str, changes[:5])))
        self.recapture()
        return changes

    def pause(self, *, keep_graphs: bool = True) -> None:
        """No call may run until ``resume``: weights may be freed and moved. Nothing is kept alive any more;
        with ``keep_graphs=False`` the graphs' own memory is given back, too. Raises ``GraphError`` where
        there are no graphs."""
        if self._state is not State.READY:
            raise GraphError(f"{self._name} is {self._state}; only a captured one can be paused")
        self._state = State.PAUSED
        if self._template is not None:
            self._template = self._template.without_tensors()
        if self._generation is not None:
            self._generation.disown()
            if not keep_graphs:
                self._generation.release()
                self._generation = None

    def resume(self, *args: Any, **kwargs: Any) -> list[Change]:
        """Run again. Graphs are kept if everything is at its old address, else captured anew.

        Frozen tensor arguments were let go by ``pause``, so a callable that has some needs an example call
        again. Returns what had moved or changed. Raises ``GraphError`` when it is not paused, and without
        an example that it needs.
        """
        if self._state is not State.PAUSED:
            raise GraphError(f"{self._name} is {self._state}, not paused")
        assert self._template is not None
        if args or kwargs:
            self._use_example(args, kwargs)
        elif self._template.lacks_tensors:
            missing = ", ".join(leaf.name for leaf in self._template.frozen_tensors)
            raise GraphError(f"resume() needs an example call: {missing} was let go by pause()")
        if self._generation is None:
            self._build(None)
            return []
        self._generation.template = self._template
        changes = self._generation.changes()
        if changes:
            self._drop_generation()
            self._build(None)
        else:
            self._generation.own()
            self._state = State.READY
        return changes

    def release(self) -> None:
        """Give all memory back. Calls run eagerly from then on, counted; ``recapture`` revives it."""
        self._drop_generation()
        self._template = self._samples = None
        self._state = State.RELEASED

    def report(self) -> dict[str, Any]:
        """The report schema of ``report.py``: plan, graphs, failures, steps, eager, timeline, memory."""
        return build_report(
            plan=self._plan(), store=self._generation.store if self._generation else None, log=self.log
        )

    def verify(
        self,
        *,
        seed: int = 0,
        variants: Sequence[Mapping[str, Any]] = (),
        scratch: Sequence[Tensor] = (),
        tolerance: float | None = None,
    ) -> CheckReport:
        """Prove on fresh data that the graphs are right: see ``check.py``.

        ``variants``: other values of frozen arguments, by name, that real calls might use; what the graphs
        would freeze of them is an error in the report. ``scratch``: views of memory that the callable writes
        in place and padding may write, too (a cache's sink slot); elsewhere padding must write nothing.
        """
        from gapless.graphs.check_targets import verify_graphed

        return verify_graphed(self, seed=seed, variants=variants, scratch=scratch, tolerance=tolerance)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """A decorated method has graphs of its own for every instance."""
        if instance is None:
            return self
        name = getattr(self.fn, "__name__", None)
        if name is None or not hasattr(instance, "__dict__"):
            raise GraphError(f"{self._name} cannot be a method of {type(instance).__name__}")
        bound = Graphed(self.fn.__get__(instance, owner), inputs=self._inputs, options=self.options)
        instance.__dict__[name] = bound
        return bound

    @property
    def _name(self) -> str:
        return getattr(self.fn, "__qualname__", type(self.fn).__name__)

    def _refuse_if_paused(self) -> None:
        if self._state is State.PAUSED:
            raise GraphError(f"{self._name} is paused: its weights may be gone. Call resume() first")

    def _is_inside_capture(self) -> bool:
        return is_recording_here() or active_recorder() is not None or torch.compiler.is_compiling()

    def _capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], on_progress: Callable[[int, int], None] | None
    ) -> None:
        if self.options.make_inputs is not None and not args and not kwargs.keys() & self._inputs.keys():
            kwargs = {**self._made_example(), **kwargs}
        self._use_example(args, kwargs)
        self._build(on_progress)

    def _made_example(self) -> dict[str, Any]:
        assert self.options.make_inputs is not None
        if self.options.sizes is None:
            raise ConfigError("capture() without an example needs sizes=")
        sizes = make_buckets(self._arguments.symbols, self.options.sizes, {}).max_sizes
        return dict(self.options.make_inputs(sizes, torch.Generator().manual_seed(0)))

    def _use_example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        template = CallTemplate.of(self._arguments, args, kwargs)
        call = template.read(args, kwargs)
        self._template = template
        self._samples = Samples(template, call.values, make_inputs=self.options.make_inputs)
        self._example_sizes = call.sizes

    def _build(self, on_progress: Callable[[int, int], None] | None) -> None:
        self._state = State.CAPTURING
        try:
            self._generation = self._make_generation(on_progress)
        except BaseException:
            self._state = State.NEW
            raise
        self._state = State.READY

    def _make_generation(self, on_progress: Callable[[int, int], None] | None) -> Generation | None:
        assert self._template is not None
        assert self._samples is not None
        self._audited.clear()
        self._ambient = Ambient.now(self.fn, self._template.device.type)
        if self.options.strategy is Strategy.DISABLED:
            return None
        device = get_device(self._template.device)
        generation = Generation(
            self.fn,
            template=self._template,
            samples=self._samples,
            buckets=make_buckets(self._arguments.symbols, self.options.sizes, self._example_sizes),
            device=device,
            compile=self.options.compile,
            pool=self.options.pool or SharedPool(device),
        )
        with generation.pool.use():
            generation.capture(
                self.options.strategy,
                outputs=self.options.outputs,
                checks_padding=self.options.checks_padding,
                on_progress=on_progress,
            )
        return generation

    def _drop_generation(self) -> None:
        if self._generation is not None:
            with self._generation.pool.use():
                self._generation.release()
            self._generation = None
        self._state = State.NEW

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        assert self._template is not None
        call = self._template.read(args, kwargs)
        assert self._ambient is not None
        self._ambient.check(self.fn, self._template.device.type)
        return call

    def _choose(self, call: Call) -> tuple[BatchDescriptor | None, Fallback | None]:
        assert self._generation is not None
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.values.values()):
            return None, Fallback.REQUIRES_GRAD
        if not all(call.sizes.values()):
            return None, Fallback.EMPTY
        descriptor = self._generation.find(call.sizes)
        if descriptor is None:
            holds = self._generation.buckets.holds(call.sizes)
            return None, Fallback.CAPTURE_FAILED if holds else Fallback.LARGER_THAN_LARGEST
        if self._generation.pool.is_busy_here:
            return None, Fallback.POOL_BUSY
        return descriptor, None

    def _run_bucket(self, descriptor: BatchDescriptor, mode: RuntimeMode, call: Call) -> Any:
        generation = self._generation
        assert generation is not None
        with generation.pool.use():
            if mode is not RuntimeMode.NONE:
                self._audit_before(descriptor)
            tensors: Sequence[Tensor] = generation.run(descriptor, mode, call)
            if self.options.copy_outputs:
                tensors = [tensor.clone() for tensor in tensors]
        self._count(descriptor, mode, call)
        return generation.unflatten(tensors)

    def _audit_before(self, descriptor: BatchDescriptor) -> None:
        when = self.options.audit
        if when == "never" or (when == "first" and descriptor in self._audited):
            return
        changes = self.audit()
        if changes:
            raise GraphError(_changes_text(self._name, changes))
        self._audited.add(descriptor)

    def _count(self, descriptor: BatchDescriptor, mode: RuntimeMode, call: Call) -> None:
        assert self._generation is not None
        if mode is RuntimeMode.NONE:
            self.log.count_eager(Phase.FORWARD, Fallback.PADDED_EAGER)
            return
        bucket = real = 1
        for symbol, size in self._generation.buckets.sizes_of(descriptor).items():
            bucket, real = bucket * size, real * call.sizes[symbol]
        self.log.count_replay(Phase.FORWARD, self._generation.strategy, bucket, real)

    def _run_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: Fallback) -> Any:
        self.log.count_eager(Phase.FORWARD, reason)
        return self._plain(args, kwargs, keeps_grad=reason is Fallback.REQUIRES_GRAD)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps_grad: bool) -> Any:
        template = self._template or CallTemplate.of(self._arguments, args, kwargs)
        sizes = template.sizes_of(args, kwargs)
        batch = RealSizes(tuple(sizes), sizes=sizes, device=template.device)
        with torch.set_grad_enabled(keeps_grad), use_forward_context(ForwardContext(batch=batch)):
            return self.fn(*args, **kwargs)

    def _plan(self) -> dict[str, Any]:
        buckets: Buckets | None = self._generation.buckets if self._generation else None
        ladders = {} if buckets is None else {s: list(ladder.sizes) for s, ladder in buckets.ladders.items()}
        return {
            "mode": None,
            "callable": self._name,
            "state": str(self._state),
            "strategy": str(self.strategy),
            "sizes": ladders,
            "compile": self._generation.compile_stats() if self._generation is not None else None,
            "decisions": []
            if self._generation is None
            else [d.to_dict() for d in self._generation.decisions],
        }


def _changes_text(name: str, changes: Sequence[Change]) -> str:
    shown = "; ".join(map(str, changes[:8])) + (f"; and {len(changes) - 8} more" if len(changes) > 8 else "")
    return (
        f"{name}: since its graphs were captured, {shown}. They still use what they saw: put values back "
        "with copy_() at the old address, or call revalidate() or recapture()"
    )
