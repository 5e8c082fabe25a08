"""Random ragged batches for attention tests: a poisoned paged cache, shuffled block tables, empty slots, pad
rows.

``naive_attention`` is the plainest statement of what attention must compute: one query row at a time, in
float64.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.attention.base import AttentionMetadata


@dataclass(frozen=True, kw_only=True, slots=True)
class RaggedBatch:
    query: Tensor
    key: Tensor
    value: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    metadata: AttentionMetadata
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def num_real_tokens(self) -> int:
        return sum(self.query_lens)


def make_batch(
    requests: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 32,
    block_size: int = 16,
    pad_tokens: int = 0,
    table_columns: int | None = None,
    max_query_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> RaggedBatch:
    """``requests`` are (cached tokens, new tokens). Everything that must reach no result is NaN: cache slots
    that no token was written to, and query, key and value of pad rows. ``out`` starts as NaN too."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    query_lens = tuple(new for _, new in requests)
    seq_lens = tuple(cached + new if new else 0 for cached, new in requests)
    blocks_of = [math.ceil(n / block_size) for n in seq_lens]
    num_blocks = 1 + sum(blocks_of)
    num_tokens = sum(query_lens) + pad_tokens
    free = list(range(1, num_blocks))
    rng.shuffle(free)

    columns = table_columns or max(1, *blocks_of)
    table = torch.zeros(len(requests), columns, dtype=torch.int32)
    cache_shape = (num_blocks, block_size, num_kv_heads, head_size)
    k_cache, v_cache = (torch.full(cache_shape, math.nan, dtype=dtype) for _ in range(2))
    slots: list[int] = []
    for index, (num_keys, num_new) in enumerate(zip(seq_lens, query_lens, strict=True)):
        own = [free.pop() for _ in range(blocks_of[index])]
        table[index, : len(own)] = torch.tensor(own, dtype=torch.int32)
        positions = [own[p // block_size] * block_size + p % block_size for p in range(num_keys)]
        slots += positions[num_keys - num_new :]
        for position in positions[: num_keys - num_new]:
            for cache in (k_cache, v_cache):
                row = torch.randn(num_kv_heads, head_size, generator=generator)
                cache[position // block_size, position % block_size] = row.to(dtype)
    slots += [i % block_size for i in range(pad_tokens)]

    def rows(heads: int) -> Tensor:
        new = torch.randn(num_tokens, heads, head_size, generator=generator).to(dtype)
        new[sum(query_lens) :] = math.nan
        return new.to(device)

    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.tensor(slots, dtype=torch.int32, device=device),
        max_query_len=num_tokens if max_query_len is None else max_query_len,
        max_seq_len=columns * block_size,
    )
    return RaggedBatch(
        query=rows(num_heads),
        key=rows(num_kv_heads),
        value=rows(num_kv_heads),
        k_cache=k_cache.to(device),
        v_cache=v_cache.to(device),
        out=torch.full((num_tokens, num_heads, head_size), math.nan, dtype=dtype, device=device),
        metadata=metadata,
        query_lens=query_lens,
        seq_lens=seq_lens,
    )


def naive_attention(batch: RaggedBatch, *, scale: float, window: int | None) -> Tensor:
    """What ``attend`` must write, float64 on the CPU, after this step's keys and values have been stored."""
    query, k_cache, v_cache = (t.cpu().double() for t in (batch.query, batch.k_cache, batch.v_cache))
    table = batch.metadata.block_table.cpu()
    block_size = k_cache.shape[1]
    group = query.shape[1] // k_cache.shape[2]
    expected = torch.zeros(query.shape, dtype=torch.float64)
    row = 0
    for request, (num_keys, num_new) in enumerate(zip(batch.seq_lens, batch.query_lens, strict=True)):
        for position in range(num_keys - num_new, num_keys):
            low = 0 if window is None else max(0, position - window + 1)
            places = [
                (int(table[request, p // block_size]), p % block_size) for p in range(low, position + 1)
            ]
            for head in range(query.shape[1]):
                keys = torch.stack([k_cache[b, s, head // group] for b, s in places])
                values = torch.stack([v_cache[b, s, head // group] for b, s in places])
                weights = torch.softmax(keys @ query[row, head] * scale, 0)
                expected[row, head] = weights @ values
            row += 1
    return expected


def run_backend(backend: object, batch: RaggedBatch, *, scale: float, window: int | None) -> Tensor:
    """Write this step's keys and values, attend, and return the output."""
    backend.write_kv(  # type: ignore[attr-defined]
        batch.key, batch.value, batch.k_cache, batch.v_cache, batch.metadata.slot_mapping
    )
    backend.attend(  # type: ignore[attr-defined]
        batch.query, batch.k_cache, batch.v_cache, batch.out, batch.metadata, scale=scale, window=window
    )
    return batch.out
