"""What the roles of ``hopper_kernel.py`` share: which tiles of queries a program takes, scores, softmax.

Nothing here waits: a product that is started is somebody else's to wait for. Every warp looks tiles up all by
itself, so that none waits for others.

Shapes: M rows of a query tile, N keys of a tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

LOG2_E = gl.constexpr(1.4426950408889634)
REQUESTS_AT_ONCE = gl.constexpr(256)

# mypy: allow-untyped-defs


@gluon.jit
def num_active_programs(query_start_loc, num_reqs, BLOCK_Q: gl.constexpr, WARPS: gl.constexpr):
    """``(tiles of queries, programs that share them)``; no tiles for a program that gets none."""
    end_of_batch = gl.load(query_start_loc + num_reqs)
    num_used = count_requests(query_start_loc, num_reqs, end_of_batch, 1, 0, WARPS)
    num_tiles = end_of_batch // BLOCK_Q + num_used
    num_programs = gl.minimum(gl.num_programs(1), gl.maximum(num_tiles, 1))
    if gl.program_id(1) >= num_programs:
        num_tiles = 0
    return num_tiles, num_programs


@gluon.jit
def tile_of_round(round, num_tiles, num_programs):
    """Tiles from the last to the first, dealt out back and forth, so that whoever got a heavy one gets a
    light one next; below 0: none is left for this program."""
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
def last_tile_of_keys(num_keys, num_queries, first_query, BLOCK_Q: gl.constexpr, N: gl.constexpr):
    """That a tile of queries sees. Never below 0, so that roles never wait for each other in vain, even where
    a length makes no sense: that is to be a wrong result, not a GPU that hangs."""
    end_key = gl.minimum(num_keys - num_queries + first_query + BLOCK_Q, num_keys)
    return gl.maximum(end_key - 1, 0) // N


@gluon.jit
def count_requests(
    query_start_loc, num_reqs, bound, BLOCK_Q: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr
):
    """As in ``triton_kernels.py``: how many requests b have ``query_start_loc[b] // BLOCK_Q + b * STEP <
    bound``."""
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
def start_scores(query_MD, keys_ND, M: gl.constexpr, N: gl.constexpr, SCORE: gl.constexpr):
    zeros_MN = gl.zeros([M, N], gl.float32, SCORE)
    return warpgroup_mma(query_MD, keys_ND.permute((1, 0)), zeros_MN, use_acc=False, is_async=True)


@gluon.jit
def softmax(
    score_MN,
    best_M,
    total_M,
    scale_log2,
    tile,
    position_M,
    num_keys,
    MASKED: gl.constexpr,
    N: gl.constexpr,
    SCORE: gl.constexpr,
):
    """The running softmax, as in ``triton_tiles.attend_keys``: ``(weights, decay of sums so far, ...)``."""
    if MASKED:
        key_N = tile * N + gl.arange(0, N, gl.SliceLayout(0, SCORE))
        visible_MN = (key_N[None, :] <= position_M[:, None]) & (key_N < num_keys)[None, :]
        score_MN = gl.where(visible_MN, score_MN, float("-inf"))
    new_best_M = gl.maximum(best_M, gl.max(score_MN, 1) * scale_log2)
    pivot_M = new_best_M
    if MASKED:
        # A row may have seen no key yet: -inf minus -inf would be NaN.
        pivot_M = gl.where(new_best_M == float("-inf"), 0.0, new_best_M)
    weight_MN = gl.exp2(score_MN * scale_log2 - pivot_M[:, None])
    decay_M = gl.exp2(best_M - pivot_M)
    return weight_MN, decay_M, new_best_M, total_M * decay_M + gl.sum(weight_MN, 1)
