"""Cosines and sines of rows with a position on each of several axes, made by one kernel per step.

Tokens of m-rope have three axes, patches of an image two. By torch operations a step makes them with eight
small kernels, each a node of every graph. What comes out has a row per token; ``rotate_into_cache`` and
``rotate_heads`` take it with None for positions and then look for it only when the kernels before them have
ended. ``A`` axes, ``T`` tokens, ``F`` frequencies of a head. Read ``models/mrope.py`` for what the axes of
tokens are; its torch operations are the oracle.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.graphs.ops import register_custom_op
from gapless.kernels.launch import Constants, launch
from gapless.kernels.select import next_power_of_2


def _fake(
    positions: Tensor, frequencies_F: Tensor, axes_F: Tensor, factor: float, dtype: torch.dtype
) -> Tensor:
    shape = (positions.shape[-1], 2, frequencies_F.shape[0])
    return frequencies_F.new_empty(shape, dtype=dtype)


@register_custom_op(fake=_fake, is_fresh=True)
def axis_rows(
    positions: Tensor, frequencies_F: Tensor, axes_F: Tensor, factor: float, dtype: torch.dtype
) -> Tensor:
    """``[A, T]``, or ``[T]`` where all axes agree, to ``[T, 2, F]``: cosines (0) and sines (1), times
    ``factor``.

    ``axes_F``: the axis of each frequency, int32. Raises ``ConfigError`` for positions of another shape.
    """
    rows_T2F = _fake(positions, frequencies_F, axes_F, factor, dtype)
    _launch(positions, frequencies_F, axes_F, factor, rows_T2F)
    return rows_T2F


@register_custom_op(mutates_args=["rows_T2F"])
def write_axis_rows(
    positions: Tensor, frequencies_F: Tensor, axes_F: Tensor, factor: float, rows_T2F: Tensor
) -> None:
    """``axis_rows`` into memory that is there."""
    _launch(positions, frequencies_F, axes_F, factor, rows_T2F)


def _launch(
    positions: Tensor, frequencies_F: Tensor, axes_F: Tensor, factor: float, rows_T2F: Tensor
) -> None:
    if positions.dim() not in (1, 2):
        raise ConfigError(f"positions of shape {tuple(positions.shape)}; by axis they are [A, T], or [T]")
    shape = (positions.shape[-1], 2, len(frequencies_F))
    if rows_T2F.shape != shape or not rows_T2F.is_contiguous():
        raise ConfigError(f"rows of shape {tuple(rows_T2F.shape)}; they must be {shape} and contiguous")
    if positions.shape[-1] == 0:
        return
    axis_stride = positions.stride(0) if positions.dim() == 2 else 0
    args = (positions, frequencies_F, axes_F, rows_T2F, axis_stride, positions.stride(-1), factor)
    launch(_kernels().axis_rows_kernel, (positions.shape[-1],), args, _constants(len(frequencies_F)))


@functools.cache
def _constants(half: int) -> Constants:
    half_pad = next_power_of_2(half)
    return Constants(HALF=half, HALF_PAD=half_pad, num_warps=min(max(half_pad // 64, 1), 4))


@functools.cache
def _kernels() -> ModuleType:
    from gapless.kernels import media_jit

    return media_jit
