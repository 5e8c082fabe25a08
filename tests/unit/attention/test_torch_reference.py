"""The reference backend against attention written out row by row, and the invariants it promises."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.attention import reference_plan, torch_reference
from gapless.attention.base import Attention
from gapless.attention.torch_reference import (
    TorchReferenceBackend,
    torch_paged_attention,
    torch_write_kv,
)
from gapless.errors import GraphError
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.modes import AttentionSupport
from gapless.graphs.ops import implementation_of
from ragged_batches import RaggedBatch, make_batch, naive_attention, run_backend

BATCHES = {
    "one decode": [(7, 1)],
    "first token": [(0, 1)],
    "uniform decode": [(5, 1), (30, 1), (15, 1), (16, 1)],
    "decode with empty slots": [(5, 1), (0, 0), (40, 1), (0, 0)],
    "decode of very different lengths": [(1, 1), (600, 1), (70, 1), (130, 1), (64, 1)],
    "prefill": [(0, 12), (0, 33)],
    "prefill with cached prefix": [(16, 12), (33, 5)],
    "mixed": [(20, 1), (0, 9), (7, 3), (0, 0), (50, 1)],
    "speculative verification": [(20, 3), (5, 3)],
    "nothing": [(0, 0), (0, 0)],
}


def attend(batch: RaggedBatch, *, window: int | None = None, scale: float = 0.3) -> Tensor:
    return run_backend(TorchReferenceBackend(), batch, scale=scale, window=window)


@pytest.fixture(autouse=True)
def _fresh_plans() -> Iterator[None]:
    reference_plan.plan_step.cache_clear()
    yield
    reference_plan.plan_step.cache_clear()


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES.keys())
def test_equals_attention_row_by_row(requests: list[tuple[int, int]], window: int | None) -> None:
    batch = make_batch(requests, pad_tokens=3)
    out = attend(batch, window=window)
    expected = naive_attention(batch, scale=0.3, window=window)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    assert (out[batch.num_real_tokens :] == 0).all()


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES.keys())
def test_the_block_table_may_be_stored_by_column(requests: list[tuple[int, int]]) -> None:
    batch, twin = make_batch(requests), make_batch(requests)
    by_column = batch.metadata.block_table.t().contiguous().t()
    metadata = dataclasses.replace(batch.metadata, block_table=by_column)
    assert torch.equal(attend(dataclasses.replace(batch, metadata=metadata)), attend(twin))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (4, 1), (9, 3), (8, 2), (14, 2)])
@pytest.mark.parametrize("head_size", [32, 40, 64, 80, 128, 256])
def test_every_head_layout(num_heads: int, num_kv_heads: int, head_size: int) -> None:
    batch = make_batch(
        BATCHES["mixed"], num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, pad_tokens=1
    )
    out = attend(batch, scale=head_size**-0.5)
    expected = naive_attention(batch, scale=head_size**-0.5, window=None)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 16, 24, 128])
def test_every_block_size(block_size: int) -> None:
    batch = make_batch([(20, 1), (30, 4), (127, 1), (0, 3)], block_size=block_size, pad_tokens=2)
    out = attend(batch, window=50)
    torch.testing.assert_close(
        out.double(), naive_attention(batch, scale=0.3, window=50), atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)]
)
def test_every_dtype_computes_in_at_least_float32(dtype: torch.dtype, tolerance: float) -> None:
    batch = make_batch(BATCHES["mixed"], dtype=dtype, pad_tokens=2)
    out = attend(batch)
    assert out.dtype == dtype
    expected = naive_attention(batch, scale=0.3, window=None)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


requests_strategy = st.lists(
    st.tuples(st.integers(0, 40), st.one_of(st.just(0), st.just(1), st.integers(1, 20))),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(
    requests=requests_strategy,
    window=st.one_of(st.none(), st.integers(1, 30)),
    heads=st.sampled_from([(2, 1), (3, 3), (6, 2)]),
    block_size=st.sampled_from([16, 32]),
    pad_tokens=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_ragged_batches_equal_attention_row_by_row(
    requests: list[tuple[int, int]],
    window: int | None,
    heads: tuple[int, int],
    block_size: int,
    pad_tokens: int,
    seed: int,
) -> None:
    batch = make_batch(
        requests,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=16,
        block_size=block_size,
        pad_tokens=pad_tokens,
        seed=seed,
    )
    out = attend(batch, window=window)
    expected = naive_attention(batch, scale=0.3, window=window)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 10])
def test_a_query_longer_than_a_tile_is_exact(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(torch_reference, "_QUERY_TILE", 8)
    batch = make_batch([(5, 21), (0, 8), (40, 9)])
    torch.testing.assert_close(
        attend(batch, window=window).double(),
        naive_attention(batch, scale=0.3, window=window),
        atol=2e-6,
        rtol=1e-5,
    )


def test_rows_split_into_chunks_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [(n, 1) for n in (5, 60, 33, 100, 7, 200, 63)]
    whole = attend(make_batch(requests))
    monkeypatch.setattr(reference_plan, "_CHUNK_BYTES", 1)
    reference_plan.plan_step.cache_clear()
    assert torch.equal(attend(make_batch(requests)), whole)


def rows_of(batch: RaggedBatch, index: int) -> slice:
    start = sum(batch.query_lens[:index])
    return slice(start, start + batch.query_lens[index])


def transplant(source: RaggedBatch, index: int, target: RaggedBatch, place: int) -> None:
    """Give request ``place`` of ``target`` the content of request ``index`` of ``source``."""
    for name in ("query", "key", "value"):
        getattr(target, name)[rows_of(target, place)] = getattr(source, name)[rows_of(source, index)]
    for position in range(source.seq_lens[index]):
        size = source.k_cache.shape[1]
        block, offset = divmod(position, size)
        from_block = int(source.metadata.block_table[index, block])
        to_block = int(target.metadata.block_table[place, block])
        for name in ("k_cache", "v_cache"):
            getattr(target, name)[to_block, offset] = getattr(source, name)[from_block, offset]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (2, 2), (14, 2), (4, 1)])
@pytest.mark.parametrize("request_shape", [(30, 1), (500, 1), (20, 7)])
def test_a_row_has_the_same_bits_whatever_its_neighbours_place_and_batch_size(
    request_shape: tuple[int, int], num_heads: int, num_kv_heads: int, num_threads: int
) -> None:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    alone = make_batch([request_shape], **heads, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = attend(alone).clone()
        torch.set_num_threads(num_threads)
        for place, others in (
            (1, [(3, 1), (250, 1)]),
            (0, [(40, 1)]),
            (3, [(9, 4), (0, 0), (31, 1), (64, 1)]),
        ):
            requests = [*others[:place], request_shape, *others[place:]]
            crowd = make_batch(requests, **heads, seed=place + 2, pad_tokens=2)
            transplant(alone, 0, crowd, place)
            assert torch.equal(attend(crowd)[rows_of(crowd, place)], expected)
    finally:
        torch.set_num_threads(before)


def test_pad_entries_of_the_block_table_are_never_used() -> None:
    requests = [(20, 1), (5, 3), (70, 1), (0, 0)]
    clean, dirty = make_batch(requests, table_columns=9), make_batch(requests, table_columns=9)
    for index, length in enumerate(dirty.seq_lens):
        dirty.metadata.block_table[index, math.ceil(length / 16) :] = 1_000_000
    assert torch.equal(attend(dirty), attend(clean))


def test_lengths_and_tables_are_read_at_the_call_not_remembered() -> None:
    """The same tensors with new contents, as a replay sees them."""
    first = make_batch([(20, 1), (9, 1)], seed=1, table_columns=3)
    second = make_batch([(3, 1), (40, 1)], seed=2, table_columns=3)
    attend(first)
    expected = attend(second)
    for name in ("query_start_loc", "seq_lens", "block_table"):
        getattr(first.metadata, name).copy_(getattr(second.metadata, name))
    out = torch.empty_like(second.out)
    backend = TorchReferenceBackend()
    backend.attend(second.query, second.k_cache, second.v_cache, out, first.metadata, scale=0.3, window=None)
    assert torch.equal(out, expected)


def test_a_moved_block_table_under_the_same_lengths_is_noticed() -> None:
    """Layers of a step share what the table says; the next may have the same lengths and other blocks."""
    batch = make_batch([(20, 1), (33, 1)])
    expected = attend(batch)
    order = torch.randperm(batch.k_cache.shape[0], generator=torch.Generator().manual_seed(0))
    place = order.argsort().to(torch.int32)
    batch.k_cache.copy_(batch.k_cache[order])
    batch.v_cache.copy_(batch.v_cache[order])
    batch.metadata.block_table.copy_(place[batch.metadata.block_table.long()])
    assert not torch.equal(place, torch.arange(len(place)))
    out = torch.empty_like(batch.out)
    TorchReferenceBackend().attend(
        batch.query, batch.k_cache, batch.v_cache, out, batch.metadata, scale=0.3, window=None
    )
    assert torch.equal(out, expected)


def test_a_non_finite_request_does_not_touch_its_neighbours() -> None:
    requests = [(20, 1), (20, 1), (3, 5)]
    clean, sick = make_batch(requests), make_batch(requests)
    sick.key[1], sick.value[1] = math.inf, math.nan
    healthy = [0, 2, 3, 4, 5, 6]
    out = attend(sick)
    assert torch.equal(out[healthy], attend(clean)[healthy])
    assert out[1].isnan().any()


def test_queries_may_be_views_of_a_fused_projection() -> None:
    plain = make_batch(BATCHES["mixed"], num_heads=4, num_kv_heads=2)
    tokens = plain.query.shape[0]
    fused = torch.cat([t.flatten(1) for t in (plain.query, plain.key, plain.value)], 1)
    parts = fused.split([4 * 32, 2 * 32, 2 * 32], 1)
    views = dataclasses.replace(
        make_batch(BATCHES["mixed"], num_heads=4, num_kv_heads=2),
        query=parts[0].view(tokens, 4, 32),
        key=parts[1].view(tokens, 2, 32),
        value=parts[2].view(tokens, 2, 32),
    )
    assert torch.equal(attend(views), attend(plain))


def _fresh_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_reference, "_scratch", torch_reference._Scratch())


def test_a_first_step_in_inference_mode_leaves_memory_for_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    _fresh_scratch(monkeypatch)
    batch = make_batch([(5, 1), (9, 1)], num_heads=6, num_kv_heads=2)
    with torch.inference_mode():
        expected = attend(batch).clone()
    for _ in range(2):
        assert torch.equal(attend(batch), expected)


def test_queries_that_autograd_follows_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's graph, with all its activations, would hang on the one before."""
    _fresh_scratch(monkeypatch)
    batch = make_batch([(5, 1), (9, 1)], num_heads=6, num_kv_heads=2)
    expected = attend(batch)
    batch.query.requires_grad_()
    assert torch.equal(attend(batch), expected)
    assert torch_reference._scratch._queries is not None
    padded, live = torch_reference._scratch._queries[1]
    assert not padded.requires_grad
    assert not live.requires_grad


