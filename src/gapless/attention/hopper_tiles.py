"""The parts of a tile's work in the Gluon kernel for Hopper: look-ups, copies, scores, softmax.

``hopper_kernels.py`` puts them in order. Nothing here waits: a copy or a product that is started is somebody
else's to wait for.

Shapes: M rows of a query tile, N keys of a tile, D head size.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma

LOG2_E = gl.constexpr(1.4426950408889634)
REQUESTS_AT_ONCE = gl.constexpr(256)

# mypy: allow-untyped-defs


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


@gluon.jit
def find_blocks(
    table_row, tile, table_stride_m, BLOCK_SIZE: gl.constexpr, N: gl.constexpr, COPY: gl.constexpr
):
    """The cache block of each key of a tile before the last, all of whose keys exist; 0 for tiles below 0."""
    key_N = tile * N + gl.arange(0, N, gl.SliceLayout(1, COPY))
    is_tile = (tile >= 0) & (key_N >= 0)
    return gl.load(table_row + key_N // BLOCK_SIZE * table_stride_m, mask=is_tile, other=0)


@gluon.jit
def copy_tile(
    buffer_ND,
    head_pointer,
    block_N,
    tile,
    num_keys,
    CACHE_STRIDE_S: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    COPY: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Starts the copy of a tile; masked, keys past the last become zeros. The stride is a constant because a
    64-bit product for each row would cost as much as the softmax."""
    dim = gl.arange(0, D, gl.SliceLayout(0, COPY))
    key_N = tile * N + gl.arange(0, N, gl.SliceLayout(1, COPY))
    block_start_N = block_N.to(gl.int64) * (BLOCK_SIZE * CACHE_STRIDE_S)
    in_block_N = key_N % BLOCK_SIZE * CACHE_STRIDE_S
    pointer = head_pointer + in_block_N[:, None] + dim[None, :] + block_start_N[:, None]
    if MASKED:
        is_cached = (key_N < num_keys)[:, None] & (dim >= 0)[None, :]
        async_copy.async_copy_global_to_shared(buffer_ND, pointer, mask=is_cached)
    else:
        async_copy.async_copy_global_to_shared(buffer_ND, pointer)


@gluon.jit
def count_requests(
    query_start_loc, num_reqs, bound, BLOCK_Q: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr
):
    """As in ``triton_kernels.py``: how many requests b have ``query_start_loc[b] // BLOCK_Q + b * STEP <
    bound``."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    count = 0
    for start in range(0, num_reqs, REQUESTS_AT_ONCE):
        request = start + gl.arange(0, REQUESTS_AT_ONCE, LAYOUT)
        is_request = request < num_reqs
        first = gl.load(query_start_loc + request, mask=is_request, other=0)
        is_below = is_request & (first // BLOCK_Q + request * STEP < bound)
        count += gl.sum(is_below.to(gl.int32), 0)
    return count
