"""The Triton kernels of steps with images: rotary rows on three axes, and rows that an encoder has made.

What is in a row that is not ``is_media`` may be anything, NaN included: such a row is not loaded at all.
Arithmetic is float32 and rounded where the torch forward rounds. See ``mrope.py`` and ``media.py`` for
shapes; ``jit.py`` for ``EARLY``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.jit import write_rms_norm

# mypy: allow-untyped-defs


@triton.jit
def axis_rows_kernel(
    positions_3T,
    frequencies_F,
    axes_F,
    rows_T2F,
    axis_stride,
    token_stride,
    factor,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """One program per token: its cosines, then its sines."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, HALF_PAD)
    is_frequency = index < HALF
    axis = tl.load(axes_F + index, mask=is_frequency, other=0)
    position = tl.load(positions_3T + axis * axis_stride + token * token_stride, mask=is_frequency, other=0)
    angle = position.to(tl.float32) * tl.load(frequencies_F + index, mask=is_frequency, other=0.0)
    dtype = rows_T2F.dtype.element_ty
    row = rows_T2F + token * (2 * HALF) + index
    tl.store(row, (tl.cos(angle) * factor).to(dtype), mask=is_frequency)
    tl.store(row + HALF, (tl.sin(angle) * factor).to(dtype), mask=is_frequency)


@triton.jit
def embed_media_kernel(
    input_ids_T,
    embedding_VE,
    media_TE,
    is_media_T,
    hidden_TE,
    embedding_stride_v,
    media_stride_t,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per token and tile: a row of ``media`` where that is set, else of the embedding."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_element = element < SIZE
    is_media = tl.load(is_media_T + token) != 0
    token_id = tl.load(input_ids_T + token).to(tl.int64)
    word = tl.load(
        embedding_VE + token_id * embedding_stride_v + element, mask=is_element & (is_media == 0), other=0.0
    )
    row = tl.load(media_TE + token * media_stride_t + element, mask=is_element & is_media, other=0.0)
    tl.store(hidden_TE + token * SIZE + element, tl.where(is_media, row, word), mask=is_element)


@triton.jit
def add_media_norm_kernel(
    update_TE,
    residual_TE,
    media_TE,
    is_media_T,
    weight_E,
    sum_TE,
    normed_TE,
    update_stride_t,
    residual_stride_t,
    media_stride_t,
    eps,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``rms_norm_kernel`` with an update, and a row of ``media`` added where that is set."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, SIZE_PAD)
    is_element = element < SIZE
    weight = tl.load(weight_E + element, mask=is_element, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    is_added = is_element
    if HAS_MASK:
        is_added = is_element & (tl.load(is_media_T + token) != 0)
    residual = tl.load(residual_TE + token * residual_stride_t + element, mask=is_element, other=0.0)
    update = tl.load(update_TE + token * update_stride_t + element, mask=is_element, other=0.0)
    media = tl.load(media_TE + token * media_stride_t + element, mask=is_added, other=0.0)
    dtype = sum_TE.dtype.element_ty
    row_E = (residual.to(tl.float32) + update.to(tl.float32)).to(dtype)
    row_E = (row_E.to(tl.float32) + media.to(tl.float32)).to(dtype)
    tl.store(sum_TE + token * SIZE + element, row_E, mask=is_element)
    write_rms_norm(row_E, weight, normed_TE, token, element, is_element, eps, SIZE)
