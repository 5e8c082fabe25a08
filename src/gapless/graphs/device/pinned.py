"""Pinned host memory that is copied to or from the device in every step, and the event behind each copy.

``Tensor.copy_`` from or to pinned memory costs 10-15 us of CPU: it makes tensors for the slices, asks the
pinned-memory allocator to follow the copy, and ``Event.record`` looks the stream up anew. Here the addresses
are fixed, so a copy is two calls of the CUDA runtime (about 3 us). Invariant: a slot's memory is touched by
the host only when ``wait`` has returned after the last copy. ``PinnedSlot`` is for whoever reads results back
and for large inputs; ``PinnedRing``, for the staging of every step, shares one event among several copies.
What a copy needs is bound and made beforehand: between two steps the caches of a CPU go cold, and then each
object and each function that is touched costs more than the work itself.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch

_HOST_TO_DEVICE, _DEVICE_TO_HOST = ctypes.c_int(1), ctypes.c_int(2)


class PinnedSlot:
    """``num_bytes`` of pinned memory (``host``, and ``address``) for copies on one CUDA device."""

    def __init__(self, num_bytes: int, torch_device: torch.device) -> None:
        self._tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.host = self._tensor.numpy()
        self._device = torch_device
        self._index = torch_device.index if torch_device.index is not None else torch.cuda.current_device()
        self._address = self._tensor.data_ptr()
        self._event = torch.cuda.Event()
        # Its handle is made by the first record, on the device of that stream, current or not.
        self._event.record(torch.cuda.current_stream(torch_device))
        self._runtime = _runtime()
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        # What the runtime is called with, made once: to convert integers takes as long as the call.
        self._handle = ctypes.c_void_p(self._event.cuda_event)
        self._here, self._there = ctypes.c_void_p(self._address), ctypes.c_void_p()
        self._size, self._stream = ctypes.c_size_t(), ctypes.c_void_p()

    def wait(self) -> None:
        """Until the last copy has ended; the thread spins, which sees it soonest."""
        self._event.synchronize()

    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._event.query()

    def send(self, address: int, num_bytes: int) -> None:
        """Queue a copy of the first ``num_bytes`` to the device memory at ``address``, on the current
        stream."""
        self._there.value = address
        self._queue(self._there, self._here, num_bytes, _HOST_TO_DEVICE)

    def fetch(self, address: int, num_bytes: int) -> None:
        """Queue a copy of ``num_bytes`` at ``address`` on the device into the slot, on the current stream."""
        self._there.value = address
        self._queue(self._here, self._there, num_bytes, _DEVICE_TO_HOST)

    def __del__(self) -> None:
        # The pinned-memory allocator has not seen the copies: it would give the memory to the next who asks.
        if hasattr(self, "_event"):
            self.wait()

    def _queue(
        self, target: ctypes.c_void_p, source: ctypes.c_void_p, num_bytes: int, kind: ctypes.c_int
    ) -> None:
        runtime, stream = self._runtime, self._stream
        self._size.value = num_bytes
        stream.value = self._raw_stream(self._index)
        error = runtime.cudaMemcpyAsync(target, source, self._size, kind, stream)
        error = error or runtime.cudaEventRecord(self._handle, stream)
        if error:
            raise _failure(error, num_bytes, self._device)


class PinnedRing:
    """Slots of ``num_bytes`` (``hosts``) that are sent in turn to the device memory at ``address``.

    The slots are two halves. An event is recorded when a half is left, behind all of its copies, and waited
    for when it is entered again: to do so for every copy takes the CPU as long as the copy. An event is
    behind copies of its own stream only, so a half is left early where the current stream has changed; a
    stream must live until the next copy on another one. Invariant: after ``acquire`` no copy reads the slot.
    """

    __slots__ = (
        "_copy", "_device", "_end", "_events", "_handles", "_heres", "_index", "_next", "_num_bytes",
        "_raw_stream", "_runtime", "_size", "_stream", "_stream_now", "_tensor", "_there", "hosts",
    )  # fmt: skip

    is_private = True
    """Nobody but those who fill it writes to its memory."""

    def __init__(self, address: int, num_bytes: int, torch_device: torch.device) -> None:
        size = -(-num_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        self._tensor = torch.empty(2 * _HALF * size, dtype=torch.uint8, pin_memory=True)
        starts = range(0, 2 * _HALF * size, size)
        memory = self._tensor.numpy()
        self.hosts = [memory[start : start + num_bytes] for start in starts]
        self._device = torch_device
        self._index = torch_device.index if torch_device.index is not None else torch.cuda.current_device()
        self._events = [torch.cuda.Event() for _ in range(2)]
        for event in self._events:  # see PinnedSlot
            event.record(torch.cuda.current_stream(torch_device))
        self._handles = [ctypes.c_void_p(event.cuda_event) for event in self._events]
        self._runtime = _runtime()
        self._copy, self._raw_stream = self._runtime.cudaMemcpyAsync, torch._C._cuda_getCurrentRawStream
        self._there = ctypes.c_void_p(address)
        self._heres = [ctypes.c_void_p(self._tensor.data_ptr() + start) for start in starts]
        self._size, self._stream = ctypes.c_size_t(), ctypes.c_void_p()
        self._num_bytes = 0
        """What ``_size`` holds, which is faster compared than set."""
        self._stream_now: int | None = None
        """What ``_stream`` holds, of all copies of this half; None before the first."""
        self._next = self._end = 2 * _HALF

    def acquire(self) -> tuple[int, np.ndarray]:
        """The slot to write next and its memory. The thread spins where copies of its half are still on their
        way."""
        stream = self._raw_stream(self._index)
        if self._next == self._end or stream != self._stream_now:
            self._turn(stream)
        slot = self._next
        return slot, self.hosts[slot]

    def submit(self, num_bytes: int) -> None:
        """Queue a copy of the first ``num_bytes`` of the slot that was acquired, on the stream that was
        current then."""
        slot = self._next
        self._next = slot + 1  # first, so that an interrupt leaves no slot to be written under its copy
        if num_bytes != self._num_bytes:
            self._size.value = self._num_bytes = num_bytes
        error = self._copy(self._there, self._heres[slot], self._size, _HOST_TO_DEVICE, self._stream)
        if error:
            raise _failure(error, num_bytes, self._device)

    def __del__(self) -> None:
        if not hasattr(self, "_next"):  # as in PinnedSlot
            return
        try:
            self._mark()
        except RuntimeError:  # its stream has gone, whose copies may not have
            torch.cuda.synchronize(self._device)
        self._wait(0)
        self._wait(1)

    def _turn(self, stream: int) -> None:
        """Leave this half for the other one."""
        self._mark()
        entered = 0 if self._end > _HALF else 1
        self._wait(entered)
        self._stream.value = self._stream_now = stream
        self._next, self._end = entered * _HALF, (entered + 1) * _HALF

    def _wait(self, half: int) -> None:
        self._events[half].synchronize()

    def _mark(self) -> None:
        """Record the event of this half: all of its copies lie before, in the same stream."""
        if self._stream_now is None:
            return
        error = self._runtime.cudaEventRecord(self._handles[self._end // _HALF - 1], self._stream)
        if error:
            raise _failure(error, self._num_bytes, self._device)


_HALF = 4
"""Slots in half a ring."""
_SLOT_ALIGNMENT = 256


def _failure(error: int, num_bytes: int, torch_device: torch.device) -> RuntimeError:
    text = _runtime().cudaGetErrorString(error).decode()
    return RuntimeError(f"copying {num_bytes} bytes between pinned memory and {torch_device} failed: {text}")


@functools.cache
def _runtime() -> Any:
    """The CUDA runtime that torch has loaded. Raises ``OSError`` where torch was built without a shared
    one."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    runtime.cudaGetErrorString.argtypes = (ctypes.c_int,)
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime
