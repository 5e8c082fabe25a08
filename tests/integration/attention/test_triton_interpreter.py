"""The Triton kernels under Triton's interpreter on the CPU, against the reference; what launches depend on.

On a machine with a GPU the kernels are compiled instead, and ``tests/gpu/test_triton_paged.py`` runs the
comparison.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.attention import triton_launch, triton_paged
from gapless.attention.tile_rules import DecodeTile, PrefillTile, decode_tile, prefill_tile
from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.attention.triton_paged import TritonPagedBackend, triton_write_kv
from gapless.errors import ConfigError
from gapless.graphs.modes import AttentionSupport
from ragged_batches import RaggedBatch, make_batch, run_backend

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def assert_equals_reference(batch: RaggedBatch, twin: RaggedBatch, *, window: int | None) -> None:
    out = run_backend(TritonPagedBackend(), batch, scale=0.3, window=window)
    expected = run_backend(TorchReferenceBackend(), twin, scale=0.3, window=window)
    tolerance = TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    assert (out[batch.num_real_tokens :] == 0).all()
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(getattr(batch, name), getattr(twin, name), equal_nan=True, atol=0, rtol=0)


def compare(requests: list[tuple[int, int]], *, window: int | None = None, **options: Any) -> None:
    assert_equals_reference(make_batch(requests, **options), make_batch(requests, **options), window=window)


@interpreted
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(
    ("requests", "max_query_len"),
    [
        ([(5, 1), (70, 1), (15, 1)], 1),
        ([(5, 1), (0, 0), (33, 1), (0, 0)], 1),
        ([(5, 3), (0, 3)], 3),
        ([(0, 12), (9, 20)], None),
        ([(20, 1), (0, 9), (0, 0), (70, 3)], None),
    ],
    ids=["decode", "decode with empty slots", "verification", "prefill", "mixed"],
)
def test_every_kind_of_batch(
    requests: list[tuple[int, int]], max_query_len: int | None, window: int | None
) -> None:
    compare(requests, window=window, max_query_len=max_query_len, pad_tokens=2, head_size=16)


@interpreted
@pytest.mark.parametrize("most_tiles", [1, 2])
def test_a_step_of_more_tiles_than_a_grid_may_have(most_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key/value head of very many query heads: a tile has room for one token or two."""
    monkeypatch.setattr(triton_paged, "_MOST_TILES", most_tiles)
    compare([(20, 1), (0, 9), (0, 0), (7, 20)], num_heads=32, num_kv_heads=1, head_size=16, pad_tokens=9)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_size", [32, 40, 64, 96, 128, 256])
def test_every_head_size_and_dtype(head_size: int, dtype: torch.dtype) -> None:
    compare([(20, 1), (3, 4)], head_size=head_size, dtype=dtype, num_heads=2, num_kv_heads=1, pad_tokens=1)


@interpreted
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (9, 3), (8, 2), (7, 1), (20, 1)])
def test_every_head_layout(num_heads: int, num_kv_heads: int) -> None:
    compare([(20, 1), (3, 4)], head_size=16, num_heads=num_heads, num_kv_heads=num_kv_heads, pad_tokens=1)


@interpreted
@pytest.mark.parametrize("block_size", [16, 24, 64, 128])
def test_every_block_size(block_size: int) -> None:
    compare([(70, 1), (3, 4), (129, 2)], head_size=16, block_size=block_size, window=100, pad_tokens=1)


@interpreted
@settings(max_examples=12, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 40), st.one_of(st.just(0), st.just(1), st.integers(1, 20))),
        min_size=1,
        max_size=4,
    ),
    window=st.one_of(st.none(), st.integers(1, 30)),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    pad_tokens=st.integers(0, 20),
    seed=st.integers(0, 1000),
)
def test_ragged_batches_equal_the_reference(
    requests: list[tuple[int, int]],
    window: int | None,
    heads: tuple[int, int],
    pad_tokens: int,
    seed: int,
) -> None:
    compare(
        requests,
        window=window,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=16,
        pad_tokens=pad_tokens,
        seed=seed,
    )


