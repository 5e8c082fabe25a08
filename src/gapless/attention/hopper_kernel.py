"""Prefill attention for Hopper in Gluon: one warp only has keys and values brought, others only compute.

Triton waits for the scores of a tile before it starts the tile's softmax, and no product runs then. Here a
producer (``hopper_producer.py``) fills a ring of tiles through the copy engine (TMA), a page at a time, and
two consumers of four warps empty it, each with 64 rows of queries, tied to each other by nothing but the
ring: while one computes its softmax, the products of the other run. Within a consumer, too, the product of
weights and values of one tile runs while the softmax of the next is computed: ``step`` is one turn of that.
Where programs of two would leave multiprocessors idle there is one consumer a program, whose turns are
shorter (``tile_rules.hopper_tile``). Keys are walked from the last tile to the first, so that the tiles with
a mask, and the only one that may have fewer keys, come first.

What the arguments mean, how tiles of queries are numbered and what may be read before ``gdc_wait`` is as in
``triton_kernels.py``. Invariants: a slot of the ring is filled only after all consumers have said that they
are done with what was in it, and read only after the producer's barrier; each role goes through the same
tiles in the same order. Other ways were measured and were slower (``docs/log.md``, "Prefill attention"):
rows gathered by four warps, one program a multiprocessor, consumers that start their products in turn.
There is no interpreter for Gluon: ``tests/integration/attention/gluon_on_cpu.py`` plays one.

Shapes: T tokens, H query heads, D head size (64 or 128), M = 64 rows of a consumer, N keys of a tile, S
stages of the ring.
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

from gapless.attention.hopper_producer import PRODUCER_WARPS, produce
from gapless.attention.hopper_tiles import (
    LOG2_E,
    find_tile,
    last_tile_of_keys,
    num_active_programs,
    softmax,
    start_scores,
    tile_of_round,
)
from gapless.attention.tile_rules import HOPPER_CONSUMER_ROWS

CONSUMER_ROWS = gl.constexpr(HOPPER_CONSUMER_ROWS)
CONSUMER_WARPS = gl.constexpr(4)
CONSUMER_REGISTERS = gl.constexpr(232)
"""A thread's. Two consumers and the producer, which counts as four warps, share the 512 that a multiprocessor
has for as many threads of every fourth warp."""
PRODUCER_REGISTERS = gl.constexpr(40)

# mypy: allow-untyped-defs


@gluon.jit(do_not_specialize=["num_reqs", "num_tokens", "table_stride_b", "table_stride_m"])
def hopper_prefill_kernel(
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
    BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Programs (pack of query heads, tile of queries). The caches are descriptors of [slots, K * D] with
    boxes of [PAGE_ROWS, 64]; PAGE_ROWS divides BLOCK_SIZE and BLOCK_N; BLOCK_Q * PACK are the rows of all
    CONSUMERS, of which there are one or two."""
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
    # Keys have come, values have come; keys are done with, values are done with; a tile with a tail has come.
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    landed = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_full.index(stage), count=1)
        mbarrier.init(value_full.index(stage), count=1)
        mbarrier.init(key_free.index(stage), count=CONSUMERS)
        mbarrier.init(value_free.index(stage), count=CONSUMERS)
    mbarrier.init(landed, count=1)
    fence_async_shared()
    gl.thread_barrier()

    batch = (query_start_loc, seq_lens, num_reqs)
    queries = (query_THD, out_THD, query_stride_t, query_stride_h, out_stride_t, out_stride_h)
    barriers = (key_full, value_full, key_free, value_free)
    shared = (query_SMD, keys_SND, values_SND, barriers, batch, queries, scale * LOG2_E, first_head)
    producer = (
        k_cache, v_cache, keys_SND, values_SND, barriers, landed, batch, block_table, cache_stride_k,
        table_stride_b, table_stride_m, first_head,
    )  # fmt: skip
    # Tuples that are assigned turn constants into values, so these are written where they are passed.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume, (shared, 0, PACK, BLOCK_Q, N, D, STAGES, EARLY)),
                (produce, (producer, GROUP, BLOCK_SIZE, BLOCK_Q, N, D, STAGES, PAGE_ROWS, EARLY)),
            ],
            [PRODUCER_WARPS],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (shared, 0, PACK, BLOCK_Q, N, D, STAGES, EARLY)),
                (consume, (shared, 1, PACK, BLOCK_Q, N, D, STAGES, EARLY)),
                (produce, (producer, GROUP, BLOCK_SIZE, BLOCK_Q, N, D, STAGES, PAGE_ROWS, EARLY)),
            ],
            [CONSUMER_WARPS, PRODUCER_WARPS],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )

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
    key_full, value_full, key_free, value_free = barriers
    dtype: gl.constexpr = query_THD.dtype.element_ty
    query_MD = query_SMD.index(CONSUMER)
    row = CONSUMER * M + gl.arange(0, M, gl.SliceLayout(1, COPY))
    dim = gl.arange(0, D, gl.SliceLayout(0, COPY))
    head = first_head + row % PACK
    is_dim = (dim >= 0)[None, :]
    num_tiles, num_programs = num_active_programs(query_start_loc, num_reqs, BLOCK_Q, CONSUMER_WARPS)
    filled = 0  # tiles of keys so far; of values as many
    for round in range(0, gl.cdiv(num_tiles, num_programs)):
        tile = tile_of_round(round, num_tiles, num_programs)
        _request, query_start, num_queries, first_query, num_keys = find_tile(
            tile, query_start_loc, seq_lens, num_reqs, BLOCK_Q, CONSUMER_WARPS
        )
        if (tile >= 0) & (first_query < num_queries):
            first_position = num_keys - num_queries + first_query
            last = last_tile_of_keys(num_keys, num_queries, first_query, BLOCK_Q, N)
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
            weight_MN = gl.convert_layout(weight_MN.to(dtype), WEIGHT)
            sum_MD = gl.zeros([M, D], gl.float32, SUM)
            first_inner = gl.minimum(gl.maximum(num_masked, 1), last + 1)
            for turn in range(1, first_inner):
                weight_MN, sum_MD, decay_M, best_M, total_M = step(
                    turn, last, filled, query_MD, keys_SND, values_SND, barriers, weight_MN, sum_MD, decay_M,
                    best_M, total_M, position_M, num_keys, scale_log2,
                    True, STAGES, M, N, SCORE, SUM, WEIGHT,
                )  # fmt: skip
            for turn in range(first_inner, last + 1):
                weight_MN, sum_MD, decay_M, best_M, total_M = step(
                    turn, last, filled, query_MD, keys_SND, values_SND, barriers, weight_MN, sum_MD, decay_M,
                    best_M, total_M, position_M, num_keys, scale_log2,
                    False, STAGES, M, N, SCORE, SUM, WEIGHT,
                )  # fmt: skip
            sum_MD = sum_MD * gl.convert_layout(decay_M, gl.SliceLayout(1, SUM))[:, None]
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


@gluon.jit
def step(
    turn,
    last,
    filled,
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
    wait for the one before.
    """
    key_full, value_full, key_free, value_free = barriers
    this = filled + turn
    before = this - 1
    mbarrier.wait(key_full.index(this % STAGES), this // STAGES & 1)
    scores = start_scores(query_MD, keys_SND.index(this % STAGES), M, N, SCORE)
    sum_MD = sum_MD * gl.convert_layout(decay_M, gl.SliceLayout(1, SUM))[:, None]
    mbarrier.wait(value_full.index(before % STAGES), before // STAGES & 1)
    sums = warpgroup_mma(weight_MN, values_SND.index(before % STAGES), sum_MD, is_async=True)
    score_MN = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(key_free.index(this % STAGES), count=1)
    weight_MN, decay_M, best_M, total_M = softmax(
        score_MN, best_M, total_M, scale_log2, last - turn, position_M, num_keys, MASKED, N, SCORE
    )
    sum_MD = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(value_free.index(before % STAGES), count=1)
    weight_MN = gl.convert_layout(weight_MN.to(values_SND.dtype), WEIGHT)
    return weight_MN, sum_MD, decay_M, best_M, total_M
