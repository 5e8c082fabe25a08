"""The producer of ``hopper_roles.py``: brings tiles of keys and values into the ring. And what all roles
share: which tiles of queries a program takes.

Shapes: N keys of a tile, D head size.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from gapless.attention.hopper_tiles import copy_tile

REQUESTS_AT_ONCE = gl.constexpr(256)

# mypy: allow-untyped-defs


@gluon.jit
def count_requests(
    query_start_loc, num_reqs, bound, BLOCK_Q: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr
):
    """As ``hopper_tiles.count_requests``; every warp counts all by itself, so that none waits for others."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    count = 0
    for start in range(0, num_reqs, REQUESTS_AT_ONCE):
        request = start + gl.arange(0, REQUESTS_AT_ONCE, LAYOUT)
        is_request = request < num_reqs
        first = gl.load(query_start_loc + request, mask=is_request, other=0)
        is_below = is_request & (first // BLOCK_Q + request * STEP < bound)
        count += gl.sum(is_below.to(gl.int32), 0)
    return count


@gluon.jit
def num_active_programs(
    query_start_loc, num_reqs, BLOCK_Q: gl.constexpr, ROUNDS: gl.constexpr, WARPS: gl.constexpr
):
    """``(tiles of queries, programs that share them)``: programs take ``ROUNDS`` tiles each, or more where
    the grid is too small for that."""
    end_of_batch = gl.load(query_start_loc + num_reqs)
    num_used = count_requests(query_start_loc, num_reqs, end_of_batch, 1, 0, WARPS)
    num_tiles = end_of_batch // BLOCK_Q + num_used
    num_programs = gl.minimum(gl.num_programs(1), gl.maximum(gl.cdiv(num_tiles, ROUNDS), 1))
    if gl.program_id(1) >= num_programs:
        num_tiles = 0
    return num_tiles, num_programs


@gluon.jit
def tile_of_round(round, num_tiles, num_programs):
    """Tiles from the last to the first, dealt out back and forth; below 0: none is left for this program."""
    program = gl.program_id(1)
    place = program
    if round % 2 == 1:
        place = num_programs - 1 - program
    return num_tiles - 1 - (round * num_programs + place)


@gluon.jit
def find_tile(tile, query_start_loc, seq_lens, num_reqs, BLOCK_Q: gl.constexpr, WARPS: gl.constexpr):
    """``(request, its first token, its queries, the tile's first query, its keys)``. A tile whose first query
    is past the queries is empty; so is one below 0."""
    tile = gl.maximum(tile, 0)
    request = count_requests(query_start_loc, num_reqs, tile + 1, BLOCK_Q, 1, WARPS) - 1
    query_start = gl.load(query_start_loc + request)
    num_queries = gl.load(query_start_loc + request + 1) - query_start
    num_keys = gl.load(seq_lens + request)
    return request, query_start, num_queries, (tile - query_start // BLOCK_Q - request) * BLOCK_Q, num_keys


@gluon.jit
def feed(
    producer,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CACHE_STRIDE_S: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    USE_TMA: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    ROUNDS: gl.constexpr,
    WARPS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Fills the ring in the order in which consumers need tiles: the keys of a turn, then the values of the
    one before."""
    k_cache, v_cache, keys_SND, values_SND, barriers, landed, batch, block_table = producer[:8]
    cache_stride_k, table_stride_b, table_stride_m, first_head = producer[8:]
    query_start_loc, seq_lens, num_reqs = batch
    key_full, value_full, key_free, value_free, _order = barriers
    num_tiles, num_programs = num_active_programs(query_start_loc, num_reqs, BLOCK_Q, ROUNDS, WARPS)
    kv_head = first_head // GROUP
    if USE_TMA:
        keys, values = k_cache, v_cache
        column = kv_head * cache_stride_k
    else:
        keys = k_cache + kv_head * cache_stride_k
        values = v_cache + kv_head * cache_stride_k
        column = 0
    filled = 0
    num_landed = 0
    for round in range(0, gl.cdiv(num_tiles, num_programs)):
        tile = tile_of_round(round, num_tiles, num_programs)
        request, _start, num_queries, first_query, num_keys = find_tile(
            tile, query_start_loc, seq_lens, num_reqs, BLOCK_Q, WARPS
        )
        if (tile >= 0) & (first_query < num_queries):
            last = (gl.minimum(num_keys - num_queries + first_query + BLOCK_Q, num_keys) - 1) // N
            table_row = block_table + request * table_stride_b
            if EARLY:
                tl.extra.cuda.gdc_wait()
            fill(
                filled, last, keys, column, keys_SND, key_full, key_free, landed, num_landed,
                table_row, table_stride_m, num_keys, True, False,
                BLOCK_SIZE, CACHE_STRIDE_S, N, D, STAGES, USE_TMA, PAGE_ROWS, WARPS,
            )  # fmt: skip
            if last > 0:
                fill(
                    filled + 1, last - 1, keys, column, keys_SND, key_full, key_free, landed, num_landed,
                    table_row, table_stride_m, num_keys, False, False,
                    BLOCK_SIZE, CACHE_STRIDE_S, N, D, STAGES, USE_TMA, PAGE_ROWS, WARPS,
                )  # fmt: skip
            num_landed = fill(
                filled, last, values, column, values_SND, value_full, value_free, landed, num_landed,
                table_row, table_stride_m, num_keys, True, True,
                BLOCK_SIZE, CACHE_STRIDE_S, N, D, STAGES, USE_TMA, PAGE_ROWS, WARPS,
            )  # fmt: skip
            for turn in range(1, last + 1):
                if turn < last:
                    fill(
                        filled + turn + 1, last - turn - 1, keys, column, keys_SND, key_full, key_free,
                        landed, num_landed, table_row, table_stride_m, num_keys, False, False,
                        BLOCK_SIZE, CACHE_STRIDE_S, N, D, STAGES, USE_TMA, PAGE_ROWS, WARPS,
                    )  # fmt: skip
                fill(
                    filled + turn, last - turn, values, column, values_SND, value_full, value_free,
                    landed, num_landed, table_row, table_stride_m, num_keys, False, False,
                    BLOCK_SIZE, CACHE_STRIDE_S, N, D, STAGES, USE_TMA, PAGE_ROWS, WARPS,
                )  # fmt: skip
            filled += last + 1


@gluon.jit
def fill(
    count,
    tile,
    cache,
    column,
    buffer_SND,
    full,
    free,
    landed,
    num_landed,
    table_row,
    table_stride_m,
    num_keys,
    IS_LAST: gl.constexpr,
    CLEAR: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CACHE_STRIDE_S: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    USE_TMA: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Starts the copy of one tile as the ``count``-th of its ring. ``IS_LAST``: it may have keys past the
    last; ``CLEAR``: those become zeros. Returns how often ``landed`` was used."""
    slot = count % STAGES
    buffer_ND = buffer_SND.index(slot)
    if USE_TMA:
        slots = find_pages(table_row, tile, table_stride_m, num_keys, IS_LAST, BLOCK_SIZE, PAGE_ROWS, N)
        mbarrier.wait(free.index(slot), (count // STAGES & 1) ^ 1)
        num_landed = copy_pages(
            buffer_ND, cache, slots, column, full.index(slot), landed, num_landed, num_keys - tile * N,
            CLEAR, PAGE_ROWS, N, D, WARPS,
        )  # fmt: skip
    else:
        COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
        key_N = tile * N + gl.arange(0, N, gl.SliceLayout(1, COPY))
        block_N = gl.load(table_row + key_N // BLOCK_SIZE * table_stride_m, mask=key_N < num_keys, other=0)
        mbarrier.wait(free.index(slot), (count // STAGES & 1) ^ 1)
        copy_tile(buffer_ND, cache, block_N, tile, num_keys, CACHE_STRIDE_S, BLOCK_SIZE, N, D, COPY, IS_LAST)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
    return num_landed


@gluon.jit
def find_pages(
    table_row,
    tile,
    table_stride_m,
    num_keys,
    IS_LAST: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    N: gl.constexpr,
):
    """First cache slot of every page of a tile; past the last key one outside of the cache, which is copied
    as zeros."""
    blocks = ()
    for page in gl.static_range(N // PAGE_ROWS):
        key = tile * N + page * PAGE_ROWS
        if IS_LAST:
            key = gl.minimum(key, num_keys - 1)
        blocks = blocks + (gl.load(table_row + key // BLOCK_SIZE * table_stride_m),)  # type: ignore[assignment]  # noqa: RUF005
    slots = ()
    for page in gl.static_range(N // PAGE_ROWS):
        key = tile * N + page * PAGE_ROWS
        slot = blocks[page] * BLOCK_SIZE + key % BLOCK_SIZE
        if IS_LAST:
            slot = gl.where(key < num_keys, slot, -PAGE_ROWS)
        slots = slots + (slot,)  # type: ignore[assignment]  # noqa: RUF005
    return slots


@gluon.jit
def copy_pages(
    buffer_ND,
    cache,
    slots,
    column,
    full,
    landed,
    num_landed,
    keys_left,
    CLEAR: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    WARPS: gl.constexpr,
):
    """A tile is stored as panels of 64 columns, one after another; a page's part of a panel is one piece."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PAGES: gl.constexpr = N // PAGE_ROWS
    PANELS: gl.constexpr = D // 64
    BYTES: gl.constexpr = N * D * 2
    pieces = buffer_ND._reinterpret(buffer_ND.dtype, [PANELS * PAGES, PAGE_ROWS, 64], SHARED)
    has_tail = False
    if CLEAR:
        has_tail = keys_left % PAGE_ROWS != 0
        if keys_left >= N:
            has_tail = False
    if has_tail:
        mbarrier.expect(landed, BYTES)
        for page in gl.static_range(PAGES):
            for panel in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    cache, [slots[page], column + panel * 64], landed, pieces.index(panel * PAGES + page)
                )
        mbarrier.wait(landed, num_landed & 1)
        num_landed += 1
        # Past the request's length a page holds anything, also NaN, which a weight of 0 does not undo.
        PIECE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        row = gl.arange(0, PAGE_ROWS, gl.SliceLayout(1, PIECE))
        for panel in gl.static_range(PANELS):
            piece = pieces.index(panel * PAGES + keys_left // PAGE_ROWS)
            value = piece.load(PIECE)
            piece.store(gl.where((row < keys_left % PAGE_ROWS)[:, None], value, 0.0))
        fence_async_shared()
        mbarrier.arrive(full, count=1)
    else:
        mbarrier.expect(full, BYTES)
        for page in gl.static_range(PAGES):
            for panel in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    cache, [slots[page], column + panel * 64], full, pieces.index(panel * PAGES + page)
                )
    return num_landed
