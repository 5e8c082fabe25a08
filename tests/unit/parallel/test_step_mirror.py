"""Batches told to other ranks: what a runner reads there is what it would read here."""

from __future__ import annotations

import pickle
import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.engine.inputs import BatchBuilder
from gapless.engine.request import Request, make_sequences
from gapless.engine.scheduler import Scheduler
from gapless.engine.step import ScheduledBatch
from gapless.engine.step_mirror import RunMessage, StepMessage, StepReader, StepWriter
from gapless.sampling.params import SamplingParams

LIMITS = {"block_size": 16, "max_num_reqs": 4}


class Mirror:
    """A scheduler, a writer, and a reader that gets what is written as bytes."""

    def __init__(self, *, num_blocks: int = 33, budget: int = 32, caches: bool = False) -> None:
        self.scheduler = Scheduler(
            num_blocks=num_blocks, max_num_batched_tokens=budget, enable_prefix_caching=caches, **LIMITS
        )
        self.in_flight: deque[ScheduledBatch] = deque()
        self.writer, self.reader = StepWriter(), StepReader()
        builder = {"max_num_tokens": budget, "max_blocks": num_blocks - 1, **LIMITS}
        self.here, self.there = BatchBuilder(**builder), BatchBuilder(**builder)
        self.kinds: list[type] = []
        self.sequences = []

    def add(self, length: int, *, max_tokens: int, n: int = 1) -> None:
        request = Request(
            request_id=str(len(self.sequences)),
            prompt="text",
            prompt_token_ids=tuple(range(1, length + 1)),
            params=SamplingParams(max_tokens=max_tokens, n=n, seed=5),
            max_total_tokens=length + max_tokens,
        )
        for sequence in make_sequences(request, base_seed=5):
            self.sequences.append(sequence)
            self.scheduler.add(sequence)

    def step(self, token: int) -> bool:
        """Schedule, tell, compare, accept; False when there is nothing to do."""
        if not self.launch():
            return False
        self.accept(token)
        return True

    def launch(self) -> bool:
        """Schedule, tell, compare; the tokens become known at ``accept``."""
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        message = pickle.loads(pickle.dumps(self.writer.write(batch)))
        self.kinds.append(type(message))
        mirrored = self.reader.read(message)
        self._compare(batch, mirrored)
        self.scheduler.launched(batch)
        self.in_flight.append(batch)
        return True

    def accept(self, token: int) -> None:
        batch = self.in_flight.popleft()
        for entry in batch.sampled_entries:
            if entry.is_stale:
                continue
            entry.sequence.append_token(token)
            if len(entry.sequence.token_ids) >= entry.sequence.request.max_total_tokens:
                self.scheduler.finish(entry.sequence, reason="length")
        self.scheduler.complete(batch)

    def _compare(self, batch, mirrored) -> None:
        assert mirrored.step_id == batch.step_id
        assert mirrored.is_decode == batch.is_decode
        for ours, theirs in zip(batch.entries, mirrored.entries, strict=True):
            assert theirs[1:5] == ours[1:5]
            assert theirs.block_table == ours.block_table
            assert theirs.sequence.token_ids == ours.sequence.token_ids
            assert theirs.sequence.seed == ours.sequence.seed
            assert theirs.sequence.params == ours.sequence.params
            assert theirs.end - theirs.sequence.num_prompt_tokens == (
                ours.end - ours.sequence.num_prompt_tokens
            )
        here, there = self.here.build(batch), self.there.build(mirrored)
        assert here.query_lens == there.query_lens
        assert here.has_unknown == there.has_unknown
        assert np.array_equal(here.sampled_rows, there.sampled_rows)
        for name, values in here.values.items():
            assert np.array_equal(values, there.values[name]), name


def test_a_decode_run_is_told_as_what_has_changed():
    mirror = Mirror()
    mirror.add(5, max_tokens=40)
    mirror.add(20, max_tokens=40)
    while mirror.step(token=9):
        pass
    assert mirror.kinds[0] is StepMessage
    assert mirror.kinds.count(RunMessage) > 30


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_with_preemptions_and_aborts_is_the_same_there(seed):
    rng = random.Random(seed)
    mirror = Mirror(num_blocks=9)
    for _ in range(60):
        if rng.random() < 0.3:
            mirror.add(rng.randrange(1, 60), max_tokens=rng.randrange(1, 40), n=rng.choice((1, 1, 2)))
        if rng.random() < 0.05 and mirror.sequences:
            mirror.scheduler.finish(rng.choice(mirror.sequences), reason="abort")
        mirror.step(token=rng.randrange(90))
    while mirror.step(token=3):
        pass
    assert any(sequence.generation for sequence in mirror.sequences), "nothing was preempted"


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60), st.integers(1, 40), st.integers(1, 2)),
        st.tuples(st.just("finish"), st.integers(0, 30), st.sampled_from(["abort", "stop", "error"])),
        st.tuples(st.sampled_from(["launch", "launch", "launch", "accept", "accept", "reset", "distrust"])),
    ),
    max_size=80,
)


@settings(max_examples=40, deadline=None)
@given(events=EVENTS, num_blocks=st.sampled_from([9, 33]))
def test_whatever_happens_with_steps_in_flight_is_the_same_there(events, num_blocks):
    """Prefixes are shared and forgotten, sequences end while steps with them are on their way."""
    mirror = Mirror(num_blocks=num_blocks, caches=True)
    token = 3
    for kind, *values in events:
        token = (token * 7 + 1) % 97
        if kind == "add":
            mirror.add(values[0], max_tokens=values[1], n=values[2])
        elif kind == "finish" and mirror.sequences:
            mirror.scheduler.finish(mirror.sequences[values[0] % len(mirror.sequences)], reason=values[1])
        elif kind == "launch" and len(mirror.in_flight) < 2:
            mirror.launch()
        elif kind == "accept" and mirror.in_flight:
            mirror.accept(token)
        elif kind == "reset":
            mirror.scheduler.prefix_cache.reset()
        elif kind == "distrust" and len(mirror.in_flight) == 1:
            mirror.scheduler.distrust(mirror.in_flight[0])
    while mirror.in_flight or mirror.launch():
        mirror.accept(token)
    assert not mirror.scheduler.has_unfinished


def test_sequences_that_have_ended_are_forgotten_on_both_sides():
    mirror = Mirror()
    for _ in range(5):
        mirror.add(4, max_tokens=2)
        while mirror.step(token=1):
            pass
    mirror.add(4, max_tokens=2)
    mirror.step(token=1)
    assert len(mirror.writer._told) == len(mirror.reader._sequences) == 1


def test_neither_text_nor_grammar_is_told():
    mirror = Mirror()
    mirror.add(4, max_tokens=2)
    batch = mirror.scheduler.schedule()
    message = mirror.writer.write(batch)
    assert message.new[0].request.prompt is None
    assert message.new[0].request.grammar is None
