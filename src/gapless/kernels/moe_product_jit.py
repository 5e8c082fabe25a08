"""The Triton kernel of both products of a mixture of experts: every block of slots by its expert's matrix.

Blocks come from ``moe_jit.py``; those that a routing leaves empty return at once. A program owns its elements
and adds in one order, so results are the same bits in every run. Sums are float32. Letters as in
``moe_jit.py``; the sum of a token's experts is in ``moe_sum_jit.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs


@triton.jit(do_not_specialize=["num_blocks"])
def expert_product_kernel(
    x,
    weight_NOI,
    slots_P,
    blocks_B3,
    scales_P,
    out,
    x_stride,
    weight_stride_n,
    weight_stride_o,
    num_out,
    num_blocks,
    NUM_IN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    GROUP: tl.constexpr,
    IS_GATE_UP: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per block and ``BLOCK_O`` output features. Programs of a block follow each other, or those
    of ``GROUP`` blocks for one tile of weights: an expert with many blocks may be more than the second-level
    cache holds.

    ``IS_GATE_UP``: rows are gathered from the tokens, gate and up (the first and second ``num_out`` rows of
    the weights) are multiplied side by side and end in ``silu(gate) * up``, stored by place. Else rows are
    places, and a result times its slot's weight is stored by slot. With few slots the weights stand on the
    left, where the tensor cores want 64 rows.
    """
    num_tiles = tl.cdiv(num_out, BLOCK_O)
    if GROUP == 1:
        block, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    else:
        first_block = tl.program_id(0) // (GROUP * num_tiles) * GROUP
        place = tl.program_id(0) % (GROUP * num_tiles)
        together = tl.minimum(num_blocks - first_block, GROUP)
        block, tile = first_block + place % together, place // together
    out_O = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    is_out = out_O < num_out
    row_O = tl.where(is_out, out_O, 0).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.load(blocks_B3 + block * 3).to(tl.int64)
    first = tl.load(blocks_B3 + block * 3 + 1)
    num_slots = tl.load(blocks_B3 + block * 3 + 2)
    if num_slots == 0:
        return
    row_P = tl.arange(0, BLOCK_P)
    is_slot = row_P < num_slots
    place_P = first + tl.where(is_slot, row_P, 0)  # the others repeat the first one and are not stored
    slot_P = tl.load(slots_P + place_P)
    source_P = (slot_P // TOP_K if IS_GATE_UP else place_P).to(tl.int64)

    in_I = tl.arange(0, BLOCK_I)
    gate = weight_NOI + expert * weight_stride_n
    if WEIGHTS_LEFT:
        gate += row_O[:, None] * weight_stride_o + in_I[None, :]
        row = x + source_P[None, :] * x_stride + in_I[:, None]
        total = tl.zeros([BLOCK_O, BLOCK_P], dtype=tl.float32)
        second = tl.zeros([BLOCK_O, BLOCK_P], dtype=tl.float32)
    else:
        gate += row_O[None, :] * weight_stride_o + in_I[:, None]
        row = x + source_P[:, None] * x_stride + in_I[None, :]
        total = tl.zeros([BLOCK_P, BLOCK_O], dtype=tl.float32)
        second = tl.zeros([BLOCK_P, BLOCK_O], dtype=tl.float32)
    up = gate + num_out * weight_stride_o
    for start in range(0, NUM_IN, BLOCK_I):
        if WEIGHTS_LEFT:
            left = _load(gate + start, in_I[None, :] + start, NUM_IN, BLOCK_I)
            right = _load(row + start, in_I[:, None] + start, NUM_IN, BLOCK_I)
            total = tl.dot(left, right, total, input_precision="ieee")
            if IS_GATE_UP:
                left = _load(up + start, in_I[None, :] + start, NUM_IN, BLOCK_I)
                second = tl.dot(left, right, second, input_precision="ieee")
        else:
            left = _load(row + start, in_I[None, :] + start, NUM_IN, BLOCK_I)
            right = _load(gate + start, in_I[:, None] + start, NUM_IN, BLOCK_I)
            total = tl.dot(left, right, total, input_precision="ieee")
            if IS_GATE_UP:
                right = _load(up + start, in_I[:, None] + start, NUM_IN, BLOCK_I)
                second = tl.dot(left, right, second, input_precision="ieee")

    dtype = out.dtype.element_ty
    if IS_GATE_UP:
        # Rounded where separate steps would round.
        value, factor = total.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        value = (value / (1.0 + tl.exp(-value))).to(dtype).to(tl.float32) * factor
        target_P = place_P
    else:
        scale_P = tl.load(scales_P + slot_P)
        value = total * (scale_P[None, :] if WEIGHTS_LEFT else scale_P[:, None])
        target_P = slot_P
    start_P = target_P.to(tl.int64) * num_out
    if WEIGHTS_LEFT:
        tl.store(
            out + start_P[None, :] + out_O[:, None], value.to(dtype), mask=is_slot[None, :] & is_out[:, None]
        )
    else:
        tl.store(
            out + start_P[:, None] + out_O[None, :], value.to(dtype), mask=is_slot[:, None] & is_out[None, :]
        )


@triton.jit
def _load(pointer, column, NUM_IN: tl.constexpr, BLOCK_I: tl.constexpr):
    """A tile, with zeros behind the last column."""
    if NUM_IN % BLOCK_I == 0:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=column < NUM_IN, other=0.0)
