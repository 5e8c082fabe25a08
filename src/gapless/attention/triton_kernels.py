"""The Triton kernels behind ``triton_paged.py``: write to the paged cache, and attend over it.

Apart so that only a program that uses them imports Triton. ``TRITON_INTERPRET=1`` before the first import
runs them on CPU tensors (that is how they are tested without a GPU). Nothing here reads data on the host: a
launch depends on shapes and host upper bounds only, so a captured launch is right for every batch that fits.

Shapes in names: T tokens, B requests, H query heads, K key/value heads, G = H / K, D head size, N cache
blocks, S slots per block. A program's tile holds ``BLOCK_M = BLOCK_Q * GROUP_PAD`` rows: BLOCK_Q query tokens
times the heads that share one key/value head, so keys and values are loaded once for the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton reads global names as compile-time constants only when they are tl.constexpr.
LOG2_E = tl.constexpr(1.4426950408889634)

# mypy: allow-untyped-defs


@triton.jit
def write_kv_kernel(
    key_TKD,
    value_TKD,
    k_cache,
    v_cache,
    slot_mapping,
    key_stride_t,
    key_stride_k,
    value_stride_t,
    value_stride_k,
    cache_stride_n,
    cache_stride_s,
    cache_stride_k,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_PAD: tl.constexpr,
):
    """One program per token: copy its keys and values of all heads to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    element = tl.arange(0, ROW_PAD)
    head = element // HEAD_SIZE
    dim = element % HEAD_SIZE
    in_row = element < NUM_KV_HEADS * HEAD_SIZE
    target = (
        slot // BLOCK_SIZE * cache_stride_n + slot % BLOCK_SIZE * cache_stride_s + head * cache_stride_k + dim
    )
    key = tl.load(key_TKD + token * key_stride_t + head * key_stride_k + dim, mask=in_row)
    value = tl.load(value_TKD + token * value_stride_t + head * value_stride_k + dim, mask=in_row)
    tl.store(k_cache + target, key.to(k_cache.dtype.element_ty), mask=in_row)
    tl.store(v_cache + target, value.to(v_cache.dtype.element_ty), mask=in_row)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "table_stride_b", "table_stride_m"])
