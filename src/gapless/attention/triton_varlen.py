"""The Triton kernel of encoder attention, and its launch.

A program takes a tile of rows of one segment and one head and walks that segment's keys; programs are as many
as rows and ``max_len`` ask for, and take tiles by a stride, so the number of segments on the device needs no
place in the grid. Tiles are numbered without a table: those of segment ``n`` begin at ``cu_seqlens[n] //
BLOCK_Q + n``, which leaves each segment at least as many as it needs. Head sizes between two powers of 2 are
split into two parts (72 = 64 + 8, 80 = 64 + 16), each padded by itself, for padding 72 to 128 would nearly
double the work.

Strides come in units of as many elements as they all are multiples of, up to 16 bytes. Triton asks integers
only whether they divide by 16: without the unit a head of 72 elements, 144 bytes, would be read 2 bytes at a
time, and not ahead of the products.

``EARLY`` kernels are launched while the kernel before them still runs (``triton_kernels.py``): before
``gdc_wait`` they read ``cu_seqlens`` alone, which the kernel right before never writes: it is a static input,
or (``encoder_interface.py``) has become lengths in a kernel of its own since.

``S`` rows, ``N`` segments, ``H`` heads, ``M`` rows of a tile, ``A`` and ``B`` the parts of a head.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.attention.tile_rules import EncoderTile, encoder_tile
from gapless.env import read_env
from gapless.errors import ConfigError
from gapless.graphs.ops import direct, register_custom_op
from gapless.kernels.launch import Constants, launch
from gapless.kernels.select import launch_options, next_power_of_2

# mypy: allow-untyped-defs

MAX_HEAD_SIZE = 128
_SPARE_TILES = 16
"""Segments that may begin a tile of their own before programs take more than one tile."""
_MOST_TILES = 65535
SEGMENTS_AT_ONCE = tl.constexpr(256)
LOG2_E = tl.constexpr(1.4426950408889634)


@register_custom_op(mutates_args=["out_SHD"])
def triton_varlen_attention(
    query_SHD: Tensor,
    key_SHD: Tensor,
    value_SHD: Tensor,
    out_SHD: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_kk: Tensor,
    max_len: int,
    scale: float,
) -> None:
    """The contract is ``VarlenBackend.attend``. Raises ``ConfigError`` for tensors it cannot take."""
    _check(query_SHD, key_SHD, value_SHD, out_SHD, max_len, scale)
    num_rows, num_heads, _ = query_SHD.shape
    if num_rows == 0:
        return
    tile = encoder_tile(
        num_heads=num_heads, num_rows=num_rows, max_len=max_len, itemsize=query_SHD.element_size()
    )
    tensors = (query_SHD, key_SHD, value_SHD, out_SHD)
    launch_varlen(tensors, cu_seqlens, cu_seqlens_kk, scale, tile)


varlen_attention = direct(triton_varlen_attention)


def launch_varlen(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    cu_seqlens: Tensor,
    cu_seqlens_kk: Tensor,
    scale: float,
    tile: EncoderTile,
) -> None:
    """``triton_varlen_attention`` with a given tile. ``tensors``: query, key, value and out, none empty."""
    query_SHD = tensors[0]
    num_rows, num_heads, head_size = query_SHD.shape
    num_segments = cu_seqlens_kk.shape[0]
    strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
    unit = math.gcd(16 // query_SHD.element_size(), *strides)
    is_aligned = unit * query_SHD.element_size() == 16 and not any(
        tensor.data_ptr() & 15 for tensor in tensors
    )
    constants = _constants(head_size, tile, query_SHD.dtype, query_SHD.device, unit, is_aligned)
    num_tiles = -(-num_rows // constants["BLOCK_Q"]) + min(num_segments, _SPARE_TILES)
    args = (
        *tensors,
        cu_seqlens,
        cu_seqlens_kk,
        num_rows,
        num_segments,
        scale,
        *[stride // unit for stride in strides],
    )
    launch(varlen_attention_kernel, (num_heads, min(num_tiles, _MOST_TILES)), args, constants)


@functools.lru_cache(maxsize=256)
def _constants(
    head_size: int, tile: EncoderTile, dtype: torch.dtype, device: torch.device, unit: int, is_aligned: bool
) -> Constants:
    if device.type == "cpu":  # the interpreter: small tiles, so that tests see several
        tile = replace(tile, block_q=32, block_n=32)
    return Constants(**kernel_constants(head_size, tile, dtype, unit, is_aligned), **launch_options(device))


def kernel_constants(
    head_size: int, tile: EncoderTile, dtype: torch.dtype, unit: int, is_aligned: bool
) -> dict[str, Any]:
    """All but those of ``launch_options``. Only what is read 16 bytes at a time is split: of a split kernel
    that waits for its loads ptxas 12.8 makes products with a descriptor from a register that nothing has
    written (see ``sass.py`` beside its tests)."""
    part_a = next_power_of_2(head_size)
    part_b = 0
    if part_a > head_size and head_size > 16 and is_aligned:
        part_a //= 2
        part_b = max(next_power_of_2(head_size - part_a), 16)
    return {
        "HEAD_SIZE": head_size,
        "STRIDE_UNIT": unit,
        "PART_A": max(part_a, 16),
        "PART_B": part_b or 16,
        "HAS_B": part_b > 0,
        "BLOCK_Q": tile.block_q,
        "BLOCK_N": tile.block_n,
        "DOT_PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _check(
    query_SHD: Tensor, key_SHD: Tensor, value_SHD: Tensor, out_SHD: Tensor, max_len: int, scale: float
) -> None:
    if query_SHD.device.type == "cpu" and not read_env().triton_interpret:
        raise ConfigError("encoder attention triton_varlen needs a CUDA device; use torch_reference on a CPU")
    if query_SHD.shape[2] > MAX_HEAD_SIZE:
        raise ConfigError(
            f"triton_varlen handles head sizes up to {MAX_HEAD_SIZE}, not {query_SHD.shape[2]}; use "
            "torch_reference"
        )
    if any(tensor.stride(2) != 1 for tensor in (query_SHD, key_SHD, value_SHD, out_SHD)):
        raise ConfigError("triton_varlen needs contiguous heads (last stride 1)")
    if not max_len > 0:
        raise ConfigError(f"triton_varlen needs a positive max_len, not {max_len}")
    if not scale > 0:
        raise ConfigError(f"triton_varlen needs a positive scale, not {scale}; use torch_reference")


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def varlen_attention_kernel(
    query_SHD,
    key_SHD,
    value_SHD,
    out_SHD,
    cu_seqlens,
    cu_seqlens_kk,
    num_rows,
    num_segments,
    scale,
    query_stride_s,
    query_stride_h,
    key_stride_s,
    key_stride_h,
    value_stride_s,
    value_stride_h,
    out_stride_s,
    out_stride_h,
    HEAD_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    PART_A: tl.constexpr,
    PART_B: tl.constexpr,
    HAS_B: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs (head, tile); a program takes every ``num_programs``-th tile, then clears its pad rows."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    program = tl.program_id(1)
    scale_log2 = scale * LOG2_E
    row = tl.arange(0, BLOCK_Q)
    dim_a = tl.arange(0, PART_A)
    is_dim_a = dim_a < HEAD_SIZE
    dim_b = PART_A + tl.arange(0, PART_B)
    is_dim_b = dim_b < HEAD_SIZE
    query_SHD += head * (query_stride_h * STRIDE_UNIT)
    key_SHD += head * (key_stride_h * STRIDE_UNIT)
    value_SHD += head * (value_stride_h * STRIDE_UNIT)
    out_SHD += head * (out_stride_h * STRIDE_UNIT)
    query_stride_s *= STRIDE_UNIT
    key_stride_s *= STRIDE_UNIT
    value_stride_s *= STRIDE_UNIT
    out_stride_s *= STRIDE_UNIT

    end = tl.minimum(tl.load(cu_seqlens + num_segments), num_rows)
    num_used = _count_segments(cu_seqlens, num_segments, end, 1, 0)
    num_tiles = end // BLOCK_Q + num_used
    num_rounds = tl.cdiv(num_tiles - program, tl.num_programs(1))
    for round in range(0, num_rounds):
        tile = program + round * tl.num_programs(1)
        segment = _count_segments(cu_seqlens, num_used, tile + 1, BLOCK_Q, 1) - 1
        start = tl.load(cu_seqlens + segment)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        length = tl.load(cu_seqlens_kk + segment)
        first = (tile - start // BLOCK_Q - segment) * BLOCK_Q
        if first < length:
            is_row = first + row < length
            row_in_all = (start + first + row).to(tl.int64)
            query_row = query_SHD + row_in_all[:, None] * query_stride_s
            query_a = tl.load(query_row + dim_a[None, :], mask=is_row[:, None] & is_dim_a[None, :], other=0.0)
            query_b = tl.load(query_row + dim_b[None, :], mask=is_row[:, None] & is_dim_b[None, :], other=0.0)
            best_M = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
            total_M = tl.zeros([BLOCK_Q], dtype=tl.float32)
            sum_a = tl.zeros([BLOCK_Q, PART_A], dtype=tl.float32)
            sum_b = tl.zeros([BLOCK_Q, PART_B], dtype=tl.float32)
            # Whole tiles of keys need no mask; what is left of the segment is at most one more.
            key_rows = key_SHD + start.to(tl.int64) * key_stride_s
            value_rows = value_SHD + start.to(tl.int64) * value_stride_s
            whole = length // BLOCK_N * BLOCK_N
            best_M, total_M, sum_a, sum_b = _attend_keys(
                query_a, query_b, best_M, total_M, sum_a, sum_b, key_rows, value_rows, 0, whole, length,
                scale_log2, key_stride_s, value_stride_s,
                HEAD_SIZE, PART_A, PART_B, HAS_B, BLOCK_N, False, DOT_PRECISION,
            )  # fmt: skip
            best_M, total_M, sum_a, sum_b = _attend_keys(
                query_a, query_b, best_M, total_M, sum_a, sum_b, key_rows, value_rows, whole, length, length,
                scale_log2, key_stride_s, value_stride_s,
                HEAD_SIZE, PART_A, PART_B, HAS_B, BLOCK_N, True, DOT_PRECISION,
            )  # fmt: skip
            out_row = out_SHD + row_in_all[:, None] * out_stride_s
            share_M = 1.0 / total_M
            tl.store(
                out_row + dim_a[None, :],
                (sum_a * share_M[:, None]).to(out_SHD.dtype.element_ty),
                mask=is_row[:, None] & is_dim_a[None, :],
            )
            if HAS_B:
                tl.store(
                    out_row + dim_b[None, :],
                    (sum_b * share_M[:, None]).to(out_SHD.dtype.element_ty),
                    mask=is_row[:, None] & is_dim_b[None, :],
                )

    pad_row = end // BLOCK_Q * BLOCK_Q + program * BLOCK_Q
    while pad_row < num_rows:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        pad_S = pad_row + row
        is_pad = (pad_S >= end) & (pad_S < num_rows)
        out_row = out_SHD + pad_S.to(tl.int64)[:, None] * out_stride_s
        zero_a = tl.zeros([BLOCK_Q, PART_A], dtype=out_SHD.dtype.element_ty)
        tl.store(out_row + dim_a[None, :], zero_a, mask=is_pad[:, None] & is_dim_a[None, :])
        if HAS_B:
            zero_b = tl.zeros([BLOCK_Q, PART_B], dtype=out_SHD.dtype.element_ty)
            tl.store(out_row + dim_b[None, :], zero_b, mask=is_pad[:, None] & is_dim_b[None, :])
        pad_row += tl.num_programs(1) * BLOCK_Q


@triton.jit
def _attend_keys(
    query_a,
    query_b,
    best_M,
    total_M,
    sum_a,
    sum_b,
    key_rows,
    value_rows,
    first,
    end,
    length,
    scale_log2,
    key_stride_s,
    value_stride_s,
    HEAD_SIZE: tl.constexpr,
    PART_A: tl.constexpr,
    PART_B: tl.constexpr,
    HAS_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_TAIL: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """Online softmax over keys ``first : end`` of a segment; ``IS_TAIL`` masks those past ``length``."""
    dim_a = tl.arange(0, PART_A)
    dim_b = PART_A + tl.arange(0, PART_B)
    for first_key in range(first, end, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        is_key = key < length
        key_at = key_rows + key.to(tl.int64)[None, :] * key_stride_s
        value_at = value_rows + key.to(tl.int64)[:, None] * value_stride_s
        key_a = _load_part(
            key_at + dim_a[:, None], is_key[None, :], dim_a[:, None], HEAD_SIZE, PART_A, IS_TAIL
        )
        score_MN = tl.dot(query_a, key_a, input_precision=DOT_PRECISION)
        if HAS_B:
            key_b = _load_part(
                key_at + dim_b[:, None], is_key[None, :], dim_b[:, None], HEAD_SIZE, PART_A + PART_B, IS_TAIL
            )
            score_MN += tl.dot(query_b, key_b, input_precision=DOT_PRECISION)
        if IS_TAIL:
            score_MN = tl.where(is_key[None, :], score_MN, float("-inf"))
        new_best_M = tl.maximum(best_M, tl.max(score_MN, 1) * scale_log2)
        probability_MN = tl.exp2(score_MN * scale_log2 - new_best_M[:, None])
        shrink_M = tl.exp2(best_M - new_best_M)
        total_M = total_M * shrink_M + tl.sum(probability_MN, 1)
        best_M = new_best_M
        value_a = _load_part(
            value_at + dim_a[None, :], is_key[:, None], dim_a[None, :], HEAD_SIZE, PART_A, IS_TAIL
        )
        probability = probability_MN.to(value_a.dtype)
        sum_a = sum_a * shrink_M[:, None] + tl.dot(probability, value_a, input_precision=DOT_PRECISION)
        if HAS_B:
            value_b = _load_part(
                value_at + dim_b[None, :],
                is_key[:, None],
                dim_b[None, :],
                HEAD_SIZE,
                PART_A + PART_B,
                IS_TAIL,
            )
            sum_b = sum_b * shrink_M[:, None] + tl.dot(probability, value_b, input_precision=DOT_PRECISION)
    return best_M, total_M, sum_a, sum_b


@triton.jit
def _load_part(pointer, is_key, dim, HEAD_SIZE: tl.constexpr, END: tl.constexpr, IS_TAIL: tl.constexpr):
    """A tile, masked only where it may reach past the segment's keys or the head's end."""
    if IS_TAIL:
        return tl.load(pointer, mask=is_key & (dim < HEAD_SIZE), other=0.0)
    elif END > HEAD_SIZE:
        return tl.load(pointer, mask=dim < HEAD_SIZE, other=0.0)
    else:
        return tl.load(pointer)


@triton.jit
def _count_segments(cu_seqlens, num_segments, bound, BLOCK_Q: tl.constexpr, STEP: tl.constexpr):
    """How many segments n have ``cu_seqlens[n] // BLOCK_Q + n * STEP < bound``; they are the first ones, so
    the count ends with the first group that is not full. Loads side by side: a binary search would wait for
    one after another."""
    count = 0
    first = 0
    while first < num_segments:
        segment = first + tl.arange(0, SEGMENTS_AT_ONCE)
        is_segment = segment < num_segments
        start = tl.load(cu_seqlens + segment, mask=is_segment, other=0)
        is_below = is_segment & (start // BLOCK_Q + segment * STEP < bound)
        found = tl.sum(is_below.to(tl.int32), 0)
        count += found
        first = tl.where(found == SEGMENTS_AT_ONCE, first + SEGMENTS_AT_ONCE, num_segments)
    return count
