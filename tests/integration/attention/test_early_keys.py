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

from gapless.attention import triton_launch, triton_paged
from gapless.attention.tile_rules import DecodeTile
from gapless.attention.triton_paged import TritonPagedBackend
from ragged_batches import RaggedBatch, make_batch, naive_attention
from rotating_cases import make_case

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)
SCALE = 0.3


class KernelAhead:
    """Makes ``inputs`` and this step's keys and values whenever a program waits for it, for that program."""

    def __init__(self, batch: RaggedBatch, inputs: list[Tensor], *, makes_keys: bool) -> None:
        self.num_waits = 0
        self.written = [batch.out]
        """What the kernel writes to, and what it takes as scratch."""
        self._made = [(tensor, slice(None), tensor.clone()) for tensor in inputs]
        slots = batch.metadata.slot_mapping[: batch.num_real_tokens].long()
        for cache in (batch.k_cache, batch.v_cache):
            rows = cache.view(-1, *cache.shape[2:])
            if makes_keys:
                self._made.append((rows, slots, rows[slots]))
            else:
                self.written.append(cache)
        self._before: list[Tensor] | None = None
        """What programs had left when one began, until it waits."""

    def begin(self) -> None:
        self.check_nothing_is_written()  # by a program that ended without waiting
        for tensor, rows, _ in self._made:
            tensor[rows] = math.nan
        self._before = [tensor.clone() for tensor in self.written]

    def wait(self) -> None:
        self.check_nothing_is_written()
        self.num_waits += 1
        self._before = None
        for tensor, rows, made in self._made:
            tensor[rows] = made

    def check_nothing_is_written(self) -> None:
        for tensor, before in zip(self.written, self._before or (), strict=False):
            torch.testing.assert_close(tensor, before, atol=0, rtol=0, equal_nan=True)

    def stand_in(self, monkeypatch: pytest.MonkeyPatch, tile: DecodeTile) -> None:
        """Kernels have ``tile`` and this one ahead of them from now on."""
        new_empty = Tensor.new_empty

        def noted(tensor: Tensor, *size: Any, **options: Any) -> Tensor:
            fresh = new_empty(tensor, *size, **options)
            if fresh.numel() and fresh.is_floating_point():
                self.written.append(fresh.fill_(math.nan))
            return fresh

        monkeypatch.setattr(Tensor, "new_empty", noted)
        monkeypatch.setattr(triton_paged, "decode_tile", lambda **_: tile)
        monkeypatch.setattr(triton_launch, "launch_options", lambda device: {"EARLY": True})
        uncached = triton_launch.decode_constants.__wrapped__
        monkeypatch.setattr(triton_launch, "decode_constants", uncached)
        monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", lambda **_: self.begin())
        monkeypatch.setattr(tl.extra.cuda, "gdc_wait", lambda **_: self.wait())

    def check_waits(self, batch: RaggedBatch) -> None:
        """A grid may end only behind the one ahead, on which kernels behind both rely: first splits wait."""
        self.check_nothing_is_written()
        assert self.num_waits >= len(batch.query_lens) * batch.k_cache.shape[2]


def tile_of(*, num_splits: int, loads_early: bool) -> DecodeTile:
    return DecodeTile(
        block_q=8, block_n=16, num_warps=4, num_stages=2, num_splits=num_splits, min_keys=16, called_ahead=0,
        loads_early=loads_early,
    )  # fmt: skip


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(("query_len", "window"), [(1, None), (1, 20), (3, None), (3, 5)])
def test_before_the_wait_nothing_of_this_step_is_read_and_nothing_written(
    monkeypatch: pytest.MonkeyPatch, num_splits: int, query_len: int, window: int | None
) -> None:
    # No key of an earlier step, no request, new keys at the border of a tile and split, and across it.
    requests = [(0, query_len), (0, 0), (64, query_len), (15, query_len), (50, 1)]
    num_pad = len(requests) * query_len - sum(new for _, new in requests)
    batch = make_batch(requests, head_size=16, pad_tokens=num_pad, max_query_len=query_len)
    backend, caches = TritonPagedBackend(), (batch.k_cache, batch.v_cache)
    backend.write_kv(batch.key, batch.value, *caches, batch.metadata.slot_mapping)
    expected = naive_attention(batch, scale=SCALE, window=window)
    ahead = KernelAhead(batch, [batch.query], makes_keys=True)
    ahead.stand_in(monkeypatch, tile_of(num_splits=num_splits, loads_early=False))
    backend.attend(batch.query, *caches, batch.out, batch.metadata, scale=SCALE, window=window)
    ahead.check_waits(batch)
    torch.testing.assert_close(batch.out.double(), expected, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("loads_early", [False, True])
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("has_positions", [True, False])
def test_so_it_is_where_heads_are_rotated_in_attention(
    monkeypatch: pytest.MonkeyPatch,
    has_positions: bool,
    window: int | None,
    num_splits: int,
    loads_early: bool,
) -> None:
    """Without positions the rotary table, too, is made by a kernel of the step."""
    case = make_case([(0, 1), (0, 0), (64, 1), (15, 1), (50, 1)], has_positions=has_positions, head_size=16)
    expected = naive_attention(case.rotated_apart(), scale=SCALE, window=window)
    inputs = [case.qkv] if has_positions else [case.qkv, case.rotation.rope_P2F]
    ahead = KernelAhead(case.batch, inputs, makes_keys=False)
    ahead.stand_in(monkeypatch, tile_of(num_splits=num_splits, loads_early=loads_early))
    case.attend(TritonPagedBackend(), scale=SCALE, window=window)
    ahead.check_waits(case.batch)
    torch.testing.assert_close(case.batch.out.double(), expected, atol=5e-6, rtol=5e-6)
