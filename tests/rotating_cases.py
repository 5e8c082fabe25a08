"""Cases for attention that norms and rotates heads itself: rows of the q/k/v product before either."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gapless.attention.base import Rotation
from gapless.attention.triton_paged import TritonPagedBackend
from gapless.kernels.rope_cache import rotate_into_cache
from ragged_batches import RaggedBatch, make_batch

EPS = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    batch: RaggedBatch
    qkv: Tensor
    rotation: Rotation

    def rotated_apart(self) -> RaggedBatch:
        """The batch behind ``rotate_into_cache``, with caches of its own."""
        k_cache, v_cache = self.batch.k_cache.clone(), self.batch.v_cache.clone()
        query = rotate_into_cache(
            self.qkv, *self.rotation, self.batch.metadata.slot_mapping, k_cache, v_cache
        )
        return replace(self.batch, query=query, k_cache=k_cache, v_cache=v_cache)

    def attend(self, backend: TritonPagedBackend, *, scale: float, window: int | None) -> None:
        batch = self.batch
        backend.attend_rotating(
            self.qkv, self.rotation, batch.k_cache, batch.v_cache, batch.out, batch.metadata, scale=scale,
            window=window,
        )  # fmt: skip


def make_case(
    requests: list[tuple[int, int]], *, has_norm: bool = True, has_positions: bool = True, **options: Any
) -> Case:
    """One new token or none a request, and a row of padding for each that has none. ``has_positions``: the
    table is the model's, by position, else a row for each token. Options are those of ``make_batch``."""
    num_pad = sum(new == 0 for _, new in requests)
    batch = make_batch(requests, pad_tokens=num_pad, max_query_len=1, **options)
    qkv = qkv_of(batch)
    head_size, num_rotated = batch.query.shape[2], batch.query.shape[1] + batch.key.shape[1]
    generator = torch.Generator().manual_seed(1)
    num_rows = max(batch.seq_lens) + 1 if has_positions else len(qkv)
    angles = torch.rand(num_rows, head_size // 2, generator=generator) * 6
    rope = torch.stack((angles.cos(), angles.sin()), 1).to(qkv)
    weight = torch.rand(num_rotated, head_size, generator=generator).to(qkv) + 0.5
    cached = [length - 1 for length in batch.seq_lens if length]
    positions = torch.tensor(cached + [0] * num_pad, device=qkv.device)
    rotation = Rotation(weight if has_norm else None, EPS, rope, positions if has_positions else None)
    return Case(batch=batch, qkv=qkv, rotation=rotation)


def qkv_of(batch: RaggedBatch) -> Tensor:
    """Heads of the batch as rows of the q/k/v product."""
    return torch.cat([rows.flatten(1) for rows in (batch.query, batch.key, batch.value)], 1)