def paged_attention_kernel(
    query_THD,
    k_cache,
    v_cache,
    out_THD,
    query_start_loc,
    seq_lens,
    block_table,
    num_reqs,
    num_tokens,
    scale,
    query_stride_t,
    query_stride_h,
    out_stride_t,
    out_stride_h,
    cache_stride_n,
    cache_stride_s,
    cache_stride_k,
    table_stride_b,
    table_stride_m,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    ONE_TILE_PER_REQUEST: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """One program per (query tile, key/value head). ``WINDOW`` 0 means all keys.

    Tiles are numbered so that no table of tiles is needed: request b's begin at ``query_start_loc[b] //
    BLOCK_Q + b``, which leaves each request at least as many as it needs; a binary search over b inverts
    that.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    dim = tl.arange(0, HEAD_PAD)
    is_dim = dim < HEAD_SIZE

    # Pad rows: every program clears its share of the rows past the last request.
    end_of_batch = tl.load(query_start_loc + num_reqs)
    if (tile + 1) * BLOCK_Q > end_of_batch:
        pad_row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
        is_pad = (pad_row >= end_of_batch) & (pad_row < num_tokens)
        zeros = tl.zeros([BLOCK_Q, HEAD_PAD], dtype=tl.float32).to(out_THD.dtype.element_ty)
        for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
            pointer = (
                out_THD + pad_row.to(tl.int64)[:, None] * out_stride_t + head * out_stride_h + dim[None, :]
            )
            tl.store(pointer, zeros, mask=is_pad[:, None] & is_dim[None, :])

    if ONE_TILE_PER_REQUEST:
        request = tile
        query_start = tl.load(query_start_loc + request)
        first_query = 0
    else:
        request = 0
        above = num_reqs
        while above - request > 1:
            middle = (request + above) // 2
            if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= tile:
                request = middle
            else:
                above = middle
        query_start = tl.load(query_start_loc + request)
        first_query = (tile - query_start // BLOCK_Q - request) * BLOCK_Q
    num_queries = tl.load(query_start_loc + request + 1) - query_start
    if first_query >= num_queries:
        return

    num_keys = tl.load(seq_lens + request)
    first_position = num_keys - num_queries + first_query
    row = tl.arange(0, BLOCK_Q * GROUP_PAD)
    token_in_tile = row // GROUP_PAD
    head_in_group = row % GROUP_PAD
    position_M = first_position + token_in_tile
    is_row = (first_query + token_in_tile < num_queries) & (head_in_group < GROUP)
    token = (query_start + first_query + token_in_tile).to(tl.int64)
    head = kv_head * GROUP + head_in_group
    is_element = is_row[:, None] & is_dim[None, :]
    query_pointer = (
        query_THD + token[:, None] * query_stride_t + head[:, None] * query_stride_h + dim[None, :]
    )
    query_MD = tl.load(query_pointer, mask=is_element, other=0.0)

    best_M = tl.full([BLOCK_Q * GROUP_PAD], float("-inf"), dtype=tl.float32)
    total_M = tl.zeros([BLOCK_Q * GROUP_PAD], dtype=tl.float32)
    sum_MD = tl.zeros([BLOCK_Q * GROUP_PAD, HEAD_PAD], dtype=tl.float32)
    # Keys up to the tile's last query; with a window, from the first key its first query sees.
    end_key = tl.minimum(first_position + BLOCK_Q, num_keys)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    scale_log2 = scale * LOG2_E
    for start in range(first_key, end_key, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        # Masked by length: slots past it may never have been written, and NaN times a zero weight is NaN.
        is_key = key_N < num_keys
        column_N = key_N // BLOCK_SIZE * table_stride_m
        block_N = tl.load(block_table + request * table_stride_b + column_N, mask=is_key, other=0)
        slot_N = block_N.to(tl.int64) * cache_stride_n + (key_N % BLOCK_SIZE) * cache_stride_s
        slot_N += kv_head * cache_stride_k
        is_cached = is_key[:, None] & is_dim[None, :]
        keys_ND = tl.load(k_cache + slot_N[:, None] + dim[None, :], mask=is_cached, other=0.0)
        score_MN = tl.dot(query_MD, tl.trans(keys_ND), input_precision=DOT_PRECISION) * scale_log2
        visible_MN = (key_N[None, :] <= position_M[:, None]) & is_key[None, :]
        if WINDOW > 0:
            visible_MN = visible_MN & (key_N[None, :] > position_M[:, None] - WINDOW)
        score_MN = tl.where(visible_MN, score_MN, float("-inf"))
        new_best_M = tl.maximum(best_M, tl.max(score_MN, 1))
        # A row may have seen no key yet (window): -inf minus -inf would be NaN.
        pivot_M = tl.where(new_best_M == float("-inf"), 0.0, new_best_M)
        weight_MN = tl.exp2(score_MN - pivot_M[:, None])
        decay_M = tl.exp2(best_M - pivot_M)
        total_M = total_M * decay_M + tl.sum(weight_MN, 1)
        values_ND = tl.load(v_cache + slot_N[:, None] + dim[None, :], mask=is_cached, other=0.0)
        sum_MD = sum_MD * decay_M[:, None]
        sum_MD += tl.dot(weight_MN.to(values_ND.dtype), values_ND, input_precision=DOT_PRECISION)
        best_M = new_best_M

    # Rows that only fill the tile have no visible key when a window is short: keep their division quiet.
    result_MD = sum_MD / tl.where(total_M > 0, total_M, 1.0)[:, None]
    out_pointer = out_THD + token[:, None] * out_stride_t + head[:, None] * out_stride_h + dim[None, :]
    tl.store(out_pointer, result_MD.to(out_THD.dtype.element_ty), mask=is_element)
