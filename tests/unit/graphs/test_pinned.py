"""Pinned slots without a GPU: what the CUDA runtime is called with, at full width."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gapless.graphs.device import pinned

STREAM, EVENT = 0x7F00_1234_5678, 0x7E00_8765_4321


class Runtime:
    """Copies at once, by way of C functions with the runtime's signatures."""

    def __init__(self, error: int = 0) -> None:
        self.recorded: list[tuple[int, int]] = []

        def copy(target: int, source: int, size: int, kind: int, stream: int) -> int:
            assert stream == STREAM
            self.kind = kind
            ctypes.memmove(target, source, size)
            return error

        def record(event: int, stream: int) -> int:
            self.recorded.append((event, stream))
            return 0

        pointer = ctypes.c_void_p
        self._callbacks = (
            ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer)(copy),
            ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)(record),
        )
        # Without declared arguments, as functions of a library are.
        copy_address, record_address = (ctypes.cast(c, pointer).value for c in self._callbacks)
        self.cudaMemcpyAsync = ctypes.CFUNCTYPE(ctypes.c_int)(copy_address)
        self.cudaEventRecord = ctypes.CFUNCTYPE(ctypes.c_int)(record_address)

    def cudaGetErrorString(self, error: int) -> bytes:
        return b"error %d" % error


def make_slot(monkeypatch: pytest.MonkeyPatch, runtime: Runtime, num_bytes: int) -> pinned.PinnedSlot:
    class Event:
        cuda_event = EVENT

        def record(self, stream: object) -> None: ...
        def synchronize(self) -> None: ...

    fake_torch = SimpleNamespace(
        empty=lambda size, dtype, pin_memory: torch.empty(size, dtype=dtype),
        uint8=torch.uint8,
        cuda=SimpleNamespace(Event=Event, current_stream=lambda device: None),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: STREAM),
    )
    monkeypatch.setattr(pinned, "torch", fake_torch)
    monkeypatch.setattr(pinned, "_runtime", lambda: runtime)
    return pinned.PinnedSlot(num_bytes, torch.device("cuda", 0))


def test_copies_go_both_ways_with_the_sizes_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    slot = make_slot(monkeypatch, runtime, 16)
    device = np.zeros(16, dtype=np.uint8)
    slot.host[:] = np.arange(1, 17)
    slot.send(device.ctypes.data, 10)
    assert device.tolist() == [*range(1, 11), *[0] * 6]
    assert runtime.kind == 1
    slot.host[:] = 99
    slot.fetch(device.ctypes.data, 12)
    assert slot.host.tolist() == [*range(1, 11), 0, 0, *[99] * 4]
    assert runtime.kind == 2
    assert runtime.recorded == [(EVENT, STREAM)] * 2


def test_a_copy_that_fails_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(error=7)
    slot = make_slot(monkeypatch, runtime, 16)
    with pytest.raises(
        RuntimeError, match="copying 8 bytes between pinned memory and cuda:0 failed: error 7"
    ):
        slot.send(np.zeros(16, dtype=np.uint8).ctypes.data, 8)
    assert not runtime.recorded
