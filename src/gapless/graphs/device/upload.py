"""Large inputs that come from the host: cast on their way into pinned memory, then copied behind the host.

``Tensor.copy_`` of float32 host memory into a bfloat16 tensor on a GPU makes a converted copy in fresh host
memory, and copies that while the caller waits. Here the conversion goes straight into one of two pinned
slots, and the copy is queued on the stream; several parts (the patches of several images) are never joined
before. Invariant: a slot is written only when its last copy has ended. Read ``pinned.py`` for the slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gapless.graphs.device.pinned import PinnedSlot

_NUM_SLOTS = 2
"""While one is copied, the next run's is written."""


class HostRows:
    """Rows of several host arrays, one behind the other, as one value of a batch. They are read only."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        """Arrays of one shape but for the number of rows. They must not change before the value was used."""
        self._arrays = tuple(np.ascontiguousarray(part) for part in parts)  # keeps what tensors read alive
        self.parts = tuple(_tensor_of(array) for array in self._arrays)
        self.shape = (sum(len(part) for part in self.parts), *self.parts[0].shape[1:])

    def to(self, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        """All of them as a new tensor."""
        rows = torch.empty(self.shape, device=device, dtype=dtype)
        self.copy_to(rows)
        return rows

    def copy_to(self, target: Tensor) -> None:
        """Into a tensor of ``shape``, converted to its dtype."""
        start = 0
        for part in self.parts:
            target[start : start + len(part)].copy_(part)
            start += len(part)


class UploadRing:
    """Copies host rows to the front of ``target``, a static tensor on a CUDA device."""

    def __init__(
        self, target: Tensor, *, make_slot: Callable[[int, torch.device], PinnedSlot] = PinnedSlot
    ) -> None:
        self._address, self._dtype = target.data_ptr(), target.dtype
        self._slots = [make_slot(target.nbytes, target.device) for _ in range(_NUM_SLOTS)]
        self._hosts = [torch.from_numpy(slot.host).view(target.dtype) for slot in self._slots]
        self._next = 0

    def send(self, rows: HostRows) -> None:
        """Queue the copy. ``rows`` fit the target, and may change once this returns."""
        index = self._next
        self._next = (index + 1) % len(self._slots)
        slot, count = self._slots[index], int(np.prod(rows.shape))
        slot.wait()
        rows.copy_to(self._hosts[index][:count].view(rows.shape))
        slot.send(self._address, count * self._dtype.itemsize)


def _tensor_of(array: np.ndarray) -> Tensor:
    """A tensor of the array's memory. PyTorch warns of memory that may not be written (as it comes from a
    socket), so that is referred to by its address; nobody writes here."""
    if array.flags.writeable or not array.size:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    memory: Any = (ctypes.c_byte * array.nbytes).from_address(array.ctypes.data)
    return torch.from_numpy(np.frombuffer(memory, dtype=array.dtype).reshape(array.shape))
