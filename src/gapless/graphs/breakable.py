"""Breaks: ``eager_break`` marks a function that must not be captured; the recorder cuts the capture there.

Outside a breakable capture a marked function is called straight through. Inside one the recorder ends the
segment, replays it (so that the body sees real data), runs the body eagerly, and begins the next segment. At
replay the body runs again on the captured arguments; what changes from step to step it reads from the forward
context. Invariant: arguments that live in the graph pool are kept as non-owning aliases (the segment before
the break writes them at every replay, and the pool is owned by its store), everything else is owned by the
program. Read ``handoff.py`` for returned tensors, ``capture.py`` for the transaction around it all.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gapless.errors import GraphError
from gapless.graphs.device.base import GraphDevice, Pool
from gapless.graphs.handoff import Handoff, ResultSpec, SharedResults, make_slot
from gapless.graphs.peers import Peers, check_peers
from gapless.graphs.program import EagerStep, Program

P = ParamSpec("P")
R = TypeVar("R")


def eager_break(fn: Callable[P, R]) -> Callable[P, R]:
    """Make ``fn`` a break point of breakable captures.

    ``fn`` may return tensors, ``None``, or tuples, lists and dicts of them, with one shape per captured size;
    during a breakable capture the caller gets slots that hold copies. Tensors that ``fn`` writes into need no
    copy. A break called from another break's body runs inline. Full captures record ``fn`` like other code.
    Reached while ``torch.compile`` traces, it raises ``GraphError``: only a registered op can be a split.
    """

    @functools.wraps(fn)
    def call_or_break(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            raise GraphError("an eager_break function was reached while tracing: make it a split op")
        recorder = _active.recorder
        if recorder is None:
            return fn(*args, **kwargs)
        return recorder.run_break(fn, args, kwargs)

    return call_or_break


class ProgramRecorder:
    """Builds one ``Program`` while the forward runs. Used by ``capture_program`` only, on one thread."""

    def __init__(self, device: GraphDevice, pool: Pool, peers: Peers | None = None) -> None:
        self._device, self._pool, self._peers = device, pool, peers
        self._program = Program()
        self._num_ended = 0
        self._waiting: list[Callable[[], None]] = []
        """What has been recorded and not been run, in order; a body that needs real data runs it first."""
        self._broken_at: str | None = None
        self._shared: list[SharedResults] = []

    @property
    def segment_index(self) -> int:
        """Index of the segment being recorded (empty segments count)."""
        return self._num_ended

    @property
    def num_breaks(self) -> int:
        return self._program.num_breaks

    def add_check(self, check: Callable[[], None]) -> None:
        """``check`` is called before the first replay of the program."""
        self._program.add_check(check)

    def begin(self) -> None:
        self._device.begin_segment(self._pool)

    def run_break(
        self,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        shapes: Callable[..., Any] | None = None,
    ) -> Any:
        """End the segment, run ``body`` on real data, begin the next one; returns slots for its results.

        ``shapes`` returns tensors that look like the results and hold anything: then ``body`` is not run, and
        nothing before it has to be.
        """
        name = f"{body.__module__}.{body.__qualname__}"
        if self._broken_at is not None:
            raise GraphError(f"break {name} was reached after break {self._broken_at} had raised")
        self._end_segment()
        self._broken_at = name  # until the next segment is open; an exception below leaves it set
        if shapes is None:
            self._catch_up()
        with activate(None):
            result = (shapes or body)(*args, **kwargs)
        spec = ResultSpec.of(name, result, self._device.torch_device)
        kept = _KeptArguments(args, kwargs, keep=self._keep)
        # A body that hands back one of its own arguments needs no slot: the forward has that tensor already.
        is_argument = [leaf is not None and kept.has(leaf) for leaf in spec.leaves]
        copied = [None if kept_one else leaf for leaf, kept_one in zip(spec.leaves, is_argument, strict=True)]
        shared = SharedResults(name, copied, kept.originals)
        self._device.begin_segment(self._pool)
        self._broken_at = None

        slots = [
            leaf if leaf is None or is_kept else make_slot(leaf)
            for leaf, is_kept in zip(spec.leaves, is_argument, strict=True)
        ]
        shared.watch(slots)
        self._shared.append(shared)
        handoff = Handoff(
            name=name,
            structure=spec.structure,
            slots=[slot if slot is None else self._kept_slot(slot, kept) for slot in slots],
            is_argument=is_argument,
        )
        step = EagerStep(name=name, body=body, args=kept.args, kwargs=kept.kwargs, handoff=handoff)
        self._program.add_eager(step)
        # Recording is on again, so even a copy of what is there has to wait.
        fill = functools.partial(handoff.fill, kept.substitute(result))
        self._waiting.append(fill if shapes is None else step.run)
        return pytree.tree_unflatten(slots, spec.structure)

    def finish(self) -> Program:
        """End the last segment. It first runs at the first replay: nothing reads its results before."""
        if self._broken_at is not None:
            raise GraphError(f"break {self._broken_at} raised and the forward went on without it")
        for shared in self._shared:
            shared.check()
        self._end_segment()
        self._waiting.clear()
        return self._program

    def abandon(self) -> None:
        """After an exception: drop the open segment and everything recorded before it."""
        self._waiting.clear()
        self._device.abandon_segment()
        self._program.reset()

    def _end_segment(self) -> None:
        segment = self._device.end_segment()
        self._num_ended += 1
        if segment.num_nodes != 0:
            self._waiting.append(segment.replay)
        self._program.add_segment(segment)

    def _catch_up(self) -> None:
        check_peers(self._peers)  # segments may hold collectives, which nobody may wait for alone
        waiting, self._waiting = self._waiting, []
        with activate(None):
            for run in waiting:
                run()

    def _kept_slot(self, slot: Tensor, kept: _KeptArguments) -> Tensor:
        return kept.of(slot) if kept.has(slot) else self._device.alias(slot)

    def _keep(self, tensor: Tensor) -> Tensor:
        return self._device.alias(tensor) if self._pool.owns(tensor) else tensor


class _KeptArguments:
    """A break's arguments as the program keeps them: aliases of pool tensors, everything else itself."""

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: Callable[[Tensor], Tensor]
    ) -> None:
        self._by_id: dict[int, Tensor] = {}
        self.originals: list[Tensor] = []  # keeps the ids valid

        def keep_one(tensor: Tensor) -> Tensor:
            self.originals.append(tensor)
            return self._by_id.setdefault(id(tensor), keep(tensor))

        self.args, self.kwargs = pytree.tree_map_only(Tensor, keep_one, (args, kwargs))

    def has(self, tensor: Tensor) -> bool:
        return id(tensor) in self._by_id

    def of(self, tensor: Tensor) -> Tensor:
        return self._by_id[id(tensor)]

    def substitute(self, result: Any) -> Any:
        """``result`` as a replay would return it: with the kept form of the body's own arguments."""
        return pytree.tree_map_only(Tensor, lambda leaf: self._by_id.get(id(leaf), leaf), result)


def deferred_break(body: Callable[P, R], shapes: Callable[P, R]) -> Callable[P, R]:
    """A break whose results' shapes are known without running it, so that a capture computes nothing.

    ``shapes`` takes the same arguments and returns tensors of the right shape that hold anything.
    """

    def call_or_break(*args: P.args, **kwargs: P.kwargs) -> R:
        recorder = _active.recorder
        if recorder is None:
            return body(*args, **kwargs)
        return recorder.run_break(body, args, kwargs, shapes=shapes)

    return call_or_break


def active_recorder() -> ProgramRecorder | None:
    """The recorder that breaks of this thread go to."""
    return _active.recorder


@contextmanager
def activate(recorder: ProgramRecorder | None) -> Iterator[None]:
    """Send the breaks of this thread to ``recorder`` (``None``: run them inline) inside the block."""
    previous = _active.recorder
    _active.recorder = recorder
    try:
        yield
    finally:
        _active.recorder = previous


class _Active(threading.local):
    recorder: ProgramRecorder | None = None


_active = _Active()
