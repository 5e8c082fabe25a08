"""Tokens on their way back to the host.

On a GPU a copy into pinned memory is queued behind the step and an event says when it has arrived, so the
host may go on and launch the next step. The ring is longer than the number of steps in flight: a slot is read
before it is used again. On a CPU the tokens are copied at once, because the next step overwrites the buffer
they lie in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapless.graphs.device.base import GraphDevice

_RING_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Readback:
    """``host_R`` is valid once ``arrived`` returns."""

    host_R: Tensor
    arrived: Callable[[], Any]

    def wait(self) -> list[int]:
        self.arrived()
        return self.host_R.tolist()


class ReadbackRing:
    """Host memory for the tokens of the last few steps, at most ``max_rows`` each."""

    def __init__(self, max_rows: int, device: GraphDevice) -> None:
        self._device = device
        self._next = 0
        self._is_cuda = device.torch_device.type == "cuda"
        if self._is_cuda:
            shape = (_RING_SLOTS, max_rows)
            self._slots = torch.empty(shape, dtype=torch.int64, pin_memory=True)
            self._events = [torch.cuda.Event() for _ in range(_RING_SLOTS)]

    def start(self, tokens_R: Tensor) -> Readback:
        """Queue the copy on the current stream. An empty step is waited for too: its errors belong to it."""
        if not self._is_cuda:
            return Readback(tokens_R.clone(), self._device.synchronize)
        slot, self._next = self._next, (self._next + 1) % _RING_SLOTS
        host_R = self._slots[slot, : tokens_R.shape[0]]
        host_R.copy_(tokens_R, non_blocking=True)
        self._events[slot].record()
        return Readback(host_R, self._events[slot].synchronize)
