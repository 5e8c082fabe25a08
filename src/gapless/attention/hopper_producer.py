"""The producer of ``hopper_kernel.py``: one warp that has the copy engine bring keys and values.

Invariant: of a page that a request has begun all slots are copied, but what lies at and past the request's
end reaches no result. Keys there are masked; values there are overwritten with zeros before a consumer hears
of them, because a weight of 0 does not undo a NaN. Pages past the end are not read: the copy engine is given
a place outside of the cache and writes zeros.

Shapes: N keys of a tile, D head size, S stages of the ring.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gapless.attention.hopper_tiles import find_tile, last_tile_of_keys, num_active_programs, tile_of_round

PRODUCER_WARPS = gl.constexpr(1)

# mypy: allow-untyped-defs


@gluon.jit
def produce(
    producer,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Fills the ring in the order in which consumers need tiles: the keys of a turn, then the values of the
    one before."""
    k_cache, v_cache, keys_SND, values_SND, barriers, landed, batch, block_table = producer[:8]
    cache_stride_k, table_stride_b, table_stride_m, first_head = producer[8:]
    query_start_loc, seq_lens, num_reqs = batch
    key_full, value_full, key_free, value_free = barriers
    num_tiles, num_programs = num_active_programs(query_start_loc, num_reqs, BLOCK_Q, PRODUCER_WARPS)
    column = first_head // GROUP * cache_stride_k
    filled = 0
    num_landed = 0
    for round in range(0, gl.cdiv(num_tiles, num_programs)):
        tile = tile_of_round(round, num_tiles, num_programs)
        request, _start, num_queries, first_query, num_keys = find_tile(
            tile, query_start_loc, seq_lens, num_reqs, BLOCK_Q, PRODUCER_WARPS
        )
        if (tile >= 0) & (first_query < num_queries):
            last = last_tile_of_keys(num_keys, num_queries, first_query, BLOCK_Q, N)
            table_row = block_table + request * table_stride_b
            # Tables, unlike keys, are there before the kernel ahead begins.
            places = find_pages(table_row, last, table_stride_m, num_keys, True, BLOCK_SIZE, PAGE_ROWS, N)
            if EARLY:
                tl.extra.cuda.gdc_wait()
            copy_tile(
                filled, last, places, k_cache, column, keys_SND, key_full, key_free, landed, num_landed,
                num_keys, False, N, D, STAGES, PAGE_ROWS,
            )  # fmt: skip
            if last > 0:
                fill(
                    filled + 1, last - 1, k_cache, column, keys_SND, key_full, key_free, landed, num_landed,
                    table_row, table_stride_m, num_keys, BLOCK_SIZE, N, D, STAGES, PAGE_ROWS,
                )  # fmt: skip
            num_landed = copy_tile(
                filled, last, places, v_cache, column, values_SND, value_full, value_free, landed, num_landed,
                num_keys, True, N, D, STAGES, PAGE_ROWS,
            )  # fmt: skip
            for turn in range(1, last + 1):
                if turn < last:
                    fill(
                        filled + turn + 1, last - turn - 1, k_cache, column, keys_SND, key_full, key_free,
                        landed, num_landed, table_row, table_stride_m, num_keys,
                        BLOCK_SIZE, N, D, STAGES, PAGE_ROWS,
                    )  # fmt: skip
                fill(
                    filled + turn, last - turn, v_cache, column, values_SND, value_full, value_free,
                    landed, num_landed, table_row, table_stride_m, num_keys,
                    BLOCK_SIZE, N, D, STAGES, PAGE_ROWS,
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
    BLOCK_SIZE: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
):
    """Starts the copy of one tile, not a request's last, as the ``count``-th of its ring."""
    places = find_pages(table_row, tile, table_stride_m, num_keys, False, BLOCK_SIZE, PAGE_ROWS, N)
    copy_tile(
        count, tile, places, cache, column, buffer_SND, full, free, landed, num_landed,
        num_keys, False, N, D, STAGES, PAGE_ROWS,
    )  # fmt: skip


@gluon.jit
def copy_tile(
    count,
    tile,
    places,
    cache,
    column,
    buffer_SND,
    full,
    free,
    landed,
    num_landed,
    num_keys,
    CLEAR: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
):
    """Starts the copy of the tile whose pages are at ``places``. ``CLEAR``: what lies past the last key
    becomes zeros. Returns how often ``landed`` was used."""
    slot = count % STAGES
    mbarrier.wait(free.index(slot), (count // STAGES & 1) ^ 1)
    return copy_pages(
        buffer_SND.index(slot), cache, places, column, full.index(slot), landed, num_landed,
        num_keys - tile * N, CLEAR, PAGE_ROWS, N, D,
    )  # fmt: skip


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
    """First cache slot of every page of a tile. ``IS_LAST``: it may have keys past the last; there it is one
    outside of the cache, which is copied as zeros."""
    blocks = ()
    for page in gl.static_range(N // PAGE_ROWS):
        key = tile * N + page * PAGE_ROWS
        if IS_LAST:
            key = gl.maximum(gl.minimum(key, num_keys - 1), 0)
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
        PIECE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [PRODUCER_WARPS, 1], [1, 0])
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
