"""The Triton kernels of the cache write and of prefill and mixed batches (``triton_decode.py`` has decode).

A prefill program takes a tile of queries of the heads that share a key/value head, and walks the keys: first
the tiles of keys that every query of it sees, without any mask, then those at the edges. Programs are few
whatever the number of request slots, and take tiles by a stride, longest first. Everything data-dependent is
read on the device.

``EARLY`` kernels are launched while the kernel before them still runs, and let the next one start early too.
Before ``gdc_wait`` they read only the step's static inputs (starts, lengths, block table); they write
nothing.

Shapes: T tokens, H query heads, K key/value heads, D head size (padded to a power of 2), M rows of a query
tile, N keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.attention.triton_tiles import LOG2_E, attend_keys, clear_pad_rows

REQUESTS_AT_ONCE = tl.constexpr(256)

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
def prefill_attention_kernel(
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
    cache_stride_s,
    cache_stride_k,
    table_stride_b,
    table_stride_m,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_LOOP: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs (pack of query heads, tile of queries); a program takes every ``num_programs``-th tile.

    Tiles are numbered so that no table of tiles is needed: request b's begin at ``query_start_loc[b] //
    BLOCK_Q + b``, which leaves each request at least as many as it needs. They are taken from the last to the
    first, because the last tile of a request sees most keys.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    first_head = tl.program_id(0) * PACK
    kv_head = first_head // GROUP
    program = tl.program_id(1)
    dim = tl.arange(0, HEAD_PAD)
    is_dim = dim < HEAD_SIZE
    row = tl.arange(0, BLOCK_Q * PACK)
    token_in_tile = row // PACK
    head = first_head + row % PACK
    scale_log2 = scale * LOG2_E
    k_head = k_cache + kv_head * cache_stride_k
    v_head = v_cache + kv_head * cache_stride_k

    end_of_batch = tl.load(query_start_loc + num_reqs)
    num_used = _count_requests(query_start_loc, num_reqs, end_of_batch, 1, 0)
    num_tiles = end_of_batch // BLOCK_Q + num_used
    num_rounds = tl.cdiv(num_tiles - program, tl.num_programs(1))

    for round in range(0, num_rounds):
        tile = num_tiles - 1 - program - round * tl.num_programs(1)
        request = _count_requests(query_start_loc, num_reqs, tile + 1, BLOCK_Q, 1) - 1
        query_start = tl.load(query_start_loc + request)
        num_queries = tl.load(query_start_loc + request + 1) - query_start
        first_query = (tile - query_start // BLOCK_Q - request) * BLOCK_Q
        if first_query < num_queries:
            num_keys = tl.load(seq_lens + request)
            table_row = block_table + request * table_stride_b
            first_position = num_keys - num_queries + first_query
            position_M = first_position + token_in_tile
            token = (query_start + first_query + token_in_tile).to(tl.int64)
            is_element = (first_query + token_in_tile < num_queries)[:, None] & is_dim[None, :]
            query_pointer = (
                query_THD + token[:, None] * query_stride_t + head[:, None] * query_stride_h + dim[None, :]
            )
            if EARLY:
                # What came before are the step's static inputs; queries and keys are the last kernel's.
                tl.extra.cuda.gdc_wait()
            query_MD = tl.load(query_pointer, mask=is_element, other=0.0)
            best_M = tl.full([BLOCK_Q * PACK], float("-inf"), dtype=tl.float32)
            total_M = tl.zeros([BLOCK_Q * PACK], dtype=tl.float32)
            sum_MD = tl.zeros([BLOCK_Q * PACK, HEAD_PAD], dtype=tl.float32)

            # Keys up to the tile's last query; with a window, from the first key its first query sees.
            end_key = tl.minimum(first_position + BLOCK_Q, num_keys)
            first_key = 0
            if WINDOW > 0:
                first_key = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            if SPLIT_LOOP:
                # Every row sees the keys up to the first query's position, but for the window's edge.
                inner_end = (first_position + 1) // BLOCK_N * BLOCK_N
                if WINDOW > 0:
                    inner_start = tl.maximum(first_position + BLOCK_Q - WINDOW, 0)
                    inner_start = tl.minimum(tl.cdiv(inner_start, BLOCK_N) * BLOCK_N, end_key)
                    inner_start = tl.maximum(inner_start, first_key)
                    best_M, total_M, sum_MD = attend_keys(
                        query_MD, best_M, total_M, sum_MD, position_M, k_head, v_head, table_row, first_key,
                        inner_start, num_keys, scale_log2, cache_stride_s, table_stride_m,
                        HEAD_SIZE, BLOCK_SIZE, BLOCK_N, WINDOW, True, DOT_PRECISION,
                    )  # fmt: skip
                    first_key = inner_start
                    inner_end = tl.maximum(inner_end, first_key)
                best_M, total_M, sum_MD = attend_keys(
                    query_MD, best_M, total_M, sum_MD, position_M, k_head, v_head, table_row, first_key,
                    inner_end, num_keys, scale_log2, cache_stride_s, table_stride_m,
                    HEAD_SIZE, BLOCK_SIZE, BLOCK_N, WINDOW, False, DOT_PRECISION,
                )  # fmt: skip
                first_key = inner_end
            best_M, total_M, sum_MD = attend_keys(
                query_MD, best_M, total_M, sum_MD, position_M, k_head, v_head, table_row, first_key,
                end_key, num_keys, scale_log2, cache_stride_s, table_stride_m,
                HEAD_SIZE, BLOCK_SIZE, BLOCK_N, WINDOW, True, DOT_PRECISION,
            )  # fmt: skip

            # Rows that only fill the tile have no visible key when a window is short: keep their division
            # quiet.
            result_MD = sum_MD / tl.where(total_M > 0, total_M, 1.0)[:, None]
            out_pointer = (
                out_THD + token[:, None] * out_stride_t + head[:, None] * out_stride_h + dim[None, :]
            )
            tl.store(out_pointer, result_MD.to(out_THD.dtype.element_ty), mask=is_element)

    pad_row = end_of_batch // BLOCK_Q * BLOCK_Q + program * BLOCK_Q
    while pad_row < num_tokens:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        clear_pad_rows(
            out_THD, pad_row, end_of_batch, num_tokens, first_head, out_stride_t, out_stride_h,
            HEAD_SIZE, HEAD_PAD, PACK, BLOCK_Q,
        )  # fmt: skip
        pad_row += tl.num_programs(1) * BLOCK_Q


@triton.jit
def _count_requests(query_start_loc, num_reqs, bound, BLOCK_Q: tl.constexpr, STEP: tl.constexpr):
    """How many requests b have ``query_start_loc[b] // BLOCK_Q + b * STEP < bound``. Loads side by side: a
    binary search would wait for one after another."""
    count = 0
    for start in range(0, num_reqs, REQUESTS_AT_ONCE):
        request = start + tl.arange(0, REQUESTS_AT_ONCE)
        is_request = request < num_reqs
        first = tl.load(query_start_loc + request, mask=is_request, other=0)
        is_below = is_request & (first // BLOCK_Q + request * STEP < bound)
        count += tl.sum(is_below.to(tl.int32), 0)
    return count
