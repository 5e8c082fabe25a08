"""Who owns which block of the paged KV cache.

A block holds ``block_size`` consecutive tokens of one sequence; a sequence's *block table* lists its blocks
in order. The allocator is bookkeeping only, no tensors. Invariants: block 0, the sink, is never handed out
(pad tokens write there); every other block is free, in use, or held; a block freed while a step that may
still write to it is in flight is *held* until that step retires, so it can never reach a second owner too
early. The order in which blocks are handed out depends on the calls alone, so a run can be repeated. Read
``engine/scheduler.py`` next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gapless.errors import MemoryLimitError

SINK_BLOCK = 0
"""Belongs to nobody; the same number as ``attention.base.SINK_BLOCK`` (kept here too: this file needs no
torch)."""

_FREE, _USED, _HELD = 0, 1, 2


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
        self._state = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, SINK_BLOCK, -1))  # a stack: the lowest number is on top
        self._held: deque[tuple[int, list[int]]] = deque()  # (step id, blocks), any order of step ids
        self._num_held = 0
        self._retired_step = -1

    @property
    def num_usable(self) -> int:
        """Blocks that can be in use at once: all but the sink."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Freed, but a step in flight may still write to them."""
        return self._num_held

    @property
    def num_used(self) -> int:
        """Blocks in somebody's table; 0 when every sequence has ended, else there is a leak."""
        return self.num_usable - self.num_free - self._num_held

    @property
    def capacity_tokens(self) -> int:
        return self.num_usable * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks ``num_tokens`` tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """``num_blocks`` blocks, or None and nothing changed when fewer are free."""
        if num_blocks < 0:
            raise AssertionError(f"allocate({num_blocks}): negative count")
        if num_blocks > len(self._free):
            return None
        if num_blocks == 0:
            return []
        blocks = self._free[-num_blocks:][::-1]
        del self._free[-num_blocks:]
        for block in blocks:
            self._state[block] = _USED
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back at once. Only for blocks that no step in flight touches."""
        self._release(self._take_back(blocks, _FREE))

    def free_after(self, blocks: Iterable[int], *, step_id: int) -> None:
        """Give blocks back, to be handed out only once step ``step_id`` has retired (at once if it has)."""
        if step_id <= self._retired_step:
            self.free(blocks)
            return
        taken = self._take_back(blocks, _HELD)
        if taken:
            self._held.append((step_id, taken))
            self._num_held += len(taken)

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
            self._num_held -= len(blocks)
            for block in blocks:
                self._state[block] = _FREE
            self._release(blocks)

    def _take_back(self, blocks: Iterable[int], state: int) -> list[int]:
        taken = list(blocks)
        for i, block in enumerate(taken):
            if not SINK_BLOCK < block < self.num_blocks:
                self._restore(taken[:i])
                raise AssertionError(f"block {block} is not one that this allocator hands out")
            if self._state[block] != _USED:
                self._restore(taken[:i])
                raise AssertionError(f"double free of block {block}")
            self._state[block] = state
        return taken

    def _restore(self, blocks: list[int]) -> None:
        for block in blocks:
            self._state[block] = _USED

    def _release(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))  # so that the same blocks come out again in the same order
