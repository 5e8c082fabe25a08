"""What blocks hold: published blocks are found until they are reused, and reuse follows the last use."""

from __future__ import annotations

import timeit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.cache.blocks import BlockAllocator
from gapless.cache.prefix import extend_hashes

A, B, C = b"a", b"b", b"c"


def make(num_blocks: int = 6) -> BlockAllocator:
    return BlockAllocator(num_blocks=num_blocks, block_size=4)


def take(allocator: BlockAllocator, *hashes: bytes) -> list[int]:
    """As many blocks, published under ``hashes``."""
    blocks = allocator.allocate(len(hashes))
    assert blocks is not None
    for block, block_hash in zip(blocks, hashes, strict=True):
        allocator.publish(block, block_hash)
    return blocks


def hashes_of(token_ids: list[int], *, block_size: int = 4, extra: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    count = len(token_ids) // block_size
    extend_hashes(hashes, token_ids, num_blocks=count, block_size=block_size, extra=extra)
    return hashes


def test_a_published_block_is_found_in_use_and_free():
    allocator = make()
    (block,) = take(allocator, A)
    assert allocator.find(A) == block
    allocator.free([block])
    assert allocator.find(A) == block
    assert allocator.num_free == 5
    assert allocator.find(B) is None


def test_a_shared_block_is_free_only_when_every_table_has_given_it_back():
    allocator = make()
    blocks = take(allocator, A)
    allocator.share(blocks)
    allocator.free(blocks)
    assert (allocator.num_used, allocator.num_free) == (1, 4)
    allocator.free(blocks)
    assert (allocator.num_used, allocator.num_free) == (0, 5)
    with pytest.raises(AssertionError, match="double free"):
        allocator.free(blocks)


def test_blocks_without_contents_are_handed_out_before_any_with():
    allocator = make()
    kept = take(allocator, A, B)
    allocator.free(kept)
    assert not set(kept) & set(allocator.allocate(3) or [])
    assert allocator.find(A) is not None
    assert allocator.find(B) is not None


def test_what_was_used_longest_ago_goes_first_and_a_prefix_outlives_what_follows_it():
    allocator = make(5)
    first, second = take(allocator, A, B), take(allocator, C, b"d")
    allocator.free(second)
    allocator.free(first)
    assert allocator.allocate(1) == [second[1]], "the tail of the one given back first"
    assert allocator.allocate(1) == [second[0]]
    assert allocator.allocate(2) == [first[1], first[0]]
    assert [allocator.find(h) for h in (A, B, C)] == [None] * 3


def test_a_block_that_is_found_again_counts_as_used_now():
    allocator = make(4)
    a, b, c = take(allocator, A, B, C)
    for block in (a, b, c):
        allocator.free([block])
    allocator.share([a])
    allocator.free([a])
    assert allocator.allocate(2) == [b, c]
    assert allocator.find(A) == a


def test_a_reused_block_is_not_found_under_what_it_held():
    allocator = make(2)
    (block,) = take(allocator, A)
    allocator.free([block])
    assert allocator.allocate(1) == [block]
    assert allocator.find(A) is None
    allocator.publish(block, B)
    assert (allocator.find(A), allocator.find(B)) == (None, block)


def test_of_two_equal_blocks_the_first_stays_the_one():
    allocator = make()
    (first,) = take(allocator, A)
    (second,) = take(allocator, A)
    assert allocator.find(A) == first
    allocator.free([first, second])
    assert allocator.allocate(4) == [second, *allocator_order(4, without={first, second})]


def allocator_order(count: int, *, without: set[int]) -> list[int]:
    """The first ``count`` - 1 blank blocks that a fresh allocator of six would hand out."""
    return [block for block in range(1, 6) if block not in without][: count - 1]


def test_a_held_block_may_be_shared_and_the_fence_still_counts():
    allocator = make(2)
    (block,) = take(allocator, A)
    allocator.free_after([block], step_id=3)
    assert (allocator.num_held, allocator.num_free) == (1, 0)
    assert allocator.count_free([block]) == 0
    allocator.share([block])
    assert (allocator.num_held, allocator.num_used) == (0, 1)
    allocator.free([block])
    assert allocator.num_held == 1, "given back before step 3 has retired"
    allocator.retire(3)
    assert (allocator.num_held, allocator.num_free) == (0, 1)
    assert allocator.find(A) == block


def test_a_block_with_two_fences_waits_for_the_later_one():
    allocator = make(2)
    blocks = take(allocator, A)
    allocator.share(blocks)
    allocator.free_after(blocks, step_id=5)
    assert (allocator.num_used, allocator.num_held) == (1, 0)
    allocator.free_after(blocks, step_id=4)
    assert (allocator.num_used, allocator.num_held) == (0, 1)
    allocator.retire(4)
    assert allocator.num_held == 1
    allocator.retire(5)
    assert allocator.num_free == 1


@pytest.mark.parametrize("state", ["used", "free", "held"])
def test_a_forgotten_block_is_found_no_more_and_is_not_lost(state):
    allocator = make(3)
    blocks = take(allocator, A, B)
    if state == "free":
        allocator.free(blocks)
    elif state == "held":
        allocator.free_after(blocks, step_id=1)
    allocator.forget(blocks[:1])
    assert (allocator.find(A), allocator.find(B)) == (None, blocks[1])
    allocator.forget_all()
    assert allocator.num_published == 0
    if state == "used":
        allocator.free(blocks)
    allocator.retire(1)
    assert sorted(allocator.allocate(2) or []) == sorted(blocks)


def test_only_full_blocks_in_use_are_published_once():
    allocator = make()
    (block,) = allocator.allocate(1) or []
    allocator.publish(block, A)
    with pytest.raises(AssertionError, match="published already"):
        allocator.publish(block, B)
    with pytest.raises(AssertionError, match="in no table"):
        allocator.publish(5, B)
    with pytest.raises(AssertionError, match="not published"):
        allocator.share([3])


class Model:
    """What an allocator must do, said as plainly as possible."""

    def __init__(self, num_blocks: int) -> None:
        self.blank, self.lru = list(range(num_blocks - 1, 0, -1)), list[int]()
        self.tables: list[list[int]] = []
        self.fences: list[tuple[int, list[int]]] = []
        self.contents: dict[int, bytes] = {}
        self.retired = 0

    def uses(self, block: int) -> int:
        return sum(block in table for table in self.tables)

    def waits(self, block: int) -> bool:
        return any(block in blocks for _, blocks in self.fences)

    def settle(self, blocks: list[int]) -> None:
        """Those that nobody has and nothing holds become free, the last one first."""
        for block in reversed(blocks):
            if not self.uses(block) and not self.waits(block):
                (self.lru if block in self.contents else self.blank).append(block)

    def allocate(self, count: int) -> list[int]:
        blocks = []
        for _ in range(count):
            block = self.blank.pop() if self.blank else self.lru.pop(0)
            self.contents.pop(block, None)
            blocks.append(block)
        self.tables.append(list(blocks))
        return blocks

    def forget(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.contents.pop(block, None) is not None and block in self.lru:
                self.lru.remove(block)
                self.blank.append(block)


ACTIONS = [
    "take",
    "publish",
    "publish",
    "publish",
    "share",
    "share",
    "free",
    "free",
    "fence",
    "retire",
    "forget",
]


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_blocks=st.integers(2, 14))
def test_any_sequence_of_calls_does_what_the_model_says(data, num_blocks):
    allocator, model = make(num_blocks), Model(num_blocks)
    allocator.retire(0)
    hashes = [bytes([i]) for i in range(8)]
    for action in data.draw(st.lists(st.sampled_from([*ACTIONS, "forget_all"]), max_size=60)):
        if action == "take":
            count = data.draw(st.integers(0, 4))
            if count > len(model.blank) + len(model.lru):
                assert allocator.allocate(count) is None
            else:
                assert allocator.allocate(count) == model.allocate(count)
        elif action == "retire":
            model.retired += data.draw(st.integers(0, 2))
            allocator.retire(model.retired)
            due = [blocks for fence, blocks in model.fences if fence <= model.retired]
            while due:
                blocks = due.pop(0)
                model.fences.remove(next(f for f in model.fences if f[1] is blocks))
                model.settle(blocks)
        elif action == "share":
            found = [b for h in data.draw(st.sets(st.sampled_from(hashes), max_size=3))
                     if (b := allocator.find(h)) is not None]  # fmt: skip
            assert allocator.count_free(found) == sum(block in model.lru for block in found)
            allocator.share(found)
            model.lru = [block for block in model.lru if block not in found]
            model.tables.append(found)
        elif action == "forget_all":
            allocator.forget_all()
            model.forget(list(model.contents))
        elif model.tables:
            table = model.tables[data.draw(st.integers(0, len(model.tables) - 1))]
            if action == "publish":
                block_hash = data.draw(st.sampled_from(hashes))
                for block in [b for b in table if b not in model.contents][:1]:
                    allocator.publish(block, block_hash)
                    if block_hash not in model.contents.values():
                        model.contents[block] = block_hash
            elif action == "forget":
                allocator.forget(table)
                model.forget(table)
            else:
                model.tables.remove(table)
                step_id = model.retired + data.draw(st.integers(0, 3)) if action == "fence" else -1
                if step_id > model.retired:
                    model.fences.append((step_id, table))
                allocator.free_after(table, step_id=step_id)
                model.settle(table)
        used = {block for table in model.tables for block in table}
        held = {block for _, blocks in model.fences for block in blocks} - used
        assert len(used) + len(held) + len(model.blank) + len(model.lru) == num_blocks - 1
        assert (allocator.num_used, allocator.num_held) == (len(used), len(held))
        assert allocator.num_free == len(model.blank) + len(model.lru)
        by_hash = {block_hash: block for block, block_hash in model.contents.items()}
        assert {h: allocator.find(h) for h in hashes} == {h: by_hash.get(h) for h in hashes}
        assert allocator.num_published == len(by_hash)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=24), st.lists(st.integers(0, 2), max_size=24))
