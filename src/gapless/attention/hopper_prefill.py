"""When the Gluon kernel for Hopper does the prefill attention of ``triton_paged.py``, and its launch.

Gluon is Triton's lower level and experimental: the kernel runs with the versions of Triton it was written
for, on compute capability 9.0, and everything else keeps the Triton kernel; so does all with
``GAPLESS_HOPPER_ATTENTION=0``. ``tile_rules.hopper_tile`` says which shapes it takes. Gluon is imported at
the first launch.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
from torch import Tensor

from gapless.attention.tile_rules import HOPPER_CONSUMER_ROWS, PrefillTile, page_rows
from gapless.env import read_env
from gapless.kernels.launch import KNOWN_VERSIONS, Constants, launch
from gapless.kernels.select import is_hopper, launch_options


def can_run_hopper(query_THD: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the GPU is one, and 16 bytes can be copied at a time, from caches of the queries' type."""
    if not _has_kernel(query_THD.device):
        return False
    tensors = (query_THD, k_cache, v_cache)
    strides = (*query_THD.stride()[:2], *k_cache.stride()[1:3])
    is_aligned = not any(tensor.data_ptr() % 16 for tensor in tensors) and not any(n % 16 for n in strides)
    return is_aligned and k_cache.dtype == v_cache.dtype == query_THD.dtype


def prefill_hopper(
    tile: PrefillTile,
    grid: tuple[int, int],
    tensors: tuple[Tensor, ...],
    arguments: tuple[int | float, ...],
    *,
    group: int,
) -> None:
    """``tensors`` and ``arguments`` are those of the Triton kernel, in its order."""
    gluon = _gluon()
    query_THD, k_cache, v_cache, *others = tensors
    *sizes, _cache_stride_s, cache_stride_k, table_stride_b, table_stride_m = arguments
    num_blocks, block_size, num_kv_heads, head_size = k_cache.shape
    _, stride_s, stride_k, _ = k_cache.stride()
    # Rows are slots, columns those of all heads, and a copy is of a page's slots by 64 columns.
    shape = (num_blocks * block_size, (num_kv_heads - 1) * stride_k + head_size)
    box = (page_rows(block_size, tile.block_n), 64)
    keys, values = (
        gluon.box_descriptor(cache.data_ptr(), cache.dtype, shape, (stride_s, 1), box)
        for cache in (k_cache, v_cache)
    )
    args = (query_THD, keys, values, *others, *sizes, cache_stride_k, table_stride_b, table_stride_m)
    constants = kernel_constants(tile, group, head_size, block_size, query_THD.device)
    launch(gluon.hopper_prefill_kernel, grid, args, constants)


@functools.lru_cache(maxsize=4096)
def kernel_constants(
    tile: PrefillTile, group: int, head_size: int, block_size: int, device: torch.device
) -> Constants:
    return Constants(
        HEAD_SIZE=head_size,
        GROUP=group,
        PACK=tile.pack,
        BLOCK_SIZE=block_size,
        BLOCK_Q=tile.block_q,
        BLOCK_N=tile.block_n,
        STAGES=tile.num_stages,
        PAGE_ROWS=page_rows(block_size, tile.block_n),
        CONSUMERS=tile.block_q * tile.pack // HOPPER_CONSUMER_ROWS,
        num_warps=tile.num_warps,
        **launch_options(device),
    )


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    env = read_env()
    if not is_hopper(device) or env.triton_interpret or not env.hopper_attention:
        return False
    import triton

    return triton.__version__.startswith(KNOWN_VERSIONS)


@functools.cache
def _gluon() -> SimpleNamespace:
    from gapless.attention.hopper_kernel import hopper_prefill_kernel
    from gapless.kernels.descriptors import box_descriptor

    return SimpleNamespace(hopper_prefill_kernel=hopper_prefill_kernel, box_descriptor=box_descriptor)
