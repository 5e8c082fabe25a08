"""When the head and its greedy choice are one kernel: a rule over shapes and what a GPU has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gapless.kernels import head_tiles
from gapless.kernels.head_tiles import MAX_HEAD_ROWS, default_head_tiles, that_fit
from gapless.kernels.select import HOPPER_SHARED_BYTES

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZE = 151936


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether the GPU launches early, and what it is asked."""
    answer = [True]
    monkeypatch.setattr(head_tiles, "has_early_launch", lambda device: answer[0])
    monkeypatch.setattr(head_tiles, "shared_memory_bytes", lambda device: HOPPER_SHARED_BYTES)
    head_tiles._head_tiles.cache_clear()
    yield answer
    head_tiles._head_tiles.cache_clear()


def takes(num_rows: int = 8, num_in: int = 1024, size: int = SIZE, dtype=torch.bfloat16, device=GPU) -> bool:
    return head_tiles.head_tiles(num_rows, num_in, size, dtype, device) is not None


def test_some_rows_of_a_large_vocabulary_in_half_precision_take_it() -> None:
    assert all(takes(num_rows) for num_rows in (2, 3, 17, 65, MAX_HEAD_ROWS))
    assert takes(dtype=torch.float16)
    assert takes(num_in=4096, size=128256)


def test_other_shapes_and_types_do_not() -> None:
    assert not takes(0)
    assert not takes(1)
    assert not takes(MAX_HEAD_ROWS + 1)
    assert not takes(num_in=1000)
    assert not takes(num_rows=65, num_in=4096), "the library is quicker"
    assert not takes(size=49152)
    assert not takes(size=1 << 24), "the kernel behind picks among so many chunks in one program"
    assert not takes(dtype=torch.float32)
    assert not takes(device=CPU)


def test_gpus_without_an_early_launch_do_not(early: list[bool]) -> None:
    early[0] = False
    assert not takes()


def test_a_choice_is_the_same_for_a_bucket_of_rows() -> None:
    for num_rows in range(2, MAX_HEAD_ROWS + 1):
        bucket = 1 << (num_rows - 1).bit_length()
        args = (1024, SIZE, torch.bfloat16, GPU)
        assert head_tiles.head_tiles(num_rows, *args) is head_tiles.head_tiles(bucket, *args)


@pytest.mark.parametrize("num_rows", [2, 16, 32, 64, 128])
def test_built_in_tiles_are_ones_the_kernel_takes(num_rows: int) -> None:
    tiles = default_head_tiles(num_rows)
    sizes = (tiles.block_r, tiles.block_o, tiles.block_i, tiles.split, tiles.num_warps)
    assert all(size > 0 and size & (size - 1) == 0 for size in sizes)
    assert tiles.block_o <= 8192, "a key has 13 bits for the place in a tile"
    assert tiles.rows_pad(num_rows) == max(num_rows, 8)


def test_stages_shrink_to_the_shared_memory_there_is() -> None:
    tiles = default_head_tiles(128)
    assert that_fit(tiles, 128, shared_bytes=HOPPER_SHARED_BYTES) == tiles
    fewer = that_fit(tiles, 128, shared_bytes=64 << 10)
    assert fewer is not None
    assert fewer.num_stages < tiles.num_stages
    assert that_fit(tiles, 128, shared_bytes=20 << 10) is None
