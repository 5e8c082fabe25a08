"""Scheduled batches for ranks that have no scheduler: what has changed since the last one, and back.

The first rank schedules; the others run the same ``ModelRunner`` over the same batches. A batch refers to
sequences, which live on and grow, so what is sent is the difference: sequences not seen before, tokens that
have become known, blocks that were added. A decode step of a run that goes on is only its new tokens and
blocks. Invariant: a batch that ``StepReader`` returns reads, to a runner, as the one that ``StepWriter`` was
given; grammars stay behind, because a step with one is over before its tokens are used. Read
``parallel_runner.py`` for who sends and ``rank_worker.py`` for who receives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from gapless.engine.request import Request, Sequence, SequenceState
from gapless.engine.step import DecodeRun, ScheduledBatch, ScheduledSequence


class NewSequence(NamedTuple):
    """``number`` names the sequence from now on."""

    number: int
    request: Request
    choice: int
    seed: int


class EntryUpdate(NamedTuple):
    """One entry, and what its sequence has gained. ``is_new_life``: blocks are those of a new table."""

    number: int
    start: int
    num_new_tokens: int
    samples: bool
    generation: int
    tokens: list[int]
    is_new_life: bool
    blocks: list[int]


class StepMessage(NamedTuple):
    """A batch of any kind."""

    step_id: int
    new: list[NewSequence]
    entries: list[EntryUpdate]
    gone: list[int]
    run_steps_left: int | None
    """Of the decode run that begins here; None for a step that belongs to none."""


class RunMessage(NamedTuple):
    """The next step of the decode run that the last batch belongs to."""

    step_id: int
    tokens: list[list[int]]
    """By entry, what has become known."""
    blocks: dict[int, list[int]]
    """By entry, where blocks were added."""


@dataclass(slots=True)
class _Told:
    """What the other ranks know of one sequence."""

    number: int
    num_tokens: int
    generation: int = -1
    num_blocks: int = 0


class StepWriter:
    """Turns each batch into a message. Every message must reach every reader, in order."""

    def __init__(self) -> None:
        self._told: dict[Sequence, _Told] = {}
        self._next_number = 0
        self._last: ScheduledBatch | None = None

    def write(self, batch: ScheduledBatch) -> StepMessage | RunMessage:
        last, self._last = self._last, batch
        if (
            batch.run is not None
            and last is not None
            and batch.run is last.run
            and batch.step_id == last.step_id + 1
        ):
            return self._continue(batch)
        new = [self._introduce(e.sequence) for e in batch.entries if e.sequence not in self._told]
        entries = [self._update(entry) for entry in batch.entries]
        run_steps_left = None if batch.run is None else batch.run.num_steps_left
        return StepMessage(batch.step_id, new, entries, self._forget_finished(batch), run_steps_left)

    def _continue(self, batch: ScheduledBatch) -> RunMessage:
        tokens, blocks = [], {}
        for place, entry in enumerate(batch.entries):
            told, known = self._told[entry.sequence], entry.sequence.token_ids
            tokens.append(known[told.num_tokens :])
            told.num_tokens = len(known)
            if len(entry.block_table) > told.num_blocks:
                blocks[place] = entry.block_table[told.num_blocks :]
                told.num_blocks = len(entry.block_table)
        return RunMessage(batch.step_id, tokens, blocks)

    def _introduce(self, sequence: Sequence) -> NewSequence:
        number, self._next_number = self._next_number, self._next_number + 1
        self._told[sequence] = _Told(number, num_tokens=sequence.num_prompt_tokens)
        request = sequence.request
        request = replace(request, prompt=None, grammar=None, given_ids=request.prompt_ids)
        return NewSequence(number, request, sequence.index, sequence.seed)

    def _update(self, entry: ScheduledSequence) -> EntryUpdate:
        told, known, table = self._told[entry.sequence], entry.sequence.token_ids, entry.block_table
        is_new_life = told.generation != entry.generation
        if is_new_life:
            told.generation, told.num_blocks = entry.generation, 0
        update = EntryUpdate(
            told.number,
            entry.start,
            entry.num_new_tokens,
            entry.samples,
            entry.generation,
            known[told.num_tokens :],
            is_new_life,
            table[told.num_blocks :],
        )
        told.num_tokens, told.num_blocks = len(known), len(table)
        return update

    def _forget_finished(self, batch: ScheduledBatch) -> list[int]:
        taking_part = {entry.sequence for entry in batch.entries}
        ended = [s for s in self._told if s.is_finished and s not in taking_part]
        return [self._told.pop(sequence).number for sequence in ended]


class StepReader:
    """Turns messages back into batches, over sequences of its own."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}
        self._last: ScheduledBatch | None = None

    def read(self, message: StepMessage | RunMessage) -> ScheduledBatch:
        if isinstance(message, RunMessage):
            batch = self._continue(message)
        else:
            for new in message.new:
                self._sequences[new.number] = Sequence(
                    request=new.request,
                    index=new.choice,
                    seed=new.seed,
                    token_ids=list(new.request.prompt_token_ids),
                    block_table=[],
                    state=SequenceState.RUNNING,
                )
            run = None
            if message.run_steps_left is not None:
                run = DecodeRun(num_steps_left=message.run_steps_left)
            entries = tuple(self._entry(update) for update in message.entries)
            for number in message.gone:
                self._sequences.pop(number).state = SequenceState.FINISHED
            batch = ScheduledBatch(step_id=message.step_id, entries=entries, run=run)
        self._last = batch
        return batch

    def _continue(self, message: RunMessage) -> ScheduledBatch:
        assert self._last is not None
        entries = []
        for place, (before, tokens) in enumerate(zip(self._last.entries, message.tokens, strict=True)):
            before.sequence.token_ids.extend(tokens)
            before.block_table.extend(message.blocks.get(place, ()))
            entries.append(before._replace(start=before.start + 1))
        return ScheduledBatch(step_id=message.step_id, entries=tuple(entries), run=self._last.run)

    def _entry(self, update: EntryUpdate) -> ScheduledSequence:
        sequence = self._sequences[update.number]
        sequence.token_ids.extend(update.tokens)
        if update.is_new_life:
            sequence.generation, sequence.block_table = update.generation, []
        sequence.block_table.extend(update.blocks)
        return ScheduledSequence(
            sequence=sequence,
            start=update.start,
            num_new_tokens=update.num_new_tokens,
            samples=update.samples,
            generation=update.generation,
            block_table=sequence.block_table,
        )
