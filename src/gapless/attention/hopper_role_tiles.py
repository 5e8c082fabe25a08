"""Shapes of the kernel with roles (``hopper_roles.py``), and its launch.

``ROLE_TILES`` names what ``benchmarks/hopper_variants.py`` measures. Registers, in multiples of 8 a thread:
consumers and the producer, which counts as four warps, share the 512 that a multiprocessor has for as many
threads of every fourth warp.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gapless.kernels.launch import Constants, launch
from gapless.kernels.select import launch_options

CONSUMER_ROWS = 64
"""Rows of queries of a consumer: what a tensor-core product of a warpgroup takes."""
_SPARE_TILES = 16
"""As in ``triton_paged.py``: requests that may begin a tile of their own before programs take more tiles."""
_MOST_TILES = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleTile:
    """``consumers * 64`` rows of queries against ``block_n`` keys at a time, in a ring of ``stages``."""

    consumers: int = 2
    block_n: int = 128
    stages: int = 2
    use_tma: bool = True
    ping_pong: bool = False
    late: bool = False
    rounds: int = 1
    """Tiles of queries for each program; 0: as many as it takes with one program a multiprocessor."""
    feed_warps: int = 1
    feed_regs: int = 40
    consumer_regs: int = 232


ROLE_TILES = {
    "tma": RoleTile(),
    "tma_ping_pong": RoleTile(ping_pong=True),
    "tma_late": RoleTile(late=True, feed_regs=24, consumer_regs=240),
    "tma_3_stages": RoleTile(stages=3),
    "tma_2_rounds": RoleTile(rounds=2),
    "tma_persistent": RoleTile(rounds=0),
    "tma_persistent_ping_pong": RoleTile(rounds=0, ping_pong=True),
    "tma_3_consumers": RoleTile(consumers=3, block_n=64, stages=3, feed_regs=32, consumer_regs=160),
    "cp_async": RoleTile(use_tma=False, feed_warps=4, feed_regs=72, consumer_regs=216),
    "cp_async_persistent": RoleTile(use_tma=False, feed_warps=4, feed_regs=72, consumer_regs=216, rounds=0),
}


def can_take_roles(tile: RoleTile, *, group: int, head_size: int, block_size: int) -> bool:
    """Whether pages can be brought as whole pieces: the copy engine takes them in multiples of 8 rows."""
    return head_size in (64, 128) and (not tile.use_tma or _page_rows(tile, block_size) >= 8)


def prefill_roles(
    tile: RoleTile, tensors: tuple[Tensor, ...], arguments: tuple[int | float, ...], *, group: int
) -> None:
    """``tensors`` and ``arguments`` are those of the Triton kernel, in its order."""
    query_THD, k_cache, v_cache, out_THD, query_start_loc, seq_lens, block_table = tensors
    num_tokens, num_heads, head_size = query_THD.shape
    *sizes, cache_stride_s, cache_stride_k, table_stride_b, table_stride_m = arguments
    block_size = k_cache.shape[1]
    constants = constants_of(tile, group, head_size, block_size, int(cache_stride_s), query_THD.device)
    pack, block_q = constants["PACK"], constants["BLOCK_Q"]
    packs = num_heads // pack
    num_tiles = max(-(-num_tokens // block_q) + min(seq_lens.shape[0], _SPARE_TILES), 1)
    if tile.rounds == 0:
        num_programs = min(num_tiles, max(_num_multiprocessors(query_THD.device) // packs, 1))
    else:
        num_programs = -(-num_tiles // tile.rounds)
    caches: tuple[Any, Any] = (k_cache, v_cache)
    if tile.use_tma:
        rows = constants["PAGE_ROWS"]
        caches = (page_descriptor(k_cache, rows), page_descriptor(v_cache, rows))
    args = (query_THD, *caches, out_THD, query_start_loc, seq_lens, block_table, *sizes)
    args = (*args, cache_stride_k, table_stride_b, table_stride_m)
    launch(_kernels().hopper_roles_kernel, (packs, min(num_programs, _MOST_TILES)), args, constants)


@functools.lru_cache(maxsize=4096)
def constants_of(
    tile: RoleTile, group: int, head_size: int, block_size: int, cache_stride_s: int, device: torch.device
) -> Constants:
    pack = min(group & -group, CONSUMER_ROWS)
    return Constants(
        HEAD_SIZE=head_size,
        GROUP=group,
        PACK=pack,
        BLOCK_SIZE=block_size,
        CACHE_STRIDE_S=cache_stride_s,
        BLOCK_Q=tile.consumers * CONSUMER_ROWS // pack,
        BLOCK_N=tile.block_n,
        STAGES=tile.stages,
        CONSUMERS=tile.consumers,
        USE_TMA=tile.use_tma,
        PAGE_ROWS=_page_rows(tile, block_size),
        PING_PONG=tile.ping_pong,
        LATE=tile.late,
        ROUNDS=max(tile.rounds, 1),
        FEED_WARPS=tile.feed_warps,
        FEED_REGS=tile.feed_regs,
        CONSUMER_REGS=tile.consumer_regs,
        num_warps=4,
        **launch_options(device),
    )


def _page_rows(tile: RoleTile, block_size: int) -> int:
    """Rows that lie together in the cache whatever the block table says: the largest power of 2 that divides
    a block, within a tile."""
    return min(block_size & -block_size, tile.block_n)


def page_descriptor(cache: Tensor, page_rows: int) -> Any:
    """What the copy engine is told of a cache [blocks, block_size, K, D]: rows are slots, columns those of
    all heads, and a copy is ``page_rows`` slots by 64 columns."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    num_blocks, block_size, num_kv_heads, head_size = cache.shape
    _, stride_s, stride_k, _ = cache.stride()
    shape = [num_blocks * block_size, (num_kv_heads - 1) * stride_k + head_size]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(cache, shape, [stride_s, 1], [page_rows, 64], layout)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernels() -> ModuleType:
    from gapless.attention import hopper_roles

    return hopper_roles
