"""The emulated device: CUDA-graph semantics on a CPU, so that graph faults give wrong numbers in CI.

A segment records ops on fixed addresses and replays them without the model's Python. As on CUDA, capture does
not compute: outputs hold NaN until the first replay. Pool memory is an arena whose blocks recycle when their
last Python owner dies, host reads are refused, Python values are frozen. Unlike CUDA, memory outside the pool
is watched: a replay raises ``StaleAddressError`` when its owner has died. Not emulated: streams, threads,
library handles, driver memory. Read ``recorder.py`` for how ops are recorded and ``arena.py`` for memory.
"""

from __future__ import annotations

import operator
import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from gapless.errors import CaptureError, GraphError, StaleAddressError
from gapless.graphs.device.arena import DEFAULT_CAPACITY, Arena, alias_address
from gapless.graphs.device.base import MemoryReading, Pool
from gapless.graphs.device.exclusive import claim_recording, release_recording
from gapless.graphs.device.op_binding import past_autograd
from gapless.graphs.device.op_rules import OpKind, op_kind
from gapless.graphs.device.recorder import HostReadMode, Recording, RecordingMode
from gapless.graphs.device.shapes import ShapeInference, map_tensors


class EmulatedPool:
    """An arena shared by segments that never overlap in time."""

    def __init__(self, arena: Arena) -> None:
        self._arena: Arena | None = arena

    @property
    def arena(self) -> Arena:
        if self._arena is None:
            raise GraphError("this graph pool was released; ask the device for a new one")
        return self._arena

    @property
    def is_released(self) -> bool:
        return self._arena is None

    @property
    def num_bytes(self) -> int:
        return self._arena.num_bytes if self._arena is not None else 0

    @property
    def bytes_in_use(self) -> int:
        """Bytes that live tensors still own."""
        return self._arena.bytes_in_use if self._arena is not None else 0

    def owns(self, tensor: Tensor) -> bool:
        return self.arena.owns(tensor)

    def release(self) -> None:
        self._arena = None


class EmulatedSegment:
    """Bound calls in order, and the outside memory they were bound to."""

    def __init__(self, recording: Recording, device: EmulatedDevice) -> None:
        self._calls: list[Callable[[], object]] | None = recording.calls
        self._op_names = recording.op_names
        self._constants = recording.constants
        self._externals = list(recording.externals.values())
        self._watched = [use.storage.cdata for use in self._externals] if device.check_liveness else []
        self._device = device

    @property
    def num_nodes(self) -> int:
        return len(self._calls) if self._calls is not None else 0

    @property
    def num_memsets(self) -> int:
        return 0

    @property
    def op_names(self) -> tuple[str, ...]:
        return tuple(self._op_names)

    @property
    def launch(self) -> None:
        """Ops may be in Python, and read the forward context."""

    def replay(self) -> None:
        """Run the ops again. Raises ``StaleAddressError`` naming the op and argument whose memory is gone."""
        if self._calls is None:
            raise GraphError("this segment was reset; capture it again")
        if self._device.is_recording():
            raise GraphError("a segment cannot replay while another one is being recorded")
        if any(map(_is_expired, self._watched)):
            self._raise_stale()
        remaining = iter(self._calls)
        try:
            with past_autograd():
                for call in remaining:
                    call()
        except Exception as error:
            failed = len(self._calls) - operator.length_hint(remaining) - 1
            error.add_note(f"while replaying node {failed} of {len(self._calls)}: {self._op_names[failed]}")
            raise

    def reset(self) -> None:
        self._calls = None
        self._op_names, self._constants, self._externals, self._watched = [], [], [], []

    def _raise_stale(self) -> None:
        use = next(use for use in self._externals if use.storage.expired())
        raise StaleAddressError(
            f"argument {use.argument} of {use.op} ({use.description}) was freed or moved after the capture; "
            "keep every tensor that a graph reads alive at its address (update in place, do not rebind)"
        )


