"""The Triton kernel of a head that picks: logits of a chunk of the vocabulary, and the best of each row.

Logits stay in registers: they are rounded as the product would have been, and each program reduces its own
to one value and one index per row (``best_of_row_kernel`` picks among those). So a greedy step neither
writes nor reads ``[R, V]``; only where a flag on the device asks for them, float32 logits are written too.

A logit and its place are one integer while they are compared: the value's bits, ordered as the values are,
above 13 bits that count down. A half-precision number widened to float32 leaves those 13 empty. So one
maximum finds the best value and, among equals, the lowest place. NaN, whatever its sign, is above all of
them, and zeros of either sign are equal.

``R`` sampled rows, ``E`` hidden size, ``V`` vocabulary, ``C`` chunks of it, ``O`` tokens of a chunk. Read
``head_product.py`` for the launch, ``linear_jit.py`` for how weights are read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.linear_jit import multiply_tile

# mypy: allow-untyped-defs


@triton.jit(do_not_specialize=["num_rows"])
def head_product_kernel(
    hidden_RE,
    weight_VE,
    logits_RV,
    needs_logits_1,
    best_RC,
    index_RC,
    hidden_stride_r,
    weight_stride_v,
    logits_stride_r,
    size,
    num_rows,
    NUM_IN: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program per ``ROWS_PAD`` rows (first, so that those with the same weights run side by side) and chunk
    of ``BLOCK_O`` tokens, at most 8,192. The other constants are those of ``linear_jit.tile_kernel``.

    ``size``: the vocabulary. ``hidden`` is in half precision; ``best`` and ``index`` are contiguous.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * ROWS_PAD
    chunk = tl.program_id(1)
    place_O = tl.arange(0, BLOCK_O)
    token_O = chunk * BLOCK_O + place_O
    is_token_O = token_O < size
    sum_OR = multiply_tile(
        hidden_RE + first_row.to(tl.int64) * hidden_stride_r,
        weight_VE,
        token_O,
        is_token_O,
        size - 1,
        hidden_stride_r,
        weight_stride_v,
        num_rows - first_row,
        NUM_IN,
        ROWS_PAD,
        BLOCK_O,
        BLOCK_I,
        SPLIT,
        NUM_EARLY,
        PREFETCH,
        EARLY,
    )
    needs_logits = tl.load(needs_logits_1)  # asked for here, so that it arrives while the best is found
    if EARLY:
        value_OR = _rounded(sum_OR, hidden_RE.dtype.element_ty)
    else:
        value_OR = sum_OR.to(hidden_RE.dtype.element_ty).to(tl.float32)
    row_R = first_row + tl.arange(0, ROWS_PAD)
    is_row_R = row_R < num_rows

    key_OR = _ordered((value_OR + 0.0).to(tl.int32, bitcast=True)) & -8192  # the sum makes -0 a 0
    key_OR = tl.where(value_OR == value_OR, key_OR, 0x7FFFE000) | (8191 - place_O)[:, None]
    key_R = tl.max(tl.where(is_token_O[:, None], key_OR, -0x7FFFFFFF), 0)
    target_R = row_R.to(tl.int64) * tl.num_programs(1) + chunk
    tl.store(best_RC + target_R, _value(key_R), mask=is_row_R)
    tl.store(index_RC + target_R, chunk * BLOCK_O + (8191 - (key_R & 8191)), mask=is_row_R)
    if needs_logits != 0:  # from the keys again, so that there are registers for one of the two only
        logit = logits_RV + row_R.to(tl.int64)[None, :] * logits_stride_r + token_O[:, None]
        is_logit = is_token_O[:, None] & is_row_R[None, :]
        if EARLY:
            _store_as_they_lie(logit, _value(key_OR), is_logit)
        else:
            tl.store(logit, _value(key_OR), mask=is_logit)


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    """``value`` as ``dtype`` would hold it, two at a time; on GPUs only. The compiler takes them one by one,
    and to float16 in a way for which the assembler lets no two products of the loop overlap (C7514)."""
    if dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $1, $3, $2; shl.b32 $0, $1, 16; and.b32 $1, $1, 0xffff0000;",
            "=&r,=&r,r,r",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        result = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.f16x2.f32 $1, $3, $2; mov.b32 {low, high}, $1;"
            "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=&r,=&r,r,r",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return result


@triton.jit
def _store_as_they_lie(pointer, value, is_written):
    """``tl.store`` of float32, on GPUs only. Where the tensor cores leave a logit, eight neighbours lie in
    one column of a warp: whole sectors. For a store of its own the compiler would bring them into another
    order, and it does so in front of the branch, in every step."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,f,r",
        [pointer.to(tl.int64, bitcast=True), value, is_written.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _value(key):
    """The logit in a key."""
    return (_ordered(key) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _ordered(bits):
    """Integers that compare as the float32 numbers of these bits do; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
