"""The kernel with roles, run as Python on the CPU, against the reference: results, and nobody waits forever.

``benchmarks/hopper_variants.py`` compares the compiled kernel on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gapless.attention.hopper_role_tiles import ROLE_TILES, RoleTile, can_take_roles, constants_of
from gapless.attention.torch_reference import TorchReferenceBackend
from ragged_batches import make_batch, run_backend

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

MIXED = [(0, 64), (37, 129), (300, 1), (0, 0), (127, 1), (130, 255)]
SMALL = {"tma": {}, "cp_async": {"use_tma": False, "feed_warps": 4}}


def compare(
    requests: list[tuple[int, int]], tile: RoleTile, *, num_programs: int | None = None, **options: Any
) -> None:
    from roles_on_cpu import run_roles

    options = {"head_size": 64} | options
    batch, twin = (make_batch(requests, **options) for _ in range(2))
    expected = run_backend(TorchReferenceBackend(), twin, scale=0.3, window=None)
    TorchReferenceBackend().write_kv(
        batch.key, batch.value, batch.k_cache, batch.v_cache, batch.metadata.slot_mapping
    )
    run_roles(batch, tile, scale=0.3, num_programs=num_programs)
    torch.testing.assert_close(batch.out, expected, atol=4e-6, rtol=4e-6)
    assert (batch.out[batch.num_real_tokens :] == 0).all()


@pytest.mark.parametrize("name", ROLE_TILES)
def test_every_variant_equals_the_reference(name: str) -> None:
    compare(MIXED, ROLE_TILES[name], pad_tokens=77, num_programs=2 if ROLE_TILES[name].rounds == 0 else None)


@pytest.mark.parametrize("feed", SMALL)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("block_n", [64, 128])
def test_every_depth_of_the_ring(block_n: int, stages: int, feed: str) -> None:
    compare([(0, 700), (3, 70)], RoleTile(block_n=block_n, stages=stages, **SMALL[feed]), head_size=128)


@pytest.mark.parametrize("feed", SMALL)
@pytest.mark.parametrize("block_size", [16, 24, 64, 128])
@pytest.mark.parametrize("num_heads", [2, 6, 8])
def test_groups_and_block_sizes(num_heads: int, block_size: int, feed: str) -> None:
    tile = RoleTile(block_n=64, **SMALL[feed])
    compare([(3, 70), (200, 51), (63, 65)], tile, num_heads=num_heads, block_size=block_size)


@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize(
    "requests", [[(0, 1)], [(0, 300)], [(128, 128)], [(127, 1), (128, 1)], [(0, 0), (0, 5)]]
)
def test_prompts_at_the_edges_of_tiles(requests: list[tuple[int, int]], ping_pong: bool) -> None:
    compare(requests, RoleTile(ping_pong=ping_pong), pad_tokens=3)


@pytest.mark.parametrize("num_programs", [1, 3, 5])
@pytest.mark.parametrize("consumers", [2, 3])
def test_programs_take_several_tiles_back_and_forth(consumers: int, num_programs: int) -> None:
    compare(MIXED, RoleTile(consumers=consumers, block_n=64, ping_pong=True), num_programs=num_programs)


@pytest.mark.parametrize("name", ROLE_TILES)
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 128])
def test_variants_fit_the_hardware(group: int, head_size: int, name: str) -> None:
    tile = ROLE_TILES[name]
    constants = constants_of(tile, group, head_size, 16, 8 * head_size, torch.device("cpu"))
    assert group % constants["PACK"] == 0, "a program's heads share a key/value head"
    assert constants["BLOCK_Q"] * constants["PACK"] == 64 * tile.consumers
    rows = 64 * tile.consumers + 2 * tile.stages * tile.block_n
    assert rows * head_size * 2 <= 227 * 1024 - 2048, "shared memory of one Hopper SM"
    # Warps come in warpgroups, also those of a producer of one warp.
    lanes = 65536 // 128
    assert tile.consumers * tile.consumer_regs + tile.feed_regs <= lanes // 8 * 8
    assert tile.consumer_regs % 8 == tile.feed_regs % 8 == 0


def test_blocks_of_odd_sizes_cannot_be_copied_by_pages() -> None:
    assert not can_take_roles(ROLE_TILES["tma"], group=2, head_size=128, block_size=20)
    assert can_take_roles(ROLE_TILES["tma"], group=2, head_size=128, block_size=24)
    assert can_take_roles(ROLE_TILES["cp_async"], group=2, head_size=128, block_size=20)
