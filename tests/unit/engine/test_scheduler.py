"""Which tokens run in a step: chunks, budgets, order, preemption, fences."""

from __future__ import annotations

import pytest
from engine_fakes import PagedFakeRunner, expected_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import OverlappedEngine, make_scheduler, make_sequence

from gapless.engine.request import SequenceState


def chunks(batch) -> list[tuple[int, int, int]]:
    return [(entry.sequence.arrival, entry.start, entry.num_new_tokens) for entry in batch.entries]


def prompt_of(num_tokens: int, *, first: int = 0) -> list[int]:
    return [(first + i) % 1000 for i in range(num_tokens)]


def test_nothing_to_do_is_no_step():
    assert make_scheduler(PagedFakeRunner()).schedule() is None


@pytest.mark.parametrize(
    ("num_tokens", "budget", "sizes"),
    [
        (1, 32, [1]),
        (31, 32, [31]),
        (32, 32, [32]),
        (33, 32, [32, 1]),
        (70, 32, [32, 32, 6]),
        (5, 1, [1, 1, 1, 1, 1]),
    ],
)
def test_a_prompt_is_cut_into_chunks_of_the_budget_and_draws_after_the_last(num_tokens, budget, sizes):
    engine = OverlappedEngine(PagedFakeRunner(max_num_batched_tokens=budget))
    sequence = make_sequence(prompt_of(num_tokens), max_tokens=1)
    engine.add(sequence)
    entries = []
    while engine.scheduler.has_unfinished:
        entries.extend(engine.step().entries)
    assert [e.num_new_tokens for e in entries] == sizes
    assert [e.samples for e in entries] == [False] * (len(sizes) - 1) + [True]
    assert sequence.output_token_ids == expected_tokens(prompt_of(num_tokens), num_tokens=1, vocab_size=1000)


def test_decodes_run_first_and_prefill_gets_the_rest_of_the_budget():
    engine = OverlappedEngine(PagedFakeRunner(max_num_batched_tokens=10))
    engine.add(make_sequence(prompt_of(4)), make_sequence(prompt_of(3)), make_sequence(prompt_of(30)))
    assert chunks(engine.step()) == [(0, 0, 4), (1, 0, 3), (2, 0, 3)]
    assert chunks(engine.step()) == [(0, 4, 1), (1, 3, 1), (2, 3, 8)]


def test_a_decode_keeps_its_token_though_an_older_prefill_could_use_the_whole_budget():
    engine = OverlappedEngine(PagedFakeRunner(max_num_batched_tokens=8, num_blocks=100))
    long, short = make_sequence(prompt_of(40)), make_sequence(prompt_of(2), max_tokens=20)
    engine.add(short)
    engine.step()
    engine.add(long)
    while engine.scheduler.running[-1] is not long or long.num_computed_tokens < 40:
        batch = engine.step()
        assert batch.num_tokens <= 8
        assert chunks(batch)[0][0] == short.arrival


@pytest.mark.parametrize(
    ("batch_of", "is_decode"),
    [([4, 4], False), ([1, 1], True), ([1], True), ([1, 2], False)],
)
def test_a_batch_is_decode_when_every_entry_is_one_token_that_draws(batch_of, is_decode):
    scheduler = make_scheduler(PagedFakeRunner())
    for num_tokens in batch_of:
        scheduler.add(make_sequence(prompt_of(num_tokens)))
    assert scheduler.schedule().is_decode is is_decode


def test_a_chunk_of_one_token_that_draws_nothing_is_not_a_decode():
    scheduler = make_scheduler(PagedFakeRunner(max_num_batched_tokens=1))
    scheduler.add(make_sequence(prompt_of(3)))
    batch = scheduler.schedule()
    assert batch.num_tokens == 1
    assert not batch.is_decode


def test_no_more_than_the_maximum_of_requests_run():
    engine = OverlappedEngine(PagedFakeRunner(max_num_reqs=3, max_num_batched_tokens=100))
    sequences = [make_sequence([i], max_tokens=2) for i in range(7)]
    engine.add(*sequences)
    assert len(engine.step().entries) == 3
    engine.run()
    assert all(s.finish_reason == "length" for s in sequences)


