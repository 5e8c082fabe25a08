"""When the Gluon kernel for Hopper does the prefill attention of ``triton_paged.py``, and its launch.

Gluon is Triton's lower level and experimental: the kernel runs with the versions of Triton it was written
for, on compute capability 9, and everything else keeps the Triton kernel. ``tile_rules.hopper_tile`` says
which shapes it takes. Gluon is imported at the first launch.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from gapless.attention.tile_rules import PrefillTile
from gapless.env import read_env
from gapless.kernels.launch import KNOWN_VERSIONS, Constants, launch
from gapless.kernels.select import launch_options


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
    query_THD, k_cache = tensors[:2]
    *sizes, cache_stride_s, cache_stride_k, table_stride_b, table_stride_m = arguments
    constants = _constants(
        tile, group, query_THD.shape[2], k_cache.shape[1], int(cache_stride_s), query_THD.device
    )
    args = (*tensors, *sizes, cache_stride_k, table_stride_b, table_stride_m)
    launch(_kernels().hopper_prefill_kernel, grid, args, constants)


@functools.lru_cache(maxsize=4096)
def _constants(
    tile: PrefillTile, group: int, head_size: int, block_size: int, cache_stride_s: int, device: torch.device
) -> Constants:
    return Constants(
        HEAD_SIZE=head_size,
        GROUP=group,
        PACK=tile.pack,
        BLOCK_SIZE=block_size,
        CACHE_STRIDE_S=cache_stride_s,
        BLOCK_Q=tile.block_q,
        BLOCK_N=tile.block_n,
        STAGES=tile.num_stages,
        WARPS=tile.num_warps,
        num_warps=tile.num_warps,
        **launch_options(device),
    )


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    env = read_env()
    if device.type != "cuda" or torch.version.hip is not None or env.triton_interpret:
        return False
    if not env.hopper_attention:
        return False
    import triton

    return triton.__version__.startswith(KNOWN_VERSIONS) and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _kernels() -> ModuleType:
    from gapless.attention import hopper_kernels

    return hopper_kernels
