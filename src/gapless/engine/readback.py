"""Tokens on their way back to the host.

On a GPU a copy into pinned memory is queued behind the step and an event says when it has arrived, so the
host may go on and launch the next step. The ring is longer than the number of steps in flight: a slot is read
before it is used again. On a CPU the tokens are copied at once, because the next step overwrites the buffer
they lie in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gapless.graphs.device.base import GraphDevice
from gapless.graphs.device.pinned import PinnedSlot
from gapless.graphs.peers import Peers

_RING_SLOTS = 4


class Readback:
    """``host_R`` is valid once ``arrived`` returns."""

    __slots__ = ("_arrived", "_host_R")

    def __init__(self, host_R: np.ndarray, arrived: Callable[[], Any]) -> None:
        self._host_R, self._arrived = host_R, arrived

    def wait(self) -> list[int]:
        self._arrived()
        return self._host_R.tolist()


class ReadbackRing:
    """Host memory for the tokens (int64) of the last few steps, at most ``max_rows`` each."""

    def __init__(self, max_rows: int, device: GraphDevice, peers: Peers | None = None) -> None:
        """``peers``: processes without which a step on the device does not end."""
        self._device, self._peers = device, peers
        self._next = 0
        self._slots: list[PinnedSlot] = []
        if device.torch_device.type == "cuda":
            self._slots = [PinnedSlot(8 * max_rows, device.torch_device) for _ in range(_RING_SLOTS)]
        self._hosts: list[np.ndarray] = [slot.host.view(np.int64) for slot in self._slots]

    def start(self, tokens_R: Tensor) -> Readback:
        """Queue the copy on the current stream. An empty step is waited for too: its errors belong to it."""
        if not self._slots:
            return Readback(tokens_R.numpy().copy(), self._device.synchronize)
        index, self._next = self._next, (self._next + 1) % _RING_SLOTS
        num_rows = tokens_R.shape[0]
        slot = self._slots[index]
        assert tokens_R.dtype is torch.int64
        assert tokens_R.is_contiguous()
        slot.fetch(tokens_R.data_ptr(), 8 * num_rows)
        arrived = slot.wait if self._peers is None else partial(self._peers.wait_for, slot.is_done)
        return Readback(self._hosts[index][:num_rows], arrived)