@interpreted
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("spare_tiles", [-2, 16], ids=["programs take tiles in turn", "one tile each"])
@pytest.mark.parametrize("split_loop", [True, False])
@pytest.mark.parametrize("tile_rows", [16, 64])
def test_a_request_that_spans_many_tiles(
    monkeypatch: pytest.MonkeyPatch, tile_rows: int, split_loop: bool, spare_tiles: int, window: int | None
) -> None:
    tile = PrefillTile(
        block_q=tile_rows // 2, pack=2, block_n=16, num_warps=4, num_stages=2, split_loop=split_loop
    )
    monkeypatch.setattr(triton_paged, "prefill_tile", lambda **_: tile)
    monkeypatch.setattr(triton_paged, "_SPARE_TILES", spare_tiles)
    compare([(5, 30), (0, 0), (0, 33), (17, 1)], head_size=16, pad_tokens=20, window=window)


@interpreted
def test_pad_entries_of_the_block_table_are_never_used() -> None:
    requests = [(20, 1), (5, 3), (0, 0)]
    batch, twin = (make_batch(requests, table_columns=6, head_size=16) for _ in range(2))
    for index, length in enumerate(batch.seq_lens):
        batch.metadata.block_table[index, math.ceil(length / 16) :] = 1_000_000
    assert_equals_reference(batch, twin, window=None)


@interpreted
def test_the_block_table_may_be_stored_by_column() -> None:
    requests = [(70, 1), (5, 3), (0, 0), (40, 1)]
    batch, twin = (make_batch(requests, table_columns=6, head_size=16) for _ in range(2))
    by_column = replace(batch.metadata, block_table=batch.metadata.block_table.t().contiguous().t())
    assert_equals_reference(replace(batch, metadata=by_column), twin, window=None)


@interpreted
def test_queries_keys_and_values_may_be_views_of_a_fused_projection() -> None:
    batch, twin = (make_batch([(20, 1), (0, 5)], head_size=16) for _ in range(2))
    fused = torch.cat([t.flatten(1) for t in (batch.query, batch.key, batch.value)], 1)
    query, key, value = (part.unflatten(1, (-1, 16)) for part in fused.split([4 * 16, 2 * 16, 2 * 16], 1))
    backend, metadata = TritonPagedBackend(), batch.metadata
    backend.write_kv(key, value, batch.k_cache, batch.v_cache, metadata.slot_mapping)
    backend.attend(query, batch.k_cache, batch.v_cache, batch.out, metadata, scale=0.3, window=None)
    expected = run_backend(TorchReferenceBackend(), twin, scale=0.3, window=None)
    torch.testing.assert_close(batch.out, expected, atol=2e-6, rtol=1e-5)


