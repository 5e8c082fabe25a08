"""The Gluon kernel for Hopper, run as Python on the CPU, against the reference; which shapes it takes.

``tests/gpu/test_triton_paged.py`` compares the compiled kernel on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gapless.attention import hopper_prefill, triton_paged
from gapless.attention.hopper_prefill import can_run_hopper
from gapless.attention.tile_rules import hopper_tile
from gapless.attention.torch_reference import TorchReferenceBackend
from ragged_batches import make_batch, run_backend

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

MIXED = [(0, 64), (37, 129), (300, 1), (0, 0), (127, 1), (130, 255)]
SHAPE = {
    "num_heads": 16,
    "group": 2,
    "head_size": 128,
    "itemsize": 2,
    "num_tokens": 4096,
    "block_size": 16,
    "window": 0,
}
TILES = {"two consumers": (2, 128, 2), "one": (1, 128, 2), "two, few keys": (2, 64, 3)}
"""Of ``hopper_tile``: consumers, keys, stages."""


def compare(
    requests: list[tuple[int, int]],
    *,
    num_programs: int | None = None,
    tile: tuple[int, int, int] = TILES["two consumers"],
    **options: Any,
) -> None:
    """``tile``: as in ``TILES``. Slots that no request has hold NaN."""
    from roles_on_cpu import run_kernel

    options = {"head_size": 64} | options
    batch, twin = (make_batch(requests, **options) for _ in range(2))
    expected = run_backend(TorchReferenceBackend(), twin, scale=0.3, window=None)
    TorchReferenceBackend().write_kv(
        batch.key, batch.value, batch.k_cache, batch.v_cache, batch.metadata.slot_mapping
    )
    consumers, block_n, stages = tile
    run_kernel(
        batch, scale=0.3, num_programs=num_programs, consumers=consumers, block_n=block_n, stages=stages
    )
    torch.testing.assert_close(batch.out, expected, atol=8e-6, rtol=8e-6)
    assert (batch.out[batch.num_real_tokens :] == 0).all()


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
@pytest.mark.parametrize("num_programs", [None, 3])
def test_a_mixed_batch_equals_the_reference(num_programs: int | None, tile: tuple[int, int, int]) -> None:
    """With few programs each takes several tiles, back and forth."""
    compare(MIXED, pad_tokens=77, num_programs=num_programs, tile=tile)


def test_a_prompt_much_longer_than_the_ring() -> None:
    compare([(0, 300), (400, 3)], head_size=128, num_heads=2, num_kv_heads=1)


@pytest.mark.parametrize("requests", [[(0, 1)], [(128, 128)], [(127, 1), (128, 1)], [(0, 0), (0, 5)]])
def test_prompts_at_the_edges_of_tiles(requests: list[tuple[int, int]]) -> None:
    compare(requests, pad_tokens=3)


@pytest.mark.parametrize("num_keys", [0, 5])
def test_roles_do_not_wait_for_ever_where_lengths_make_no_sense(num_keys: int) -> None:
    """Fewer keys than queries: no GPU is to hang for it."""
    from roles_on_cpu import run_kernel

    batch = make_batch([(0, 300), (0, 7)], head_size=64)
    batch.metadata.seq_lens.fill_(num_keys)
    run_kernel(batch, scale=0.3)


@pytest.mark.parametrize(("num_heads", "block_size"), [(2, 24), (6, 128)])
def test_a_group_and_a_block_size(num_heads: int, block_size: int) -> None:
    compare([(3, 70), (63, 65)], num_heads=num_heads, block_size=block_size)


@pytest.mark.soak
@pytest.mark.parametrize("block_size", [8, 16, 24, 64, 128, 256])
@pytest.mark.parametrize("num_heads", [2, 6, 8])
def test_groups_and_block_sizes(num_heads: int, block_size: int) -> None:
    compare([(3, 70), (200, 51), (63, 65)], num_heads=num_heads, block_size=block_size)


@pytest.mark.soak
@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize(("block_n", "stages"), [(64, 2), (64, 3), (128, 2), (128, 3)])
@pytest.mark.parametrize("num_programs", [None, 1, 3, 5])
def test_rings_and_numbers_of_programs(
    num_programs: int | None, block_n: int, stages: int, consumers: int
) -> None:
    tile = (consumers, block_n, stages)
    compare(MIXED, num_programs=num_programs, tile=tile)
    compare([(0, 700), (3, 70)], num_programs=num_programs, tile=tile, head_size=128)


@pytest.mark.parametrize(
    ("num_tokens", "name"), [(512, "one"), (1024, "two, few keys"), (4096, "two consumers")]
)
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 128])
def test_a_tile_is_whole_products_and_fits_the_hardware(
    group: int, head_size: int, num_tokens: int, name: str
) -> None:
    tile = hopper_tile(**SHAPE | {"group": group, "head_size": head_size, "num_tokens": num_tokens})
    assert tile is not None
    assert group % tile.pack == 0, "a program's heads share a key/value head"
    assert 64 % tile.pack == 0, "a consumer has whole tokens"
    assert (tile.block_q * tile.pack / 64, tile.block_n, tile.num_stages) == TILES[name]
    rows = tile.block_q * tile.pack + 2 * tile.num_stages * tile.block_n
    assert rows * head_size * 2 <= 227 * 1024 - 2048, "shared memory of one Hopper SM"


def test_roles_share_the_registers_of_a_multiprocessor() -> None:
    from gapless.attention import hopper_kernel as kernel

    shares = 2 * kernel.CONSUMER_REGISTERS.value, kernel.PRODUCER_REGISTERS.value
    # Warps come in warpgroups, also that of the producer.
    assert sum(shares) <= 65536 // 128 // 8 * 8
    assert all(share % 8 == 0 for share in shares)


@pytest.mark.parametrize(
    "other",
    [{"head_size": 80}, {"itemsize": 4}, {"window": 5}, {"num_tokens": 511}, {"block_size": 20}],
    ids=lambda other: next(iter(other)),
)
def test_other_shapes_keep_the_triton_kernel(other: dict[str, int]) -> None:
    assert hopper_tile(**SHAPE) is not None
    assert hopper_tile(**SHAPE | other) is None


def test_programs_of_one_consumer_are_for_steps_that_leave_multiprocessors_idle() -> None:
    few, many = (hopper_tile(**SHAPE | {"num_heads": heads, "num_tokens": 512}) for heads in (24, 32))
    assert few is not None
    assert many is not None
    assert (few.block_q, many.block_q) == (32, 64)


def test_the_launch_gives_the_kernel_its_arguments_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hopper_prefill, "launch", lambda *args: launches.append(args))
    monkeypatch.setattr(triton_paged, "can_run_hopper", lambda *tensors: True)
    monkeypatch.setattr(triton_paged, "_check_layout", lambda *tensors: None)
    batch = make_batch([(0, 600), (30, 7)], head_size=128, num_heads=8, dtype=torch.bfloat16)
    triton_paged.TritonPagedBackend().attend(
        batch.query, batch.k_cache, batch.v_cache, batch.out, batch.metadata, scale=0.1, window=None
    )
    [(kernel, grid, args, constants)] = launches
    given = dict(zip(kernel.arg_names, args, strict=False))
    assert list(constants) == [*kernel.arg_names[len(args) : -1], "num_warps", "EARLY"]
    assert grid == (2, 40), "packs of heads; 38 tiles of queries, and one that each request may begin"
    for name, cache in (("k_cache", batch.k_cache), ("v_cache", batch.v_cache)):
        assert given[name].base == (cache.data_ptr(), torch.bfloat16)
        assert (given[name].shape, given[name].strides) == ([cache.shape[0] * 16, 2 * 128], [2 * 128, 1])
        assert given[name].block_shape == [16, 64]
    metadata = batch.metadata
    assert given["query_THD"] is batch.query
    assert given["out_THD"] is batch.out
    assert given["block_table"] is metadata.block_table
    assert (given["num_reqs"], given["num_tokens"], given["scale"]) == (2, 607, 0.1)
    assert (given["cache_stride_k"], given["table_stride_b"]) == (128, metadata.block_table.stride(0))


def test_a_cpu_keeps_the_triton_kernel() -> None:
    batch = make_batch([(0, 300)], head_size=64, dtype=torch.bfloat16)
    assert not can_run_hopper(batch.query, batch.k_cache, batch.v_cache)
