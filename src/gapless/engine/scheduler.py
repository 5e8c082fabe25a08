"""Which tokens of which sequences run in the next step.

Continuous batching with chunked prefill: every running sequence in decode gets its one token first, what is
left of the token budget goes to prefill chunks, oldest request first. (With ``prompts_first`` a step that
prompts can fill has no decodes.) Blocks are allocated as a sequence grows; when they run out the *latest*
arrival is preempted (its blocks go back, its tokens stay, it is computed anew later), so the oldest always
gets on and nobody starves. Invariants: ``running`` and ``waiting`` are sorted by arrival and everything
running arrived before everything waiting; a step never exceeds its token and request budgets; blocks of a
preempted or aborted sequence are handed out again only after the last step that touches them. A sequence
starts behind those of its tokens that are in the cache already (``prefix_cache.py``). Read ``step.py`` for
the data, ``core.py`` for the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from gapless.cache.blocks import BlockAllocator
from gapless.engine.outputs import FinishReason
from gapless.engine.prefix_cache import PrefixCache
from gapless.engine.request import Sequence, SequenceState
from gapless.engine.step import DecodeRun, ScheduledBatch, ScheduledSequence

_WATERMARK = 0.01
"""Share of the cache that admission leaves free for the running sequences to grow into; without it a nearly
full cache admits a request only to preempt it a few steps later."""


class Scheduler:
    """``max_num_reqs`` bounds the running sequences, ``max_num_batched_tokens`` the tokens of one step.
    ``on_release`` is told of each sequence that has run and ends or is preempted.

    With a prefix cache nobody else may write to the blocks of the KV cache between steps.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = False,
        on_release: Callable[[Sequence], None] | None = None,
    ) -> None:
        assert max_num_reqs >= 1, f"max_num_reqs={max_num_reqs}"
        assert max_num_batched_tokens >= 1, f"max_num_batched_tokens={max_num_batched_tokens}"
        self.allocator = BlockAllocator(num_blocks=num_blocks, block_size=block_size)
        self.max_num_reqs, self.max_num_batched_tokens = max_num_reqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._num_arrived = 0
        self._next_step_id = 0
        self._num_in_flight = 0
        self._run: DecodeRun | None = None
        """Set while all that runs has decoded in the last step and nothing has changed since."""
        self._run_order: list[int] = []
        """Of the run: where in ``running`` its sequences are, the longest first."""
        self.prompts_first = False
        """Whether decodes wait while prompts fill whole steps: two steps of one kind each take less of the
        device than two that mix them, but tokens come later. After ``max_num_reqs`` such steps they do not
        wait for one, so that requests which end with their prompt cannot keep the others waiting for ever."""
        self._num_steps_waited = 0
        self.prefix_cache = PrefixCache(self.allocator) if enable_prefix_caching else None
        self._on_release = on_release
        self._launched_step_id = -1
        self._prefills: list[ScheduledSequence] = []
        """Of the step scheduled last."""
        self._watermark_blocks = int(self.allocator.num_usable * _WATERMARK)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and not yet completed."""
        return self._num_in_flight

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Its request must fit: ``max_total_tokens`` within the cache (the core checks
        it)."""
        assert sequence.request.max_total_tokens <= self.allocator.capacity_tokens
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(sequence)

    def finish(
        self,
        sequence: Sequence,
        *,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """End a sequence at any moment, for any reason; a no-op when it has ended. Frees its blocks behind
        the fence."""
        if sequence.is_finished:
            return
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._run = None
        else:
            self.waiting.remove(sequence)
        self._release(sequence, is_sound=reason != "error")
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason, sequence.stop_reason, sequence.error = reason, stop_reason, error

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when nothing can run now. Counts its tokens as computed at once."""
        entries = self._continue_run()
        prefills: list[ScheduledSequence] = []
        self._prefills = prefills
        if entries is None:
            decodes: list[ScheduledSequence] = []
            if self.prompts_first and self._num_steps_waited < self.max_num_reqs and self._can_fill_step():
                self._schedule_running(decodes, prefills, decodes_wait=True)
                self._admit_waiting(decodes, prefills)
                self._num_steps_waited += 1
            if not decodes and not prefills:
                self._num_steps_waited = 0
                self._schedule_running(decodes, prefills)
                self._admit_waiting(decodes, prefills)
            self._run = None
            if not decodes and not prefills:
                return None
            entries = (*decodes, *prefills)
            if not prefills:
                # Programs of attention start in this order, and the longest must not be the last to.
                order = sorted(range(len(decodes)), key=lambda i: decodes[i].start, reverse=True)
                entries = tuple(map(decodes.__getitem__, order))
                if len(decodes) == len(self.running):
                    self._run = DecodeRun(num_steps_left=min(map(_num_decodes_left, self.running)))
                    self._run_order = order
        batch = ScheduledBatch(step_id=self._next_step_id, entries=entries, run=self._run)
        self._next_step_id += 1
        self._num_in_flight += 1
        return batch

    def launched(self, batch: ScheduledBatch) -> None:
        """The step will run before all later ones: they may read what it computes of known tokens.

        To be called before the next step is scheduled.
        """
        self._launched_step_id = batch.step_id
        if self.prefix_cache is None:
            return
        for entry in self._prefills:
            if not entry.is_stale:
                self.prefix_cache.publish(entry.sequence, entry.end)

    def distrust(self, batch: ScheduledBatch) -> None:
        """A step that was launched has failed: nothing that it or a later one has computed may be found, and
        whoever may have found it already is computed anew. None of their tokens has been accepted yet."""
        if self.prefix_cache is None:
            return
        self.prefix_cache.reset()
        while self.running and self.running[-1].admitted_step_id > batch.step_id:
            self._preempt(self.running.pop())

    def complete(self, batch: ScheduledBatch) -> None:
        """The step has ended on the device, well or badly: blocks that waited for it become free."""
        self._num_in_flight -= 1
        self.allocator.retire(batch.step_id)

    def renewed(self) -> Scheduler:
        """An empty scheduler like this one, whatever state this one was left in; no step may be in flight."""
        fresh = Scheduler(
            num_blocks=self.allocator.num_blocks,
            block_size=self.allocator.block_size,
            max_num_reqs=self.max_num_reqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            on_release=self._on_release,
        )
        if self.prefix_cache is not None:
            fresh.prefix_cache = self.prefix_cache.renewed(fresh.allocator)
        fresh.num_preemptions = self.num_preemptions
        fresh.prompts_first = self.prompts_first
        return fresh

    def add_again(self, sequence: Sequence) -> bool:
        """Queue a sequence of the scheduler before, if it had not begun to run there (or was preempted)."""
        is_waiting = sequence.state is SequenceState.WAITING
        if not is_waiting or sequence.block_table or sequence.num_computed_tokens:
            return False
        sequence.num_pending_tokens = 0
        sequence.last_step_id = -1
        sequence.generation += 1
        self.add(sequence)
        return True

    def _continue_run(self) -> tuple[ScheduledSequence, ...] | None:
        """The usual step: what decoded in the last one decodes again. None when anything may be different.

        It does what ``_schedule_running`` would do, without asking each sequence what it needs.
        """
        run, allocator = self._run, self.allocator
        if run is None or run.num_steps_left == 0 or allocator.num_free < len(self.running):
            return None
        if self.waiting and len(self.running) < self.max_num_reqs:
            return None
        run.num_steps_left -= 1
        block_size, step_id = allocator.block_size, self._next_step_id
        entries = []
        for sequence in self.running:
            start, table = sequence.num_computed_tokens, sequence.block_table
            if start >= len(table) * block_size:
                blocks = allocator.allocate(1)
                assert blocks is not None  # there is one for each
                table.extend(blocks)
            sequence.num_computed_tokens = start + 1
            sequence.num_pending_tokens += 1
            sequence.last_step_id = step_id
            entries.append(_make_entry((sequence, start, 1, True, sequence.generation, table)))
        return tuple(map(entries.__getitem__, self._run_order))

    def _can_fill_step(self) -> bool:
        """Whether what is left of prompts would fill a step alone, if there are blocks for it."""
        num_left = self.max_num_batched_tokens
        for sequence in reversed(self.running):  # who decodes arrived before whoever still prefills
            if _num_left(sequence) <= 1:
                break
            num_left -= _num_left(sequence)
        for sequence in islice(self.waiting, self.max_num_reqs - len(self.running)):
            if num_left <= 0:
                break
            num_left -= sequence.num_tokens
        return num_left <= 0

    def _schedule_running(
        self,
        decodes: list[ScheduledSequence],
        prefills: list[ScheduledSequence],
        *,
        decodes_wait: bool = False,
    ) -> None:
        """Oldest first: who decodes arrived before whoever still prefills, and whoever gets preempted (the
        latest) has not been scheduled in this step yet. Who was left out of the step before waits for the
        host to know its last token: the device knows those of one step only."""
        budget = self.max_num_batched_tokens
        block_size = self.allocator.block_size
        position = 0
        while position < len(self.running):  # which shrinks when the latest are preempted
            sequence = self.running[position]
            position += 1
            num_new = min(_num_left(sequence), budget)
            if num_new <= 0 or (decodes_wait and _num_left(sequence) == 1):
                continue
            if sequence.num_pending_tokens and sequence.last_step_id != self._next_step_id - 1:
                continue
            has_room = sequence.num_computed_tokens + num_new <= len(sequence.block_table) * block_size
            if has_room or self._grow(sequence, num_new):
                budget -= num_new
                entry = self._commit(sequence, num_new)
                (decodes if entry.is_decode else prefills).append(entry)

    def _admit_waiting(self, decodes: list[ScheduledSequence], prefills: list[ScheduledSequence]) -> None:
        """First come, first served: the head of the queue gets in or nobody does.

        Whoever was preempted in this step does not come back in it: less was left than it had.
        """
        if not self.waiting or len(self.running) >= self.max_num_reqs:
            return
        allocator = self.allocator
        budget = self.max_num_batched_tokens - sum(entry.num_new_tokens for entry in (*decodes, *prefills))
        # Blocks that running prefills still need, and some to grow into: not for newcomers.
        num_reserved = self._watermark_blocks + sum(
            max(0, allocator.blocks_for(s.num_tokens) - len(s.block_table)) for s in self.running
        )
        cache = self.prefix_cache
        while self.waiting and budget > 0 and len(self.running) < self.max_num_reqs:
            sequence = self.waiting[0]
            if cache is not None and self.running and cache.is_being_computed(sequence, by=self.running[-1]):
                return  # choices of one prompt arrive behind each other
            found = [] if cache is None else cache.match(sequence)
            num_needed = allocator.blocks_for(sequence.num_tokens) - len(found)
            num_reused = allocator.count_free(found)
            if num_needed + num_reused + (num_reserved if self.running else 0) > allocator.num_free:
                return
            start = len(found) * allocator.block_size
            num_new = min(sequence.num_tokens - start, budget)
            allocator.share(found)
            blocks = allocator.allocate(allocator.blocks_for(start + num_new) - len(found))
            assert blocks is not None
            sequence.block_table = found + blocks
            sequence.num_computed_tokens = start
            if cache is not None:
                cache.admit(sequence, len(found))
            sequence.admitted_step_id = self._next_step_id
            sequence.state = SequenceState.RUNNING
            self.running.append(self.waiting.popleft())
            budget -= num_new
            num_reserved += num_needed - len(blocks)
            entry = self._commit(sequence, num_new)
            (decodes if entry.is_decode else prefills).append(entry)

    def _grow(self, sequence: Sequence, num_new: int) -> bool:
        """Give ``sequence`` blocks for ``num_new`` more tokens, preempting the latest arrivals if it must.

        False: it was itself the latest and is preempted, or the blocks are on their way (held by a step in
        flight).
        """
        allocator = self.allocator
        num_needed = allocator.blocks_for(sequence.num_computed_tokens + num_new) - len(sequence.block_table)
        while (blocks := allocator.allocate(num_needed)) is None:
            if allocator.num_free + allocator.num_held >= num_needed:
                return False
            victim = self.running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_table.extend(blocks)
        return True

    def _commit(self, sequence: Sequence, num_new: int) -> ScheduledSequence:
        samples = num_new == _num_left(sequence)
        entry = ScheduledSequence(
            sequence,
            sequence.num_computed_tokens,
            num_new,
            samples,
            sequence.generation,
            sequence.block_table,
        )
        sequence.num_computed_tokens += num_new
        sequence.num_pending_tokens += samples
        sequence.last_step_id = self._next_step_id
        return entry

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue with nothing computed. Tokens drawn by a step in flight are
        forgotten: they are drawn again, the same ones, when the sequence has been computed anew."""
        self._release(sequence)
        self._run = None
        sequence.state = SequenceState.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_pending_tokens = 0
        sequence.generation += 1
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        cache, table = self.prefix_cache, sequence.block_table
        if self._on_release is not None:
            self._on_release(sequence)
        if cache is not None:
            if not is_sound:
                self.allocator.forget(table)
            elif sequence.last_step_id <= self._launched_step_id:
                cache.publish(sequence, min(sequence.num_computed_tokens, sequence.num_tokens))
        if table:
            self.allocator.free_after(table, step_id=sequence.last_step_id)
        sequence.block_table = []  # a new list: entries of steps in flight keep the old one
        sequence.num_published_blocks = 0


_make_entry = ScheduledSequence._make  # half the time of the call by keyword


def _num_decodes_left(sequence: Sequence) -> int:
    """How many more steps may decode this one before its longest length is reached."""
    return max(0, sequence.request.max_total_tokens - 1 - sequence.num_computed_tokens)


def _num_left(sequence: Sequence) -> int:
    """Tokens that could be computed now; 0 once the sequence can only wait for its last token to become
    known."""
    num_tokens = len(sequence.token_ids) + sequence.num_pending_tokens
    if sequence.num_pending_tokens and num_tokens >= sequence.request.max_total_tokens:
        return 0
    return num_tokens - sequence.num_computed_tokens
