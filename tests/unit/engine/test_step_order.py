"""Who is computed first where it is only a matter of speed: the longest in decode, prompts before decodes."""

from __future__ import annotations

from typing import Any

import pytest
from engine_fakes import PagedFakeRunner, expected_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import OverlappedEngine, make_sequence

from gapless.engine.core import EngineCore
from gapless.engine.outputs import RequestOutput
from gapless.engine.request import Sequence
from gapless.engine.step import ScheduledBatch
from gapless.llm import LLM
from gapless.sampling.params import SamplingParams

VOCAB_SIZE = 1000


def prompt_of(num_tokens: int, *, first: int = 0) -> list[int]:
    return [(first + i) % VOCAB_SIZE for i in range(num_tokens)]


def make_engine(*, prompts_first: bool, num_ahead: int = 0, **options: Any) -> OverlappedEngine:
    engine = OverlappedEngine(PagedFakeRunner(vocab_size=VOCAB_SIZE, **options), num_ahead=num_ahead)
    engine.scheduler.prompts_first = prompts_first
    return engine


def kinds(batches: list[ScheduledBatch]) -> str:
    """A letter for each step: prompts alone, decodes alone, or a mixture."""
    letters = []
    for batch in batches:
        are_decodes = {entry.is_decode for entry in batch.entries}
        letters.append("m" if len(are_decodes) == 2 else "d" if are_decodes == {True} else "p")
    return "".join(letters)


def all_steps(engine: OverlappedEngine) -> list[ScheduledBatch]:
    batches = []
    while engine.scheduler.has_unfinished or engine.in_flight:
        batch = engine.step()
        if batch is not None:
            batches.append(batch)
    return batches


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_the_longest_sequence_comes_first_in_every_step_of_decode(num_ahead: int) -> None:
    engine = make_engine(prompts_first=False, num_ahead=num_ahead, max_num_batched_tokens=64)
    sequences = [make_sequence(prompt_of(n), max_tokens=9 - i) for i, n in enumerate((3, 9, 5, 9, 12))]
    engine.add(*sequences)
    orders = [
        [entry.sequence.arrival for entry in batch.entries] for batch in all_steps(engine) if batch.is_decode
    ]
    assert orders[0] == [4, 1, 3, 2, 0]  # equal ones in order of arrival
    assert all(order == [i for i in orders[0] if i in order] for order in orders)
    assert len({len(order) for order in orders}) == 5, "sequences have ended one after the other"


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_prompts_that_fill_steps_go_before_decodes(num_ahead: int) -> None:
    options = {"max_num_batched_tokens": 16, "num_ahead": num_ahead, "num_blocks": 100}
    taken = {}
    for prompts_first in (True, False):
        engine = make_engine(prompts_first=prompts_first, **options)
        engine.add(*(make_sequence(prompt_of(12, first=i), max_tokens=4) for i in range(6)))
        taken[prompts_first] = kinds(all_steps(engine))
    assert taken[True] == "ppppmddd"  # 72 tokens: four full steps, and eight beside what decodes
    assert taken[False].startswith("pm")


def test_prompts_that_do_not_fill_a_step_are_mixed_with_decodes() -> None:
    engine = make_engine(prompts_first=True, max_num_batched_tokens=16)
    engine.add(make_sequence(prompt_of(4), max_tokens=8))
    engine.step()
    engine.add(make_sequence(prompt_of(15), max_tokens=8))
    batch = engine.step()
    assert batch is not None
    assert [entry.num_new_tokens for entry in batch.entries] == [1, 15]


def test_decodes_go_on_where_prompts_find_no_blocks() -> None:
    """Nobody waits for prompts that cannot be admitted."""
    engine = make_engine(prompts_first=True, max_num_batched_tokens=8, num_blocks=8, block_size=4)
    engine.add(make_sequence(prompt_of(8), max_tokens=12))
    engine.step()
    engine.add(*(make_sequence(prompt_of(16, first=i), max_tokens=4) for i in range(3)))
    first = engine.scheduler.running[0]
    while not first.is_finished:
        before = first.num_computed_tokens
        for _ in range(3):  # a prompt that is admitted takes two steps
            engine.step()
        assert first.is_finished or first.num_computed_tokens > before
    all_steps(engine)
    engine.assert_nothing_leaked()