def test_hashes_are_equal_exactly_as_far_as_whole_blocks_of_tokens_are(left, right):
    for i, (a, b) in enumerate(zip(hashes_of(left), hashes_of(right), strict=False)):
        assert (a == b) == (left[: 4 * i + 4] == right[: 4 * i + 4])


def test_hashes_depend_on_position_block_size_and_whatever_else_changes_the_keys():
    tokens = [1] * 16
    hashes = hashes_of(tokens)
    assert len(set(hashes)) == 4
    assert hashes[0] != hashes_of(tokens, block_size=8)[0]
    assert not set(hashes) & set(hashes_of(tokens, extra=b"adapter"))
    assert hashes_of(tokens, extra=b"adapter") != hashes_of(tokens, extra=b"adapter 2")


def test_hashes_are_those_of_all_at_once_however_they_are_extended():
    tokens, hashes = list(range(400, 432)), list[bytes]()
    for count in (0, 1, 1, 3, 8):
        extend_hashes(hashes, tokens, num_blocks=count, block_size=4)
        assert len(hashes) == count
    assert hashes == hashes_of(tokens)
    assert {len(h) for h in hashes} == {32}


def test_a_block_of_16_tokens_takes_a_few_microseconds_at_most():
    """About 1 µs on a desktop; the bound is for a busy machine."""
    tokens = list(range(100_000, 100_000 + 16 * 256))
    best = min(timeit.repeat(lambda: hashes_of(tokens, block_size=16), number=1, repeat=20))
    assert best / 256 < 10e-6
