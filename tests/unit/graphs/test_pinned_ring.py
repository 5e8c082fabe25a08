"""The ring of pinned slots without a GPU: streams run behind the host, and only as far as somebody waits."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.graphs.device import pinned
from gapless.graphs.device.pinned import PinnedRing

NUM_BYTES = 40
STREAMS = (0x7F00_0000_1000, 0x7F00_0000_2000, 0)


class Machine:
    """CUDA as far as the ring sees it: what is queued on a stream happens when an event behind it is waited
    for. ``arrived`` holds what each copy has read, in order."""

    def __init__(self) -> None:
        self.queues: dict[int, list[tuple[str, int]]] = defaultdict(list)
        self.marks: dict[int, int] = {}
        """By event: the stream of its last record."""
        self.stream = STREAMS[0]
        self.arrived: list[bytes] = []
        self.error = self.mark_error = self.num_records = self.num_waits = 0

        def copy(target: int, source: int, size: int, kind: int, stream: int | None) -> int:
            assert (target, kind) == (0x7E00_0000_0040, 1)
            if not self.error:
                self.queues[stream or 0].append((f"copy {size}", source))
            return self.error

        def record(event: int, stream: int | None) -> int:
            self.num_records += 1
            if not self.mark_error:
                self.marks[event] = stream or 0
            if not self.mark_error:
                self.queues[stream or 0].append(("mark", event))
            return self.mark_error

        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._callbacks = (
            ctypes.CFUNCTYPE(number, pointer, pointer, ctypes.c_size_t, number, pointer)(copy),
            ctypes.CFUNCTYPE(number, pointer, pointer)(record),
        )
        addresses = [ctypes.cast(callback, pointer).value for callback in self._callbacks]
        # Without declared arguments, as functions of a library are.
        self.cudaMemcpyAsync, self.cudaEventRecord = (ctypes.CFUNCTYPE(number)(a) for a in addresses)

    def cudaGetErrorString(self, error: int) -> bytes:
        return b"error %d" % error

    def wait(self, event: int) -> None:
        self.num_waits += 1
        if event not in self.marks:
            return
        queue = self.queues[self.marks[event]]
        last = max((i for i, work in enumerate(queue) if work == ("mark", event)), default=-1)
        for what, address in queue[: last + 1]:
            if what != "mark":
                self.arrived.append(ctypes.string_at(address, int(what.split()[1])))
        del queue[: last + 1]

    def wait_for_all(self, device: object) -> None:
        for queue in self.queues.values():
            self.arrived += [
                ctypes.string_at(address, int(what.split()[1])) for what, address in queue if what != "mark"
            ]
            queue.clear()

    @property
    def sources(self) -> set[int]:
        """Addresses that copies are still to read."""
        return {address for queue in self.queues.values() for what, address in queue if what != "mark"}


def make_ring(machine: Machine, patch: pytest.MonkeyPatch) -> PinnedRing:
    events: list[Any] = []

    class Event:
        def __init__(self) -> None:
            events.append(self)
            self.cuda_event = 0x7D00_0000_0000 + len(events)

        def record(self, stream: object) -> None: ...
        def synchronize(self) -> None:
            machine.wait(self.cuda_event)

    fake_torch = SimpleNamespace(
        empty=lambda size, dtype, pin_memory: torch.empty(size, dtype=dtype),
        uint8=torch.uint8,
        cuda=SimpleNamespace(
            Event=Event, current_stream=lambda device: None, synchronize=machine.wait_for_all
        ),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: machine.stream),
    )
    patch.setattr(pinned, "torch", fake_torch)
    patch.setattr(pinned, "_runtime", lambda: machine)
    return PinnedRing(0x7E00_0000_0040, NUM_BYTES, torch.device("cuda", 0))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 0, 0, 1, 2]),  # the current stream
            st.integers(1, NUM_BYTES),
            st.sampled_from(["sent", "sent", "sent", "given up", "failed"]),
        ),
        max_size=40,
    )
)
def test_no_slot_is_handed_out_that_a_copy_is_still_to_read(steps: list[tuple[int, int, str]]) -> None:
    machine, sent = Machine(), []
    with pytest.MonkeyPatch.context() as patch:
        ring = make_ring(machine, patch)
        for number, (stream, num_bytes, what) in enumerate(steps):
            machine.stream = STREAMS[stream]
            slot, host = ring.acquire()
            assert host is ring.hosts[slot]
            assert host.ctypes.data not in machine.sources
            host[:] = number
            if what == "given up":
                continue
            machine.error = 7 * (what == "failed")
            if machine.error:
                with pytest.raises(RuntimeError, match=f"copying {num_bytes} bytes .* failed: error 7"):
                    ring.submit(num_bytes)
                continue
            ring.submit(num_bytes)
            sent.append(bytes([number]) * num_bytes)
        ring.__del__()
    assert not machine.sources, "the memory goes when the last copy has read it"
    assert sorted(machine.arrived) == sorted(sent), "each copy has read what it was sent with"


def test_one_stream_takes_an_event_for_every_fourth_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    ring = make_ring(machine, monkeypatch)
    slots = []
    for _ in range(17):
        slots.append(ring.acquire()[0])
        ring.submit(8)
    assert slots == [*range(8), *range(8), 0]
    assert (machine.num_records, machine.num_waits) == (4, 5)
    assert len(machine.arrived) == 12, "the last four copies before it are not waited for"


def test_a_ring_whose_stream_has_gone_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    ring = make_ring(machine, monkeypatch)
    for _ in range(3):
        ring.acquire()
        ring.submit(8)
    machine.mark_error = 400
    ring.__del__()
    assert (len(machine.arrived), machine.sources) == (3, set())
    machine.mark_error = 0


def test_slots_do_not_overlap_and_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make_ring(Machine(), monkeypatch)
    starts = np.array([host.ctypes.data for host in ring.hosts])
    assert len(starts) == 8
    assert {len(host) for host in ring.hosts} == {NUM_BYTES}
    assert set(np.diff(starts)) == {256}


def test_a_slot_that_was_not_sent_is_handed_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make_ring(Machine(), monkeypatch)
    assert ring.acquire()[0] == ring.acquire()[0] == 0
    ring.submit(8)
    assert ring.acquire()[0] == 1