@interpreted
@pytest.mark.parametrize(("num_kv_heads", "head_size"), [(1, 32), (3, 40), (5, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_write_stores_rows_at_their_slots_and_nowhere_else(
    num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> None:
    shape = (3, 16, num_kv_heads, head_size)
    k_cache, v_cache = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    key, value = (torch.randn(3, num_kv_heads, head_size).to(dtype) for _ in range(2))
    slots = torch.tensor([17, 46, 3], dtype=torch.int32)
    triton_write_kv(key, value, k_cache, v_cache, slots)
    expected_k, expected_v = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    for row, slot in enumerate(slots.tolist()):
        expected_k[slot // 16, slot % 16], expected_v[slot // 16, slot % 16] = key[row], value[row]
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


# What a launch depends on


class Launches:
    """Stands in for the kernels and notes every launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[tuple[int, ...], dict[str, Any], list[Any]]] = []
        kernels = SimpleNamespace(
            write_kv_kernel=self,
            prefill_attention_kernel=self,
            decode_attention_kernel=self,
            combine_splits_kernel=self,
        )
        for module in (triton_paged, triton_launch):
            monkeypatch.setattr(module, "paged_kernels", lambda: kernels)
        monkeypatch.setenv("TRITON_INTERPRET", "1")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            numbers = [a for a in args if not isinstance(a, Tensor)]
            self.seen.append((grid, constants, numbers))

        return launch


@pytest.mark.parametrize("max_query_len", [1, 2, None])
def test_a_launch_depends_on_shapes_and_bounds_never_on_data(
    monkeypatch: pytest.MonkeyPatch, max_query_len: int | None
) -> None:
    launches = Launches(monkeypatch)
    num_tokens = 3 * max_query_len if max_query_len else 100
    for requests in ([(5, 1), (9, 1), (0, 1)], [(30, 1), (0, 0), (20, 2)], [(0, 1), (0, 0), (0, 0)]):
        batch = make_batch(
            requests,
            pad_tokens=num_tokens - sum(new for _, new in requests),
            table_columns=20,
            max_query_len=max_query_len,
        )
        run_backend(TritonPagedBackend(), batch, scale=0.3, window=None)
    step = len(launches.seen) // 3
    assert step == (3 if max_query_len else 2), "cache write, attention, and the merge of decode's splits"
    assert launches.seen == launches.seen[:step] * 3


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 512, 4096])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_size", [32, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8, 32, 128])
@pytest.mark.parametrize("kib", [99, 163, 227])
def test_prefill_tiles_fit_the_hardware(
    group: int, head_size: int, itemsize: int, num_tokens: int, kib: int
) -> None:
    size = {"group": group, "head_size": head_size, "itemsize": itemsize, "num_tokens": num_tokens}
    tile = prefill_tile(**size, shared_bytes=kib << 10)
    assert group % tile.pack == 0, "a program's heads share a key/value head"
    assert_fits(tile.block_q * tile.pack, tile.block_n, tile.num_stages, head_size, itemsize, kib)


@pytest.mark.parametrize("max_query_len", [1, 2, 5])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_size", [32, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8, 32])
@pytest.mark.parametrize("num_programs", [8, 64, 256, 2048])
@pytest.mark.parametrize("kib", [64, 99, 163, 227])
def test_decode_tiles_fit_the_hardware(
    group: int, head_size: int, itemsize: int, max_query_len: int, num_programs: int, kib: int
) -> None:
    size = {"group": group, "head_size": head_size, "itemsize": itemsize, "max_query_len": max_query_len}
    tile = choose_decode(**size, num_programs=num_programs, shared_bytes=kib << 10)
    group_pad, query_pad = (1 << (count - 1).bit_length() for count in (group, max_query_len))
    if tile is None:
        assert group_pad * query_pad > 16, "only many rows are left to prefill tiles"
        return
    assert tile.block_q >= max_query_len
    assert_fits(tile.block_q * group_pad, tile.block_n, tile.num_stages, head_size, itemsize, kib)


def assert_fits(rows: int, block_n: int, num_stages: int, head_size: int, itemsize: int, kib: int) -> None:
    assert rows >= 16, "the smallest matrix product"
    assert rows & (rows - 1) == 0
    assert block_n >= 16
    head_bytes = (1 << (head_size - 1).bit_length()) * itemsize
    assert num_stages >= 2
    num_copies = num_stages if kib == 227 else num_stages - 1
    keys_and_values = 2 * num_copies * block_n * head_bytes
    assert keys_and_values + rows * head_bytes <= kib * 1024, "what a program may have"


def choose_decode(**options: Any) -> DecodeTile | None:
    defaults = {"group": 4, "head_size": 128, "itemsize": 2, "max_query_len": 1, "rotates": True}
    return decode_tile(**{**defaults, "num_programs": 8, "max_keys": 8192, **options})


def test_long_prefill_uses_larger_query_tiles_than_decode_and_short_prefill() -> None:
    short, long = (prefill_tile(group=4, head_size=128, itemsize=2, num_tokens=n) for n in (64, 4096))
    decode = choose_decode()
    assert decode is not None
    assert decode.block_q * 4 == 16
    assert long.block_q > max(short.block_q, decode.block_q)


def test_few_programs_take_smaller_tiles_where_they_are_one_requests() -> None:
    one, two = (choose_decode(num_programs=count) for count in (8, 9))
    assert one is not None
    assert two is not None
    assert (one.block_n, one.num_warps, one.num_stages) == (64, 4, 2)
    assert (two.block_n, two.num_warps, two.num_stages) == (128, 8, 3)
    assert one.called_ahead == two.called_ahead > 0


@pytest.mark.parametrize("num_programs", [8, 64, 128, 256, 512, 1024, 2048])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_keys_are_loaded_early_where_that_was_measured_to_pay(group: int, num_programs: int) -> None:
    tile = choose_decode(group=group, num_programs=num_programs)
    assert tile is not None
    assert tile.loads_early == ((group <= 2 and num_programs < 2048) or num_programs == 256)
    wide = choose_decode(group=group, num_programs=num_programs, head_size=256)
    assert wide is not None
    assert not wide.loads_early
    smaller = choose_decode(group=group, num_programs=num_programs, shared_bytes=163 << 10)
    assert smaller is not None
    assert not smaller.loads_early
    apart = choose_decode(group=group, num_programs=num_programs, rotates=False)
    assert apart is not None
    assert not apart.loads_early, "this step's keys are in the cache like all others then"


def test_splits_fill_the_gpu_and_no_more() -> None:
    few, many, short = (choose_decode(**o) for o in ({}, {"num_programs": 1024}, {"max_keys": 64}))
    assert few is not None
    assert many is not None
    assert short is not None
    assert few.num_splits == 16
    assert many.num_splits == short.num_splits == 1


def test_prefill_programs_do_not_grow_with_empty_request_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    for num_slots in (17, 250):
        batch = make_batch([(0, 100)] + [(0, 0)] * (num_slots - 1), head_size=128)
        run_backend(TritonPagedBackend(), batch, scale=0.3, window=None)
    assert launches.seen[1][0] == launches.seen[3][0]


def test_an_empty_step_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    run_backend(TritonPagedBackend(), make_batch([(0, 0)]), scale=0.3, window=None)
    assert launches.seen == []


def shared_memory_of_compiled(which: str) -> list[int]:
    """Bytes of every kernel that ``compile_kernels.py`` compiles, outside of the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), which],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [int(line) for line in result.stdout.split()]


@pytest.mark.parametrize("shapes", ["largest", pytest.param("all", marks=pytest.mark.soak)])
def test_the_kernels_compile_for_a_hopper_gpu_and_fit_its_shared_memory(shapes: str) -> None:
    shared = shared_memory_of_compiled(f"--{shapes}")
    assert len(shared) == {"largest": 12, "all": 48}[shapes]
    assert max(shared) <= 227 * 1024


def test_the_kernels_fit_a_gpu_with_less_shared_memory() -> None:
    shared = shared_memory_of_compiled("--ada")
    assert len(shared) == 22
    assert max(shared) <= 99 * 1024


# What is refused


def test_a_scale_that_is_not_positive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Launches(monkeypatch)
    with pytest.raises(ConfigError, match="positive scale, not -1"):
        run_backend(TritonPagedBackend(), make_batch([(0, 1)]), scale=-1.0, window=None)


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"needs a CUDA device.*torch_reference"):
        run_backend(TritonPagedBackend(), make_batch([(0, 1)]), scale=0.3, window=None)


def test_head_sizes_above_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Launches(monkeypatch)
    with pytest.raises(ConfigError, match="up to 256, not 512"):
        run_backend(TritonPagedBackend(), make_batch([(0, 1)], head_size=512), scale=0.3, window=None)


def test_without_triton_the_module_imports_and_its_use_says_what_to_do() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from gapless.attention.triton_paged import TritonPagedBackend\n"
        "try:\n    TritonPagedBackend()\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=True
    )
    assert result.stdout.startswith("ConfigError attention backend triton_paged needs Triton")
    assert "install triton" in result.stdout


def test_backend_declares_that_it_serves_every_batch() -> None:
    assert (TritonPagedBackend.name, TritonPagedBackend.support) == ("triton_paged", AttentionSupport.ALWAYS)
