"""Pixels that have reached a device as bytes become the values that a vision tower reads.

A processor scales and normalises every byte of a channel alike, so a byte's value is looked up in a table of
256: the bits are those that the processor would have made on the host, and a quarter of the bytes of float32
are uploaded. Pixels come with their channels side by side, as pictures have them, and leave with each channel
by itself: on the host that would take longer than all else. A still picture fills every moment of its
patches: its pixels are uploaded once and written several times. This happens on the way into a graph's input,
not in the graph. ``P`` patches, ``A`` pixels, ``K`` channels, ``B`` bytes of a patch (``A * K``), ``R`` times
that values are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.kernels.launch import Constants, launch
from gapless.kernels.select import has_fused_kernels

_CONSTANTS = Constants(TILE=256, num_warps=2)


def write_values(
    bytes_PB: Tensor, table_KV: Tensor, num_repeats: int, values_PC: Tensor, *, is_fused: bool | None = None
) -> None:
    """``values[p, k, r, a] = table[k, bytes[p, a, k]]``: ``[P, A * K]`` uint8, ``[K, 256]`` and
    ``[P, K * R * A]``, the last two of one dtype; all contiguous. ``is_fused``: by the kernel or by torch
    operations, by default as the device allows. Raises ``ConfigError`` for other shapes and types."""
    values_writer(bytes_PB, table_KV, num_repeats, values_PC, is_fused=is_fused)()


def values_writer(
    bytes_PB: Tensor, table_KV: Tensor, num_repeats: int, values_PC: Tensor, *, is_fused: bool | None = None
) -> Callable[[], None]:
    """``write_values`` of these tensors, checked once, for static memory that is written again and again."""
    num_patches, num_bytes = bytes_PB.shape
    num_channels, num_entries = table_KV.shape
    num_values = num_bytes * num_repeats
    if num_bytes % num_channels or values_PC.shape != (num_patches, num_values) or num_entries != 256:
        raise ConfigError(
            f"bytes of shape {tuple(bytes_PB.shape)} {num_repeats} times, by a table of shape "
            f"{tuple(table_KV.shape)}, are no values of shape {tuple(values_PC.shape)}"
        )
    if bytes_PB.dtype != torch.uint8 or table_KV.dtype != values_PC.dtype:
        raise ConfigError(
            f"bytes of {bytes_PB.dtype} by a table of {table_KV.dtype} are no {values_PC.dtype}"
        )
    if not (bytes_PB.is_contiguous() and table_KV.is_contiguous() and values_PC.is_contiguous()):
        raise ConfigError("values of pixels are written from and to contiguous tensors only")
    if num_patches == 0:
        return lambda: None
    size = num_bytes // num_channels
    if not (has_fused_kernels(values_PC.device) if is_fused is None else is_fused):
        return functools.partial(_look_up, bytes_PB, table_KV, num_repeats, values_PC)
    args = (bytes_PB, table_KV, values_PC, num_channels, size, num_repeats)
    grid = (num_patches * num_channels,)
    return functools.partial(launch, _kernels().write_values_kernel, grid, args, _CONSTANTS)


def _look_up(bytes_PB: Tensor, table_KV: Tensor, num_repeats: int, values_PC: Tensor) -> None:
    num_patches, num_channels = bytes_PB.shape[0], table_KV.shape[0]
    bytes_PAK = bytes_PB.view(num_patches, -1, num_channels)
    values_PKRA = values_PC.view(num_patches, num_channels, num_repeats, -1)
    for channel in range(num_channels):
        index = bytes_PAK[..., channel].int().reshape(-1)
        values_PKRA[:, channel] = table_KV[channel].index_select(0, index).view(num_patches, 1, -1)


@functools.cache
def _kernels() -> ModuleType:
    from gapless.kernels import pixels_jit

    return pixels_jit
