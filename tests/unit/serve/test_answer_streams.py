"""Deltas on their way to one reader: order, merging, ends."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.serve.client import EngineDeadError
from gapless.serve.messages import Delta, TokenLogprob
from gapless.serve.streams import AnswerStream


def delta(
    index: int, tokens: list[int], *, end: str | None = None, logprobs: bool = False, **values
) -> Delta:
    text = "".join(f" {token}" for token in tokens)
    rows = [[TokenLogprob(token, -1.0, 1)] for token in tokens] if logprobs else None
    return Delta("r", index, text, tokens, rows, end, **values)


def test_what_is_taken_at_once_is_what_was_put():
    async def scenario():
        stream = AnswerStream(1)
        put = delta(0, [1])
        stream.put(put)
        assert await stream.take() == [put]
        assert not stream.is_over

    asyncio.run(scenario())


@settings(max_examples=50, deadline=None)
@given(events=st.lists(st.one_of(st.integers(0, 2), st.none()), max_size=60), logprobs=st.booleans())
def test_however_slow_the_reader_the_sum_is_the_same(events, logprobs):
    """An integer is a delta of that choice, None a look of the reader."""

    async def scenario():
        stream = AnswerStream(3)
        put: dict[int, list[int]] = {0: [], 1: [], 2: []}
        taken: dict[int, list[Delta]] = {0: [], 1: [], 2: []}

        async def look() -> None:
            for one in await stream.take():
                taken[one.index].append(one)

        pending = False
        for number, event in enumerate(events):
            if event is not None:
                put[event].append(number)
                stream.put(delta(event, [number], logprobs=logprobs))
                pending = True
            elif pending:
                await look()
                pending = False
        for index in put:
            stream.put(delta(index, [], end="stop", logprobs=logprobs))
        assert stream.is_complete
        await look()
        assert stream.is_over
        for index, numbers in put.items():
            deltas = taken[index]
            assert [token for d in deltas for token in d.token_ids] == numbers
            assert "".join(d.text for d in deltas) == "".join(f" {n}" for n in numbers)
            assert [d.finish_reason for d in deltas][-1] == "stop"
            assert all(d.finish_reason is None for d in deltas[:-1])
            if logprobs:
                assert [row[0].token_id for d in deltas for row in d.logprobs] == numbers

    asyncio.run(scenario())


def test_merging_keeps_what_only_the_first_or_the_last_delta_says():
    async def scenario():
        stream = AnswerStream(1)
        stream.put(delta(0, [1], prompt_logprobs=[None]))
        stream.put(delta(0, [2]))
        stream.put(delta(0, [3], end="stop", stop_reason="x", num_cached_tokens=16))
        (merged,) = await stream.take()
        assert merged.prompt_logprobs == [None]
        assert (merged.token_ids, merged.stop_reason, merged.num_cached_tokens) == ([1, 2, 3], "x", 16)

    asyncio.run(scenario())


def test_a_failure_is_raised_after_everything_that_came_before_it():
    async def scenario():
        stream = AnswerStream(1)
        stream.put(delta(0, [1]))
        stream.fail(EngineDeadError("gone"))
        assert tokens(await stream.take()) == [1]
        with pytest.raises(EngineDeadError, match="gone"):
            await stream.take()

    asyncio.run(scenario())


def test_a_failure_after_the_end_is_none():
    async def scenario():
        stream = AnswerStream(1)
        stream.put(delta(0, [1], end="stop"))
        stream.fail(EngineDeadError("gone"))
        assert tokens(await stream.take()) == [1]
        assert stream.is_over

    asyncio.run(scenario())


@pytest.mark.parametrize("fails", [False, True])
def test_a_waiting_reader_is_woken(fails):
    async def scenario():
        stream = AnswerStream(1)
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        if fails:
            stream.fail(EngineDeadError("gone"))
            with pytest.raises(EngineDeadError):
                await reader
        else:
            stream.put(delta(0, [7]))
            assert tokens(await reader) == [7]

    asyncio.run(scenario())


def test_a_reader_that_gave_up_waiting_loses_nothing():
    async def scenario():
        stream = AnswerStream(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.take(), 0.01)
        stream.put(delta(0, [7]))
        assert tokens(await stream.take()) == [7]

    asyncio.run(scenario())


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for one in deltas for token in one.token_ids]
