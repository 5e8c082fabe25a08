"""What decode attention may touch before it has waited for the kernel ahead (under Triton's interpreter).

Programs run one after another, so the two calls of an early launch tell where each of them is. From its
first call to its wait, this step's queries, keys and values are NaN, as if nobody had made them yet, and
nothing may be written.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from gapless.attention import triton_paged
from gapless.attention.tile_rules import DecodeTile
from gapless.attention.triton_paged import TritonPagedBackend
from ragged_batches import RaggedBatch, make_batch, naive_attention

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)
SCALE = 0.3


class KernelAhead:
    """Makes queries, keys and values of ``batch`` whenever a program waits for it, for that program."""

    def __init__(self, batch: RaggedBatch) -> None:
        self.num_waits = 0
        self.scratch: list[Tensor] = []
        self._slots = batch.metadata.slot_mapping[: batch.num_real_tokens].long()
        self._caches = [cache.view(-1, *cache.shape[2:]) for cache in (batch.k_cache, batch.v_cache)]
        self._query, self._out = batch.query, batch.out
        self._made = [t.clone() for t in (self._query, *self._caches)]
        self._written: list[Tensor] | None = None
        """What its writes had left when the program began, until it waits."""

    def begin(self) -> None:
        self.check_nothing_is_written()  # by a program that ended without waiting
        self._written = [t.clone() for t in (self._out, *self.scratch)]
        self._query.fill_(math.nan)
        for cache in self._caches:
            cache[self._slots] = math.nan

    def wait(self) -> None:
        self.check_nothing_is_written()
        self.num_waits += 1
        self._written = None
        for tensor, made in zip((self._query, *self._caches), self._made, strict=True):
            tensor.copy_(made)

    def check_nothing_is_written(self) -> None:
        for tensor, before in zip((self._out, *self.scratch), self._written or (), strict=False):
            torch.testing.assert_close(tensor, before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("loads_early", [False, True])
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(("query_len", "window"), [(1, None), (1, 20), (3, None), (3, 5)])
def test_before_the_wait_nothing_of_this_step_is_read_and_nothing_written(
    monkeypatch: pytest.MonkeyPatch, loads_early: bool, num_splits: int, query_len: int, window: int | None
) -> None:
    tile = DecodeTile(
        block_q=8, block_n=16, num_warps=4, num_stages=2, num_splits=num_splits, min_keys=16, called_ahead=0,
        loads_early=loads_early,
    )  # fmt: skip
    # No key of an earlier step, no request, new keys at the border of a tile and split, and across it.
    requests = [(0, query_len), (0, 0), (64, query_len), (15, query_len), (50, 1)]
    num_pad = len(requests) * query_len - sum(new for _, new in requests)
    batch = make_batch(requests, head_size=16, pad_tokens=num_pad, max_query_len=query_len)
    backend, caches = TritonPagedBackend(), (batch.k_cache, batch.v_cache)
    backend.write_kv(batch.key, batch.value, *caches, batch.metadata.slot_mapping)
    expected = naive_attention(batch, scale=SCALE, window=window)
    ahead, new_empty = KernelAhead(batch), Tensor.new_empty

    def noted(self: Tensor, *size: Any, **options: Any) -> Tensor:
        fresh = new_empty(self, *size, **options)
        if fresh.numel() and fresh.is_floating_point():
            ahead.scratch.append(fresh.fill_(math.nan))
        return fresh

    monkeypatch.setattr(Tensor, "new_empty", noted)
    monkeypatch.setattr(triton_paged, "decode_tile", lambda **_: tile)
    monkeypatch.setattr(triton_paged, "launch_options", lambda device: {"EARLY": True})
    monkeypatch.setattr(triton_paged, "_decode_constants", triton_paged._decode_constants.__wrapped__)
    monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", lambda **_: ahead.begin())
    monkeypatch.setattr(tl.extra.cuda, "gdc_wait", lambda **_: ahead.wait())
    backend.attend(batch.query, *caches, batch.out, batch.metadata, scale=SCALE, window=window)
    ahead.check_nothing_is_written()
    torch.testing.assert_close(batch.out.double(), expected, atol=3e-6, rtol=3e-6)
    # A grid may end only behind the one ahead, on which kernels behind both rely: its first splits wait.
    assert ahead.num_waits >= len(requests) * batch.k_cache.shape[2]
