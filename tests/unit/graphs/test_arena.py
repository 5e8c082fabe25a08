"""The arena: blocks live exactly as long as their tensors, never overlap, and recycle first-fit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.errors import MemoryLimitError
from gapless.graphs.device.arena import ALIGNMENT, Arena, alias_address, poison_
from gapless.graphs.device.layout import storage_bytes


def make(arena: Arena, numel: int) -> Tensor:
    return arena.empty_strided((numel,), (1,), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensor_has_the_requested_geometry(dtype):
    arena = Arena(capacity=1 << 20)
    tensor = arena.empty_strided((3, 4), (1, 3), dtype)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((3, 4), (1, 3), dtype)
    assert arena.owns(tensor)
    tensor.fill_(1)
    assert tensor.sum() == 12


@pytest.mark.parametrize("numel", [1, 127, 128, 129, 1000])
def test_blocks_are_aligned_and_rounded(numel):
    arena = Arena(capacity=1 << 20)
    first, second = make(arena, numel), make(arena, numel)
    assert (second.data_ptr() - first.data_ptr()) % ALIGNMENT == 0
    assert arena.bytes_in_use == 2 * -(-numel * 4 // ALIGNMENT) * ALIGNMENT


def test_block_is_freed_when_its_tensor_dies_and_handed_out_again():
    arena = Arena(capacity=1 << 20)
    tensor = make(arena, 100)
    address = tensor.data_ptr()
    del tensor
    assert arena.bytes_in_use == 0
    assert make(arena, 100).data_ptr() == address


def test_a_view_keeps_the_block_alive():
    arena = Arena(capacity=1 << 20)
    tensor = make(arena, 100)
    view = tensor[10:20].view(2, 5).t()
    address = tensor.data_ptr()
    del tensor
    assert arena.bytes_in_use == ALIGNMENT
    assert make(arena, 100).data_ptr() != address
    assert view.shape == (5, 2)


def test_first_fit_takes_the_lowest_hole_that_is_large_enough():
    arena = Arena(capacity=1 << 20)
    small, wall_1, large, wall_2 = make(arena, 128), make(arena, 128), make(arena, 512), make(arena, 128)
    large_address = large.data_ptr()
    del small, large
    assert make(arena, 256).data_ptr() == large_address
    assert wall_1.data_ptr() < large_address < wall_2.data_ptr()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3), (1, 3, 0, 2)])
def test_free_neighbours_of_a_segment_merge(order):
    arena = Arena(capacity=1 << 20)
    whole = make(arena, 512)
    start = whole.data_ptr()
    del whole
    blocks = {i: make(arena, 128) for i in range(4)}
    for i in order:
        del blocks[i]
    assert make(arena, 512).data_ptr() == start
    assert arena.num_bytes == 4 * ALIGNMENT


def test_blocks_of_different_segments_never_merge():
    arena = Arena(capacity=1 << 20)
    blocks = [make(arena, 128) for _ in range(4)]
    blocks.clear()
    assert arena.num_bytes == 4 * ALIGNMENT
    assert make(arena, 512).numel() == 512
    assert arena.num_bytes == 8 * ALIGNMENT


def test_segments_stay_after_frees():
    arena = Arena(capacity=1 << 20)
    tensors = [make(arena, 128) for _ in range(5)]
    assert arena.num_bytes == 5 * ALIGNMENT
    tensors.clear()
    assert (arena.bytes_in_use, arena.num_bytes) == (0, 5 * ALIGNMENT)


def test_exhausted_arena_says_how_much_was_asked_and_used():
    arena = Arena(capacity=1 << 20)
    held = make(arena, 1 << 17)
    with pytest.raises(MemoryLimitError, match=r"no room for 1048576 bytes \(524288 of 1048576 in use\)"):
        make(arena, 1 << 18)
    assert held.numel() == 1 << 17


def test_empty_tensor_takes_no_block():
    arena = Arena(capacity=1 << 20)
    tensor = arena.empty_strided((0, 4), (4, 1), torch.float32)
    assert tensor.shape == (0, 4)
    assert arena.bytes_in_use == 0


@pytest.mark.parametrize(
    "view", [lambda t: t, lambda t: t[2:], lambda t: t.view(10, 10).t(), lambda t: t[::3]]
)
def test_alias_shows_the_same_memory_but_owns_nothing(view):
    arena = Arena(capacity=1 << 20)
    tensor = make(arena, 100)
    alias = arena.alias(view(tensor))
    tensor.copy_(torch.arange(100.0))
    assert torch.equal(alias, view(tensor))
    assert (alias.data_ptr(), alias.stride()) == (view(tensor).data_ptr(), view(tensor).stride())
    del tensor
    assert arena.bytes_in_use == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_alias_of_memory_outside_any_arena(dtype):
    tensor = torch.ones(4, 6).to(dtype)
    alias = alias_address(tensor.t())
    tensor[1, 2] = 0
    assert torch.equal(alias, tensor.t())
    assert alias_address(torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("poison", [False, True])
def test_freed_blocks_are_filled_with_nan_only_when_asked(poison):
    arena = Arena(capacity=1 << 20, poison_freed=poison)
    tensor = make(arena, 10)
    tensor.fill_(7)
    alias = arena.alias(tensor)
    del tensor
    assert arena.bytes_in_use == 0  # also carries out the pending free
    assert bool(alias.isnan().all()) is poison


@pytest.mark.parametrize(
    ("dtype", "is_poison"),
    [
        (torch.float32, lambda t: t.isnan()),
        (torch.bfloat16, lambda t: t.isnan()),
        (torch.complex64, lambda t: t.isnan()),
        (torch.int32, lambda t: t > 1 << 30),
        (torch.int8, lambda t: t == 127),
        (torch.bool, lambda t: t),
    ],
)
def test_poison_fails_loudly_in_every_dtype(dtype, is_poison):
    tensor = torch.zeros(4, dtype=dtype)
    poison_(tensor)
    assert is_poison(tensor).all()


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        ((), (), 4),
        ((3,), (1,), 12),
        ((2, 3), (3, 1), 24),
        ((2, 3), (10, 2), 60),
        ((5, 0), (1, 1), 0),
        ((4,), (0,), 4),
    ],
)
def test_storage_bytes(size, stride, expected):
    assert storage_bytes(size, stride, torch.float32) == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60))
def test_live_blocks_never_overlap_and_everything_comes_back(steps):
    arena = Arena(capacity=1 << 20)
    largest = allocate_and_free(arena, steps)
    assert arena.bytes_in_use == 0
    total = arena.num_bytes
    if largest:
        assert make(arena, largest).numel() == largest
        assert arena.num_bytes == total  # whatever was cut up is whole again


def allocate_and_free(arena: Arena, steps: list[tuple[bool, int]]) -> int:
    """Returns the largest size that was allocated."""
    live: list[Tensor] = []
    largest = 0
    for number, (frees, numel) in enumerate(steps):
        if frees and live:
            live.pop(numel % len(live))
            continue
        live.append(make(arena, numel).fill_(number))
        largest = max(largest, numel)
        is_intact = [bool((tensor == tensor[0]).all()) for tensor in live]
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * 4) for tensor in live)
        is_apart = [end <= start for (_, end), (start, _) in itertools.pairwise(spans)]
        assert all(is_intact)
        assert all(is_apart)
    return largest
