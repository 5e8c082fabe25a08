"""Who owns which block of the paged KV cache, and which block holds which tokens.

A block holds ``block_size`` consecutive tokens of one sequence; a sequence's *block table* lists its blocks
in order. Full blocks may be *published* under a hash of their tokens and all before (``prefix.py``); then
other tables may share them, since nobody writes to a full block again. The allocator is bookkeeping only, no
tensors. Invariants: block 0, the sink, is never handed out (pad tokens write there); every other block is
free, in use (by as many tables as its count says), or held: given back while a step that may still touch it
is in flight, so it can never reach another owner too early. A free block keeps its hash, and can be found,
until it is handed out again; blocks without a hash go first, then those that were given back longest ago. The
order in which blocks are handed out depends on the calls alone, so a run can be repeated. Read
``engine/scheduler.py`` next.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from gapless.errors import MemoryLimitError

SINK_BLOCK = 0
"""Belongs to nobody; the same number as ``attention.base.SINK_BLOCK`` (kept here too: this file needs no
torch)."""


class BlockAllocator:
    """Hands out blocks ``1 .. num_blocks - 1``. Misuse (double free, foreign block) raises
    ``AssertionError``."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise MemoryLimitError(f"block_size={block_size}: a block must hold at least one token")
        if num_blocks < 2:
            raise MemoryLimitError(
                f"num_blocks={num_blocks}: the cache needs the sink block and at least one more; "
                "raise --kv-cache-tokens or the memory fraction"
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        self._num_tables = [0] * num_blocks  # that list the block
        self._num_fences = [0] * num_blocks  # of steps in flight, one for each time it was given back
        # Free blocks: a stack of those without a hash, the lowest number on top at first, and the others in
        # the order in which they were given back, which only this kind of dict takes from its front at once.
        self._blank = list(range(num_blocks - 1, SINK_BLOCK, -1))
        self._findable: OrderedDict[int, None] = OrderedDict()
        self._held: deque[tuple[int, list[int]]] = deque()  # (step id, blocks), any order of step ids
        self._num_held = 0
        self._retired_step = -1
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that can be in use at once: all but the sink."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._findable)

    @property
    def num_held(self) -> int:
        """In no table, but a step in flight may still touch them."""
        return self._num_held

    @property
    def num_used(self) -> int:
        """Blocks in somebody's table; 0 when every sequence has ended, else there is a leak."""
        return self.num_usable - self.num_free - self._num_held

    @property
    def num_published(self) -> int:
        """Blocks that can be found by their hash, in use or not."""
        return len(self._by_hash)

    @property
    def capacity_tokens(self) -> int:
        return self.num_usable * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks ``num_tokens`` tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """``num_blocks`` blocks, or None and nothing changed when fewer are free. What they held is
        forgotten."""
        if num_blocks < 0:
            raise AssertionError(f"allocate({num_blocks}): negative count")
        if num_blocks > self.num_free:
            return None
        if num_blocks == 0:
            return []
        blocks = self._blank[-num_blocks:][::-1]
        del self._blank[-num_blocks:]
        while len(blocks) < num_blocks:
            block, _ = self._findable.popitem(last=False)
            self._drop_hash(block)
            blocks.append(block)
        for block in blocks:
            self._num_tables[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Put published blocks into one more table."""
        for block in blocks:
            assert self._hashes[block] is not None, f"block {block} is not published"
            if not self._num_tables[block]:
                if self._num_fences[block]:
                    self._num_held -= 1
                else:
                    del self._findable[block]
            self._num_tables[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Take blocks out of one table. Only for blocks that no step in flight touches."""
        taken = self._take_out(blocks)
        self._release([b for b in taken if not self._num_tables[b] and not self._num_fences[b]])
        self._num_held += sum(1 for b in taken if not self._num_tables[b] and self._num_fences[b])

    def free_after(self, blocks: Iterable[int], *, step_id: int) -> None:
        """Take blocks out of one table; they are free only once step ``step_id`` has retired (at once if it
        has)."""
        if step_id <= self._retired_step:
            self.free(blocks)
            return
        taken = self._take_out(blocks)
        if not taken:
            return
        for block in taken:
            self._num_fences[block] += 1
            self._num_held += not self._num_tables[block]
        self._held.append((step_id, taken))

    def retire(self, step_id: int) -> None:
        """Step ``step_id`` and all earlier ones have finished on the device: release what waited for them."""
        if step_id < self._retired_step:
            raise AssertionError(
                f"step {step_id} retires after step {self._retired_step}: steps end in order"
            )
        self._retired_step = step_id
        for _ in range(len(self._held)):
            fence, blocks = self._held.popleft()
            if fence > step_id:
                self._held.append((fence, blocks))
                continue
            for block in blocks:
                self._num_fences[block] -= 1
            free = [b for b in blocks if not self._num_fences[b] and not self._num_tables[b]]
            self._num_held -= len(free)
            self._release(free)

    def find(self, block_hash: bytes) -> int | None:
        """The block that was published under ``block_hash``, if it still holds those tokens."""
        return self._by_hash.get(block_hash)

    def publish(self, block: int, block_hash: bytes) -> None:
        """From now on ``block``, which is in use and full, can be found. The first of two equal blocks stays
        the one."""
        assert self._num_tables[block], f"block {block} is in no table"
        assert self._hashes[block] is None, f"block {block} is published already"
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of published ``blocks`` are free now, so that sharing them leaves fewer to allocate."""
        return sum(block in self._findable for block in blocks)

    def forget(self, blocks: Iterable[int]) -> None:
        """``blocks`` cannot be found any more; tables that list them keep them."""
        for block in blocks:
            if self._hashes[block] is not None:
                self._drop_hash(block)
                if block in self._findable:
                    del self._findable[block]
                    self._blank.append(block)

    def forget_all(self) -> None:
        """No block can be found any more."""
        self.forget(list(self._by_hash.values()))

    def _drop_hash(self, block: int) -> None:
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self._hashes[block] = None

    def _take_out(self, blocks: Iterable[int]) -> list[int]:
        """Each block in one table fewer, or an error and nothing changed."""
        taken = list(blocks)
        for i, block in enumerate(taken):
            is_ours = SINK_BLOCK < block < self.num_blocks
            if not is_ours or not self._num_tables[block]:
                for earlier in taken[:i]:
                    self._num_tables[earlier] += 1
                raise AssertionError(
                    f"double free of block {block}"
                    if is_ours
                    else f"block {block} is not one that this allocator hands out"
                )
            self._num_tables[block] -= 1
        return taken

    def _release(self, blocks: list[int]) -> None:
        """Last block first: the same ones come out again in the same order, and a prefix outlives what
        follows it."""
        for block in reversed(blocks):
            if self._hashes[block] is None:
                self._blank.append(block)
            else:
                self._findable[block] = None
