"""Arena: the emulated device's memory, one lazily committed buffer with recycled blocks.

Each block is handed to torch as its own storage, so it is freed when the last tensor sharing that storage
dies, is merged with its free neighbours, and is handed out again first-fit. That is what makes lifetime
faults visible on a CPU: an address kept past its owner's death soon holds something else. As in CUDA's
caching allocator, blocks are 512-byte aligned, and what no free block can hold makes a new *segment*, whose
blocks never merge with another segment's: so the order in which sizes are captured decides what a pool costs.
Invariant: live blocks never overlap. ``bytes_in_use`` counts rounded blocks, ``num_bytes`` whole segments.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gapless.errors import MemoryLimitError
from gapless.graphs.device.layout import storage_bytes

ALIGNMENT = 512
DEFAULT_CAPACITY = 1 << 36
"""64 GiB of address space; pages are committed when first written."""
_MIN_CAPACITY = 1 << 20


class Arena:
    """First-fit allocator over one buffer. Not for concurrent allocation; frees may come from any thread."""

    def __init__(self, *, capacity: int = DEFAULT_CAPACITY, poison_freed: bool = False) -> None:
        buffer = _map_lazily(_round_up(capacity))
        capacity = len(buffer)
        self._bytes = np.frombuffer(buffer, dtype=np.uint8)
        self._base = torch.from_numpy(self._bytes)
        self._start = self._base.data_ptr()
        self._capacity = capacity
        self._poison_freed = poison_freed
        self._free_offsets: list[int] = []
        self._free_sizes: list[int] = []
        self._segment_starts: set[int] = set()
        # Finalizers can run at any allocation of this or another thread, so they only queue; `_drain` does
        # the work.
        self._freed: deque[tuple[int, int]] = deque()
        self._in_use = 0
        self._end = 0

    @property
    def bytes_in_use(self) -> int:
        self._drain()
        return self._in_use

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments: they are kept until the arena dies."""
        return self._end

    def owns(self, tensor: Tensor) -> bool:
        return self._start <= tensor.data_ptr() < self._start + self._capacity

    def empty_strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor with a block of its own, contents undefined. Empty tensors take no block."""
        num_bytes = storage_bytes(size, stride, dtype)
        if num_bytes == 0:
            return torch.empty_strided(size, stride, dtype=dtype)
        offset, block_bytes = self._take(num_bytes)
        block = self._bytes[offset : offset + num_bytes]
        # The storage holds the only reference to this numpy slice: its death is the death of the block.
        weakref.finalize(block, self._freed.append, (offset, block_bytes)).atexit = False
        return torch.from_numpy(block).view(dtype).as_strided(size, stride)

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor of this arena by address only: keeps the buffer mapped, but not the block taken."""
        offset = tensor.data_ptr() - self._start
        num_bytes = storage_bytes(tensor.shape, tensor.stride(), tensor.dtype)
        with torch.inference_mode(False):  # a replay must be able to write it outside inference mode
            memory = self._base[offset : offset + num_bytes].view(tensor.dtype)
            return _with_layout_of(tensor, memory)

    def _take(self, num_bytes: int) -> tuple[int, int]:
        self._drain()
        wanted = _round_up(num_bytes)
        for i, size in enumerate(self._free_sizes):
            if size >= wanted:
                offset = self._free_offsets[i]
                if size == wanted:
                    del self._free_offsets[i], self._free_sizes[i]
                else:
                    self._free_offsets[i] += wanted
                    self._free_sizes[i] -= wanted
                break
        else:
            offset = self._new_segment(wanted)
        self._in_use += wanted
        return offset, wanted

    def _new_segment(self, num_bytes: int) -> int:
        offset = self._end
        if offset + num_bytes > self._capacity:
            raise MemoryLimitError(
                f"the emulated pool has no room for {num_bytes} bytes "
                f"({self._in_use} of {self._capacity} in use); capture fewer or smaller sizes, "
                "or give the device a larger arena_bytes"
            )
        self._segment_starts.add(offset)
        self._end += num_bytes
        return offset

    def _drain(self) -> None:
        while self._freed:
            offset, size = self._freed.popleft()
            self._in_use -= size
            if self._poison_freed:
                self._bytes[offset : offset + size] = 0xFF  # NaN in every float type
            self._insert_free(offset, size)

    def _insert_free(self, offset: int, size: int) -> None:
        i = bisect_left(self._free_offsets, offset)
        end = offset + size
        if i < len(self._free_offsets) and end == self._free_offsets[i] and end not in self._segment_starts:
            size += self._free_sizes[i]
            del self._free_offsets[i], self._free_sizes[i]
        previous_ends_here = i > 0 and self._free_offsets[i - 1] + self._free_sizes[i - 1] == offset
        if previous_ends_here and offset not in self._segment_starts:
            self._free_sizes[i - 1] += size
            return
        self._free_offsets.insert(i, offset)
        self._free_sizes.insert(i, size)


def alias_address(tensor: Tensor) -> Tensor:
    """A non-owning tensor over any CPU memory. Reading it after the owner died is undefined: check first."""
    num_bytes = storage_bytes(tensor.shape, tensor.stride(), tensor.dtype)
    if num_bytes == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * num_bytes).from_address(tensor.data_ptr())
    with torch.inference_mode(False):
        return _with_layout_of(tensor, torch.frombuffer(memory, dtype=tensor.dtype))


def poison_(tensor: Tensor) -> None:
    """Overwrite with what no computation should read: NaN, or a huge number that fails as an index."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(min(torch.iinfo(tensor.dtype).max, 0x7F7F7F7F))


def _with_layout_of(tensor: Tensor, memory: Tensor) -> Tensor:
    """``memory`` (flat, beginning at the tensor's first element) seen as ``tensor`` sees it."""
    alias = memory.as_strided(tensor.shape, tensor.stride(), memory.storage_offset())
    if tensor.is_conj():  # lazily conjugated or negated: a bit of the tensor, not of its memory
        alias = alias.conj()
    return alias._neg_view() if tensor.is_neg() else alias


def _map_lazily(capacity: int) -> mmap.mmap:
    """Address space without committed pages; halved until the system grants it (strict overcommit grants
    less).
    """
    # Python names the flag from 3.12 on; without it a heuristic overcommit refuses more than the free memory.
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    while True:
        try:
            return mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        except OSError as error:
            if capacity <= _MIN_CAPACITY:
                raise MemoryLimitError(f"cannot map {capacity} bytes for an emulated graph pool") from error
            capacity = max(_MIN_CAPACITY, _round_up(capacity // 2))


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