def test_more_decodes_than_budget_take_turns_in_order_of_arrival():
    engine = OverlappedEngine(PagedFakeRunner(max_num_reqs=8, max_num_batched_tokens=2))
    sequences = [make_sequence([i], max_tokens=3) for i in range(5)]
    engine.add(*sequences)
    engine.run()
    assert all(s.num_output_tokens == 3 for s in sequences)


def test_a_later_small_request_does_not_overtake_the_head_that_does_not_fit():
    engine = OverlappedEngine(PagedFakeRunner(num_blocks=11, max_num_batched_tokens=64))
    running, big, small = (
        make_sequence(prompt_of(24), max_tokens=4),
        make_sequence(prompt_of(30), max_tokens=4),
        make_sequence(prompt_of(1), max_tokens=1),
    )
    engine.add(running, big, small)
    assert chunks(engine.step()) == [(0, 0, 24)]
    engine.run()
    assert engine.first_token_step[big.arrival] <= engine.first_token_step[small.arrival]


def test_blocks_are_allocated_only_as_the_sequence_grows():
    engine = OverlappedEngine(PagedFakeRunner(block_size=4))
    sequence = make_sequence(prompt_of(4), max_tokens=6)
    engine.add(sequence)
    sizes = []
    while engine.scheduler.has_unfinished:
        batch = engine.step()
        sizes.append(len(batch.entries[0].block_table))
    assert sizes == [1, 2, 2, 2, 2, 3]


class TestPreemption:
    """Two sequences that fit at first and outgrow the cache together."""

    def setup_method(self) -> None:
        self.engine = OverlappedEngine(PagedFakeRunner(num_blocks=7, block_size=4, max_num_batched_tokens=64))
        self.first = make_sequence(prompt_of(8), max_tokens=12)
        self.second = make_sequence(prompt_of(8, first=100), max_tokens=12)
        self.engine.add(self.first, self.second)

    def run_until_preempted(self) -> None:
        while self.engine.scheduler.num_preemptions == 0:
            self.engine.step()

    def test_the_latest_arrival_gives_way(self):
        self.run_until_preempted()
        assert self.first.state is SequenceState.RUNNING
        assert self.second.state is SequenceState.WAITING
        assert (self.second.num_computed_tokens, self.second.block_table) == (0, [])
        assert self.second.generation == 1

    def test_its_tokens_stay_and_are_computed_anew(self):
        self.run_until_preempted()
        num_drawn = self.second.num_output_tokens
        assert num_drawn > 0
        while self.second.state is SequenceState.WAITING:
            batch = self.engine.step()
        entry = next(e for e in batch.entries if e.sequence is self.second)
        assert (entry.start, entry.num_new_tokens, entry.samples) == (0, 8 + num_drawn, True)

    def test_it_goes_before_those_who_came_later(self):
        late = make_sequence(prompt_of(2), max_tokens=1)
        self.run_until_preempted()
        self.engine.add(late)
        assert list(self.engine.scheduler.waiting) == [self.second, late]

    def test_it_does_not_come_back_in_the_step_that_preempts_it(self):
        while self.engine.scheduler.num_preemptions == 0:
            batch = self.engine.step()
        assert [e.sequence for e in batch.entries] == [self.first]

    def test_its_tokens_are_the_same_as_without_preemption(self):
        self.engine.run()
        assert self.engine.scheduler.num_preemptions >= 1
        for sequence in (self.first, self.second):
            prompt = list(sequence.request.prompt_token_ids)
            assert sequence.output_token_ids == expected_tokens(prompt, num_tokens=12, vocab_size=1000)
        self.engine.assert_nothing_leaked()


def test_the_oldest_request_is_never_preempted():
    engine = OverlappedEngine(PagedFakeRunner(num_blocks=11, max_num_reqs=8, max_num_batched_tokens=64))
    sequences = [make_sequence(prompt_of(4, first=10 * i), max_tokens=30) for i in range(5)]
    engine.add(*sequences)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert sequences[0].generation == 0


def test_a_lone_request_may_fill_the_whole_cache():
    engine = OverlappedEngine(PagedFakeRunner(num_blocks=5, block_size=4, max_num_batched_tokens=64))
    sequence = make_sequence(prompt_of(15), max_tokens=1)
    engine.add(sequence)
    engine.run()
    assert sequence.finish_reason == "length"


def test_admission_keeps_a_share_of_a_large_cache_for_those_who_run():
    engine = OverlappedEngine(PagedFakeRunner(num_blocks=401, block_size=1, max_num_batched_tokens=1000))
    first, second = make_sequence(prompt_of(200), max_tokens=50), make_sequence(prompt_of(197), max_tokens=1)
    engine.add(first)
    engine.step()
    engine.add(second)
    engine.step()
    assert second.state is SequenceState.WAITING
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_prefills_under_way_are_counted_before_a_newcomer_is_let_in():
    engine = OverlappedEngine(PagedFakeRunner(num_blocks=11, block_size=4, max_num_batched_tokens=8))
    long, late = make_sequence(prompt_of(32), max_tokens=1), make_sequence(prompt_of(12), max_tokens=1)
    engine.add(long, late)
    while not long.is_finished:
        engine.step()
        assert engine.scheduler.num_preemptions == 0
    engine.run()
    assert late.finish_reason == "length"


@pytest.mark.parametrize("moment", ["waiting", "running", "in_flight", "finished"])
def test_a_sequence_can_end_at_any_moment(moment):
    engine = OverlappedEngine(PagedFakeRunner())
    sequence, other = make_sequence(prompt_of(9)), make_sequence(prompt_of(5))
    engine.add(other, sequence)
    scheduler = engine.scheduler
    if moment == "running":
        engine.step()
    elif moment == "in_flight":
        batch = engine.submit()
        assert any(e.sequence is sequence for e in batch.entries)
    elif moment == "finished":
        while not sequence.is_finished:
            engine.step()
    scheduler.finish(sequence, reason="abort")
    assert sequence.is_finished
    assert sequence.finish_reason == ("length" if moment == "finished" else "abort")
    assert sequence not in scheduler.running
    assert sequence not in scheduler.waiting
    if moment == "in_flight":
        engine.complete_oldest()
        assert engine.num_dropped == 1
    engine.run()
    assert other.finish_reason == "length"
    engine.assert_nothing_leaked()


def test_blocks_of_an_aborted_sequence_wait_for_the_step_in_flight():
    engine = OverlappedEngine(PagedFakeRunner(num_blocks=4, block_size=4, max_num_batched_tokens=64))
    aborted, waiting = make_sequence(prompt_of(8), max_tokens=4), make_sequence(prompt_of(8), max_tokens=4)
    engine.add(aborted, waiting)
    batch = engine.scheduler.schedule()
    engine.scheduler.finish(aborted, reason="abort")
    assert engine.scheduler.allocator.num_held == 2
    assert engine.scheduler.schedule() is None
    engine.scheduler.complete(batch)
    assert chunks(engine.scheduler.schedule()) == [(1, 0, 8)]


def test_a_step_in_flight_keeps_the_block_table_it_was_given():
    engine = OverlappedEngine(PagedFakeRunner())
    sequence = make_sequence(prompt_of(9))
    engine.add(sequence)
    (entry,) = engine.scheduler.schedule().entries
    table = list(entry.block_table)
    engine.scheduler.finish(sequence, reason="abort")
    assert entry.block_table == table
    assert sequence.block_table == []


def test_a_sequence_preempted_in_flight_drops_the_late_token_and_draws_the_same_again():
    engine = OverlappedEngine(
        PagedFakeRunner(num_blocks=7, block_size=4, max_num_batched_tokens=64), num_ahead=1
    )
    first, second = (
        make_sequence(prompt_of(8), max_tokens=12),
        make_sequence(prompt_of(8, first=50), max_tokens=12),
    )
    engine.add(first, second)
    engine.run()
    assert engine.scheduler.num_preemptions >= 1
    assert engine.num_dropped >= 1
    for sequence in (first, second):
        prompt = list(sequence.request.prompt_token_ids)
        assert sequence.output_token_ids == expected_tokens(prompt, num_tokens=12, vocab_size=1000)
    engine.assert_nothing_leaked()


