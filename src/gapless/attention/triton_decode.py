"""Decode by Triton: every request is one tile of queries, and its keys are split among programs.

The number of splits is part of the grid and fixed by the bucket; how many keys each takes follows from the
request's length on the device, so short requests use few splits and the others end at once. Each split
leaves its running softmax in scratch memory; ``combine_splits_kernel`` merges them in the order of the splits
(never of arrival), so results are the same from run to run. A request of one split writes its output
directly.

Scratch is written before it is read in every launch, and nothing persists between launches. An early launch
(``kernels/jit.py``) begins while the kernel ahead still runs: memory would be idle then. It calls keys of
earlier steps into the second-level cache, and with ``LOADS_EARLY`` it loads the first tiles of them: the wait
is inside the first round of the loop over keys, and the compiler's pipeline has copied what comes before it
by then. So the loop leaves this step's own key out, with which the softmax begins. Invariant: keys of earlier
steps are in the cache before the first kernel of a step starts.

Shapes: B requests, P packs of query heads (the heads of a key/value head), M rows of a query tile, S splits,
N keys of a tile, D head size padded to a power of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.attention.decode_rotation import begin_with_new_key, load_angles
from gapless.attention.triton_tiles import LOG2_E, attend_keys, attend_tile, clear_pad_rows, find_slots
from gapless.kernels.jit import prefetch

# mypy: allow-untyped-defs


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "min_keys", "table_stride_b", "table_stride_m"])
def decode_attention_kernel(
    query_THD,
    k_cache,
    v_cache,
    out_THD,
    part_BPSMD,
    stat_BPS2M,
    query_start_loc,
    seq_lens,
    block_table,
    norm_weight_GD,
    rope_P2F,
    positions_T,
    num_reqs,
    num_tokens,
    min_keys,
    scale,
    eps,
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
    GROUP_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    CALLED_AHEAD: tl.constexpr,
    LOADS_EARLY: tl.constexpr,
    ROTATED_ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs (key/value head, request, split). ``CALLED_AHEAD`` keys of a program are called ahead.

    ``ROTATED_ROWS`` > 0: a request has one query at most, and ``query`` holds the rows of the q/k/v product,
    whose queries and keys are normed and rotated here, in tiles of so many rows (``decode_rotation.py``), and
    whose keys and values are stored here. ``LOADS_EARLY`` only then.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    split = tl.program_id(2)
    query_start = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1) - query_start
    num_keys = tl.load(seq_lens + request)
    end_of_batch = tl.load(query_start_loc + num_reqs)
    num_splits = tl.num_programs(2)
    first_key, keys_per_split, num_used = share_keys(
        num_keys, num_queries, num_splits, min_keys, BLOCK_N, WINDOW
    )
    first_key += split * keys_per_split
    end_key = tl.minimum(first_key + keys_per_split, num_keys)
    k_head, v_head = k_cache + kv_head * cache_stride_k, v_cache + kv_head * cache_stride_k
    table_row = block_table + request * table_stride_b
    end_early = tl.minimum(end_key, num_keys - num_queries)
    is_used = (num_queries > 0) & (split < num_used)
    if EARLY and CALLED_AHEAD > 0 and is_used:
        call_ahead(
            k_head, v_head, table_row, first_key, end_early, cache_stride_s, table_stride_m,
            HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, CALLED_AHEAD,
        )  # fmt: skip
    if not is_used:
        if split == 0:
            if EARLY:
                tl.extra.cuda.gdc_wait()
            clear_pad_rows(
                out_THD, request * BLOCK_Q, end_of_batch, num_tokens, kv_head * GROUP, out_stride_t,
                out_stride_h, HEAD_SIZE, HEAD_PAD, GROUP, BLOCK_Q,
            )  # fmt: skip
        return

    dim = tl.arange(0, HEAD_PAD)
    is_dim = (dim < HEAD_SIZE)[None, :]
    row = tl.arange(0, BLOCK_Q * GROUP_PAD)
    query = row // GROUP_PAD
    token = (query_start + query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP_PAD
    is_row = (query < num_queries) & (row % GROUP_PAD < GROUP)
    is_element = is_row[:, None] & is_dim
    position_M = num_keys - num_queries + query
    query_pointer = (
        query_THD + token[:, None] * query_stride_t + head[:, None] * query_stride_h + dim[None, :]
    )
    best_M = tl.full([BLOCK_Q * GROUP_PAD], float("-inf"), dtype=tl.float32)
    total_M = tl.zeros([BLOCK_Q * GROUP_PAD], dtype=tl.float32)
    sum_MD = tl.zeros([BLOCK_Q * GROUP_PAD, HEAD_PAD], dtype=tl.float32)
    if ROTATED_ROWS > 0:
        last_key = num_keys - 1
        new_block = tl.load(table_row + last_key // BLOCK_SIZE * table_stride_m).to(tl.int64)
        new_place = (new_block * BLOCK_SIZE + last_key % BLOCK_SIZE) * cache_stride_s
        qkv_row = query_THD + query_start.to(tl.int64) * query_stride_t
        place = (query_start, kv_head, tl.num_programs(0))
        angles = load_angles(rope_P2F, positions_T, query_start, HEAD_SIZE, HEAD_PAD, HAS_POSITIONS)
    if LOADS_EARLY:
        query_MD = tl.zeros([BLOCK_Q * GROUP_PAD, HEAD_PAD], dtype=query_THD.dtype.element_ty)
        slot_N = find_slots(table_row, first_key, end_early, table_stride_m, BLOCK_SIZE, BLOCK_N, True)
        # One round at least, for the wait that is in it.
        for start in range(first_key, tl.maximum(end_early, first_key + 1), BLOCK_N):
            key_N = start + tl.arange(0, BLOCK_N)
            offset_ND = (slot_N.to(tl.int64) * cache_stride_s)[:, None] + dim[None, :]
            slot_N = find_slots(
                table_row, start + BLOCK_N, end_early, table_stride_m, BLOCK_SIZE, BLOCK_N, True
            )
            is_cached = (key_N < end_early)[:, None] & is_dim
            keys_ND = tl.load(k_head + offset_ND, mask=is_cached, other=0.0)
            values_ND = tl.load(v_head + offset_ND, mask=is_cached, other=0.0)
            if start == first_key:
                if EARLY:
                    tl.extra.cuda.gdc_wait()
                query_MD, best_M, total_M, sum_MD = begin_with_new_key(
                    qkv_row, k_head + new_place, v_head + new_place, norm_weight_GD, rope_P2F, angles, place,
                    eps, scale * LOG2_E, end_key == num_keys, HEAD_SIZE, HEAD_PAD, GROUP, ROTATED_ROWS,
                    BLOCK_Q * GROUP_PAD, HAS_NORM, HAS_POSITIONS,
                )  # fmt: skip
            best_M, total_M, sum_MD = attend_tile(
                query_MD, best_M, total_M, sum_MD, position_M, keys_ND, values_ND, key_N, end_early,
                scale * LOG2_E, WINDOW, True, DOT_PRECISION,
            )  # fmt: skip
    else:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        if ROTATED_ROWS > 0:
            query_MD, best_M, total_M, sum_MD = begin_with_new_key(
                qkv_row, k_head + new_place, v_head + new_place, norm_weight_GD, rope_P2F, angles, place,
                eps, scale * LOG2_E, end_key == num_keys, HEAD_SIZE, HEAD_PAD, GROUP, ROTATED_ROWS,
                BLOCK_Q * GROUP_PAD, HAS_NORM, HAS_POSITIONS,
            )  # fmt: skip
            end_key, num_keys = end_early, end_early
        else:
            query_MD = tl.load(query_pointer, mask=is_element, other=0.0)
        best_M, total_M, sum_MD = attend_keys(
            query_MD, best_M, total_M, sum_MD, position_M, k_head, v_head, table_row, first_key, end_key,
            num_keys, scale * LOG2_E, cache_stride_s, table_stride_m, HEAD_SIZE, BLOCK_SIZE, BLOCK_N, WINDOW,
            True, DOT_PRECISION,
        )  # fmt: skip
    if split == 0:
        clear_pad_rows(
            out_THD, request * BLOCK_Q, end_of_batch, num_tokens, kv_head * GROUP, out_stride_t, out_stride_h,
            HEAD_SIZE, HEAD_PAD, GROUP, BLOCK_Q,
        )  # fmt: skip

    if num_used == 1:
        result_MD = sum_MD / tl.where(total_M > 0, total_M, 1.0)[:, None]
        out_pointer = out_THD + token[:, None] * out_stride_t + head[:, None] * out_stride_h + dim[None, :]
        tl.store(out_pointer, result_MD.to(out_THD.dtype.element_ty), mask=is_element)
    else:
        first = ((request * tl.num_programs(0) + kv_head) * num_splits + split).to(tl.int64)
        first = first * (BLOCK_Q * GROUP_PAD)
        tl.store(stat_BPS2M + 2 * first + row, best_M, mask=is_row)
        tl.store(stat_BPS2M + 2 * first + BLOCK_Q * GROUP_PAD + row, total_M, mask=is_row)
        part = part_BPSMD + (first + row)[:, None] * HEAD_PAD + dim[None, :]
        tl.store(part, sum_MD, mask=is_element)


@triton.jit(do_not_specialize=["num_splits", "min_keys"])
def combine_splits_kernel(
    part_BPSMD,
    stat_BPS2M,
    out_THD,
    query_start_loc,
    seq_lens,
    num_splits,
    min_keys,
    out_stride_t,
    out_stride_h,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs (query head, request, query): the weighted mean of what the splits found."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    request = tl.program_id(1)
    query = tl.program_id(2)
    query_start = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1) - query_start
    num_keys = tl.load(seq_lens + request)
    _, _, num_used = share_keys(num_keys, num_queries, num_splits, min_keys, BLOCK_N, WINDOW)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if (query >= num_queries) | (num_used <= 1):
        return

    dim = tl.arange(0, HEAD_PAD)
    split = tl.arange(0, SPLITS_PAD)
    is_used = split < num_used
    num_kv_heads = tl.num_programs(0) // GROUP
    place = ((request * num_kv_heads + head // GROUP) * num_splits + split).to(tl.int64)
    place = place * (BLOCK_Q * GROUP_PAD)
    row = query * GROUP_PAD + head % GROUP
    best_S = tl.load(stat_BPS2M + 2 * place + row, mask=is_used, other=float("-inf"))
    total_S = tl.load(stat_BPS2M + 2 * place + BLOCK_Q * GROUP_PAD + row, mask=is_used, other=0.0)
    part = part_BPSMD + (place + row)[:, None] * HEAD_PAD + dim[None, :]
    part_SD = tl.load(part, mask=is_used[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0)
    # Some split holds the query's own key, so the best of them is finite.
    weight_S = tl.exp2(best_S - tl.max(best_S, 0))
    result_D = tl.sum(part_SD * weight_S[:, None], 0) / tl.sum(total_S * weight_S, 0)
    out = out_THD + (query_start + query).to(tl.int64) * out_stride_t + head * out_stride_h + dim
    tl.store(out, result_D.to(out_THD.dtype.element_ty), mask=dim < HEAD_SIZE)


@triton.jit
def share_keys(num_keys, num_queries, num_splits, min_keys, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """First key of a request; keys of each split, a multiple of ``BLOCK_N``; how many splits have any."""
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(num_keys - num_queries - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    keys_per_split = tl.maximum(tl.cdiv(num_keys - first_key, num_splits), min_keys)
    keys_per_split = tl.cdiv(keys_per_split, BLOCK_N) * BLOCK_N
    return first_key, keys_per_split, tl.cdiv(num_keys - first_key, keys_per_split)


@triton.jit
def call_ahead(
    k_head,
    v_head,
    table_row,
    first_key,
    end_key,
    cache_stride_s,
    table_stride_m,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Ask for the first ``COUNT`` of keys ``first_key : end_key``, and their values, line by line. Where
    there are fewer, block 0 is asked for."""
    key_N = first_key + tl.arange(0, COUNT)
    block_N = tl.load(table_row + key_N // BLOCK_SIZE * table_stride_m, mask=key_N < end_key, other=0)
    slot_N = block_N * BLOCK_SIZE + key_N % BLOCK_SIZE
    LINE: tl.constexpr = 1024 // k_head.dtype.element_ty.primitive_bitwidth
    first_D = tl.arange(0, HEAD_PAD // LINE if HEAD_PAD > LINE else 1) * LINE
    offset_ND = (slot_N.to(tl.int64) * cache_stride_s)[:, None] + tl.minimum(first_D, HEAD_SIZE - 1)[None, :]
    prefetch(k_head + offset_ND)
    prefetch(v_head + offset_ND)
