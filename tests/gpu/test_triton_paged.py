"""The compiled Triton kernels against the reference, and under capture: one graph, many batches."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.attention import hopper_prefill, triton_paged
from gapless.attention.base import AttentionMetadata
from gapless.attention.tile_rules import HOPPER_CONSUMER_ROWS, PrefillTile, hopper_tile
from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.attention.triton_paged import TritonPagedBackend
from gapless.kernels import launch
from ragged_batches import RaggedBatch, make_batch, run_backend

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def reference(batch: RaggedBatch, *, scale: float, window: int | None) -> Tensor:
    """The oracle in float64, so that its own rounding does not count."""
    keys = TorchReferenceBackend()
    keys.write_kv(batch.key, batch.value, batch.k_cache, batch.v_cache, batch.metadata.slot_mapping)
    out = torch.empty(batch.out.shape, dtype=torch.float64, device=batch.out.device)
    keys.attend(
        batch.query.double(),
        batch.k_cache.double(),
        batch.v_cache.double(),
        out,
        batch.metadata,
        scale=scale,
        window=window,
    )
    return out


def compare(requests: list[tuple[int, int]], *, window: int | None = None, **options: Any) -> None:
    batch, twin = (make_batch(requests, device="cuda", **options) for _ in range(2))
    scale = batch.query.shape[2] ** -0.5
    out = run_backend(TritonPagedBackend(), batch, scale=scale, window=window)
    expected = reference(twin, scale=scale, window=window)
    tolerance = TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    assert (out[batch.num_real_tokens :] == 0).all()


HOPPER_TILES = {"one consumer": (1, 128, 2), "two": (2, 128, 2), "two, few keys": (2, 64, 3)}
"""Of ``hopper_tile``: consumers, keys, stages. By its rule these batches would nearly all get the first."""


@pytest.fixture(params=["triton", *HOPPER_TILES])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Which does prefill attention where both can: ``triton`` or ``hopper``, the latter with every tile."""
    is_hopper = request.param in HOPPER_TILES
    if is_hopper:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs compute capability 9.0")
        consumers, block_n, num_stages = HOPPER_TILES[request.param]

        def tile_of(**shape: Any) -> PrefillTile | None:
            tile = hopper_tile(**shape)
            if tile is None:
                return None
            block_q = consumers * HOPPER_CONSUMER_ROWS // tile.pack
            return replace(tile, block_q=block_q, block_n=block_n, num_stages=num_stages)

        monkeypatch.setattr(triton_paged, "hopper_tile", tile_of)
    monkeypatch.setenv("GAPLESS_HOPPER_ATTENTION", str(int(is_hopper)))
    hopper_prefill._has_kernel.cache_clear()
    yield "hopper" if is_hopper else "triton"
    hopper_prefill._has_kernel.cache_clear()