def test_write_stores_rows_at_their_slots_and_nowhere_else() -> None:
    k_cache, v_cache = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    torch_write_kv(key, value, k_cache, v_cache, torch.tensor([6, 9, 0], dtype=torch.int32))
    for row, (block, offset) in enumerate([(1, 2), (2, 1), (0, 0)]):
        assert torch.equal(k_cache[block, offset], key[row])
        assert torch.equal(v_cache[block, offset], value[row])
        k_cache[block, offset] = v_cache[block, offset] = 0
    assert k_cache.abs().sum() == v_cache.abs().sum() == 0


def test_write_converts_to_the_cache_dtype() -> None:
    k_cache, v_cache = (torch.zeros(2, 4, 1, 8, dtype=torch.bfloat16) for _ in range(2))
    key = torch.randn(1, 1, 8)
    torch_write_kv(key, key, k_cache, v_cache, torch.tensor([5], dtype=torch.int32))
    assert torch.equal(k_cache[1, 1], key[0].bfloat16())


def test_pad_tokens_of_one_slot_only_touch_the_sink_block() -> None:
    k_cache, v_cache = torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 8)
    key = torch.full((3, 1, 8), math.nan)
    torch_write_kv(key, key, k_cache, v_cache, torch.zeros(3, dtype=torch.int32))
    assert not k_cache[1:].isnan().any()
    assert not v_cache[1:].isnan().any()


class CallLog(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_a_recorder_sees_two_opaque_calls() -> None:
    batch = make_batch(BATCHES["mixed"])
    with CallLog() as log:
        attend(batch)
    assert log.calls == [torch_write_kv, torch_paged_attention]
    assert all(implementation_of(op) is not None for op in log.calls)


def test_backend_declares_that_it_serves_every_batch() -> None:
    backend = TorchReferenceBackend()
    assert (backend.name, backend.support) == ("torch_reference", AttentionSupport.ALWAYS)


def test_the_attention_layer_reads_the_live_batch_from_the_context() -> None:
    batch = make_batch(BATCHES["mixed"], pad_tokens=1)
    layer = Attention(num_heads=4, num_kv_heads=2, head_size=32, scale=0.3, window=None, layer_index=0)
    with use_forward_context(ForwardContext(batch=batch.metadata)):
        with pytest.raises(GraphError, match="layer 0 has no cache"):
            layer(batch.query, batch.key, batch.value)
        layer.bind(TorchReferenceBackend(), batch.k_cache, batch.v_cache)
        out = layer(batch.query, batch.key, batch.value)
    torch.testing.assert_close(
        out.double(), naive_attention(batch, scale=0.3, window=None), atol=2e-6, rtol=1e-5
    )
