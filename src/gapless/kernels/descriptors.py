"""Descriptors for Hopper's copy engine (TMA) as arguments of Gluon kernels, each made once.

Triton asks the driver for the 128 bytes of a descriptor at every launch. Here they stay with the descriptor
(``KeptDescriptor.expand``), and a descriptor is found again by what it is a function of: address, type, shape
and strides. So it holds no memory and need not be dropped: whatever lies at that address in that shape is
described by it. Read ``launch.py`` for how it gets into a kernel.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gapless.kernels.launch import Described


class _Memory(NamedTuple):
    """What a descriptor asks of a tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class KeptDescriptor(TensorDescriptor, Described):
    """Triton's own, so that Triton takes it, too."""

    _values: list[Any] | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        return (KeptDescriptor, self.base.dtype, *self.block_shape)

    def expand(self, metadata: Any) -> list[Any]:
        """Raises ``RuntimeError`` where the driver refuses it."""
        if self._values is None:
            self._values = make_tensordesc_arg(self, metadata)
        return self._values


@functools.lru_cache(maxsize=4096)
def box_descriptor(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, int],
    strides: tuple[int, int],
    box: tuple[int, int],
) -> KeptDescriptor:
    """Of a matrix of 16-bit numbers, in elements: copies bring ``box`` (rows, 64 columns) of it, and zeros
    for what lies outside of ``shape``. Raises ``AssertionError`` where address or rows do not divide by 16
    bytes."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return KeptDescriptor(_Memory(address, dtype), list(shape), list(strides), list(box), layout)