@pytest.fixture
def hopper_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each launch of the Hopper kernel."""
    seen: list[int] = []
    prefill = triton_paged.prefill_hopper

    def counting(*args: Any, **options: Any) -> None:
        seen.append(1)
        prefill(*args, **options)

    monkeypatch.setattr(triton_paged, "prefill_hopper", counting)
    return seen


BATCHES = {
    "decode": ([(5, 1), (170, 1), (15, 1), (0, 0), (900, 1)], 1),
    "verification": ([(50, 4), (0, 4), (300, 4)], 4),
    "prefill": ([(0, 300), (65, 100), (0, 1)], None),
    "mixed": ([(200, 1), (0, 90), (0, 0), (700, 3), (33, 1)], None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize(("requests", "max_query_len"), BATCHES.values(), ids=BATCHES.keys())
def test_every_kind_of_batch(
    requests: list[tuple[int, int]], max_query_len: int | None, window: int | None, dtype: torch.dtype
) -> None:
    compare(
        requests,
        window=window,
        dtype=dtype,
        max_query_len=max_query_len,
        pad_tokens=7,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 24, 64, 128])
@pytest.mark.parametrize("head_size", [32, 40, 64, 80, 96, 128, 192, 256])
def test_every_head_and_block_size(head_size: int, block_size: int, dtype: torch.dtype) -> None:
    compare(
        [(200, 1), (0, 90), (70, 3)], head_size=head_size, block_size=block_size, dtype=dtype, pad_tokens=3
    )


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (8, 8), (14, 2), (32, 8), (32, 1), (71, 1)])
@pytest.mark.parametrize("max_query_len", [1, None])
def test_every_head_layout(num_heads: int, num_kv_heads: int, max_query_len: int | None) -> None:
    requests = [(200, 1), (90, 1), (0, 1)] if max_query_len == 1 else [(200, 1), (0, 90), (70, 3)]
    compare(
        requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=64,
        dtype=torch.bfloat16,
        max_query_len=max_query_len,
    )


@pytest.mark.parametrize("num_heads", [3, 6, 12])
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (128, 16), (128, 128)])
@pytest.mark.parametrize(
    "requests", [[(0, 1024)], [(333, 700), (0, 1), (0, 0), (127, 1), (64, 500)], [(1000, 3200)]]
)
def test_long_prompts_at_every_head_size_of_the_hopper_kernel(
    kernel: str,
    hopper_launches: list[int],
    requests: list[tuple[int, int]],
    head_size: int,
    block_size: int,
    num_heads: int,
) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": 3, "head_size": head_size, "block_size": block_size}
    compare(requests, dtype=torch.bfloat16, pad_tokens=200, **shape)
    assert len(hopper_launches) == (kernel == "hopper")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64, 128, 256])
def test_pages_of_every_size(kernel: str, block_size: int, dtype: torch.dtype) -> None:
    """Lengths at, before and behind the ends of pages and tiles; slots behind them hold NaN."""
    requests = [(0, 127), (0, 128), (0, 129), (block_size - 1, 1), (block_size, 1), (250, 5), (300, 160)]
    compare(requests, block_size=block_size, head_size=128, num_heads=8, dtype=dtype, pad_tokens=9)


def test_a_step_of_requests_with_one_token_and_a_long_prefix(kernel: str, hopper_launches: list[int]) -> None:
    requests = [(700 + 61 * i, 1) for i in range(60)] + [(0, 450)] + [(0, 0)] * 40
    compare(requests, head_size=128, num_heads=4, dtype=torch.bfloat16, pad_tokens=2)
    assert len(hopper_launches) == (kernel == "hopper")


def test_launches_over_several_caches_use_each_its_own(
    kernel: str, hopper_launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again, as eager layers do: descriptors are kept, and Triton's Python is not asked again."""
    options = {"head_size": 128, "dtype": torch.bfloat16, "device": "cuda"}
    batches = [make_batch([(40, 512 + 16 * i), (5, 1)], seed=i, **options) for i in range(4)]
    expected = [reference(batch, scale=0.1, window=None) for batch in batches]
    for _ in range(3):
        for batch, wanted in zip(batches, expected, strict=True):
            batch.out.fill_(math.nan)
            out = run_backend(TritonPagedBackend(), batch, scale=0.1, window=None)
            torch.testing.assert_close(out.double(), wanted, atol=3e-2, rtol=3e-2)
        if launch._launcher() is not None:
            monkeypatch.setattr("triton.runtime.jit.JITFunction.run", None)
    assert len(hopper_launches) == (12 if kernel == "hopper" else 0)


def test_repeated_prefill_gives_the_same_bits(kernel: str) -> None:
    options = {"num_heads": 8, "head_size": 128, "dtype": torch.bfloat16, "device": "cuda"}
    batch = make_batch([(700, 300), (3000, 1), (0, 515)], **options)
    first = run_backend(TritonPagedBackend(), batch, scale=0.1, window=None).clone()
    for _ in range(20):
        batch.out.fill_(math.nan)
        assert torch.equal(run_backend(TritonPagedBackend(), batch, scale=0.1, window=None), first)


