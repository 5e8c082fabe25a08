"""Paged attention by Triton: the default on CUDA, for decode, prefill and mixed batches alike.

All lengths and tables stay on the device. A launch depends only on tensor shapes and on ``max_query_len`` (a
host upper bound), never on data, so a captured launch serves every batch of its bucket
(``AttentionSupport.ALWAYS``). Tile sizes come from a small rule, not from an autotuner: nothing may be
compiled, timed or synchronised while a stream is capturing.

Invariants: cache slots past a request's length are never read; pad rows of the output become zeros. The
kernels and their numbering of tiles are in ``triton_kernels.py``; the oracle is ``torch_reference.py``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from gapless.attention.base import AttentionMetadata
from gapless.env import read_env
from gapless.errors import ConfigError
from gapless.graphs.modes import AttentionSupport, GraphMode
from gapless.graphs.ops import register_custom_op

MAX_HEAD_SIZE = 256
_MIN_TILE_ROWS = 16
"""The smallest matrix product Triton's ``dot`` takes."""
_TILE_BYTES = 16 * 1024
"""Bytes of one tile of keys: keys and values of two stages then fit in shared memory for every dtype."""


class TritonPagedBackend:
    """See the module docstring. Raises ``ConfigError`` when Triton is not installed."""

    name = "triton_paged"
    support = AttentionSupport.ALWAYS
    preferred: GraphMode | None = GraphMode.FULL

    def __init__(self) -> None:
        _kernels()

    def write_kv(
        self, key_TKD: Tensor, value_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        triton_write_kv(key_TKD, value_TKD, k_cache, v_cache, slot_mapping)

    def attend(
        self,
        query_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out_THD: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
    ) -> None:
        triton_paged_attention(
            query_THD,
            k_cache,
            v_cache,
            out_THD,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.max_query_len,
            scale,
            window,
        )


@register_custom_op(mutates_args=["k_cache", "v_cache"])
def triton_write_kv(
    key_TKD: Tensor, value_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store row ``t`` at cache slot ``slot_mapping[t]``."""
    _check_layout(key_TKD, value_TKD, k_cache, v_cache)
    num_tokens, num_kv_heads, head_size = key_TKD.shape
    if num_tokens == 0:
        return
    _kernels().write_kv_kernel[(num_tokens,)](
        key_TKD,
        value_TKD,
        k_cache,
        v_cache,
        slot_mapping,
        key_TKD.stride(0),
        key_TKD.stride(1),
        value_TKD.stride(0),
        value_TKD.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=k_cache.shape[1],
        ROW_PAD=_next_power_of_2(num_kv_heads * head_size),
    )


@register_custom_op(mutates_args=["out_THD"])
def triton_paged_attention(
    query_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_THD: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    scale: float,
    window: int | None,
) -> None:
    """Causal attention over the paged cache; the contract is ``AttentionBackend.attend``."""
    _check_layout(query_THD, out_THD, k_cache, v_cache)
    num_tokens, num_heads, head_size = query_THD.shape
    num_reqs, num_kv_heads = seq_lens.shape[0], k_cache.shape[2]
    if num_tokens == 0:
        return
    group = num_heads // num_kv_heads
    tile = _choose_tile(
        group=group, head_size=head_size, itemsize=query_THD.element_size(), max_query_len=max_query_len
    )
    one_tile_per_request = max_query_len <= tile.block_q and num_tokens <= num_reqs * tile.block_q
    num_tiles = num_reqs if one_tile_per_request else num_tokens // tile.block_q + num_reqs
    _kernels().paged_attention_kernel[(num_tiles, num_kv_heads)](
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
        query_THD.stride(0),
        query_THD.stride(1),
        out_THD.stride(0),
        out_THD.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_table.stride(0),
        block_table.stride(1),
        HEAD_SIZE=head_size,
        HEAD_PAD=max(_next_power_of_2(head_size), 16),
        GROUP=group,
        GROUP_PAD=_next_power_of_2(group),
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_Q=tile.block_q,
        BLOCK_N=tile.block_n,
        WINDOW=window or 0,
        ONE_TILE_PER_REQUEST=one_tile_per_request,
        DOT_PRECISION="ieee" if query_THD.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tile:
    block_q: int
    block_n: int
    num_warps: int
    num_stages: int


def _choose_tile(*, group: int, head_size: int, itemsize: int, max_query_len: int) -> _Tile:
    """Small tiles for decode, where only ``group`` rows are real and the keys' bytes decide; large ones for
    prefill, where each tile of keys should serve many queries."""
    group_pad = _next_power_of_2(group)
    head_bytes = max(_next_power_of_2(head_size), 16) * itemsize
    block_n = min(max(_TILE_BYTES // head_bytes, 16), 64)
    wanted_rows = _next_power_of_2(max_query_len) * group_pad
    most_rows = 128 if head_bytes <= 256 else 64 if head_bytes <= 512 else 32
    rows = max(_MIN_TILE_ROWS, group_pad, min(wanted_rows, most_rows))
    return _Tile(
        block_q=rows // group_pad,
        block_n=block_n,
        num_warps=8 if rows >= 128 and head_bytes >= 256 else 4,
        # Two stages of the pipeline go to the block table, which tells where the keys are; so five keep two
        # tiles of keys and values in flight, three keep one.
        num_stages=5 if rows <= 32 else 3,
    )


def _check_layout(new_THD: Tensor, other_THD: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if new_THD.device.type == "cpu" and not _is_interpreted():
        raise ConfigError(
            "attention backend triton_paged needs a CUDA device, but got tensors on the CPU; on a CPU "
            "use --attention-backend torch_reference"
        )
    if new_THD.shape[2] > MAX_HEAD_SIZE:
        raise ConfigError(f"triton_paged handles head sizes up to {MAX_HEAD_SIZE}, not {new_THD.shape[2]}")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ConfigError("triton_paged needs key and value caches of one layout with contiguous heads")
    if new_THD.stride(2) != 1 or other_THD.stride(2) != 1:
        raise ConfigError("triton_paged needs contiguous heads (last stride 1)")


def _is_interpreted() -> bool:
    return read_env().triton_interpret


@functools.cache
def _kernels() -> ModuleType:
    try:
        from gapless.attention import triton_kernels
    except ImportError as error:
        raise ConfigError(
            f"attention backend triton_paged needs Triton, which cannot be imported ({error}); install triton"
        ) from error
    return triton_kernels


def _next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
