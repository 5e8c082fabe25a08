"""Large inputs that come from the host: by way of pinned memory, and copied behind the host.

``Tensor.copy_`` of float32 host memory into a bfloat16 tensor on a GPU makes a converted copy in fresh host
memory, and copies that while the caller waits. Here the conversion goes straight into one of two pinned
slots, and the copy is queued on the stream; several parts (the patches of several images) are never joined
before. ``RawRows`` are less: bytes, which become values on the device, by work that is queued behind the
copy, and which may be made in the slot. Invariant: a slot is written only when its last copy has ended. Read
``pinned.py`` for the slots.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gapless.graphs.device.pinned import PinnedSlot

_NUM_SLOTS = 2
"""While one is copied, the next run's is written."""
_MAX_KEPT = 256


Finish = Callable[[Tensor, Tensor], Callable[[], None]]


class LateBytes(Protocol):
    """Bytes that are made where they are needed."""

    @property
    def nbytes(self) -> int: ...

    def write(self, target: np.ndarray) -> None:
        """All of them into ``nbytes`` bytes that lie side by side."""


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


class RawRows:
    """Rows of several arrays of bytes that become values of a batch where that is. They are read only."""

    def __init__(
        self, parts: Sequence[np.ndarray | LateBytes], *, shape: tuple[int, ...], finish: Finish
    ) -> None:
        """``finish(raw, values)`` gives what makes values of ``shape`` of the bytes of all ``parts``, one
        behind the other in a uint8 tensor on the same device. That may only queue work on the current
        stream, and may be kept and called again for rows with an equal ``finish``. Late bytes are made each
        time that the rows are used."""
        self._parts = parts
        self.shape, self.finish = shape, finish
        self.num_bytes = sum([part.nbytes for part in parts])
        assert self.num_bytes <= math.prod(shape), "rows of more bytes than values do not fit a ring"

    def write(self, host: np.ndarray) -> None:
        """All bytes to the front of ``host``."""
        start = 0
        for part in self._parts:
            target = host[start : start + part.nbytes]
            if isinstance(part, np.ndarray):
                target[...] = part.reshape(-1)
            else:
                part.write(target)
            start += part.nbytes

    def to(self, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        """All of them as a new tensor of values."""
        values = torch.empty(self.shape, device=device, dtype=dtype)
        self.copy_to(values)
        return values

    def copy_to(self, target: Tensor) -> None:
        """Into a contiguous tensor of ``shape``."""
        host = np.empty(self.num_bytes, np.uint8)
        self.write(host)
        self.finish(torch.from_numpy(host).to(target.device), target)()


class UploadRing:
    """Copies host rows to the front of ``target``, a static tensor on a CUDA device."""

    def __init__(
        self, target: Tensor, *, make_slot: Callable[[int, torch.device], PinnedSlot] = PinnedSlot
    ) -> None:
        self._address, self._dtype = target.data_ptr(), target.dtype
        self._target = target.view(-1)
        # static: bytes on their way, at most one for each value; a later copy waits in the same stream
        self._raw = torch.empty(target.numel(), dtype=torch.uint8, device=target.device)
        self._raw_address = self._raw.data_ptr()
        self._slots = [make_slot(target.nbytes, target.device) for _ in range(_NUM_SLOTS)]
        self._hosts = [torch.from_numpy(slot.host).view(target.dtype) for slot in self._slots]
        self._next = 0
        self._finishes: dict[tuple[tuple[int, ...], Finish], Callable[[], None]] = {}
        """What makes values of bytes here, for shapes that come again and again."""

    @property
    def num_bytes(self) -> int:
        """On the device, beside the target."""
        return self._raw.nbytes

    def send(self, rows: HostRows | RawRows) -> None:
        """Queue the copy. ``rows`` fit the target, and may change once this returns."""
        index = self._next
        self._next = (index + 1) % len(self._slots)
        slot = self._slots[index]
        slot.wait()
        if isinstance(rows, RawRows):
            rows.write(slot.host)
            slot.send(self._raw_address, rows.num_bytes)
            self._finish_of(rows)()
            return
        count = math.prod(rows.shape)
        rows.copy_to(self._hosts[index][:count].view(rows.shape))
        slot.send(self._address, count * self._dtype.itemsize)

    def _finish_of(self, rows: RawRows) -> Callable[[], None]:
        key = rows.shape, rows.finish
        known = self._finishes.get(key)
        if known is None:
            if len(self._finishes) >= _MAX_KEPT:
                self._finishes.clear()
            values = self._target[: math.prod(rows.shape)].view(rows.shape)
            known = self._finishes[key] = rows.finish(self._raw, values)
        return known


def _tensor_of(array: np.ndarray) -> Tensor:
    """A tensor of the array's memory. PyTorch warns of memory that may not be written (as it comes from a
    socket), so that is referred to by its address; nobody writes here."""
    if array.flags.writeable or not array.size:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    memory: Any = (ctypes.c_byte * array.nbytes).from_address(array.ctypes.data)
    return torch.from_numpy(np.frombuffer(memory, dtype=array.dtype).reshape(array.shape))