@pytest.mark.parametrize("seed", range(20))
def test_random_ragged_batches(seed: int) -> None:
    rng = random.Random(seed)
    requests = [
        (rng.choice([0, rng.randrange(2000)]), rng.choice([0, 1, 1, rng.randrange(1, 200)]))
        for _ in range(rng.randrange(1, 12))
    ]
    compare(
        requests,
        window=rng.choice([None, rng.randrange(1, 600)]),
        dtype=rng.choice([torch.float32, torch.bfloat16]),
        pad_tokens=rng.randrange(40),
        seed=seed,
    )


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "head_size"), [(64, torch.float32, 32), (512, torch.bfloat16, 128)]
)
def test_a_captured_launch_serves_every_batch_of_its_bucket(
    kernel: str, num_tokens: int, dtype: torch.dtype, head_size: int
) -> None:
    """One graph; between replays lengths, tables, queries and the poison move."""
    backend, num_reqs, columns = TritonPagedBackend(), 4, 64
    tolerance = TOLERANCE[dtype]

    def fitted(requests: list[tuple[int, int]], seed: int) -> RaggedBatch:
        requests = requests + [(0, 0)] * (num_reqs - len(requests))
        batch = make_batch(
            requests,
            pad_tokens=num_tokens - sum(new for _, new in requests),
            table_columns=columns,
            max_query_len=num_tokens,
            dtype=dtype,
            head_size=head_size,
            seed=seed,
            device="cuda",
        )
        room = 256 - batch.k_cache.shape[0]
        grow = (0, 0, 0, 0, 0, 0, 0, room)
        return RaggedBatch(
            **{name: getattr(batch, name) for name in batch.__slots__ if not name.endswith("_cache")},
            k_cache=torch.nn.functional.pad(batch.k_cache, grow, value=math.nan),
            v_cache=torch.nn.functional.pad(batch.v_cache, grow, value=math.nan),
        )

    static = fitted([(3, 1)], 0)
    run_backend(backend, static, scale=0.3, window=None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_backend(backend, static, scale=0.3, window=None)
    for seed, requests in enumerate(
        [[(0, 64)], [(900, 1), (3, 20), (0, 0), (500, 7)], [(1, 1)] * 4, [(0, 0)] * 4, [(300, 60), (7, 1)]], 1
    ):
        batch = fitted(requests, seed)
        for name in ("query", "key", "value", "k_cache", "v_cache"):
            getattr(static, name).copy_(getattr(batch, name))
        for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
            getattr(static.metadata, name).copy_(getattr(batch.metadata, name))
        static.out.fill_(math.nan)
        graph.replay()
        expected = run_backend(backend, batch, scale=0.3, window=None)
        assert torch.equal(static.out, expected), "replay differs from the eager launch"
        torch.testing.assert_close(
            expected.double(), reference(batch, scale=0.3, window=None), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_heads", [8, 14])
def test_split_decode_replays_with_growing_lengths_and_interleaved_buckets(
    num_heads: int, window: int | None
) -> None:
    """Two buckets with different numbers of splits share the cache and replay in turn while requests grow."""
    backend, block_size, columns, scale = TritonPagedBackend(), 16, 160, 0.2
    generator = torch.Generator("cuda").manual_seed(0)
    cache_shape = (1 + 8 * columns, block_size, 2, 64)
    caches = [torch.full(cache_shape, math.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    order = torch.randperm(8 * columns, generator=torch.Generator().manual_seed(1)).view(8, columns) + 1
    table = order.int().cuda()
    graphs = {}
    for num_reqs in (1, 8):
        query = torch.empty(num_reqs, num_heads, 64, dtype=torch.bfloat16, device="cuda")
        metadata = AttentionMetadata(
            query_start_loc=torch.zeros(num_reqs + 1, dtype=torch.int32, device="cuda"),
            seq_lens=torch.zeros(num_reqs, dtype=torch.int32, device="cuda"),
            block_table=table[:num_reqs],
            slot_mapping=torch.zeros(num_reqs, dtype=torch.int32, device="cuda"),
            max_query_len=1,
            max_seq_len=columns * block_size,
        )
        out = torch.empty_like(query)
        backend.attend(query, *caches, out, metadata, scale=scale, window=window)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            backend.attend(query, *caches, out, metadata, scale=scale, window=window)
        graphs[num_reqs] = (graph, query, metadata, out)
    written = 0
    for length in (1, 2, 63, 64, 65, 170, 500, 1023, 1024, 2400):
        for row in range(8):
            positions = torch.arange(written, length, device="cuda")
            for cache in caches:
                fresh = torch.randn(len(positions), 2, 64, generator=generator, device="cuda")
                cache[table[row, positions // block_size].long(), positions % block_size] = fresh.bfloat16()
        written = length
        for num_reqs, (graph, query, metadata, out) in graphs.items():
            lengths = torch.tensor([max(length - 3 * row, 0) for row in range(num_reqs)], device="cuda")
            metadata.seq_lens.copy_(lengths)
            metadata.query_start_loc[1:].copy_((lengths > 0).cumsum(0))
            query.normal_(generator=generator)
            out.fill_(math.nan)
            graph.replay()
            expected = torch.empty(out.shape, dtype=torch.float64, device="cuda")
            doubles = (t.double() for t in (query, *caches))
            TorchReferenceBackend().attend(*doubles, expected, metadata, scale=scale, window=window)
            torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=3e-2)


def test_repeated_split_decode_gives_the_same_bits() -> None:
    batch = make_batch(
        [(4000, 1), (70, 1)], num_heads=8, head_size=128, dtype=torch.bfloat16, max_query_len=1, device="cuda"
    )
    first = run_backend(TritonPagedBackend(), batch, scale=0.1, window=None).clone()
    for _ in range(20):
        batch.out.fill_(math.nan)
        assert torch.equal(run_backend(TritonPagedBackend(), batch, scale=0.1, window=None), first)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (7, 1), (12, 2), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_prefill(
    kernel: str, num_heads: int, num_kv_heads: int, dtype: torch.dtype, window: int | None
) -> None:
    compare(
        [(0, 1100), (700, 300), (40, 1), (0, 0), (0, 77)],
        window=window,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=128,
        dtype=dtype,
        pad_tokens=30,
    )


@pytest.mark.parametrize("num_new", [20, 600])
def test_offsets_reach_past_two_to_the_31_elements(kernel: str, num_new: int) -> None:
    """A cache of 2.2e9 elements, with the request's blocks at its far end."""
    head_size, num_kv_heads, block_size = 128, 8, 16
    num_blocks = 2**31 // (head_size * num_kv_heads * block_size) + 64
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of free device memory")
    small = make_batch(
        [(40, 1), (0, num_new)],
        num_heads=8,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=torch.bfloat16,
        device="cuda",
    )
    used = small.k_cache.shape[0]
    shift = num_blocks - used
    caches = [
        torch.zeros(num_blocks, block_size, num_kv_heads, head_size, dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    ]
    for cache, source in zip(caches, (small.k_cache, small.v_cache), strict=True):
        cache[shift:].copy_(source)
    metadata = small.metadata
    metadata.block_table.add_(shift)
    metadata.slot_mapping.add_(shift * block_size)
    backend = TritonPagedBackend()
    backend.write_kv(small.key, small.value, *caches, metadata.slot_mapping)
    backend.attend(small.query, *caches, small.out, metadata, scale=0.1, window=None)
    metadata.block_table.sub_(shift)
    metadata.slot_mapping.sub_(shift * block_size)
    expected = reference(small, scale=0.1, window=None)
    torch.testing.assert_close(small.out.double(), expected, atol=3e-2, rtol=3e-2)
    assert torch.equal(caches[0][shift:].nan_to_num(7), small.k_cache.nan_to_num(7))
