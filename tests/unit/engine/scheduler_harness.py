"""Drives a bare ``Scheduler`` as an engine would, with any number of steps in flight at once.

``OverlappedEngine`` hands each batch to an imaginary device at once and takes its tokens ``num_ahead`` steps
later, as an engine does that runs ahead of its GPU. After each ``schedule`` it checks that no block of a step
in flight is written to by another sequence, the fault that only fences prevent, and that what a step reads is
known to the host or to the device.
"""

from __future__ import annotations

from collections import deque

from engine_fakes import PagedFakeRunner, check_batch, next_token

from gapless.engine.request import Request, Sequence, make_sequences
from gapless.engine.scheduler import Scheduler
from gapless.engine.step import ScheduledBatch, ScheduledSequence
from gapless.engine.stop import finish_of_token
from gapless.sampling.params import SamplingParams


def make_sequence(
    prompt: list[int], *, max_tokens: int = 4, name: str = "r", stop: frozenset[int] = frozenset()
) -> Sequence:
    request = Request(
        request_id=name,
        prompt=None,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, detokenize=False),
        max_total_tokens=len(prompt) + max_tokens,
        stop_token_ids=stop,
    )
    return make_sequences(request, base_seed=0)[0]


def make_scheduler(runner: PagedFakeRunner, *, enable_prefix_caching: bool = False) -> Scheduler:
    return Scheduler(
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_num_reqs=runner.max_num_reqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )


class OverlappedEngine:
    """``num_ahead`` 0 waits for each step before the next one is scheduled."""

    def __init__(
        self, runner: PagedFakeRunner, *, num_ahead: int = 0, enable_prefix_caching: bool = False
    ) -> None:
        self.runner, self.num_ahead = runner, num_ahead
        self.scheduler = make_scheduler(runner, enable_prefix_caching=enable_prefix_caching)
        self.in_flight: deque[tuple[ScheduledBatch, list[int]]] = deque()
        self.slots: dict[int, int] = {}
        self.device_tokens: dict[
            tuple[int, int, int], int
        ] = {}  # (arrival, generation, position) → drawn token
        self.first_token_step: dict[int, int] = {}
        self.num_dropped = 0
        self.last_batch: ScheduledBatch | None = None

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    def run(self) -> None:
        while self.scheduler.has_unfinished or self.in_flight:
            self.step()

    def step(self) -> ScheduledBatch | None:
        batch = self.submit()
        if len(self.in_flight) > self.num_ahead or (batch is None and self.in_flight):
            self.complete_oldest()
        return batch

    def submit(self) -> ScheduledBatch | None:
        """Schedule a step and start it; its tokens come with ``complete_oldest``."""
        batch = self.scheduler.schedule()
        self._check_order()
        if batch is None:
            assert self.in_flight or not self.scheduler.has_unfinished, "the scheduler is stuck"
            return None
        check_batch(batch, self.runner)
        self._check_fences(batch)
        self._check_unknown_tokens(batch)
        for entry in batch.entries:
            self._write(entry)
        self.in_flight.append((batch, [self._draw(entry) for entry in batch.entries]))
        self.scheduler.launched(batch)
        return batch

    def complete_oldest(self) -> None:
        batch, tokens = self.in_flight.popleft()
        self.scheduler.complete(batch)
        for entry, token in zip(batch.entries, tokens, strict=True):
            if not entry.samples:
                continue
            if entry.is_stale:
                self.num_dropped += 1
                continue
            sequence = entry.sequence
            self.first_token_step.setdefault(sequence.arrival, batch.step_id)
            sequence.append_token(token)
            finish = finish_of_token(sequence)
            if finish is not None:
                self.scheduler.finish(sequence, reason=finish.reason, stop_reason=finish.stop_reason)

    def assert_nothing_leaked(self) -> None:
        allocator = self.scheduler.allocator
        assert (allocator.num_used, allocator.num_held) == (0, 0)
        assert allocator.num_free == allocator.num_usable
        assert self.scheduler.num_in_flight == 0

    def _write(self, entry: ScheduledSequence) -> None:
        for position in range(entry.start, entry.end):
            self.slots[self._slot(entry, position)] = self._input(entry, position)

    def _draw(self, entry: ScheduledSequence) -> int:
        read = [self.slots[self._slot(entry, position)] for position in range(entry.end)]
        token = next_token(read, vocab_size=self.runner.vocab_size)
        if entry.samples:
            self.device_tokens[entry.sequence.arrival, entry.generation, entry.end] = token
        return token

    def _input(self, entry: ScheduledSequence, position: int) -> int:
        known = entry.sequence.token_ids
        if position < len(known):
            return known[position]
        return self.device_tokens[entry.sequence.arrival, entry.generation, position]

    def _slot(self, entry: ScheduledSequence, position: int) -> int:
        size = self.runner.block_size
        return entry.block_table[position // size] * size + position % size

    def _check_fences(self, batch: ScheduledBatch) -> None:
        for older, _ in self.in_flight:
            for old in older.entries:
                for new in batch.entries:
                    same = old.sequence is new.sequence and old.generation == new.generation
                    first = new.start // self.runner.block_size
                    assert same or not set(old.block_table) & set(new.block_table[first:]), (
                        f"step {batch.step_id} writes to blocks that step {older.step_id} may still touch"
                    )

    def _check_unknown_tokens(self, batch: ScheduledBatch) -> None:
        """A device knows the tokens of the step launched last only, the host those of completed steps."""
        drawn = (
            {entry.sequence for entry in self.last_batch.entries if entry.samples} if self.last_batch else ()
        )
        for entry in batch.entries:
            is_known = entry.end <= len(entry.sequence.token_ids)
            assert is_known or entry.sequence in drawn, f"step {batch.step_id} reads a token that nobody has"
        self.last_batch = batch

    def _check_order(self) -> None:
        arrivals = [s.arrival for s in (*self.scheduler.running, *self.scheduler.waiting)]
        assert arrivals == sorted(arrivals), "running before waiting, each in order of arrival"
