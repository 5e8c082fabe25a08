"""Prefill attention for Hopper with roles: some warps only copy keys and values, the others only compute.

``hopper_kernels.py`` has all warps do both, in step with each other. Here a producer fills a ring of tiles
and two (or three) consumers of four warps empty it, each with 64 rows of queries, tied to each other by
nothing but the ring: while one computes its softmax, the products of another run. ``USE_TMA`` says how tiles
come: the copy engine brings a page at a time (one warp starts it), or four warps gather rows.

What the arguments mean and how tiles of queries are numbered is as in ``triton_kernels.py``; the order of
keys, last to first, as in ``hopper_kernels.py``. Programs go through tiles back and forth
(``tile_of_round``), so that whoever got a heavy tile gets a light one next. Invariants: a slot of the ring
is filled only after every consumer has said that it is done with what was in it, and read only after the
producer's barrier; each role goes through the same tiles in the same order. ``hopper_feed.py`` has the
producer.

Shapes: T tokens, H query heads, D head size (64 or 128), M = 64 rows of a consumer, N keys of a tile.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gapless.attention.hopper_feed import feed, find_tile, num_active_programs, tile_of_round
from gapless.attention.hopper_tiles import LOG2_E, softmax, start_scores

CONSUMER_ROWS = gl.constexpr(64)
CONSUMER_WARPS = gl.constexpr(4)

# mypy: allow-untyped-defs


@gluon.jit(do_not_specialize=["num_reqs", "num_tokens", "table_stride_b", "table_stride_m"])
def hopper_roles_kernel(
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
    cache_stride_k,
    table_stride_b,
    table_stride_m,
    HEAD_SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CACHE_STRIDE_S: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    USE_TMA: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    PING_PONG: gl.constexpr,
    LATE: gl.constexpr,
    ROUNDS: gl.constexpr,
    FEED_WARPS: gl.constexpr,
    FEED_REGS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Programs (pack of query heads, tile of queries). With ``USE_TMA`` the caches are descriptors of
    [slots, K * D] with boxes of [PAGE_ROWS, 64]; PAGE_ROWS divides BLOCK_SIZE and BLOCK_N."""
    N: gl.constexpr = BLOCK_N
    D: gl.constexpr = HEAD_SIZE
    dtype: gl.constexpr = query_THD.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    first_head = gl.program_id(0) * PACK
    query_SMD = gl.allocate_shared_memory(dtype, [CONSUMERS, CONSUMER_ROWS, D], SHARED)
    keys_SND = gl.allocate_shared_memory(dtype, [STAGES, N, D], SHARED)
    values_SND = gl.allocate_shared_memory(dtype, [STAGES, N, D], SHARED)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # Keys have come, values have come; keys are done with, values are done with; whose turn; a tail has come.
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    order = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    landed = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    FILLS: gl.constexpr = 1 if USE_TMA else 32 * FEED_WARPS
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_full.index(stage), count=FILLS)
        mbarrier.init(value_full.index(stage), count=FILLS)
        mbarrier.init(key_free.index(stage), count=CONSUMERS)
        mbarrier.init(value_free.index(stage), count=CONSUMERS)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(order.index(consumer), count=1)
    mbarrier.init(landed, count=1)
    fence_async_shared()
    gl.thread_barrier()

    batch = (query_start_loc, seq_lens, num_reqs)
    queries = (query_THD, out_THD, query_stride_t, query_stride_h, out_stride_t, out_stride_h)
    barriers = (key_full, value_full, key_free, value_free, order)
    shared = (query_SMD, keys_SND, values_SND, barriers, batch, queries, scale * LOG2_E, first_head)
    producer = (
        k_cache, v_cache, keys_SND, values_SND, barriers, landed, batch, block_table, cache_stride_k,
        table_stride_b, table_stride_m, first_head,
    )  # fmt: skip
    # Tuples that are assigned turn constants into values, so these are written where they are passed.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        shared, 0, PACK, BLOCK_Q, N, D, STAGES, CONSUMERS, PING_PONG, LATE, ROUNDS, EARLY,
                    ),
                ),
                (
                    consume,
                    (
                        shared, 1, PACK, BLOCK_Q, N, D, STAGES, CONSUMERS, PING_PONG, LATE, ROUNDS, EARLY,
                    ),
                ),
                (
                    feed,
                    (
                        producer, GROUP, PACK, BLOCK_SIZE, CACHE_STRIDE_S, BLOCK_Q, N, D, STAGES, USE_TMA,
                        PAGE_ROWS, ROUNDS, FEED_WARPS, EARLY,
                    ),
                ),
            ],
            [CONSUMER_WARPS, FEED_WARPS],
            [CONSUMER_REGS, FEED_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        shared, 0, PACK, BLOCK_Q, N, D, STAGES, CONSUMERS, PING_PONG, LATE, ROUNDS, EARLY,
                    ),
                ),
                (
                    consume,
                    (
                        shared, 1, PACK, BLOCK_Q, N, D, STAGES, CONSUMERS, PING_PONG, LATE, ROUNDS, EARLY,
                    ),
                ),
                (
                    consume,
                    (
                        shared, 2, PACK, BLOCK_Q, N, D, STAGES, CONSUMERS, PING_PONG, LATE, ROUNDS, EARLY,
                    ),
                ),
                (
                    feed,
                    (
                        producer, GROUP, PACK, BLOCK_SIZE, CACHE_STRIDE_S, BLOCK_Q, N, D, STAGES, USE_TMA,
                        PAGE_ROWS, ROUNDS, FEED_WARPS, EARLY,
                    ),
                ),
            ],
            [CONSUMER_WARPS, CONSUMER_WARPS, FEED_WARPS],
            [CONSUMER_REGS, CONSUMER_REGS, FEED_REGS],
        )  # fmt: skip

    # Rows past the batch, by the first consumer's warps.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [CONSUMER_WARPS, 1], [1, 0])
    end_of_batch = gl.load(query_start_loc + num_reqs)
    row = gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, COPY))
    dim = gl.arange(0, D, gl.SliceLayout(0, COPY))
    PAD_ROWS: gl.constexpr = CONSUMER_ROWS // PACK
    pad_row = end_of_batch + gl.program_id(1) * PAD_ROWS
    while pad_row < num_tokens:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        token = (pad_row + row // PACK).to(gl.int64)
        head = first_head + row % PACK
        is_pad = (token < num_tokens)[:, None] & (dim >= 0)[None, :]
        out_pointer = out_THD + token[:, None] * out_stride_t + head[:, None] * out_stride_h + dim[None, :]
        gl.store(out_pointer, gl.zeros([CONSUMER_ROWS, D], dtype, COPY), mask=is_pad)
        pad_row += gl.num_programs(1) * PAD_ROWS


@gluon.jit
def consume(
    shared,
    CONSUMER: gl.constexpr,
    PACK: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PING_PONG: gl.constexpr,
    LATE: gl.constexpr,
    ROUNDS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """64 rows of each tile of queries: those from ``64 * CONSUMER`` on."""
    M: gl.constexpr = CONSUMER_ROWS
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [CONSUMER_WARPS, 1], [1, 0])
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [CONSUMER_WARPS, 1], [16, N, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [CONSUMER_WARPS, 1], [16, D, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    query_SMD, keys_SND, values_SND, barriers, batch, queries, scale_log2, first_head = shared
    query_start_loc, seq_lens, num_reqs = batch
    query_THD, out_THD, query_stride_t, query_stride_h, out_stride_t, out_stride_h = queries
    key_full, value_full, key_free, value_free, _order = barriers
    dtype: gl.constexpr = query_THD.dtype.element_ty
    query_MD = query_SMD.index(CONSUMER)
    row = CONSUMER * M + gl.arange(0, M, gl.SliceLayout(1, COPY))
    dim = gl.arange(0, D, gl.SliceLayout(0, COPY))
    head = first_head + row % PACK
    is_dim = (dim >= 0)[None, :]
    num_tiles, num_programs = num_active_programs(query_start_loc, num_reqs, BLOCK_Q, ROUNDS, CONSUMER_WARPS)
    filled = 0  # tiles of keys so far; of values as many
    started = 0  # turns so far that started products: one fewer for each tile of queries
    for round in range(0, gl.cdiv(num_tiles, num_programs)):
        tile = tile_of_round(round, num_tiles, num_programs)
        _request, query_start, num_queries, first_query, num_keys = find_tile(
            tile, query_start_loc, seq_lens, num_reqs, BLOCK_Q, CONSUMER_WARPS
        )
        if (tile >= 0) & (first_query < num_queries):
            first_position = num_keys - num_queries + first_query
            last = (gl.minimum(first_position + BLOCK_Q, num_keys) - 1) // N
            # Tiles of keys up to the first query's position are visible to every row.
            num_masked = gl.maximum(last + 1 - (first_position + CONSUMER * M // PACK + 1) // N, 0)
            token = (query_start + first_query + row // PACK).to(gl.int64)
            is_element = (first_query + row // PACK < num_queries)[:, None] & is_dim
            if EARLY:
                tl.extra.cuda.gdc_wait()
            query_pointer = (
                query_THD + token[:, None] * query_stride_t + head[:, None] * query_stride_h + dim[None, :]
            )
            query_MD.store(gl.load(query_pointer, mask=is_element, other=0.0))
            fence_async_shared()
            gl.thread_barrier()
            position_M = first_position + (CONSUMER * M + gl.arange(0, M, gl.SliceLayout(1, SCORE))) // PACK
            best_M = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORE))
            total_M = gl.zeros([M], gl.float32, gl.SliceLayout(1, SCORE))
            mbarrier.wait(key_full.index(filled % STAGES), filled // STAGES & 1)
            scores = start_scores(query_MD, keys_SND.index(filled % STAGES), M, N, SCORE)
            score_MN = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(key_free.index(filled % STAGES), count=1)
            weight_MN, decay_M, best_M, total_M = softmax(
                score_MN, best_M, total_M, scale_log2, last, position_M, num_keys, True, N, SCORE
            )
            if not LATE:
                weight_MN = gl.convert_layout(weight_MN.to(dtype), WEIGHT)
            sum_MD = gl.zeros([M, D], gl.float32, SUM)
            first_inner = gl.minimum(gl.maximum(num_masked, 1), last + 1)
            for turn in range(1, first_inner):
                weight_MN, sum_MD, decay_M, best_M, total_M = step(
                    turn, last, filled, started, query_MD, keys_SND, values_SND, barriers, weight_MN, sum_MD,
                    decay_M, best_M, total_M, position_M, num_keys, scale_log2,
                    True, CONSUMER, CONSUMERS, PING_PONG, LATE, STAGES, M, N, SCORE, SUM, WEIGHT,
                )  # fmt: skip
            for turn in range(first_inner, last + 1):
                weight_MN, sum_MD, decay_M, best_M, total_M = step(
                    turn, last, filled, started, query_MD, keys_SND, values_SND, barriers, weight_MN, sum_MD,
                    decay_M, best_M, total_M, position_M, num_keys, scale_log2,
                    False, CONSUMER, CONSUMERS, PING_PONG, LATE, STAGES, M, N, SCORE, SUM, WEIGHT,
                )  # fmt: skip
            sum_MD = sum_MD * gl.convert_layout(decay_M, gl.SliceLayout(1, SUM))[:, None]
            if LATE:
                weight_MN = gl.convert_layout(weight_MN.to(dtype), WEIGHT)
            slot = (filled + last) % STAGES
            mbarrier.wait(value_full.index(slot), (filled + last) // STAGES & 1)
            sums = warpgroup_mma(weight_MN, values_SND.index(slot), sum_MD, is_async=True)
            sum_MD = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(value_free.index(slot), count=1)
            # Never a division by zero: every row sees the first key, also one that only fills the tile.
            inverse_M = 1.0 / total_M
            result_MD = sum_MD * gl.convert_layout(inverse_M, gl.SliceLayout(1, SUM))[:, None]
            # Through the queries' buffer, which nobody reads any more, for stores of 16 bytes.
            query_MD.store(result_MD.to(dtype))
            out_pointer = (
                out_THD + token[:, None] * out_stride_t + head[:, None] * out_stride_h + dim[None, :]
            )
            gl.store(out_pointer, query_MD.load(COPY), mask=is_element)
            filled += last + 1
            started += last


@gluon.jit
def step(
    turn,
    last,
    filled,
    started,
    query_MD,
    keys_SND,
    values_SND,
    barriers,
    weight_MN,
    sum_MD,
    decay_M,
    best_M,
    total_M,
    position_M,
    num_keys,
    scale_log2,
    MASKED: gl.constexpr,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PING_PONG: gl.constexpr,
    LATE: gl.constexpr,
    STAGES: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    SCORE: gl.constexpr,
    SUM: gl.constexpr,
    WEIGHT: gl.constexpr,
):
    """One turn, tile ``last - turn`` of keys: starts its scores and, with the weights of the turn before, the
    values of that turn, whose product runs while the softmax of these scores is computed.

    No product is in flight between turns: where one is, ptxas 12.8 makes every product of a kernel with roles
    wait for the one before. ``PING_PONG``: consumers start products in turn, so that the softmax of one falls
    into the products of the others instead of all doing the same at once.
    """
    key_full, value_full, key_free, value_free, order = barriers
    this = filled + turn
    before = this - 1
    mbarrier.wait(key_full.index(this % STAGES), this // STAGES & 1)
    if PING_PONG:
        # The first consumer's turn n waits for n turns of the last one, others' for n + 1 of the one before.
        mbarrier.wait(order.index(CONSUMER), (started + turn + (0 if CONSUMER == 0 else 1)) & 1)
    scores = start_scores(query_MD, keys_SND.index(this % STAGES), M, N, SCORE)
    sum_MD = sum_MD * gl.convert_layout(decay_M, gl.SliceLayout(1, SUM))[:, None]
    if LATE:
        weight_MN = gl.convert_layout(weight_MN.to(values_SND.dtype), WEIGHT)
    mbarrier.wait(value_full.index(before % STAGES), before // STAGES & 1)
    sums = warpgroup_mma(weight_MN, values_SND.index(before % STAGES), sum_MD, is_async=True)
    if PING_PONG:
        mbarrier.arrive(order.index((CONSUMER + 1) % CONSUMERS), count=1)
    score_MN = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(key_free.index(this % STAGES), count=1)
    weight_MN, decay_M, best_M, total_M = softmax(
        score_MN, best_M, total_M, scale_log2, last - turn, position_M, num_keys, MASKED, N, SCORE
    )
    sum_MD = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(value_free.index(before % STAGES), count=1)
    if not LATE:
        weight_MN = gl.convert_layout(weight_MN.to(values_SND.dtype), WEIGHT)
    return weight_MN, sum_MD, decay_M, best_M, total_M
