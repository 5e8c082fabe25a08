"""Engines over one runner: they may take turns; at once they would write to the same blocks."""

from __future__ import annotations

import gc

import pytest
from engine_fakes import PagedFakeRunner, expected_tokens

from gapless.engine.core import EngineCore
from gapless.errors import GaplessError
from gapless.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, detokenize=False)


def finish(core: EngineCore) -> list[int]:
    tokens: list[int] = []
    while core.has_unfinished():
        for output in core.step():
            tokens = list(output.outputs[0].token_ids)
    return tokens


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_second_engine_is_refused_while_the_first_has_requests(ahead: int, num_steps: int) -> None:
    runner = PagedFakeRunner(max_steps_ahead=ahead)
    first, second = EngineCore(runner), EngineCore(runner)
    first.add_request("a", [1, 2, 3], GREEDY)
    for _ in range(num_steps):
        first.step()
    with pytest.raises(GaplessError, match="another engine has 1 unfinished request"):
        second.add_request("b", [7, 8, 9], GREEDY)
    assert not second.has_unfinished()
    assert finish(first) == expected_tokens([1, 2, 3], num_tokens=5, vocab_size=runner.vocab_size)
    second.add_request("b", [7, 8, 9], GREEDY)
    assert finish(second) == expected_tokens([7, 8, 9], num_tokens=5, vocab_size=runner.vocab_size)


def test_engines_take_turns_in_any_order() -> None:
    runner = PagedFakeRunner(max_steps_ahead=1)
    engines = [EngineCore(runner), EngineCore(runner)]
    for number, which in enumerate((0, 1, 1, 0, 0, 1)):
        engines[which].add_request("r", [number, 5], GREEDY)
        assert finish(engines[which]) == expected_tokens([number, 5], num_tokens=5, vocab_size=1000)


def test_aborting_what_runs_hands_the_runner_on() -> None:
    runner = PagedFakeRunner(max_steps_ahead=1)
    first, second = EngineCore(runner), EngineCore(runner)
    first.add_request("a", [1, 2, 3], GREEDY)
    first.step()
    first.abort_all()
    with pytest.raises(GaplessError, match="another engine"):
        second.add_request("b", [7], GREEDY)
    first.step()  # its last output has been fetched now, and no step is in flight
    second.add_request("b", [7], GREEDY)


def test_an_engine_that_was_dropped_half_way_blocks_nobody() -> None:
    runner = PagedFakeRunner(max_steps_ahead=1)
    first = EngineCore(runner)
    first.add_request("a", [1, 2, 3], GREEDY)
    first.step()
    gc.disable()  # it must not take a collection to be rid of it
    try:
        del first
        EngineCore(runner).add_request("b", [7], GREEDY)
    finally:
        gc.enable()


def test_engines_over_different_runners_know_nothing_of_each_other() -> None:
    for core in [EngineCore(PagedFakeRunner()) for _ in range(3)]:
        core.add_request("a", [1], GREEDY)


def test_cached_prefixes_are_forgotten_when_another_engine_was_there() -> None:
    runner = PagedFakeRunner(max_steps_ahead=1)
    first = EngineCore(runner, enable_prefix_caching=True)
    prompt = list(range(20))
    expected = expected_tokens(prompt, num_tokens=5, vocab_size=runner.vocab_size)
    for number in range(3):
        first.add_request("a", prompt, GREEDY)
        assert finish(first) == expected
        other = EngineCore(runner)
        other.add_request("b", [number, *range(100, 140)], GREEDY)
        finish(other)
        del other  # even then: what it wrote is there
