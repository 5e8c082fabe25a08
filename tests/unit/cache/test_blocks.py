"""The block allocator: all or nothing, never the sink, never twice, and held behind the fence of a step in
flight."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.cache.blocks import SINK_BLOCK, BlockAllocator
from gapless.errors import MemoryLimitError


def make(num_blocks: int = 8, block_size: int = 4) -> BlockAllocator:
    return BlockAllocator(num_blocks=num_blocks, block_size=block_size)


def test_the_sink_is_the_block_that_attention_pads_with():
    from gapless.attention import base

    assert SINK_BLOCK == base.SINK_BLOCK


@pytest.mark.parametrize("num_blocks", [2, 3, 8, 100])
def test_every_block_but_the_sink_is_handed_out_once(num_blocks):
    blocks = make(num_blocks).allocate(num_blocks - 1)
    assert blocks is not None
    assert sorted(blocks) == list(range(1, num_blocks))


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_cache_without_one_usable_block_is_refused(num_blocks):
    with pytest.raises(MemoryLimitError, match=f"num_blocks={num_blocks}"):
        make(num_blocks)


@pytest.mark.parametrize("block_size", [0, -4])
def test_a_block_must_hold_a_token(block_size):
    with pytest.raises(MemoryLimitError, match=f"block_size={block_size}"):
        make(block_size=block_size)


def test_a_request_for_too_many_changes_nothing():
    allocator = make(8)
    allocator.allocate(4)
    assert allocator.allocate(4) is None
    assert (allocator.num_free, allocator.num_used) == (3, 4)
    assert allocator.allocate(3) is not None


def test_zero_blocks_is_an_empty_table():
    assert make().allocate(0) == []


def test_a_negative_count_is_a_programming_error():
    with pytest.raises(AssertionError, match="negative"):
        make().allocate(-1)


def test_freed_blocks_come_out_again_in_the_same_order():
    allocator = make()
    first = allocator.allocate(3)
    assert first is not None
    allocator.free(first)
    assert allocator.allocate(3) == first


def test_equal_calls_give_equal_blocks():
    def run(allocator: BlockAllocator) -> list[list[int] | None]:
        a, b = allocator.allocate(2), allocator.allocate(3)
        allocator.free(a or [])
        return [a, b, allocator.allocate(1), allocator.allocate(2)]

    assert run(make()) == run(make())


def test_double_free_is_caught_and_names_the_block():
    allocator = make()
    blocks = allocator.allocate(2)
    assert blocks is not None
    allocator.free(blocks)
    with pytest.raises(AssertionError, match=f"double free of block {blocks[0]}"):
        allocator.free(blocks)


def test_double_free_within_one_call_leaves_the_blocks_in_use():
    allocator = make()
    (block,) = allocator.allocate(1) or []
    with pytest.raises(AssertionError, match="double free"):
        allocator.free([block, block])
    assert (allocator.num_used, allocator.num_free) == (1, 6)
    allocator.free([block])
    assert allocator.num_used == 0


@pytest.mark.parametrize("block", [SINK_BLOCK, -1, 8, 99])
def test_a_foreign_block_cannot_be_freed(block):
    with pytest.raises(AssertionError, match=f"block {block} is not one"):
        make(8).free([block])


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(num_tokens, num_blocks):
    assert make(block_size=4).blocks_for(num_tokens) == num_blocks


def test_a_block_of_a_step_in_flight_is_held_until_the_step_retires():
    allocator = make(4)
    blocks = allocator.allocate(3)
    assert blocks is not None
    allocator.free_after(blocks, step_id=5)
    assert (allocator.num_free, allocator.num_held, allocator.num_used) == (0, 3, 0)
    assert allocator.allocate(1) is None
    allocator.retire(4)
    assert allocator.allocate(1) is None
    allocator.retire(5)
    assert (allocator.num_free, allocator.num_held) == (3, 0)


def test_a_held_block_cannot_be_freed_again():
    allocator = make()
    blocks = allocator.allocate(1)
    assert blocks is not None
    allocator.free_after(blocks, step_id=1)
    with pytest.raises(AssertionError, match="double free"):
        allocator.free(blocks)


def test_after_its_step_has_retired_a_block_is_free_at_once():
    allocator = make()
    blocks = allocator.allocate(2)
    assert blocks is not None
    allocator.retire(3)
    allocator.free_after(blocks, step_id=3)
    assert allocator.num_held == 0
    assert allocator.num_free == 7


def test_a_later_fence_is_not_released_by_an_earlier_step_whatever_the_order_of_freeing():
    allocator = make()
    late, early = allocator.allocate(2), allocator.allocate(1)
    allocator.free_after(late or [], step_id=9)
    allocator.free_after(early or [], step_id=2)
    allocator.retire(2)
    assert (allocator.num_held, allocator.num_free) == (2, 5)


def test_steps_retire_in_order():
    allocator = make()
    allocator.retire(4)
    with pytest.raises(AssertionError, match="step 3 retires after step 4"):
        allocator.retire(3)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_blocks=st.integers(2, 20))
def test_any_sequence_of_calls_keeps_each_block_in_exactly_one_place(data, num_blocks):
    allocator = make(num_blocks)
    owned: list[list[int]] = []
    held: dict[int, set[int]] = {}
    step = 0
    allocator.retire(step)
    for action in data.draw(st.lists(st.sampled_from(["take", "free", "fence", "retire"]), max_size=40)):
        if action == "take":
            count = data.draw(st.integers(0, num_blocks))
            num_free = allocator.num_free
            blocks = allocator.allocate(count)
            assert (blocks is None) == (count > num_free)
            if blocks is not None:
                owned.append(blocks)
        elif action == "retire":
            step += data.draw(st.integers(0, 2))
            allocator.retire(step)
            held = {fence: blocks for fence, blocks in held.items() if fence > step}
        elif owned:
            blocks = owned.pop(data.draw(st.integers(0, len(owned) - 1)))
            if action == "free":
                allocator.free(blocks)
            else:
                fence = step + data.draw(st.integers(0, 3))
                allocator.free_after(blocks, step_id=fence)
                if fence > step:
                    held.setdefault(fence, set()).update(blocks)
        in_use = [block for blocks in owned for block in blocks]
        in_fence = [block for blocks in held.values() for block in blocks]
        assert SINK_BLOCK not in in_use
        assert len(set(in_use + in_fence)) == len(in_use) + len(in_fence)
        assert allocator.num_used == len(in_use)
        assert allocator.num_held == len(in_fence)
        assert allocator.num_free + allocator.num_used + allocator.num_held == num_blocks - 1