class EmulatedDevice:
    """A ``GraphDevice`` for CPU tensors."""

    def __init__(
        self,
        *,
        num_warmups: int = 1,
        arena_bytes: int = DEFAULT_CAPACITY,
        poison_freed: bool = False,
        check_liveness: bool = True,
    ) -> None:
        """``poison_freed`` fills freed pool blocks with NaN. ``check_liveness=False`` lets a replay read
        outside memory whose owner died, as CUDA would.
        """
        self.name = "emulated"
        self.torch_device = torch.device("cpu")
        self.supports_graphs = True
        self.num_warmups = num_warmups
        self.check_liveness = check_liveness
        self._arena_bytes, self._poison_freed = arena_bytes, poison_freed
        self._shapes = ShapeInference()
        self._ops_mode, self._reads_mode = RecordingMode(), HostReadMode()
        self._modes_entered = False
        self._paused: Recording | None = None
        self._thread: int | None = None
        self._last_op: str | None = None
        self._pools: weakref.WeakSet[EmulatedPool] = weakref.WeakSet()

    @property
    def last_op(self) -> str | None:
        recording = self._ops_mode.recording
        return recording.last_op if recording is not None else self._last_op

    def new_pool(self) -> EmulatedPool:
        pool = EmulatedPool(Arena(capacity=self._arena_bytes, poison_freed=self._poison_freed))
        self._pools.add(pool)
        return pool

    def begin_segment(self, pool: Pool) -> None:
        assert isinstance(pool, EmulatedPool), f"pool of another device: {pool!r}"
        arena = pool.arena
        claim_recording(self)
        self._thread = threading.get_ident()
        self._enter_modes()
        recording = Recording(arena, self._shapes)
        self._ops_mode.recording = self._reads_mode.recording = recording

    def end_segment(self) -> EmulatedSegment:
        recording = self._ops_mode.recording
        if recording is None:
            raise GraphError("no segment is open")
        if not self.is_recording():
            raise GraphError("a segment must be ended on the thread that began it")
        self._close()
        if recording.error is not None:
            raise CaptureError(f"the segment is invalid: {recording.error}") from recording.error
        return EmulatedSegment(recording, self)

    def abandon_segment(self) -> None:
        self._close()

    def is_recording(self) -> bool:
        """True on the thread that records; others go on undisturbed (CUDA's thread-local mode)."""
        return self._ops_mode.recording is not None and self._thread == threading.get_ident()

    @contextmanager
    def pause_recording(self) -> Iterator[None]:
        recording = self._ops_mode.recording
        if recording is None or not self.is_recording():
            yield
            return
        self._hide(recording)
        try:
            yield
        finally:
            self._show()

    @contextmanager
    def resume_recording(self) -> Iterator[None]:
        if self._paused is None:
            yield
            return
        self._show()
        try:
            yield
        finally:
            recording = self._ops_mode.recording  # another one if a break has ended the segment meanwhile
            if recording is not None:
                self._hide(recording)

    def record_call(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], *, abstract: Callable[..., Any]
    ) -> Any:
        recording = self._ops_mode.recording
        if recording is None or not self.is_recording():
            return fn(*args)
        with self.pause_recording():
            return recording.record_call(name, fn, args, abstract=abstract)

    def alias(self, tensor: Tensor) -> Tensor:
        recording, self._ops_mode.recording = self._ops_mode.recording, None
        try:
            for pool in self._pools:
                if not pool.is_released and pool.owns(tensor):
                    return pool.arena.alias(tensor)
            return alias_address(tensor)
        finally:
            self._ops_mode.recording = recording

    def stream_scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step_scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def eager_arena(self) -> Iterator[Arena]:
        """Route what eager ops allocate through a first-fit arena of its own, so that "returned at a fresh
        address" and "freed, then recycled" become visible outside the pool too. For tests.
        """
        arena = Arena(capacity=self._arena_bytes, poison_freed=self._poison_freed)
        with _EagerArenaMode(arena):
            yield arena

    def synchronize(self) -> None:
        return None

    def memory(self, pool: Pool | None = None) -> MemoryReading:
        return MemoryReading(
            pool_bytes=pool.num_bytes if pool is not None else 0,
            allocated_bytes=sum(p.bytes_in_use for p in self._pools),
            free_bytes=os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        )

    def keep_random_state(self) -> Callable[[], None]:
        return partial(torch.set_rng_state, torch.get_rng_state())

    def trim(self) -> None:
        pass

    def time(self, fn: Callable[[], object], *, repeats: int) -> float:
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            fn()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _hide(self, recording: Recording) -> None:
        """Put the open recording aside and take its modes off the stacks."""
        if not self._leave_modes():
            raise GraphError(
                "compiled code was called under a dispatch or function mode that the caller entered during a "
                "capture (`with torch.device(...)` is one); enter such modes inside the compiled forward"
            )
        self._paused = recording
        self._ops_mode.recording = self._reads_mode.recording = None

    def _show(self) -> None:
        """Undo ``_hide``; nothing to do when the recording was closed meanwhile."""
        recording, self._paused = self._paused, None
        if recording is not None:
            self._enter_modes()
            self._ops_mode.recording = self._reads_mode.recording = recording

    def _enter_modes(self) -> None:
        if not self._modes_entered:
            self._reads_mode.__enter__()
            self._ops_mode.__enter__()
            self._modes_entered = True

    def _leave_modes(self) -> bool:
        """False when another mode lies on top: then ours stay, for the stacks have to be left in order."""
        if self._modes_entered:
            tops = (_get_current_dispatch_mode(), _top_function_mode())
            if tops != (self._ops_mode, self._reads_mode):
                return False
            self._ops_mode.__exit__(None, None, None)
            self._reads_mode.__exit__(None, None, None)
            self._modes_entered = False
        return True

    def _close(self) -> None:
        recording = self._ops_mode.recording or self._paused
        if recording is not None:
            self._last_op = recording.last_op
            self._paused = self._ops_mode.recording = self._reads_mode.recording = None
            release_recording(self)
        # A break inside the user's own mode (``with torch.device(...)``) finds that mode on top of the stack.
        # Ours then stay where they are; a mode without a recording passes everything on.
        self._leave_modes()


class _EagerArenaMode(TorchDispatchMode):
    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if op_kind(func) in (OpKind.FUNCTIONAL, OpKind.ALLOCATION):
            return map_tensors(self._move, result)
        return result

    def _move(self, tensor: Tensor) -> Tensor:
        moved = self._arena.empty_strided(tensor.shape, tensor.stride(), tensor.dtype)
        return moved.copy_(tensor)


_is_expired = torch.UntypedStorage._expired


def _top_function_mode() -> Any:
    depth = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(depth - 1) if depth else None
