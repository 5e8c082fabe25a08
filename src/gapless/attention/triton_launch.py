"""What a launch of Triton's paged attention is made of: constants of the kernels, and decode with its splits.

Used by ``triton_paged.py``. Constants are cached by tile and by what is fixed in an engine, so that an eager
launch costs little of the CPU.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.attention.base import Rotation
from gapless.attention.tile_rules import DecodeTile, PrefillTile
from gapless.errors import ConfigError
from gapless.kernels.launch import Constants, launch
from gapless.kernels.select import launch_options, next_power_of_2


class Fixed(NamedTuple):
    """What the kernels are compiled for, apart from their tiles."""

    head_size: int
    group: int
    """Query heads of a key/value head."""
    block_size: int
    window: int
    """0: none."""
    dtype: torch.dtype
    device: torch.device


def launch_decode(
    tile: DecodeTile,
    max_query_len: int,
    tensors: tuple[Tensor, ...],
    batch: tuple[Tensor, ...],
    arguments: tuple[int | float, ...],
    fixed: Fixed,
    rotation: Rotation | None = None,
) -> None:
    """``tensors``: queries, both caches, output; ``batch``: where queries start, lengths, block table. With a
    ``rotation`` the queries are those of q/k/v rows, which have keys and values behind them."""
    query_THD, k_cache, _, out_THD = tensors
    num_heads, num_kv_heads = out_THD.shape[1], k_cache.shape[2]
    query_start_loc, seq_lens, _ = batch
    num_reqs = seq_lens.shape[0]
    num_rows = tile.block_q * next_power_of_2(fixed.group)
    # With one split nothing is stored in them, and any tensor will do. Scratch comes from the graph's pool.
    part = stat = seq_lens
    if tile.num_splits > 1:
        shape = (num_reqs, num_kv_heads, tile.num_splits)
        part = query_THD.new_empty((*shape, num_rows, head_pad(fixed.head_size)), dtype=torch.float32)
        stat = query_THD.new_empty((*shape, 2, num_rows), dtype=torch.float32)
    norm_weight, eps, rope, positions = rotation or (None, 0.0, query_THD, None)
    num_rotated = 0 if rotation is None else rotated_rows(tile, num_rows, next_power_of_2(fixed.group))
    turned = (
        query_THD if norm_weight is None else norm_weight,
        rope,
        seq_lens if positions is None else positions,
    )
    constants, combine_constants = decode_constants(
        tile, fixed, num_rotated, norm_weight is not None, positions is not None
    )
    numbers = (*arguments[:2], tile.min_keys, arguments[2], eps, *arguments[3:])
    args = (*tensors, part, stat, *batch, *turned, *numbers)
    kernels = paged_kernels()
    launch(kernels.decode_attention_kernel, (num_kv_heads, num_reqs, tile.num_splits), args, constants)
    if tile.num_splits > 1:
        sizes = (tile.num_splits, tile.min_keys, *out_THD.stride()[:2])
        launch(
            kernels.combine_splits_kernel,
            (num_heads, num_reqs, max_query_len),
            (part, stat, out_THD, query_start_loc, seq_lens, *sizes),
            combine_constants,
        )


@functools.lru_cache(maxsize=4096)
def prefill_constants(tile: PrefillTile, fixed: Fixed) -> Constants:
    return Constants(
        **_heads(fixed),
        **_lookups(fixed),
        PACK=tile.pack,
        BLOCK_Q=tile.block_q,
        BLOCK_N=tile.block_n,
        SPLIT_LOOP=tile.split_loop,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@functools.lru_cache(maxsize=4096)
def decode_constants(
    tile: DecodeTile, fixed: Fixed, num_rotated: int, has_norm: bool, has_positions: bool
) -> tuple[Constants, Constants]:
    """Of the kernel itself, and of the one that merges splits."""
    group_pad = next_power_of_2(fixed.group)
    shared = {**_heads(fixed), "GROUP_PAD": group_pad, "BLOCK_Q": tile.block_q, "BLOCK_N": tile.block_n}
    decode = Constants(
        **shared,
        **_lookups(fixed),
        CALLED_AHEAD=tile.called_ahead,
        LOADS_EARLY=tile.loads_early,
        ROTATED_ROWS=num_rotated,
        HAS_NORM=has_norm,
        HAS_POSITIONS=has_positions,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return decode, Constants(**shared, SPLITS_PAD=next_power_of_2(tile.num_splits))


def rotated_rows(tile: DecodeTile, num_rows: int, group_pad: int) -> int:
    """Rows of the tile in which queries are rotated: one for each head in a program of a few warps, whose
    registers hold no more; else all, because copies of rows thinner than its threads make the assembler run
    out of registers."""
    return num_rows if tile.num_warps >= 4 else group_pad


def head_pad(head_size: int) -> int:
    return max(next_power_of_2(head_size), 16)


@functools.cache
def paged_kernels() -> SimpleNamespace:
    """The kernels by name. Raises ``ConfigError`` where Triton cannot be imported."""
    try:
        from gapless.attention import triton_decode, triton_kernels
    except ImportError as error:
        raise ConfigError(
            f"attention backend triton_paged needs Triton, which cannot be imported ({error}); install triton"
        ) from error
    return SimpleNamespace(
        write_kv_kernel=triton_kernels.write_kv_kernel,
        prefill_attention_kernel=triton_kernels.prefill_attention_kernel,
        decode_attention_kernel=triton_decode.decode_attention_kernel,
        combine_splits_kernel=triton_decode.combine_splits_kernel,
    )


def _heads(fixed: Fixed) -> dict[str, Any]:
    return {
        "HEAD_SIZE": fixed.head_size,
        "HEAD_PAD": head_pad(fixed.head_size),
        "GROUP": fixed.group,
        "WINDOW": fixed.window,
        **launch_options(fixed.device),
    }


def _lookups(fixed: Fixed) -> dict[str, Any]:
    precision = "ieee" if fixed.dtype == torch.float32 else "tf32"
    return {"BLOCK_SIZE": fixed.block_size, "DOT_PRECISION": precision}
