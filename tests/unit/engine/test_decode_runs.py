"""Runs of decode steps: what is carried over from the step before equals what making it anew would give.

The oracle is the long way: a scheduler that never continues a run, and a builder that is never told of one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_fakes import PagedFakeRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import OverlappedEngine, make_scheduler, make_sequence

from gapless.engine.inputs import BatchBuilder, token_fields
from gapless.engine.request import Sequence
from gapless.engine.scheduler import Scheduler
from gapless.engine.step import DecodeRun, ScheduledBatch, ScheduledSequence
from gapless.graphs.buffers import StaticInputs

BLOCK_SIZE = 4


class LongWay(Scheduler):
    """Asks every sequence in every step."""

    def _continue_run(self) -> None:
        return None


def make_engine(*, num_ahead: int, long_way: bool = False, **options: Any) -> OverlappedEngine:
    engine = OverlappedEngine(PagedFakeRunner(block_size=BLOCK_SIZE, **options), num_ahead=num_ahead)
    if long_way:
        engine.scheduler.__class__ = LongWay
    return engine


def make_builder(runner: PagedFakeRunner) -> BatchBuilder:
    return BatchBuilder(
        block_size=BLOCK_SIZE,
        max_num_reqs=runner.max_num_reqs,
        max_num_tokens=runner.max_num_batched_tokens,
        max_blocks=runner.num_blocks,
        rope_axes=3,
    )


def arrays_of(builder: BatchBuilder, batch: ScheduledBatch) -> dict[str, Any]:
    arrays = builder.build(batch)
    copies: dict[str, Any] = {name: value.tolist() for name, value in arrays.values.items()}
    copies["dtypes"] = {value.dtype for value in arrays.values.values()}
    return copies | {
        "query_lens": arrays.query_lens,
        "sampled_rows": arrays.sampled_rows.tolist(),
        "has_unknown": arrays.has_unknown,
    }


def with_positions(sequence: Sequence, *, delta: int) -> Sequence:
    """As of a prompt with an image: positions of its own on three axes."""
    request, count = sequence.request, sequence.num_prompt_tokens
    own_3T = np.random.default_rng(count).integers(50, size=(3, count), dtype=np.int32)
    sequence.request = replace(request, rope_positions_3T=own_3T, rope_delta=delta)
    return sequence


def expected_positions(batch: ScheduledBatch) -> list[list[int]]:
    """Token by token: the prompt's own positions, then index and delta; without either the index."""
    columns = []
    for entry in batch.entries:
        request = entry.sequence.request
        for index in range(entry.start, entry.end):
            own_3T = request.rope_positions_3T
            if own_3T is not None and index < own_3T.shape[1]:
                columns.append(own_3T[:, index].tolist())
            else:
                columns.append([index + request.rope_delta] * 3)
    return [list(axis) for axis in zip(*columns, strict=True)]


def facts(entry: ScheduledSequence) -> tuple[Any, ...]:
    sequence, *rest = entry
    return (sequence.arrival, *rest[:-1], tuple(entry.block_table))


def without_run(batch: ScheduledBatch) -> ScheduledBatch:
    return ScheduledBatch(step_id=batch.step_id, entries=batch.entries)


WORK = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 25)), min_size=1, max_size=7)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 9)),
        st.tuples(st.just("add"), st.integers(1, 20)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("fail"), st.integers(0, 9)),
    ),
    max_size=12,
)


