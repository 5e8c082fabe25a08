"""Keys of a decode step split among programs and merged again, under Triton's interpreter, in many ways."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.attention import triton_paged
from gapless.attention.tile_rules import DecodeTile
from gapless.attention.triton_paged import TritonPagedBackend
from ragged_batches import RaggedBatch, make_batch, naive_attention, run_backend

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def use_splits(
    monkeypatch: pytest.MonkeyPatch, num_splits: int, *, group: int, query_len: int = 1, block_n: int = 16
) -> None:
    """Decode with ``num_splits`` splits whatever the shapes."""
    group_pad = 1 << (group - 1).bit_length()
    block_q = max(16 // group_pad, 1 << (query_len - 1).bit_length())
    tile = DecodeTile(
        block_q=block_q,
        block_n=block_n,
        num_warps=4,
        num_stages=2,
        num_splits=num_splits,
        min_keys=block_n,
        called_ahead=16,
        loads_early=False,
    )
    monkeypatch.setattr(triton_paged, "decode_tile", lambda **_: tile)
    monkeypatch.delattr(triton_paged, "_prefill")


def attend(batch: RaggedBatch, *, window: int | None = None) -> Tensor:
    return run_backend(TritonPagedBackend(), batch, scale=0.3, window=window)


def check(requests: list[tuple[int, int]], *, window: int | None = None, **options: Any) -> Tensor:
    """Poisoned scratch, caches and outputs, against float64. Pad rows make the batch uniform."""
    num_rows = len(requests) * options["max_query_len"]
    options["pad_tokens"] = max(num_rows - sum(new for _, new in requests), options.get("pad_tokens", 0))
    batch = make_batch(requests, **options)
    out = attend(batch, window=window)
    expected = naive_attention(batch, scale=0.3, window=window)
    tolerance = TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    assert (out[batch.num_real_tokens :] == 0).all()
    return out


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, so that what a split did not write shows."""
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *size: Any, **options: Any) -> Tensor:
        fresh = new_empty(self, *size, **options)
        return fresh.fill_(math.nan) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


@pytest.mark.parametrize("window", [None, 1, 7, 50])
@pytest.mark.parametrize("num_splits", [1, 3, 7])
def test_any_number_of_splits_and_any_window(
    monkeypatch: pytest.MonkeyPatch, num_splits: int, window: int | None
) -> None:
    use_splits(monkeypatch, num_splits, group=2)
    requests = [(0, 1), (15, 1), (0, 0), (16, 1), (97, 1)]
    check(requests, window=window, head_size=16, max_query_len=1)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (6, 2), (7, 1), (20, 1)])
@pytest.mark.parametrize("query_len", [1, 3])
def test_any_group_and_query_length(
    monkeypatch: pytest.MonkeyPatch, num_heads: int, num_kv_heads: int, query_len: int
) -> None:
    use_splits(monkeypatch, 4, group=num_heads // num_kv_heads, query_len=query_len)
    check(
        [(60, query_len), (0, 0), (0, query_len), (13, query_len)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=16,
        max_query_len=query_len,
    )


@pytest.mark.parametrize("window", [None, 3])
def test_queries_of_one_request_may_end_in_different_splits(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """A split whose keys come after a query says nothing about it."""
    use_splits(monkeypatch, 8, group=2, query_len=8)
    check([(28, 8), (0, 8), (9, 2)], window=window, head_size=16, max_query_len=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_any_head_size_and_dtype(monkeypatch: pytest.MonkeyPatch, head_size: int, dtype: torch.dtype) -> None:
    use_splits(monkeypatch, 4, group=2)
    check([(50, 1), (0, 1)], head_size=head_size, dtype=dtype, max_query_len=1, pad_tokens=1)


@pytest.mark.parametrize("block_n", [16, 64])
@pytest.mark.parametrize("block_size", [16, 24, 32, 64, 128])
def test_any_block_size(monkeypatch: pytest.MonkeyPatch, block_size: int, block_n: int) -> None:
    use_splits(monkeypatch, 4, group=2, block_n=block_n)
    check([(150, 1), (block_size - 1, 1)], block_size=block_size, head_size=16, max_query_len=1)


def test_pad_rows_beyond_the_requests_become_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    use_splits(monkeypatch, 4, group=2)
    requests = [(40, 1), (0, 0), (0, 0)]
    check(requests, head_size=16, max_query_len=1, pad_tokens=2)
    check([(0, 0)] * 3, head_size=16, max_query_len=1, pad_tokens=3)


def test_pad_entries_of_the_block_table_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    use_splits(monkeypatch, 8, group=2)
    batch, twin = (
        make_batch([(70, 1), (5, 1), (0, 0)], table_columns=9, head_size=16, max_query_len=1, pad_tokens=1)
        for _ in range(2)
    )
    by_column = batch.metadata.block_table.t().contiguous().t()
    for index, length in enumerate(batch.seq_lens):
        by_column[index, math.ceil(length / 16) :] = 1_000_000
    changed = replace(batch, metadata=replace(batch.metadata, block_table=by_column))
    assert torch.equal(attend(changed), attend(twin))


def test_a_request_has_the_same_bits_whatever_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    use_splits(monkeypatch, 4, group=2)
    batch = make_batch([(77, 1), (40, 1), (0, 1)], head_size=16, max_query_len=1)
    together = attend(batch).clone()
    metadata = replace(
        batch.metadata,
        query_start_loc=batch.metadata.query_start_loc[:2],
        seq_lens=batch.metadata.seq_lens[:1],
        block_table=batch.metadata.block_table[:1],
        slot_mapping=batch.metadata.slot_mapping[:1],
    )
    rows = {name: getattr(batch, name)[:1] for name in ("query", "key", "value", "out")}
    assert torch.equal(attend(replace(batch, metadata=metadata, **rows)), together[:1])


@settings(max_examples=8, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 1)), min_size=1, max_size=4),
    window=st.one_of(st.none(), st.integers(1, 60)),
    num_splits=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_ragged_decode_batches(
    requests: list[tuple[int, int]], window: int | None, num_splits: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_splits(monkeypatch, num_splits, group=2)
        check(requests, window=window, head_size=16, max_query_len=1, seed=seed)
