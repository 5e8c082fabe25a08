"""What the reference backend works out from the lengths of a step, once for all layers.

Decode rows are grouped by padded key length into chunks; each chunk carries the index tensors that gather its
keys from the paged cache. The plan is a function of lengths and shapes alone; what the block table says is
looked up when the op runs (``DecodeChunk.find_slots``). Invariant: a row's chunk has the key length that the
row alone asks for, so that its neighbours cannot change its bits. Used by ``torch_reference.py``.

Shapes: R rows of a chunk, L padded keys of a row.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

_KEY_BUCKETS = (64, 128, 256, 512)
"""Padded key lengths of decode rows; beyond the last, its multiples (the CPU kernel's own key block)."""
_CHUNK_BYTES = 2 << 20
"""Gathered keys of one decode call. Larger ones fall out of the caches: 8 MiB was up to three times slower at
16 requests of 500 tokens, 1 MiB (more calls) up to a third slower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """What the lengths of a step ask for."""

    decode: tuple[DecodeChunk, ...]
    long_requests: tuple[int, ...]
    """Requests with more than one query token."""


@dataclass(kw_only=True, slots=True)
class DecodeChunk:
    """Decode rows with the same padded key length L, as index tensors that serve every layer of a step."""

    num_rows: int
    rows: slice | Tensor
    """Query rows: a slice where they follow each other, as in pure decode."""
    table_index: Tensor
    """The blocks that hold visible keys, as places in the flattened block table. No other is looked at."""
    block_of_key: Tensor
    """[R * L], the place of a key's block among those. A key that does not exist is replaced by the row's
    first one: its weight is zero, and zero times what was really written is zero (not so for NaN)."""
    offset_of_key: Tensor
    """[R * L], its offset within the block."""
    mask_R11L: Tensor
    mask: Tensor | None = None
    """The mask that ``mask_of`` made last."""
    slots: tuple[Tensor, Tensor] | None = None
    """Blocks, and the cache slots of all keys for these blocks: layers of one step share a block table."""

    def find_slots(self, block_table: Tensor, block_size: int) -> Tensor:
        blocks = block_table.take(self.table_index)
        known = self.slots
        if known is None or not torch.equal(known[0], blocks):
            slots = blocks.index_select(0, self.block_of_key) * block_size + self.offset_of_key
            known = self.slots = (blocks, slots)
        return known[1]

    def mask_of(self, dtype: torch.dtype, num_queries: int) -> Tensor:
        """``[R, 1, Q, L]``, the same for each of the Q query rows of a key/value head."""
        known = self.mask
        if known is None or known.dtype != dtype or known.shape[2] != num_queries:
            known = self.mask = self.mask_R11L.to(dtype).expand(-1, -1, num_queries, -1)
        return known


@functools.lru_cache(maxsize=16)
def plan_step(
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    table_width: int,
    block_size: int,
    key_bytes: int,
    window: int | None,
    device: torch.device,
) -> StepPlan:
    """A function of the lengths alone, so the layers of one step share the answer."""
    long_requests = []
    groups: dict[int, list[tuple[int, int, int, int]]] = {}
    for request, num_keys in enumerate(lengths):
        num_queries = starts[request + 1] - starts[request]
        if num_queries == 1:
            first_key = first_key_of(num_keys - 1, window)
            entry = (request, starts[request], first_key, num_keys)
            groups.setdefault(_bucket(num_keys - first_key), []).append(entry)
        elif num_queries > 1:
            long_requests.append(request)
    chunks = []
    for bucket, entries in groups.items():
        size = max(1, _CHUNK_BYTES // (bucket * key_bytes))
        for start in range(0, len(entries), size):
            part = entries[start : start + size]
            chunks.append(_plan_chunk(part, bucket, table_width, block_size, device))
    return StepPlan(decode=tuple(chunks), long_requests=tuple(long_requests))


def first_key_of(query_position: int, window: int | None) -> int:
    return 0 if window is None else max(0, query_position - window + 1)


def _plan_chunk(
    entries: list[tuple[int, int, int, int]],
    bucket: int,
    table_width: int,
    block_size: int,
    device: torch.device,
) -> DecodeChunk:
    request_R1, row_R1, first_key_R1, num_keys_R1 = torch.tensor(entries).unsqueeze(1).unbind(-1)
    position_RL = first_key_R1 + torch.arange(bucket)
    dead_RL = position_RL >= num_keys_R1
    position_RL = torch.where(dead_RL, first_key_R1, position_RL)
    place_RL = request_R1 * table_width + position_RL // block_size
    table_index, block_of_key = place_RL.flatten().unique(return_inverse=True)
    first_row, last_row = entries[0][1], entries[-1][1]
    is_run = last_row - first_row + 1 == len(entries)
    return DecodeChunk(
        num_rows=len(entries),
        rows=slice(first_row, last_row + 1) if is_run else row_R1.flatten().to(device),
        table_index=table_index.to(device),
        block_of_key=block_of_key.to(device),
        offset_of_key=(position_RL % block_size).flatten().to(device),
        mask_R11L=torch.zeros(dead_RL.shape).masked_fill_(dead_RL, -math.inf)[:, None, None].to(device),
    )


def _bucket(num_keys: int) -> int:
    for bucket in _KEY_BUCKETS:
        if num_keys <= bucket:
            return bucket
    return math.ceil(num_keys / _KEY_BUCKETS[-1]) * _KEY_BUCKETS[-1]
