"""Everything between the q/k/v product and attention: head norm, rotation and the write to the paged cache.

Decode does the same inside attention, where its backend can (``attention/decode_rotation.py``).
``rotate_into_cache`` reads slots and positions from device memory when it runs, so one captured launch serves
every batch of its bucket; pad tokens carry a slot of the sink block. ``rotate_heads`` leaves the cache
alone, for code that is traced: there the attention operator owns the cache. Both read cosines and sines from
the rotary table by position; without positions row ``t`` of the table is token ``t``'s, and the table may
have been made by the step itself. ``T`` tokens, ``C`` columns of merged q/k/v heads, ``H`` query heads, ``K``
key/value heads, ``G`` = H + K, ``D`` head size, ``F`` = D / 2, ``P`` positions.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.graphs.ops import register_custom_op
from gapless.kernels.launch import Constants, launch
from gapless.kernels.select import kernels, launch_options, next_power_of_2

_TILE_ELEMENTS, _WIDE_TILE_ELEMENTS = 512, 1024
"""Of each half of the heads that a program handles."""
_MANY_TOKENS = 512
"""From so many tokens on, programs are plenty and each takes wider tiles: 7 to 17% quicker on an H200 at 512,
1024 and 4096 tokens."""


def _fake_into_cache(
    qkv_TC: Tensor,
    norm_weight_GD: Tensor | None,
    eps: float,
    rope_P2F: Tensor,
    positions_T: Tensor | None,
    slot_mapping_T: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    num_kv_heads, head_size = k_cache.shape[2:]
    return qkv_TC.new_empty((qkv_TC.shape[0], qkv_TC.shape[1] // head_size - 2 * num_kv_heads, head_size))


@register_custom_op(mutates_args=["k_cache", "v_cache"], fake=_fake_into_cache, is_fresh=True)
def rotate_into_cache(
    qkv_TC: Tensor,
    norm_weight_GD: Tensor | None,
    eps: float,
    rope_P2F: Tensor,
    positions_T: Tensor | None,
    slot_mapping_T: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """``[T, (H + 2K) * D] -> [T, H, D]`` rotated queries; rotated keys and the values go to the cache.

    ``norm_weight_GD``: ``[H + K, D]``, weights of the norm of each query and key head, or None for no norm.
    """
    query_THD = _fake_into_cache(
        qkv_TC, norm_weight_GD, eps, rope_P2F, positions_T, slot_mapping_T, k_cache, v_cache
    )
    strides = k_cache.stride()
    if strides != v_cache.stride() or strides[3] != 1:
        raise ConfigError("the fused cache write needs caches of one layout with contiguous heads")
    _launch(
        qkv_TC,
        norm_weight_GD,
        eps,
        rope_P2F,
        positions_T,
        query_THD,
        num_heads=query_THD.shape[1],
        num_kv_heads=k_cache.shape[2],
        cache=(slot_mapping_T, k_cache, v_cache),
    )
    return query_THD


def _fake_rotate(
    qkv_TC: Tensor,
    norm_weight_GD: Tensor | None,
    eps: float,
    rope_P2F: Tensor,
    positions_T: Tensor | None,
    num_kv_heads: int,
) -> Tensor:
    head_size = 2 * rope_P2F.shape[2]
    num_rotated = qkv_TC.shape[1] // head_size - num_kv_heads
    return qkv_TC.new_empty((qkv_TC.shape[0], num_rotated, head_size))


@register_custom_op(fake=_fake_rotate, is_fresh=True)
def rotate_heads(
    qkv_TC: Tensor,
    norm_weight_GD: Tensor | None,
    eps: float,
    rope_P2F: Tensor,
    positions_T: Tensor | None,
    num_kv_heads: int,
) -> Tensor:
    """``[T, (H + 2K) * D] -> [T, H + K, D]``: normed and rotated queries and keys."""
    rotated_TGD = _fake_rotate(qkv_TC, norm_weight_GD, eps, rope_P2F, positions_T, num_kv_heads)
    _launch(
        qkv_TC,
        norm_weight_GD,
        eps,
        rope_P2F,
        positions_T,
        rotated_TGD,
        num_heads=rotated_TGD.shape[1] - num_kv_heads,
        num_kv_heads=num_kv_heads,
        cache=None,
    )
    return rotated_TGD


def _launch(
    qkv_TC: Tensor,
    norm_weight_GD: Tensor | None,
    eps: float,
    rope_P2F: Tensor,
    positions_T: Tensor | None,
    rotated_TGD: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    cache: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    num_tokens, half = qkv_TC.shape[0], rope_P2F.shape[2]
    if num_tokens == 0:
        return
    assert rope_P2F.is_contiguous()
    # Without a cache any pointer will do: the kernel never looks at it.
    slot_mapping_T, k_cache, v_cache = cache or (rope_P2F, rotated_TGD, rotated_TGD)
    num_launched = num_heads + (2 if cache is not None else 1) * num_kv_heads
    args = (
        qkv_TC,
        qkv_TC if norm_weight_GD is None else norm_weight_GD,
        rope_P2F,
        rope_P2F if positions_T is None else positions_T,
        slot_mapping_T,
        rotated_TGD,
        k_cache,
        v_cache,
        qkv_TC.stride(0),
        rotated_TGD.stride(0),
        *k_cache.stride()[:3],
        eps,
    )
    constants = _constants(
        num_heads,
        num_kv_heads,
        num_launched,
        half,
        k_cache.shape[1],
        norm_weight_GD is not None,
        positions_T is not None,
        cache is not None,
        num_tokens >= _MANY_TOKENS,
        qkv_TC.device,
    )
    grid = (num_tokens, -(-num_launched // constants["TILE_HEADS"]))
    launch(kernels().rotate_heads_kernel, grid, args, constants)


@functools.cache
def _constants(
    num_heads: int,
    num_kv_heads: int,
    num_launched: int,
    half: int,
    block_size: int,
    has_norm: bool,
    has_positions: bool,
    has_cache: bool,
    is_many: bool,
    device: torch.device,
) -> Constants:
    half_pad = next_power_of_2(half)
    tile_heads = _tile_heads(num_launched, half_pad=half_pad, is_many=is_many)
    return Constants(
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        HALF_PAD=half_pad,
        BLOCK_SIZE=block_size,
        TILE_HEADS=tile_heads,
        HAS_NORM=has_norm,
        HAS_POSITIONS=has_positions,
        HAS_CACHE=has_cache,
        num_warps=min(max(tile_heads * half_pad // 256, 1), 8),
        **launch_options(device),
    )


def _tile_heads(num_heads: int, *, half_pad: int, is_many: bool) -> int:
    """Heads a program handles, with 16 elements per thread. Two choices, so that only two kernels are
    compiled: few enough that a single token is spread over several processors, or twice as many."""
    most = _WIDE_TILE_ELEMENTS if is_many else _TILE_ELEMENTS
    return min(max(most // half_pad, 1), next_power_of_2(num_heads))
