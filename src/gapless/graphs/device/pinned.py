"""Pinned host memory that is copied to or from the device in every step, and the event behind each copy.

``Tensor.copy_`` from or to pinned memory costs 10-15 us of CPU: it makes tensors for the slices, asks the
pinned-memory allocator to follow the copy, and ``Event.record`` looks the stream up anew. Here the addresses
are fixed, so a copy is two calls of the CUDA runtime (about 3 us). Invariant: a slot's memory is touched by
the host only when ``wait`` has returned after the last copy. Used by the staging ring (``buffers.py``) and by
whoever reads results back.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

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
        runtime, stream = _runtime(), self._stream
        self._size.value = num_bytes
        stream.value = torch._C._cuda_getCurrentRawStream(self._index)
        error = runtime.cudaMemcpyAsync(target, source, self._size, kind, stream)
        error = error or runtime.cudaEventRecord(self._handle, stream)
        if error:
            raise RuntimeError(
                f"copying {num_bytes} bytes between pinned memory and {self._device} failed: "
                f"{runtime.cudaGetErrorString(error).decode()}"
            )


@functools.cache
def _runtime() -> Any:
    """The CUDA runtime that torch has loaded. Raises ``OSError`` where torch was built without a shared
    one."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    runtime.cudaGetErrorString.argtypes = (ctypes.c_int,)
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime
