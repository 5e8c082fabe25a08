"""Paged attention in plain PyTorch: the CPU's backend, and the oracle every other backend is compared with.

Both halves are opaque custom ops that read slots, lengths and block tables when they *run*, so they behave
inside a recorded graph exactly as a GPU kernel does (``AttentionSupport.ALWAYS``). Scores and sums are
float32 (float64 for float64 input) whatever the cache's dtype.

Invariants: a request's result depends on that request alone, bit for bit (its neighbours, its place in the
batch and the number of threads do not matter to decode rows; a longer query depends on its own shape only);
cache slots that were never written are never read into a sum; every row of the output is written, pad rows
with zeros.

How: query rows of one-token requests are batched by padded key length, because 16 small calls a layer cost
more than the arithmetic; longer queries go one request at a time in tiles of ``_QUERY_TILE``. See
``triton_paged.py`` for the same contract on a GPU.

Shapes: T tokens, B requests, R rows of a chunk, H heads, K key/value heads, G = H / K, D head size, L keys, N
blocks, S slots per block, M block-table columns.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from gapless.attention.base import AttentionMetadata
from gapless.attention.reference_plan import DecodeChunk, first_key_of, plan_step
from gapless.graphs.modes import AttentionSupport, GraphMode
from gapless.graphs.ops import register_custom_op

_QUERY_TILE = 256
"""Query tokens per call of a long query: bounds the mask, and skips keys that lie in the tile's future."""
_ROW_ALIGN = 4
"""Query rows per key/value head are padded to this. The CPU kernel gives each thread a scratch buffer whose
alignment depends on the row count, and the matrix library picks its kernel by alignment: with 1 or 3 rows the
last bits depend on which thread ran. Multiples of 4 do not (and 4 rows are faster than 3)."""


class TorchReferenceBackend:
    """See the module docstring. Stateless."""

    name = "torch_reference"
    support = AttentionSupport.ALWAYS
    preferred: GraphMode | None = GraphMode.FULL

    def write_kv(
        self, key_TKD: Tensor, value_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        torch_write_kv(key_TKD, value_TKD, k_cache, v_cache, slot_mapping)

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
        torch_paged_attention(
            query_THD,
            k_cache,
            v_cache,
            out_THD,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            scale,
            window,
        )


@register_custom_op(mutates_args=["k_cache", "v_cache"])
def torch_write_kv(
    key_TKD: Tensor, value_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store row ``t`` at cache slot ``slot_mapping[t]``; several pad rows may share a slot of the sink
    block."""
    slots = slot_mapping.long()
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, _as_dtype(key_TKD, k_cache.dtype))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, _as_dtype(value_TKD, v_cache.dtype))


@register_custom_op(mutates_args=["out_THD"])
def torch_paged_attention(
    query_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_THD: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
) -> None:
    """Causal attention over the paged cache; the contract is ``AttentionBackend.attend``."""
    starts, lengths = tuple(query_start_loc.tolist()), tuple(seq_lens.tolist())
    _, block_size, num_kv_heads, head_size = k_cache.shape
    step = plan_step(
        starts,
        lengths,
        table_width=block_table.shape[1],
        block_size=block_size,
        key_bytes=num_kv_heads * head_size * 4,
        window=window,
        device=query_THD.device,
    )
    for chunk in step.decode:
        _attend_decode(query_THD, k_cache, v_cache, out_THD, block_table, chunk, scale)
    for request in step.long_requests:
        rows = slice(starts[request], starts[request + 1])
        _attend_long_query(
            query_THD[rows],
            k_cache,
            v_cache,
            out_THD[rows],
            block_table[request],
            lengths[request],
            scale,
            window,
        )
    if starts[-1] < out_THD.shape[0]:
        out_THD[starts[-1] :].zero_()


def _attend_decode(
    query_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_THD: Tensor,
    block_table: Tensor,
    chunk: DecodeChunk,
    scale: float,
) -> None:
    """Few operations matter more than little arithmetic here: weights flush the caches between two layers, so
    that each operation first fetches its own code."""
    num_tokens, num_heads, head_size = query_THD.shape
    num_rows, num_kv_heads = chunk.num_rows, k_cache.shape[2]
    compute = _compute_dtype(query_THD)
    group = num_heads // num_kv_heads
    padded_group = math.ceil(group / _ROW_ALIGN) * _ROW_ALIGN
    slots = chunk.find_slots(block_table, k_cache.shape[1])
    rows = chunk.rows
    if num_rows == num_tokens:
        query_RHD, out_RHD = query_THD, out_THD
    elif isinstance(rows, slice):
        query_RHD, out_RHD = query_THD[rows], out_THD[rows]
    else:
        query_RHD, out_RHD = query_THD.index_select(0, rows), None
    query_RKGD = query_RHD.view(num_rows, num_kv_heads, group, head_size)
    if padded_group != group:
        query_RKGD = _scratch.padded_queries(query_RKGD, padded_group, compute)
    out_RKGD = scaled_dot_product_attention(
        _as_dtype(query_RKGD, compute),
        _gather(k_cache, slots, num_rows, compute, scratch="keys"),
        _gather(v_cache, slots, num_rows, compute, scratch="values"),
        attn_mask=chunk.mask_of(compute, padded_group),
        scale=scale,
    ).narrow(2, 0, group)
    if out_RHD is not None:
        out_RHD.view(num_rows, num_kv_heads, group, head_size).copy_(out_RKGD)
    else:
        assert isinstance(rows, Tensor)
        out_THD.index_copy_(0, rows, out_RKGD.reshape(num_rows, num_heads, head_size).to(out_THD.dtype))


def _gather(
    cache_NSKD: Tensor, slots: Tensor, num_rows: int, compute: torch.dtype, *, scratch: str
) -> Tensor:
    """``[R, K, L, D]``: what lies at the slots of each row."""
    num_kv_heads, head_size = cache_NSKD.shape[2:]
    flat, heads_RKLD = _scratch.gathered(scratch, num_rows, slots.shape[0], cache_NSKD)
    torch.index_select(cache_NSKD.view(-1, num_kv_heads * head_size), 0, slots, out=flat)
    return _as_dtype(heads_RKLD, compute)


def _attend_long_query(
    query_QHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_QHD: Tensor,
    block_row_M: Tensor,
    num_keys: int,
    scale: float,
    window: int | None,
) -> None:
    num_queries, num_heads, _ = query_QHD.shape
    _, block_size, num_kv_heads, head_size = k_cache.shape
    compute = _compute_dtype(query_QHD)
    num_cached = num_keys - num_queries
    first_block = first_key_of(num_cached, window) // block_size
    blocks = block_row_M[first_block : math.ceil(num_keys / block_size)]
    first_key = first_block * block_size
    keys_LKD, values_LKD = (
        cache.index_select(0, blocks).view(-1, num_kv_heads, head_size).to(compute)
        for cache in (k_cache, v_cache)
    )
    for tile in range(0, num_queries, _QUERY_TILE):
        tile_end = min(tile + _QUERY_TILE, num_queries)
        low = first_key_of(num_cached + tile, window)
        high = num_cached + tile_end
        position_q = torch.arange(num_cached + tile, high, device=query_QHD.device).unsqueeze(1)
        position_k = torch.arange(low, high, device=query_QHD.device)
        hidden = position_k > position_q
        if window is not None:
            hidden |= position_k <= position_q - window
        mask = torch.zeros(hidden.shape, dtype=compute, device=hidden.device).masked_fill_(hidden, -math.inf)
        out_1HQD = scaled_dot_product_attention(
            query_QHD[tile:tile_end].to(compute).transpose(0, 1).unsqueeze(0),
            keys_LKD[low - first_key : high - first_key].transpose(0, 1).unsqueeze(0),
            values_LKD[low - first_key : high - first_key].transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            scale=scale,
            enable_gqa=num_heads != num_kv_heads,
        )
        out_QHD[tile:tile_end].copy_(out_1HQD[0].transpose(0, 1))


class _Scratch(threading.local):
    """Memory that decode writes before it reads it, kept per thread with the views of its last use, which is
    the layer before. Fresh from the C library such memory often comes with page faults, which made steps of 4
    requests of 1000 tokens five times slower."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._views: dict[str, tuple[Any, tuple[Tensor, Tensor]]] = {}
        self._queries: tuple[Any, tuple[Tensor, Tensor]] | None = None

    def gathered(self, use: str, num_rows: int, num_keys: int, like_NSKD: Tensor) -> tuple[Tensor, Tensor]:
        """Room for ``num_keys`` keys (or values) in all: as ``[R * L, K * D]``, and as ``[R, K, L, D]``."""
        _, _, num_kv_heads, head_size = like_NSKD.shape
        key = (num_rows, num_keys, num_kv_heads, head_size, like_NSKD.dtype, like_NSKD.device)
        last = self._views.get(use)
        if last is not None and last[0] == key:
            return last[1]
        size = num_keys * num_kv_heads * head_size
        kind = (use, like_NSKD.dtype, like_NSKD.device)
        buffer = self._buffers.get(kind)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # a later step outside of that mode writes it too
                buffer = self._buffers[kind] = like_NSKD.new_empty(size)
        flat = buffer[:size].view(num_keys, num_kv_heads * head_size)
        views = flat, flat.view(num_rows, -1, num_kv_heads, head_size).transpose(1, 2)
        self._views[use] = (key, views)
        return views

    def padded_queries(self, query_RKGD: Tensor, padded_group: int, dtype: torch.dtype) -> Tensor:
        """The queries with rows of zeros behind those of each key/value head. What autograd follows is not
        kept: each step's graph would hang on the one before."""
        if query_RKGD.requires_grad:
            return pad(query_RKGD.to(dtype), (0, 0, 0, padded_group - query_RKGD.shape[2]))
        key = (query_RKGD.shape, padded_group, dtype, query_RKGD.device)
        last = self._queries
        if last is None or last[0] != key:
            num_rows, num_kv_heads, group, head_size = query_RKGD.shape
            shape = (num_rows, num_kv_heads, padded_group, head_size)
            with torch.inference_mode(False):
                padded = torch.zeros(shape, dtype=dtype, device=query_RKGD.device)
                last = self._queries = (key, (padded, padded[:, :, :group]))
        padded_RKGD, live_RKGD = last[1]
        live_RKGD.copy_(query_RKGD)
        return padded_RKGD


_scratch = _Scratch()


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, without its call where it has nothing to do: five times a layer."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _compute_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32
