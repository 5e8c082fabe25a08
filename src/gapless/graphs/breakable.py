"""Breaks: ``eager_break`` marks a function that must not be captured, and the recorder cuts the capture there.

Outside a breakable capture a marked function is called straight through. Inside one the recorder ends the segment,
replays it (so that the body sees real data), runs the body eagerly, and begins the next segment. At replay the body
runs again on the captured arguments; what changes from step to step it reads from the forward context.
Invariant: arguments that live in the graph pool are kept as non-owning aliases (the segment before the break writes
them at every replay, and the pool is owned by its store), everything else is owned by the program.
Read ``handoff.py`` for returned tensors, ``capture.py`` for the transaction around it all.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from gapless.errors import GraphError
from gapless.graphs.device.base import GraphDevice, Pool
from gapless.graphs.handoff import Handoff, ResultSpec, make_slots
from gapless.graphs.program import EagerStep, Program

P = ParamSpec("P")
R = TypeVar("R")


def eager_break(fn: Callable[P, R]) -> Callable[P, R]:
    """Make ``fn`` a break point of breakable captures.

    ``fn`` may return tensors, ``None``, or tuples, lists and dicts of them, with one shape per captured size; during
    a breakable capture the caller gets slots that hold copies. Tensors that ``fn`` writes into need no copy. A break
    called from another break's body runs inline. Full captures record ``fn`` like any other code.
    """

    @functools.wraps(fn)
    def call_or_break(*args: P.args, **kwargs: P.kwargs) -> R:
        recorder = _active.recorder
        if recorder is None:
            return fn(*args, **kwargs)
        return recorder.run_break(fn, args, kwargs)

    return call_or_break


class ProgramRecorder:
    """Builds one ``Program`` while the forward runs. Used by ``capture_program`` only, on one thread."""

    def __init__(self, device: GraphDevice, pool: Pool) -> None:
        self._device, self._pool = device, pool
        self._program = Program()
        self._pending: Callable[[], None] | None = None
        self._failed_break: str | None = None

    @property
    def segment_index(self) -> int:
        """Number of segments ended so far (empty ones included): the index of the one being recorded."""
        return self._num_ended

    _num_ended = 0

    def begin(self) -> None:
        self._device.begin_segment(self._pool)

    def run_break(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = f"{body.__module__}.{body.__qualname__}"
        if self._failed_break is not None:
            raise GraphError(f"break {name} was reached after break {self._failed_break} had raised")
        self._end_segment(is_last=False)
        self._failed_break = name
        with activate(None):
            result = body(*args, **kwargs)
        spec = ResultSpec.of(name, result, self._device.torch_device)
        own_args = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kept_args, kept_kwargs = pytree.tree_map_only(Tensor, self._keep, (args, kwargs))
        kept_leaves = [
            leaf for leaf in pytree.tree_leaves((kept_args, kept_kwargs)) if isinstance(leaf, Tensor)
        ]
        self._device.begin_segment(self._pool)
        self._failed_break = None

        slots = make_slots(spec, lambda leaf: any(leaf is arg for arg in own_args))
        kept_by_id = {id(arg): kept for arg, kept in zip(own_args, kept_leaves, strict=True)}
        handoff = Handoff(
            name=name,
            structure=spec.structure,
            slots=[
                None if slot is None else kept_by_id.get(id(slot)) or self._device.alias(slot)
                for slot in slots
            ],
        )
        self._program.add_eager(
            EagerStep(name=name, body=body, args=kept_args, kwargs=kept_kwargs, handoff=handoff)
        )
        # The stream is capturing now, so the copy waits until just before this segment's first replay.
        self._pending = functools.partial(handoff.fill, _as_kept(result, kept_by_id))
        return pytree.tree_unflatten(slots, spec.structure)

    def finish(self) -> Program:
        if self._failed_break is not None:
            raise GraphError(
                f"break {self._failed_break} raised and the forward went on; its capture cannot be completed"
            )
        self._end_segment(is_last=True)
        return self._program

    def abandon(self) -> None:
        """After an exception: drop the open segment and everything recorded before it."""
        self._pending = None
        self._device.abandon_segment()
        self._program.reset()

    def _end_segment(self, *, is_last: bool) -> None:
        segment = self._device.end_segment()
        self._num_ended += 1
        self._program.add_segment(segment)
        pending, self._pending = self._pending, None
        if is_last:  # nothing reads it before the first real replay
            return
        if pending is not None:
            pending()
        if segment.num_nodes != 0:
            segment.replay()

    def _keep(self, tensor: Tensor) -> Tensor:
        return self._device.alias(tensor) if self._pool.owns(tensor) else tensor


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


def _as_kept(result: Any, kept_by_id: dict[int, Tensor]) -> Any:
    """``result`` with the body's own arguments replaced by what the program keeps of them."""
    return pytree.tree_map_only(Tensor, lambda leaf: kept_by_id.get(id(leaf), leaf), result)
