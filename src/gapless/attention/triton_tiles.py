"""What the Triton attention kernels share: the loop over tiles of keys, and the store of a finished tile.

The running softmax keeps, per query row, the best score so far (in units of log2), the total of the weights
and the weighted sum of values. Invariants: a cache slot at or past ``num_keys`` is never read, because it may
hold NaN and NaN times a zero weight is NaN; tiles begin at multiples of ``BLOCK_N``. Read
``triton_kernels.py`` (prefill) and ``triton_decode.py`` for who calls this.

Shapes: M rows of a query tile (token by token, the heads of a pack within), N keys of a tile, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton reads global names as compile-time constants only when they are tl.constexpr.
LOG2_E = tl.constexpr(1.4426950408889634)

# mypy: allow-untyped-defs


@triton.jit
def attend_keys(
    query_MD,
    best_M,
    total_M,
    sum_MD,
    position_M,
    k_head,
    v_head,
    table_row,
    first_key,
    end_key,
    num_keys,
    scale_log2,
    cache_stride_s,
    table_stride_m,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """The running softmax over keys ``first_key : end_key``. Unmasked tiles must be visible to every row.

    Where the keys of a tile lie is looked up one tile ahead and carried along in registers: left in the loop,
    the compiler's pipeline spends two of its stages on the block table instead of on keys and values.
    """
    dim = tl.arange(0, query_MD.shape[1])
    is_dim = (dim < HEAD_SIZE)[None, :]
    k_dim, v_dim = (k_head + dim)[None, :], (v_head + dim)[None, :]
    # There may be no tile at all, and none past the last one: unmasked, that is looked up once more instead.
    first_bound = num_keys if MASKED else end_key
    last_key = num_keys if MASKED else end_key - BLOCK_N
    slot_N = find_slots(table_row, first_key, first_bound, table_stride_m, BLOCK_SIZE, BLOCK_N, True)
    for start in range(first_key, end_key, BLOCK_N):
        row_N1 = (slot_N.to(tl.int64) * cache_stride_s)[:, None]
        slot_N = find_slots(table_row, start + BLOCK_N, last_key, table_stride_m, BLOCK_SIZE, BLOCK_N, MASKED)
        key_N = start + tl.arange(0, BLOCK_N)
        if MASKED:
            is_cached = (key_N < num_keys)[:, None] & is_dim
            keys_ND = tl.load(k_dim + row_N1, mask=is_cached, other=0.0)
            values_ND = tl.load(v_dim + row_N1, mask=is_cached, other=0.0)
        elif query_MD.shape[1] == HEAD_SIZE:
            keys_ND = tl.load(k_dim + row_N1)
            values_ND = tl.load(v_dim + row_N1)
        else:
            keys_ND = tl.load(k_dim + row_N1, mask=is_dim, other=0.0)
            values_ND = tl.load(v_dim + row_N1, mask=is_dim, other=0.0)
        best_M, total_M, sum_MD = attend_tile(
            query_MD, best_M, total_M, sum_MD, position_M, keys_ND, values_ND, key_N, num_keys, scale_log2,
            WINDOW, MASKED, DOT_PRECISION,
        )  # fmt: skip
    return best_M, total_M, sum_MD


@triton.jit
def attend_tile(
    query_MD,
    best_M,
    total_M,
    sum_MD,
    position_M,
    keys_ND,
    values_ND,
    key_N,
    num_keys,
    scale_log2,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """One step of the running softmax: a tile of keys and values that has been loaded. Masked: keys at and
    past ``num_keys`` count for nothing."""
    score_MN = tl.dot(query_MD, tl.trans(keys_ND), input_precision=DOT_PRECISION)
    if MASKED:
        visible_MN = (key_N[None, :] <= position_M[:, None]) & (key_N < num_keys)[None, :]
        if WINDOW > 0:
            visible_MN = visible_MN & (key_N[None, :] > position_M[:, None] - WINDOW)
        score_MN = tl.where(visible_MN, score_MN, float("-inf"))
    new_best_M = tl.maximum(best_M, tl.max(score_MN, 1) * scale_log2)
    pivot_M = new_best_M
    if MASKED:
        # A row may have seen no key yet: -inf minus -inf would be NaN.
        pivot_M = tl.where(new_best_M == float("-inf"), 0.0, new_best_M)
    weight_MN = tl.exp2(score_MN * scale_log2 - pivot_M[:, None])
    decay_M = tl.exp2(best_M - pivot_M)
    total_M = total_M * decay_M + tl.sum(weight_MN, 1)
    sum_MD = sum_MD * decay_M[:, None]
    sum_MD = tl.dot(weight_MN.to(values_ND.dtype), values_ND, sum_MD, input_precision=DOT_PRECISION)
    return new_best_M, total_M, sum_MD


@triton.jit
def clear_pad_rows(
    out_THD,
    first_row,
    end_of_batch,
    num_tokens,
    first_head,
    out_stride_t,
    out_stride_h,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
):
    """Zeros to the rows of ``first_row : first_row + NUM_ROWS`` that lie past the last request."""
    if first_row + NUM_ROWS > end_of_batch:
        dim = tl.arange(0, HEAD_PAD)
        pad_row = first_row + tl.arange(0, NUM_ROWS)
        is_pad = (pad_row >= end_of_batch) & (pad_row < num_tokens)
        is_element = is_pad[:, None] & (dim < HEAD_SIZE)[None, :]
        zeros = tl.zeros([NUM_ROWS, HEAD_PAD], dtype=tl.float32).to(out_THD.dtype.element_ty)
        row = out_THD + pad_row.to(tl.int64)[:, None] * out_stride_t + dim[None, :]
        for head in range(first_head, first_head + NUM_HEADS):
            tl.store(row + head * out_stride_h, zeros, mask=is_element)


@triton.jit
def find_slots(
    table_row,
    start,
    last_key,
    table_stride_m,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The cache slot of each key of the tile at ``start``. Masked: entries of the block table at and past
    ``last_key`` are not looked at. Unmasked: of the tile at ``last_key`` if that comes first."""
    offset_N = tl.arange(0, BLOCK_N)
    if not MASKED:
        start = tl.minimum(start, last_key)
    if BLOCK_SIZE % BLOCK_N == 0:
        # The tile lies within one block.
        entry = table_row + start // BLOCK_SIZE * table_stride_m
        block = tl.load(entry, mask=start < last_key, other=0) if MASKED else tl.load(entry)
        return block * BLOCK_SIZE + start % BLOCK_SIZE + offset_N
    if BLOCK_N % BLOCK_SIZE == 0:
        in_block_N = offset_N % BLOCK_SIZE
        entry_N = table_row + start // BLOCK_SIZE * table_stride_m + offset_N // BLOCK_SIZE * table_stride_m
    else:
        in_block_N = (start + offset_N) % BLOCK_SIZE
        entry_N = table_row + (start + offset_N) // BLOCK_SIZE * table_stride_m
    block_N = tl.load(entry_N, mask=start + offset_N < last_key, other=0) if MASKED else tl.load(entry_N)
    return block_N * BLOCK_SIZE + in_block_N