def test_decodes_get_their_turn_though_prompts_that_end_at_once_never_stop_coming() -> None:
    engine = make_engine(prompts_first=True, max_num_batched_tokens=8, max_num_reqs=4, num_blocks=100)
    first = make_sequence(prompt_of(3), max_tokens=5)
    engine.add(first)
    engine.step()
    for index in range(60):
        engine.add(*(make_sequence(prompt_of(8, first=index), max_tokens=1) for _ in range(2)))
        engine.step()
    assert first.is_finished
    assert len(engine.scheduler.waiting) > 40, "prompts have filled every step"


@settings(max_examples=60, deadline=None)
@given(
    work=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12),
    num_blocks=st.integers(14, 60),
    budget=st.sampled_from([2, 5, 16, 40]),
    max_num_reqs=st.integers(1, 8),
    num_ahead=st.integers(0, 2),
    aborted=st.sets(st.integers(0, 11), max_size=3),
)
def test_answers_are_the_same_and_all_end(
    work: list[tuple[int, int]],
    num_blocks: int,
    budget: int,
    max_num_reqs: int,
    num_ahead: int,
    aborted: set[int],
) -> None:
    """Over preemption and aborts; the harness checks budgets, fences, the order of arrival and that each
    step's tokens are known somewhere."""
    engine = make_engine(
        prompts_first=True,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_reqs=max_num_reqs,
        num_ahead=num_ahead,
    )
    sequences: list[Sequence] = []
    for index, (num_prompt, max_tokens) in enumerate(work):
        sequences.append(make_sequence(prompt_of(num_prompt, first=31 * index), max_tokens=max_tokens))
        engine.add(sequences[-1])
        if index % 3 == 2:
            engine.step()
    for index in aborted:
        if index < len(sequences):
            engine.scheduler.finish(sequences[index], reason="abort")
    engine.run()
    engine.assert_nothing_leaked()
    for index, (sequence, (num_prompt, max_tokens)) in enumerate(zip(sequences, work, strict=True)):
        prompt = prompt_of(num_prompt, first=31 * index)
        expected = expected_tokens(prompt, num_tokens=max_tokens, vocab_size=VOCAB_SIZE)
        found = sequence.output_token_ids
        assert found == expected if sequence.finish_reason == "length" else index in aborted
        assert found == expected[: len(found)]


def run_core(*streams: bool, favors_throughput: bool = True) -> tuple[str, list[RequestOutput]]:
    """Kinds of steps of an engine with a request for each flag."""
    runner = PagedFakeRunner(max_num_batched_tokens=16, num_blocks=100)
    core = EngineCore(runner, favors_throughput=favors_throughput)
    params = SamplingParams(max_tokens=5, detokenize=False)
    for index, is_streaming in enumerate(streams):
        core.add_request(str(index), prompt_of(12, first=index), params, streams=is_streaming)
    last: dict[str, RequestOutput] = {}
    while core.has_unfinished():
        last |= {output.request_id: output for output in core.step()}
    return kinds(runner.batches), [last[str(index)] for index in range(len(streams))]


def test_an_engine_keeps_decodes_going_as_soon_as_one_request_streams() -> None:
    alone, outputs = run_core(False, False, False, False)
    assert alone.startswith("ppp")
    for streams in ((True, False, False, False), (False, False, False, True)):
        mixed, streamed = run_core(*streams)
        assert mixed.startswith("pm")
        assert [o.outputs[0].token_ids for o in streamed] == [o.outputs[0].token_ids for o in outputs]
    assert run_core(False, False, False, False, favors_throughput=False)[0].startswith("pm")


def test_an_engine_may_wait_again_when_the_last_stream_has_ended() -> None:
    runner = PagedFakeRunner(max_num_batched_tokens=16, num_blocks=100)
    core = EngineCore(runner, favors_throughput=True)
    core.add_request("stream", [1, 2], SamplingParams(max_tokens=2, detokenize=False))
    while core.has_unfinished():
        core.step()
    runner.batches.clear()
    for index in range(4):
        params = SamplingParams(max_tokens=5, detokenize=False)
        core.add_request(str(index), prompt_of(12, first=index), params, streams=False)
    while core.has_unfinished():
        core.step()
    assert kinds(runner.batches).startswith("ppp")


@pytest.mark.parametrize("is_stream", [False, True])
def test_generate_favors_throughput_and_stream_does_not(is_stream: bool) -> None:
    runner = PagedFakeRunner(max_num_batched_tokens=16, num_blocks=100)
    llm = LLM._from_parts(runner, None)
    prompts = [prompt_of(12, first=index) for index in range(4)]
    params = SamplingParams(max_tokens=5, detokenize=False)
    if is_stream:
        list(llm.stream(prompts, params))
    else:
        llm.generate(prompts, params)
    assert kinds(runner.batches).startswith("pm" if is_stream else "ppp")
