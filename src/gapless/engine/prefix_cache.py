"""Which of a sequence's tokens are in the cache already, and when those it computes can be found by others.

Only full blocks are shared, so nobody ever writes to a shared one. A lookup never covers a sequence's last
known token: it has to be computed for its logits. When a block can be found:

- with known tokens, from the moment the step that computes its last token has been launched: steps run one
  after the other on one stream, so every step scheduled later reads what that one writes;
- with tokens that were drawn, from the moment its sequence gives it back (ended or preempted), which costs
  decode steps nothing;
- never, if the step was not launched or the sequence ended with an error.

A launched step that fails later empties the cache, and ``epoch`` tells what was computed before from what
comes after: a sequence publishes only in the epoch it was admitted in. Read ``scheduler.py`` next.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gapless.cache.blocks import BlockAllocator
from gapless.cache.prefix import extend_hashes
from gapless.engine.media_names import name_of_block
from gapless.engine.request import Sequence


class PrefixCache:
    """Sequences and the published blocks of one allocator."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._epoch = 0
        self.num_queries = 0
        """Prompt tokens that were looked up; prompts that are computed anew after a preemption not counted
        again."""
        self.num_hits = 0
        """Prompt tokens among them that were found."""
        self._counted_from = (0, 0)

    def match(self, sequence: Sequence) -> list[int]:
        """Published blocks that hold the first tokens of a waiting sequence, as many as there are."""
        if not _may_read(sequence):
            return []
        blocks: list[int] = []
        for index in range(self._num_shareable(sequence.num_tokens)):
            self._extend(sequence, index + 1)
            block = self._allocator.find(sequence.block_hashes[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def is_being_computed(self, sequence: Sequence, *, by: Sequence) -> bool:
        """``by`` has the same prompt and will publish blocks of it that ``sequence`` could share."""
        if by.request is not sequence.request or by.cache_epoch != self._epoch or not _may_read(sequence):
            return False
        return by.num_published_blocks < self._num_shareable(sequence.num_prompt_tokens)

    def admit(self, sequence: Sequence, num_blocks: int) -> None:
        """``sequence`` is about to run, sharing ``num_blocks`` blocks that were found."""
        sequence.cache_epoch = self._epoch
        sequence.num_published_blocks = num_blocks
        if sequence.admitted_step_id < 0 and _may_read(sequence):
            sequence.num_cached_tokens = num_blocks * self._allocator.block_size
            self.num_queries += sequence.num_prompt_tokens
            self.num_hits += sequence.num_cached_tokens

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """The first ``num_tokens`` tokens of ``sequence`` are known and in the cache, or will be before any
        later step reads them."""
        num_blocks = num_tokens // self._allocator.block_size
        first = sequence.num_published_blocks
        if num_blocks <= first or sequence.cache_epoch != self._epoch:
            return
        self._extend(sequence, num_blocks)
        for index in range(first, num_blocks):
            self._allocator.publish(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_published_blocks = num_blocks

    def reset(self) -> None:
        """Forget everything, also what running sequences have computed and would publish later."""
        self._epoch += 1
        self._allocator.forget_all()

    def renewed(self, allocator: BlockAllocator) -> PrefixCache:
        """An empty one that goes on counting."""
        fresh = PrefixCache(allocator)
        fresh.num_queries, fresh.num_hits = self.num_queries, self.num_hits
        fresh._counted_from = self._counted_from
        return fresh

    def reset_counts(self) -> None:
        """``report`` counts from now on; ``num_queries`` and ``num_hits`` never fall."""
        self._counted_from = (self.num_queries, self.num_hits)

    def report(self) -> dict[str, Any]:
        queries, hits = self.num_queries - self._counted_from[0], self.num_hits - self._counted_from[1]
        return {
            "queries": queries,
            "hits": hits,
            "hit_rate": round(hits / queries, 4) if queries else 0.0,
            "blocks": self._allocator.num_published,
        }

    def _num_shareable(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self._allocator.block_size

    def _extend(self, sequence: Sequence, num_blocks: int) -> None:
        request, block_size = sequence.request, self._allocator.block_size
        is_prompt = num_blocks * block_size <= len(request.prompt_ids)
        extend_hashes(
            sequence.block_hashes,
            request.prompt_ids if is_prompt else sequence.token_ids,
            num_blocks=num_blocks,
            block_size=block_size,
            extra=request.cache_extra,
            block_extra=partial(name_of_block, request) if request.media else None,
        )


def _may_read(sequence: Sequence) -> bool:
    """Scores of a prompt and embeddings are read from hidden states, of which the cache knows nothing."""
    params = sequence.params
    return not params.pooling and (params.prompt_logprobs is None or sequence.index > 0)
