"""Triton kernels of matrix products with few rows on the left: ``out[t, o] = sum_i x[t, i] * weight[o, i]``.

With few tokens a product only reads its weights, and what counts is that the memory is never idle. Weights
are constant, so an early launch (see ``jit.py``) puts the first ones of every program in flight *before*
``gdc_wait``: they arrive while the kernel ahead ends. A program owns whole rows of the weights, so no sum is
shared between programs: results are deterministic, and a token's do not depend on the others' data. Sums are
float32. Only the number of columns is compiled in, because it decides how much is in flight.

Where rows are too few to keep every processor busy, ``PARTS`` programs may share the columns of the same
rows. Each writes its part of the sum, and the kernel behind adds them up (``summed_product.py``): always in
the same order, so results are still deterministic.

``gemv_kernel`` multiplies on the ordinary cores, for a token or a few; ``tile_kernel`` on the tensor cores,
weights on the left, so that up to a whole tile of tokens costs what one costs. Both may end in the gated
activation: then a program owns rows of gate and the same rows of up, interleaved. ``T`` tokens, ``I`` input
features, ``O`` rows of the weights a program owns. Read ``linear.py`` for the choice of tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.jit import prefetch

# mypy: allow-untyped-defs


@triton.jit
def gemv_kernel(
    x_TI,
    weight_OI,
    bias_O,
    out_TO,
    x_stride_t,
    weight_stride_o,
    num_out,
    NUM_IN: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    NUM_EARLY: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per ``BLOCK_O`` rows. ``NUM_EARLY`` blocks of columns (1 to 4) are in flight before the
    wait; the others follow in a loop."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    if IS_GATED:
        is_row = row_O < 2 * num_out
        row_O = row_O // 2 + row_O % 2 * num_out
    else:
        is_row = row_O < num_out
    column_I = tl.arange(0, BLOCK_I)
    weight = weight_OI + row_O.to(tl.int64)[:, None] * weight_stride_o + column_I[None, :]
    is_row = is_row[:, None]
    w0 = tl.load(weight, mask=is_row & (column_I < NUM_IN)[None, :], other=0.0)
    if NUM_EARLY > 1:
        w1 = tl.load(weight + BLOCK_I, mask=is_row & (column_I + BLOCK_I < NUM_IN)[None, :], other=0.0)
    if NUM_EARLY > 2:
        w2 = tl.load(
            weight + 2 * BLOCK_I, mask=is_row & (column_I + 2 * BLOCK_I < NUM_IN)[None, :], other=0.0
        )
    if NUM_EARLY > 3:
        w3 = tl.load(
            weight + 3 * BLOCK_I, mask=is_row & (column_I + 3 * BLOCK_I < NUM_IN)[None, :], other=0.0
        )
    if HAS_BIAS:
        bias = tl.load(bias_O + row_O[:, None], mask=is_row, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for token in tl.static_range(NUM_TOKENS):
        x = x_TI + token * x_stride_t + column_I
        product = _times(w0, x, column_I < NUM_IN)
        if NUM_EARLY > 1:
            product += _times(w1, x + BLOCK_I, column_I + BLOCK_I < NUM_IN)
        if NUM_EARLY > 2:
            product += _times(w2, x + 2 * BLOCK_I, column_I + 2 * BLOCK_I < NUM_IN)
        if NUM_EARLY > 3:
            product += _times(w3, x + 3 * BLOCK_I, column_I + 3 * BLOCK_I < NUM_IN)
        for start in range(NUM_EARLY * BLOCK_I, NUM_IN, BLOCK_I):
            is_column = column_I + start < NUM_IN
            late = tl.load(weight + start, mask=is_row & is_column[None, :], other=0.0)
            product += _times(late, x + start, is_column)
        sum_O1 = tl.sum(product, 1)[:, None]
        if HAS_BIAS:
            sum_O1 += bias
        _store(sum_O1, out_TO + token * num_out, num_out, 1, 1, BLOCK_O, IS_GATED)


@triton.jit(do_not_specialize=["num_tokens"])
def tile_kernel(
    x_TI,
    weight_OI,
    bias_O,
    out_TO,
    x_stride_t,
    weight_stride_o,
    num_out,
    num_tokens,
    NUM_IN: tl.constexpr,
    TOKENS_PAD: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
    PARTS: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per ``BLOCK_O`` rows and part of the columns, taken ``SPLIT * BLOCK_I`` at a time: each of
    ``SPLIT`` groups of warps multiplies its own ``BLOCK_I``, and their sums are added once, at the end.

    ``NUM_EARLY`` (0, 1 or 2) such steps are in flight before the wait; the others follow in a loop. The first
    ``PREFETCH`` columns of the loop are called into the second-level cache before the wait.

    With ``PARTS`` > 1, which divides ``NUM_IN``, ``out`` is float32 ``[PARTS, T, O]``, and there is neither a
    bias nor a gate.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    if IS_GATED:
        is_row_O = row_O < 2 * num_out
        row_O = row_O // 2 + row_O % 2 * num_out
    else:
        is_row_O = row_O < num_out
    NUM_COLUMNS: tl.constexpr = NUM_IN // PARTS
    if PARTS > 1:
        part = tl.program_id(1)
        x_TI += part * NUM_COLUMNS
        weight_OI += part * NUM_COLUMNS
        out_TO += part.to(tl.int64) * num_tokens * num_out
    if HAS_BIAS:
        bias = tl.load(bias_O + row_O[:, None], mask=is_row_O[:, None], other=0.0).to(tl.float32)
    sum_OT = multiply_tile(
        x_TI,
        weight_OI,
        row_O,
        is_row_O,
        2 * num_out - 1 if IS_GATED else num_out - 1,
        x_stride_t,
        weight_stride_o,
        num_tokens,
        NUM_COLUMNS,
        TOKENS_PAD,
        BLOCK_O,
        BLOCK_I,
        SPLIT,
        NUM_EARLY,
        PREFETCH,
        EARLY,
    )
    if HAS_BIAS:
        sum_OT += bias
    _store(sum_OT, out_TO, num_out, num_tokens, TOKENS_PAD, BLOCK_O, IS_GATED)


@triton.jit
def multiply_tile(
    x_TI,
    weight_OI,
    row_O,
    is_row_O,
    last_row,
    x_stride_t,
    weight_stride_o,
    num_tokens,
    NUM_COLUMNS: tl.constexpr,
    TOKENS_PAD: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``[BLOCK_O, TOKENS_PAD]`` in float32: rows ``row_O`` of the weights, those with ``is_row_O``, times the
    first ``num_tokens`` rows of ``x``, over ``NUM_COLUMNS`` columns; zeros elsewhere.

    Weights are asked for as ``tile_kernel`` says, and ``x`` behind the wait, which is in here.
    """
    token_T = tl.arange(0, TOKENS_PAD)
    column_I = tl.arange(0, BLOCK_I)
    if SPLIT > 1:
        start_S = tl.arange(0, SPLIT) * BLOCK_I
        column_left = start_S[:, None, None] + column_I[None, None, :]
        column_right = start_S[:, None, None] + column_I[None, :, None]
        row, is_row = row_O[None, :, None], is_row_O[None, :, None]
        token = token_T[None, None, :]
        total = tl.zeros([SPLIT, BLOCK_O, TOKENS_PAD], dtype=tl.float32)
    else:
        column_left, column_right = column_I[None, :], column_I[:, None]
        row, is_row = row_O[:, None], is_row_O[:, None]
        token = token_T[None, :]
        total = tl.zeros([BLOCK_O, TOKENS_PAD], dtype=tl.float32)
    weight = weight_OI + row.to(tl.int64) * weight_stride_o + column_left
    STEP: tl.constexpr = SPLIT * BLOCK_I
    if NUM_EARLY > 0:
        w0 = tl.load(weight, mask=is_row & (column_left < NUM_COLUMNS), other=0.0)
    if NUM_EARLY > 1:
        w1 = tl.load(weight + STEP, mask=is_row & (column_left + STEP < NUM_COLUMNS), other=0.0)
    if EARLY and PREFETCH > 0:
        line = tl.arange(0, PREFETCH // 64) * 64 + NUM_EARLY * STEP
        line = tl.minimum(line, NUM_COLUMNS - 1)[None, :]
        prefetch(weight_OI + tl.minimum(row_O, last_row).to(tl.int64)[:, None] * weight_stride_o + line)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    x = x_TI + token * x_stride_t + column_right
    is_token = token < num_tokens
    if NUM_EARLY > 0:
        total = tl.dot(w0, tl.load(x, mask=is_token & (column_right < NUM_COLUMNS), other=0.0), total)
    if NUM_EARLY > 1:
        x1 = tl.load(x + STEP, mask=is_token & (column_right + STEP < NUM_COLUMNS), other=0.0)
        total = tl.dot(w1, x1, total)
    for start in range(NUM_EARLY * STEP, NUM_COLUMNS, STEP):
        late = tl.load(weight + start, mask=is_row & (column_left + start < NUM_COLUMNS), other=0.0)
        x_late = tl.load(x + start, mask=is_token & (column_right + start < NUM_COLUMNS), other=0.0)
        total = tl.dot(late, x_late, total)
    return tl.sum(total, 0) if SPLIT > 1 else total


@triton.jit
def _times(weight_OI, x, is_column):
    x_I = tl.load(x, mask=is_column, other=0.0).to(tl.float32)
    return weight_OI.to(tl.float32) * x_I[None, :]


@triton.jit
def _store(
    sum_OT,
    out_TO,
    num_out,
    num_tokens,
    TOKENS_PAD: tl.constexpr,
    BLOCK_O: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Round and write. Gate and up are rounded first, silu before its product: as in separate steps."""
    dtype = out_TO.dtype.element_ty
    token_T = tl.arange(0, TOKENS_PAD)[None, :]
    if IS_GATED:
        pair_OT2 = tl.reshape(sum_OT, [BLOCK_O // 2, 2, TOKENS_PAD]).to(dtype).to(tl.float32)
        gate, up = tl.split(tl.permute(pair_OT2, (0, 2, 1)))
        value = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
        out_O = tl.program_id(0) * (BLOCK_O // 2) + tl.arange(0, BLOCK_O // 2)
    else:
        value = sum_OT
        out_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    out_O = out_O[:, None]
    target = out_TO + token_T.to(tl.int64) * num_out + out_O
    tl.store(target, value.to(dtype), mask=(out_O < num_out) & (token_T < num_tokens))