@settings(max_examples=50, deadline=None)
@given(
    work=WORK,
    events=EVENTS,
    num_blocks=st.integers(13, 60),
    budget=st.sampled_from([2, 5, 40]),
    max_num_reqs=st.integers(1, 8),
    num_ahead=st.integers(0, 1),  # a runner is fed one step ahead at most
    prompts_first=st.booleans(),
)
def test_steps_and_their_arrays_are_those_of_the_long_way(
    work, events, num_blocks, budget, max_num_reqs, num_ahead, prompts_first
) -> None:
    """Over admission, preemption, abort, errors, stops and any number of steps in flight."""
    options = {
        "num_blocks": num_blocks,
        "max_num_batched_tokens": budget,
        "max_num_reqs": max_num_reqs,
        "num_ahead": num_ahead,
    }
    engines = [make_engine(**options), make_engine(long_way=True, **options)]
    builders = [make_builder(engine.runner) for engine in engines]
    sequences: list[list[Any]] = [[], []]
    for engine in engines:
        engine.scheduler.prompts_first = prompts_first

    def add(num_prompt: int, max_tokens: int) -> None:
        for engine, own in zip(engines, sequences, strict=True):
            own.append(make_sequence([7 * len(own) + i for i in range(num_prompt)], max_tokens=max_tokens))
            if len(own) % 3:
                with_positions(own[-1], delta=len(own) - 5)
            engine.add(own[-1])

    def step() -> None:
        # Arrays are built when a step is launched: before older ones are accepted.
        batches = [engine.submit() for engine in engines]
        if batches[0] is not None and batches[1] is not None:
            assert [facts(e) for e in batches[0].entries] == [facts(e) for e in batches[1].entries]
            assert batches[0].is_decode == without_run(batches[0]).is_decode
            assert list(batches[0].sampled_positions) == list(without_run(batches[0]).sampled_positions)
            arrays = arrays_of(builders[0], batches[0])
            assert arrays == arrays_of(builders[1], without_run(batches[1]))
            assert arrays["rope_positions"] == expected_positions(batches[0])
        else:
            assert batches == [None, None]
        for engine, batch in zip(engines, batches, strict=True):
            while engine.in_flight and (batch is None or len(engine.in_flight) > num_ahead):
                engine.complete_oldest()

    for num_prompt, max_tokens in work:
        add(num_prompt, max_tokens)
    for kind, number in events:
        if kind == "step":
            for _ in range(number):
                step()
        elif kind == "add":
            add(number, 6)
        else:
            for engine, own in zip(engines, sequences, strict=True):
                reason = "abort" if kind == "abort" else "error"
                engine.scheduler.finish(own[number % len(own)], reason=reason)
    while engines[0].scheduler.has_unfinished or engines[0].in_flight:
        step()
    assert not engines[1].scheduler.has_unfinished
    for engine in engines:
        engine.assert_nothing_leaked()
    assert [s.output_token_ids for s in sequences[0]] == [s.output_token_ids for s in sequences[1]]


def decoding_engine(num_reqs: int = 3, *, num_ahead: int = 0, **options: Any) -> OverlappedEngine:
    """An engine whose sequences are all in decode, past the first step of a run."""
    engine = make_engine(num_ahead=num_ahead, **options)
    engine.add(*(make_sequence([i, i + 1], max_tokens=30) for i in range(num_reqs)))
    engine.step()
    engine.step()
    return engine


def run_of(engine: OverlappedEngine) -> DecodeRun | None:
    batch = engine.step()
    assert batch is not None
    return batch.run


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_one_run_lasts_while_nothing_changes(num_ahead: int) -> None:
    engine = decoding_engine(num_ahead=num_ahead)
    runs = {run_of(engine) for _ in range(12)}
    assert len(runs) == 1
    assert None not in runs


@pytest.mark.parametrize("reason", ["abort", "error", "stop", "length"])
def test_a_run_ends_when_one_of_its_sequences_does(reason: Any) -> None:
    engine = decoding_engine()
    before = run_of(engine)
    engine.scheduler.finish(engine.scheduler.running[1], reason=reason)
    after = run_of(engine)
    assert after is not None
    assert after is not before


def test_a_run_ends_when_a_request_arrives_and_another_begins_behind_its_prompt() -> None:
    engine = decoding_engine()
    before = run_of(engine)
    engine.add(make_sequence([50, 51, 52], max_tokens=20))
    assert run_of(engine) is None  # a prefill step
    assert run_of(engine) not in (None, before)


def test_a_request_that_waits_for_a_place_does_not_end_the_run() -> None:
    engine = decoding_engine(max_num_reqs=3)
    before = run_of(engine)
    engine.add(make_sequence([50], max_tokens=4))
    assert run_of(engine) is before


def test_a_run_ends_before_the_cache_runs_out_and_preemption_goes_the_long_way() -> None:
    engine = make_engine(num_ahead=0, num_blocks=12)
    engine.add(*(make_sequence([i, i + 1], max_tokens=24) for i in range(3)))
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    engine.assert_nothing_leaked()


def test_prefill_chunks_belong_to_no_run() -> None:
    engine = make_engine(num_ahead=0, max_num_batched_tokens=4)
    engine.add(make_sequence(list(range(9)), max_tokens=3))
    assert [run_of(engine) is None for _ in range(3)] == [True, True, False]  # 4 and 4 tokens, then one


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_engines_that_share_a_builder_do_not_continue_each_others_runs(num_ahead: int) -> None:
    """Step numbers of two engines coincide; only the run tells them apart."""
    engines = [decoding_engine(2, num_ahead=0), decoding_engine(2, num_ahead=0)]
    shared = make_builder(engines[0].runner)
    own = [make_builder(engine.runner) for engine in engines]
    order = [0, 1, 0, 0, 1, 1, 0, 1] if num_ahead else [0, 1] * 4
    for which in order:
        batch = engines[which].submit()
        assert batch is not None
        assert arrays_of(shared, batch) == arrays_of(own[which], without_run(batch))
        engines[which].complete_oldest()


