"""Pinned slots on a GPU: copies both ways are ordered with the work of the stream and are waited for."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from gapless.graphs.device.pinned import PinnedRing, PinnedSlot

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def test_what_is_sent_comes_back() -> None:
    slot, back = PinnedSlot(64, DEVICE), PinnedSlot(64, DEVICE)
    target = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    slot.host[:] = np.arange(64)
    slot.send(target.data_ptr(), 40)
    back.host[:] = 99
    back.fetch(target.data_ptr(), 48)
    back.wait()
    assert back.host.tolist() == [*range(40), *[0] * 8, *[99] * 16]


def test_a_copy_waits_for_the_work_queued_before_it_on_the_current_stream() -> None:
    side, slot = torch.cuda.Stream(), PinnedSlot(8, DEVICE)
    value = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        value.fill_(7)
        slot.fetch(value.data_ptr(), 8)
    assert slot.host.view(np.int64)[0] != 7  # still asleep
    slot.wait()
    assert slot.host.view(np.int64)[0] == 7


def test_another_thread_may_use_a_slot() -> None:
    slot = PinnedSlot(8, DEVICE)
    value = torch.full((1,), 5, dtype=torch.int64, device=DEVICE)
    torch.cuda.synchronize()

    def fetch() -> None:
        slot.fetch(value.data_ptr(), 8)
        slot.wait()

    thread = threading.Thread(target=fetch)
    thread.start()
    thread.join()
    assert slot.host.view(np.int64)[0] == 5


def test_a_slot_that_is_dropped_keeps_its_memory_until_its_copy_has_ended() -> None:
    target = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
    slot = PinnedSlot(1 << 20, DEVICE)
    slot.host[:] = 3
    torch.cuda._sleep(20_000_000)
    slot.send(target.data_ptr(), 1 << 20)
    del slot
    gc.collect()
    torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).fill_(9)
    assert bool((target == 3).all())


@pytest.mark.parametrize("num_streams", [1, 2])
def test_slots_of_a_ring_are_not_written_before_they_were_read(num_streams: int) -> None:
    """Each stream sleeps before each of its copies, so the host runs into slots that are still to be read."""
    streams = [torch.cuda.Stream() for _ in range(num_streams)]
    staged = torch.zeros(1 << 16, dtype=torch.uint8, device=DEVICE)
    ring, seen = PinnedRing(staged.data_ptr(), staged.nbytes, DEVICE), []
    torch.cuda.synchronize()
    for number in range(40):
        stream = streams[number % num_streams]
        stream.wait_stream(streams[(number - 1) % num_streams])
        with torch.cuda.stream(stream):
            torch.cuda._sleep(500_000)
            ring.acquire()[1][:] = number
            ring.submit(staged.nbytes)
            seen.append(staged.clone())
            seen[-1].record_stream(stream)
    torch.cuda.synchronize()
    assert [found.unique().tolist() for found in seen] == [[number] for number in range(40)]


def test_a_ring_that_is_dropped_keeps_its_memory_until_its_copies_have_ended() -> None:
    target = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
    ring = PinnedRing(target.data_ptr(), 1 << 20, DEVICE)
    ring.acquire()[1][:] = 3
    torch.cuda._sleep(20_000_000)
    ring.submit(1 << 20)
    del ring
    gc.collect()
    torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True).fill_(9)
    assert bool((target == 3).all())
