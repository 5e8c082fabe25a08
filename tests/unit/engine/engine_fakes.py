"""A runner without a model whose tokens prove that the engine's bookkeeping is right.

``PagedFakeRunner`` keeps a paged "cache" of token ids. It writes each scheduled token into the slot its block
table names and draws the next token as a hash of *everything it reads back through that table*. A wrong,
shared or reused block, a skipped or repeated chunk: each changes what is read and fails an assertion, and
every drawn token can be predicted from the prompt alone (``expected_tokens``).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gapless.cache.blocks import SINK_BLOCK
from gapless.engine.step import ScheduledBatch, ScheduledSequence, StepResult, TokenLogprob


def next_token(token_ids: list[int], *, vocab_size: int) -> int:
    """A deterministic "model": the token that follows ``token_ids``."""
    digest = hashlib.blake2b(repr(token_ids).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def expected_tokens(prompt: list[int], *, num_tokens: int, vocab_size: int) -> list[int]:
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(next_token(known, vocab_size=vocab_size))
    return known[len(prompt) :]


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step whose result is known already."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class PagedFakeRunner:
    """See the module. ``before_execute(batch)`` runs first and may raise or abort; ``banned_seen`` records
    bans."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 200,
        max_num_reqs: int = 8,
        max_num_batched_tokens: int = 32,
        vocab_size: int = 1000,
        max_steps_ahead: int = 0,
    ) -> None:
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        self.max_num_reqs, self.max_num_batched_tokens = max_num_reqs, max_num_batched_tokens
        self.vocab_size = vocab_size
        self.slots: dict[int, int] = {}
        self.batches: list[ScheduledBatch] = []
        self.before_execute: Callable[[ScheduledBatch], None] | None = None
        self.errors: Callable[[ScheduledBatch], dict[int, str]] | None = None
        self.draw: Callable[[ScheduledSequence, list[int]], int] | None = None
        self.is_shut_down = False
        self.media = None
        self.max_steps_ahead = max_steps_ahead
        # On the device: tokens drawn that the host may not know yet, by sequence, life and position.
        self._drawn: dict[tuple[int, int, int], int] = {}

    def launch(self, batch: ScheduledBatch) -> CompletedStep:
        return CompletedStep(self.execute(batch))

    def execute(self, batch: ScheduledBatch) -> StepResult:
        check_batch(batch, self)
        self.batches.append(batch)
        if self.before_execute is not None:
            self.before_execute(batch)
        for entry in batch.entries:
            self._write(entry)
        tokens = [self._draw(entry) for entry in batch.sampled_entries]
        for entry, token in zip(batch.sampled_entries, tokens, strict=True):
            self._drawn[entry.sequence.arrival, entry.generation, entry.end] = token
        logprobs = [_logprobs(e, t) for e, t in zip(batch.sampled_entries, tokens, strict=True)]
        errors = self.errors(batch) if self.errors is not None else {}
        return StepResult(token_ids=tokens, logprobs=logprobs, errors=errors)

    def report(self) -> dict[str, Any]:
        return {"steps": len(self.batches)}

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _slot(self, entry: ScheduledSequence, position: int) -> int:
        return entry.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, entry: ScheduledSequence) -> None:
        for position in range(entry.start, entry.end):
            self.slots[self._slot(entry, position)] = self._token(entry, position)

    def _token(self, entry: ScheduledSequence, position: int) -> int:
        known = entry.sequence.token_ids
        if position < len(known):
            return known[position]
        return self._drawn[entry.sequence.arrival, entry.generation, position]

    def _draw(self, entry: ScheduledSequence) -> int:
        read = [self.slots[self._slot(entry, position)] for position in range(entry.end)]
        expected = [self._token(entry, position) for position in range(entry.end)]
        assert read == expected, "the cache holds another sequence's tokens"
        if self.draw is not None:
            return self.draw(entry, read)
        return next_token(read, vocab_size=self.vocab_size)


def check_batch(batch: ScheduledBatch, runner: PagedFakeRunner) -> None:
    """What every step must satisfy, whatever was asked."""
    assert batch.entries
    assert batch.num_reqs <= runner.max_num_reqs
    assert batch.num_tokens <= runner.max_num_batched_tokens
    assert len({id(entry.sequence) for entry in batch.entries}) == batch.num_reqs, (
        "a sequence twice in one step"
    )
    is_decode = [entry.is_decode for entry in batch.entries]
    assert is_decode == sorted(is_decode, reverse=True), "decodes come first"
    listed = Counter(block for entry in batch.entries for block in entry.block_table)
    for entry in batch.entries:
        assert entry.num_new_tokens >= 1
        table = entry.block_table
        assert len(table) * runner.block_size >= entry.end
        assert SINK_BLOCK not in table
        assert all(0 < block < runner.num_blocks for block in table)
        assert len(set(table)) == len(table)
        written = table[entry.start // runner.block_size : -(-entry.end // runner.block_size)]
        assert all(listed[block] == 1 for block in written), "a block that is written to is shared"


def _logprobs(entry: ScheduledSequence, token_id: int) -> list[TokenLogprob] | None:
    count = entry.sequence.params.logprobs
    if count is None:
        return None
    return [TokenLogprob(token_id, -0.5, 1)] + [TokenLogprob(i, -1.0 - i, i + 2) for i in range(count)]
