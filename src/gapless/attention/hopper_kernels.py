"""Prefill attention for Hopper in Gluon, where copies, tensor-core products and their waits are written out.

Triton waits for the scores of a tile before it starts the tile's softmax, and no product runs then. Here the
product of weights and values of one tile runs while the softmax of the next is computed: ``step`` is one turn
of that. Keys are walked from the last tile to the first, so that the tiles with a mask, and the only one that
may have fewer keys, come first.

What the arguments mean, how tiles of queries are numbered and what may be read before ``gdc_wait`` is as in
``triton_kernels.py``. Invariants: a cache slot at or past a request's length is never read; a buffer of keys
or values is written only after the barrier behind the last wait for a product that reads it. There is no
interpreter for Gluon: ``tests/integration/attention/gluon_on_cpu.py`` plays one.

Between a copy and the products that read what it brings there is no ``fence.proxy.async``, as in Triton's own
pipelines and CUTLASS's: with one the large tile was 1 to 2% slower, and no nearer to the oracle (H200).

Shapes: T tokens, H query heads, D head size (64 or 128), M rows of a query tile, N keys of a tile.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from gapless.attention.hopper_tiles import (
    LOG2_E,
    copy_tile,
    count_requests,
    find_blocks,
    softmax,
    start_scores,
)

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
    CACHE_STRIDE_S: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Programs (pack of query heads, tile of queries); a program takes every ``num_programs``-th tile."""
    M: gl.constexpr = BLOCK_Q * PACK
    N: gl.constexpr = BLOCK_N
    D: gl.constexpr = HEAD_SIZE
    dtype: gl.constexpr = query_THD.dtype.element_ty
    # 16 bytes a thread; products in registers; a request a thread.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    first_head = gl.program_id(0) * PACK
    kv_head = first_head // GROUP
    program = gl.program_id(1)
    num_programs = gl.num_programs(1)
    scale_log2 = scale * LOG2_E
    k_head = k_cache + kv_head * cache_stride_k
    v_head = v_cache + kv_head * cache_stride_k
    end_of_batch = gl.load(query_start_loc + num_reqs)
    num_used = count_requests(query_start_loc, num_reqs, end_of_batch, 1, 0, WARPS)
    num_tiles = end_of_batch // BLOCK_Q + num_used
    num_rounds = gl.cdiv(num_tiles - program, num_programs)

    query_MD = gl.allocate_shared_memory(dtype, [M, D], SHARED)
    keys_SND = gl.allocate_shared_memory(dtype, [STAGES, N, D], SHARED)
    values_SND = gl.allocate_shared_memory(dtype, [STAGES, N, D], SHARED)
    row = gl.arange(0, M, gl.SliceLayout(1, COPY))
    dim = gl.arange(0, D, gl.SliceLayout(0, COPY))
    head = first_head + row % PACK
    is_dim = (dim >= 0)[None, :]

    for round in range(0, num_rounds):
        tile = num_tiles - 1 - program - round * num_programs
        request = count_requests(query_start_loc, num_reqs, tile + 1, BLOCK_Q, 1, WARPS) - 1
        query_start = gl.load(query_start_loc + request)
        num_queries = gl.load(query_start_loc + request + 1) - query_start
        first_query = (tile - query_start // BLOCK_Q - request) * BLOCK_Q
        if first_query < num_queries:
            num_keys = gl.load(seq_lens + request)
            table_row = block_table + request * table_stride_b
            first_position = num_keys - num_queries + first_query
            last = (gl.minimum(first_position + BLOCK_Q, num_keys) - 1) // N
            # Tiles of keys up to the first query's position are visible to every row.
            num_masked = last + 1 - (first_position + 1) // N
            key_N = last * N + gl.arange(0, N, gl.SliceLayout(1, COPY))
            value_block_N = gl.load(
                table_row + key_N // BLOCK_SIZE * table_stride_m, mask=key_N < num_keys, other=0
            )
            key_block_N = find_blocks(table_row, last - 1, table_stride_m, BLOCK_SIZE, N, COPY)
            token = (query_start + first_query + row // PACK).to(gl.int64)
            is_element = (first_query + row // PACK < num_queries)[:, None] & is_dim
            query_pointer = (
                query_THD + token[:, None] * query_stride_t + head[:, None] * query_stride_h + dim[None, :]
            )
            if EARLY:
                # What came before are the step's static inputs; queries and keys are the last kernel's.
                tl.extra.cuda.gdc_wait()
            gl.thread_barrier()  # the tile before is done with the buffers
            async_copy.async_copy_global_to_shared(query_MD, query_pointer, mask=is_element)
            copy_tile(
                keys_SND.index(0), k_head, value_block_N, last, num_keys,
                CACHE_STRIDE_S, BLOCK_SIZE, N, D, COPY, True,
            )  # fmt: skip
            async_copy.commit_group()
            for ahead in gl.static_range(STAGES - 1):
                if last - 1 - ahead >= 0:
                    copy_tile(
                        keys_SND.index(ahead + 1), k_head, key_block_N, last - 1 - ahead, num_keys,
                        CACHE_STRIDE_S, BLOCK_SIZE, N, D, COPY, False,
                    )  # fmt: skip
                if last - ahead >= 0:
                    copy_tile(
                        values_SND.index(ahead), v_head, value_block_N, last - ahead, num_keys,
                        CACHE_STRIDE_S, BLOCK_SIZE, N, D, COPY, ahead == 0,
                    )  # fmt: skip
                async_copy.commit_group()
                value_block_N = key_block_N
                key_block_N = find_blocks(table_row, last - 2 - ahead, table_stride_m, BLOCK_SIZE, N, COPY)

            position_M = first_position + gl.arange(0, M, gl.SliceLayout(1, SCORE)) // PACK
            best_M = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORE))
            total_M = gl.zeros([M], gl.float32, gl.SliceLayout(1, SCORE))
            async_copy.wait_group(STAGES - 1)
            gl.thread_barrier()
            scores = start_scores(query_MD, keys_SND.index(0), M, N, SCORE)
            score_MN = warpgroup_mma_wait(0, deps=[scores])
            sums = warpgroup_mma_init(gl.zeros([M, D], gl.float32, SUM))
            first_inner = gl.minimum(num_masked, last)
            for turn in range(0, first_inner):
                score_MN, sums, best_M, total_M, key_block_N, value_block_N = step(
                    turn, last, query_MD, keys_SND, values_SND, score_MN, sums, best_M, total_M,
                    key_block_N, value_block_N, k_head, v_head, table_row, position_M, num_keys, scale_log2,
                    table_stride_m,
                    True, STAGES, BLOCK_SIZE, CACHE_STRIDE_S, M, N, D, COPY, SCORE, SUM, WEIGHT,
                )  # fmt: skip
            for turn in range(first_inner, last):
                score_MN, sums, best_M, total_M, key_block_N, value_block_N = step(
                    turn, last, query_MD, keys_SND, values_SND, score_MN, sums, best_M, total_M,
                    key_block_N, value_block_N, k_head, v_head, table_row, position_M, num_keys, scale_log2,
                    table_stride_m,
                    False, STAGES, BLOCK_SIZE, CACHE_STRIDE_S, M, N, D, COPY, SCORE, SUM, WEIGHT,
                )  # fmt: skip
            # The first tile of keys is the last turn, with nothing left to start.
            weight_MN, decay_M, best_M, total_M = softmax(
                score_MN, best_M, total_M, scale_log2, 0, position_M, num_keys, True, N, SCORE
            )
            weight_MN = gl.convert_layout(weight_MN.to(dtype), WEIGHT)
            sum_MD = warpgroup_mma_wait(0, deps=[sums])
            sum_MD = sum_MD * gl.convert_layout(decay_M, gl.SliceLayout(1, SUM))[:, None]
            async_copy.wait_group(0)
            gl.thread_barrier()
            sums = warpgroup_mma(weight_MN, values_SND.index(last % STAGES), sum_MD, is_async=True)
            sum_MD = warpgroup_mma_wait(0, deps=[sums])
            # Never a division by zero: every row sees the first key, also one that only fills the tile.
            inverse_M = 1.0 / total_M
            result_MD = sum_MD * gl.convert_layout(inverse_M, gl.SliceLayout(1, SUM))[:, None]
            # Through the queries' buffer, which nobody reads any more, for stores of 16 bytes.
            query_MD.store(result_MD.to(dtype))
            out_pointer = (
                out_THD + token[:, None] * out_stride_t + head[:, None] * out_stride_h + dim[None, :]
            )
            gl.store(out_pointer, query_MD.load(COPY), mask=is_element)

    pad_row = end_of_batch // BLOCK_Q * BLOCK_Q + program * BLOCK_Q
    while pad_row < num_tokens:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        token = (pad_row + row // PACK).to(gl.int64)
        is_pad = (token >= end_of_batch) & (token < num_tokens)
        out_pointer = out_THD + token[:, None] * out_stride_t + head[:, None] * out_stride_h + dim[None, :]
        gl.store(out_pointer, gl.zeros([M, D], dtype, COPY), mask=is_pad[:, None] & is_dim)
        pad_row += num_programs * BLOCK_Q


@gluon.jit
def step(
    turn,
    last,
    query_MD,
    keys_SND,
    values_SND,
    score_MN,
    sums,
    best_M,
    total_M,
    key_block_N,
    value_block_N,
    k_head,
    v_head,
    table_row,
    position_M,
    num_keys,
    scale_log2,
    table_stride_m,
    MASKED: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CACHE_STRIDE_S: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    COPY: gl.constexpr,
    SCORE: gl.constexpr,
    SUM: gl.constexpr,
    WEIGHT: gl.constexpr,
):
    """One turn: tile ``last - turn`` of keys.

    Its softmax, while the values of the turn before are in flight (``sums``); then starts the scores of the
    next turn and the values of this one, and waits for those scores. A turn's copies are one group: keys
    ``STAGES`` turns ahead, values one fewer.
    """
    weight_MN, decay_M, best_M, total_M = softmax(
        score_MN, best_M, total_M, scale_log2, last - turn, position_M, num_keys, MASKED, N, SCORE
    )
    weight_MN = gl.convert_layout(weight_MN.to(values_SND.dtype), WEIGHT)
    sum_MD = warpgroup_mma_wait(0, deps=[sums])
    async_copy.wait_group(STAGES - 2)
    gl.thread_barrier()
    scores = start_scores(query_MD, keys_SND.index((turn + 1) % STAGES), M, N, SCORE)
    sum_MD = sum_MD * gl.convert_layout(decay_M, gl.SliceLayout(1, SUM))[:, None]
    sums = warpgroup_mma(weight_MN, values_SND.index(turn % STAGES), sum_MD, is_async=True)
    # Free are this turn's keys and the values of the turn before. Without this barrier the compiler, which
    # does not tell stages apart, puts one before each copy.
    gl.thread_barrier()
    next_key, next_value = last - turn - STAGES, last - turn - STAGES + 1
    if next_key >= 0:
        copy_tile(
            keys_SND.index(turn % STAGES), k_head, key_block_N, next_key, num_keys,
            CACHE_STRIDE_S, BLOCK_SIZE, N, D, COPY, False,
        )  # fmt: skip
    if next_value >= 0:
        copy_tile(
            values_SND.index((turn + STAGES - 1) % STAGES), v_head, value_block_N, next_value, num_keys,
            CACHE_STRIDE_S, BLOCK_SIZE, N, D, COPY, False,
        )  # fmt: skip
    async_copy.commit_group()
    value_block_N = key_block_N
    key_block_N = find_blocks(table_row, next_key - 1, table_stride_m, BLOCK_SIZE, N, COPY)
    score_MN = warpgroup_mma_wait(1, deps=[scores])
    return score_MN, sums, best_M, total_M, key_block_N, value_block_N
