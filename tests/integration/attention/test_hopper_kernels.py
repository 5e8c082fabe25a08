"""The Gluon kernel for Hopper, run as Python on the CPU, against the reference; which shapes it takes.

``tests/gpu/test_triton_paged.py`` compares the compiled kernel on a GPU, with the switch on.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gapless.attention.hopper_prefill import can_run_hopper
from gapless.attention.tile_rules import hopper_tile
from gapless.attention.torch_reference import TorchReferenceBackend
from ragged_batches import make_batch, run_backend

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

MIXED = [(0, 64), (37, 129), (300, 1), (0, 0), (127, 1), (130, 255)]


def compare(requests: list[tuple[int, int]], *, pad_tokens: int = 0, **options: Any) -> None:
    from gluon_on_cpu import run_kernel

    shape = {name: options.pop(name) for name in ("num_heads", "block_size") if name in options}
    batch, twin = (make_batch(requests, pad_tokens=pad_tokens, **shape) for _ in range(2))
    expected = run_backend(TorchReferenceBackend(), twin, scale=0.3, window=None)
    TorchReferenceBackend().write_kv(
        batch.key, batch.value, batch.k_cache, batch.v_cache, batch.metadata.slot_mapping
    )
    run_kernel(batch, scale=0.3, **options)
    torch.testing.assert_close(batch.out, expected, atol=4e-6, rtol=4e-6)
    assert (batch.out[batch.num_real_tokens :] == 0).all()


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize(("rows", "block_n"), [(128, 128), (64, 64)])
def test_every_depth_of_the_pipeline_equals_the_reference(rows: int, block_n: int, num_stages: int) -> None:
    compare(MIXED, rows=rows, block_n=block_n, num_stages=num_stages, pad_tokens=77)


def test_programs_take_several_tiles() -> None:
    compare(MIXED, rows=64, block_n=64, num_stages=2, num_programs=3)


@pytest.mark.parametrize("block_size", [16, 24, 64, 128])
@pytest.mark.parametrize("num_heads", [2, 6, 8])
def test_groups_and_block_sizes(num_heads: int, block_size: int) -> None:
    requests = [(3, 70), (200, 51), (63, 65)]
    compare(requests, num_heads=num_heads, block_size=block_size, rows=64, block_n=64, num_stages=3)


@pytest.mark.parametrize("requests", [[(0, 1)], [(0, 300)], [(128, 128)], [(127, 1), (128, 1)]])
def test_prompts_at_the_edges_of_tiles(requests: list[tuple[int, int]]) -> None:
    compare(requests, rows=128, block_n=128, num_stages=2, pad_tokens=3)


def test_caches_may_have_more_elements_than_32_bits_count() -> None:
    from gluon_on_cpu import Buffer, Machine, Pointer

    places: list[torch.Tensor] = []

    class Watched(Machine):
        def _copy(self, buffer: Any, pointer: Pointer, mask: Any = None) -> None:
            places.append(pointer.offset)

    block, stride = 2**20, 4096
    machine, blocks = Watched(1), torch.full((16,), block, dtype=torch.int32)
    machine.function("copy_tile")(
        Buffer(torch.empty(16, 64)), Pointer(torch.empty(0)), blocks, 3, 64,
        CACHE_STRIDE_S=stride, BLOCK_SIZE=32, N=16, D=64, COPY=None, MASKED=False,
    )  # fmt: skip
    slots = block * 32 + torch.arange(48, 64) % 32
    assert torch.equal(places[0], slots[:, None] * stride + torch.arange(64)[None, :])


@pytest.mark.parametrize("num_tokens", [512, 2048, 4096])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 8, 128])
def test_tiles_are_whole_products_and_fit_the_hardware(group: int, head_size: int, num_tokens: int) -> None:
    tile = hopper_tile(group=group, head_size=head_size, itemsize=2, num_tokens=num_tokens, window=0)
    assert tile is not None
    assert group % tile.pack == 0, "a program's heads share a key/value head"
    assert tile.block_q * tile.pack == 16 * tile.num_warps, "each warp has 16 rows of a product"
    assert tile.num_stages >= 2
    rows = tile.block_q * tile.pack + 2 * tile.num_stages * tile.block_n
    assert rows * head_size * 2 <= 227 * 1024 - 1024, "shared memory of one Hopper SM"


@pytest.mark.parametrize("other", [{"head_size": 80}, {"itemsize": 4}, {"window": 5}, {"num_tokens": 511}])
def test_other_shapes_keep_the_triton_kernel(other: dict[str, int]) -> None:
    shape = {"group": 2, "head_size": 128, "itemsize": 2, "num_tokens": 4096, "window": 0}
    assert hopper_tile(**(shape | other)) is None


def test_a_cpu_keeps_the_triton_kernel() -> None:
    batch = make_batch([(0, 300)], head_size=64, dtype=torch.bfloat16)
    assert not can_run_hopper(batch.query, batch.k_cache, batch.v_cache)