def test_running_ahead_never_schedules_past_the_last_token():
    engine = OverlappedEngine(PagedFakeRunner(), num_ahead=1)
    sequence = make_sequence(prompt_of(3), max_tokens=3)
    engine.add(sequence)
    ends = []
    while engine.scheduler.has_unfinished:
        batch = engine.step()
        if batch is not None:
            ends.append(batch.entries[0].end)
    assert ends == [3, 4, 5]


def test_a_token_drawn_after_the_end_of_a_sequence_is_dropped_when_running_ahead():
    prompt = prompt_of(3)
    tokens = expected_tokens(prompt, num_tokens=3, vocab_size=1000)
    engine = OverlappedEngine(PagedFakeRunner(), num_ahead=1)
    sequence = make_sequence(prompt, max_tokens=10, stop=frozenset({tokens[2]}))
    engine.add(sequence)
    engine.run()
    assert sequence.output_token_ids == tokens
    assert engine.num_dropped == 1
    engine.assert_nothing_leaked()


WORKLOADS = st.lists(
    st.tuples(st.integers(1, 24), st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=14
)


@settings(max_examples=50, deadline=None)
@given(
    work=WORKLOADS,
    num_blocks=st.integers(10, 40),
    block_size=st.sampled_from([1, 4, 7]),
    max_num_reqs=st.integers(1, 9),
    budget=st.integers(1, 40),
    num_ahead=st.integers(0, 2),
)
def test_any_workload_finishes_with_the_right_tokens_in_order_and_without_a_leak(
    work, num_blocks, block_size, max_num_reqs, budget, num_ahead
):
    runner = PagedFakeRunner(
        num_blocks=num_blocks, block_size=block_size, max_num_reqs=max_num_reqs, max_num_batched_tokens=budget
    )
    engine = OverlappedEngine(runner, num_ahead=num_ahead)
    capacity = (num_blocks - 1) * block_size
    sequences = []
    for number, (num_prompt, max_tokens, pause) in enumerate(work):
        num_prompt = min(num_prompt, capacity - 1)
        sequence = make_sequence(
            prompt_of(num_prompt, first=37 * number), max_tokens=min(max_tokens, capacity - num_prompt)
        )
        sequences.append(sequence)
        engine.add(sequence)
        for _ in range(pause):
            engine.step()
    engine.run()
    for sequence in sequences:
        prompt = list(sequence.request.prompt_token_ids)
        assert sequence.output_token_ids == expected_tokens(
            prompt, num_tokens=sequence.request.max_total_tokens - len(prompt), vocab_size=1000
        )
    engine.assert_nothing_leaked()
    steps = [engine.first_token_step[s.arrival] for s in sequences]
    if num_ahead == 0:
        assert steps == sorted(steps), "first come, first served"


@settings(max_examples=40, deadline=None)
@given(
    work=WORKLOADS,
    aborts=st.lists(st.tuples(st.integers(0, 13), st.integers(0, 3))),
    num_ahead=st.integers(0, 2),
)
def test_aborts_at_any_moment_leak_nothing_and_harm_nobody(work, aborts, num_ahead):
    engine = OverlappedEngine(PagedFakeRunner(num_blocks=16, max_num_reqs=5), num_ahead=num_ahead)
    sequences = [make_sequence(prompt_of(n, first=31 * i), max_tokens=m) for i, (n, m, _) in enumerate(work)]
    engine.add(*sequences)
    for victim, num_steps in aborts:
        for _ in range(num_steps):
            engine.step()
        engine.scheduler.finish(sequences[victim % len(sequences)], reason="abort")
    engine.run()
    for sequence in sequences:
        prompt = list(sequence.request.prompt_token_ids)
        expected = expected_tokens(prompt, num_tokens=sequence.params.max_tokens, vocab_size=1000)
        assert sequence.output_token_ids == expected[: sequence.num_output_tokens]
        if sequence.finish_reason != "abort":
            assert sequence.output_token_ids == expected
    engine.assert_nothing_leaked()