def test_a_step_that_was_never_built_breaks_the_continuation() -> None:
    engine = decoding_engine()
    builder, oracle = make_builder(engine.runner), make_builder(engine.runner)
    for number in range(6):
        batch = engine.step()
        assert batch is not None
        if number == 3:
            continue
        assert arrays_of(builder, batch) == arrays_of(oracle, without_run(batch))


@pytest.mark.parametrize("positions", [(0,), (3, 4), (0, 1, 2)])
def test_rows_of_the_mirror_need_not_be_adjacent(positions: tuple[int, ...]) -> None:
    """Sequences that ended leave holes between the rows of those that go on."""
    engine = make_engine(num_ahead=0)
    engine.add(*(make_sequence([i], max_tokens=40) for i in range(6)))
    builder, oracle = make_builder(engine.runner), make_builder(engine.runner)
    for number in range(16):
        if number == 3:
            victims = [engine.scheduler.running[p] for p in positions]
            for victim in victims:
                engine.scheduler.finish(victim, reason="abort")
        batch = engine.submit()
        assert batch is not None
        assert arrays_of(builder, batch) == arrays_of(oracle, without_run(batch))
        engine.complete_oldest()


def test_one_prompt_alone_has_the_arrays_of_any_batch() -> None:
    """The short way for a single sequence, over chunks that begin and end anywhere in a block."""
    runner = PagedFakeRunner(block_size=BLOCK_SIZE, max_num_batched_tokens=64)
    for start in range(6):
        for count in range(1, 12):
            sequence = make_sequence(list(range(100, 100 + 20)))
            sequence.arrival = 0
            entry = ScheduledSequence(sequence, start, count, start + count == 20, 0, [5, 3, 9, 2, 7])
            builder = make_builder(runner)
            rows = builder._mirror((entry,))
            one, any_ = builder._build_one(entry, rows), builder._build_any((entry,), rows)
            for name, value in any_.values.items():
                assert np.array_equal(one.values[name], value), name
                assert one.values[name].dtype == value.dtype
            assert one.query_lens == any_.query_lens
            assert one.sampled_rows.tolist() == any_.sampled_rows.tolist()
            assert one.has_unknown is any_.has_unknown is False


def test_rows_of_drawn_tokens_are_staged_only_where_a_token_is_unknown() -> None:
    """Where all are known the padding says so: every row names the drawn token that is always 0."""
    runner = PagedFakeRunner(block_size=BLOCK_SIZE, max_num_batched_tokens=64)
    builder, max_num_reqs = make_builder(runner), runner.max_num_reqs
    fields = token_fields(max_blocks=runner.num_blocks, vocab_size=99, max_num_reqs=max_num_reqs, rope_axes=3)
    inputs = StaticInputs(fields, max_sizes={"tokens": 8, "reqs": 4}, torch_device=torch.device("cpu"))
    views = inputs.views({"tokens": 8, "reqs": 4})
    sequence = make_sequence(list(range(100, 103)))
    sequence.arrival = 0
    for start, count, num_staged, expected in ((0, 3, 0, [max_num_reqs] * 8), (3, 1, 1, [0])):
        entry = ScheduledSequence(sequence, start, count, True, 0, [5])
        rows, builder._drawn = builder._mirror((entry,)), {sequence: 0}
        for arrays in (builder._build_one(entry, rows), builder._build_any((entry,), rows)):
            positions = arrays.values["positions"]
            inputs.load(views, {**arrays.values, "rope_positions": np.stack([positions] * 3)})
            assert len(arrays.values["drawn_rows"]) == num_staged
            assert views["drawn_rows"].tolist() == expected + [max_num_reqs] * (8 - len(expected))


def test_parameters_are_looked_at_once_in_a_run() -> None:
    engine = decoding_engine()
    first, second = engine.step(), engine.step()
    assert first is not None
    assert second is not None
    assert second.sampling_params is first.sampling_params
    assert {id(p) for p in first.sampling_params} == {id(e.sequence.params) for e in first.entries}


def test_a_run_never_passes_the_longest_length_while_tokens_are_in_flight() -> None:
    scheduler = make_scheduler(PagedFakeRunner())
    scheduler.add(make_sequence([1], max_tokens=3))
    steps = 0
    while scheduler.schedule() is not None:  # nothing is ever accepted
        steps += 1
    assert steps == 3
