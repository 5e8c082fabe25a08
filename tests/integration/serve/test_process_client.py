"""The client over a real engine process whose runner is a fake."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_process_fakes import (
    CRASHING_TOKEN,
    KILLING_TOKEN,
    LOOP_BREAKING_TOKEN,
    OpenFake,
    expected_answer,
)

from gapless.errors import ConfigError, RequestError
from gapless.serve.client import EngineBusyError, EngineDeadError, EngineDrainingError
from gapless.serve.engine_loop import MAX_FAILED_STEPS
from gapless.serve.messages import Delta, EmbedRequest, GenerateRequest
from gapless.serve.process_client import ProcessClient


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


@asynccontextmanager
async def opened(opener: OpenFake | None = None, **options: Any) -> AsyncIterator[ProcessClient]:
    client = ProcessClient(opener or OpenFake(), **options)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def request(
    name: str, prompt: list[int], num_tokens: int, *, stream: bool = True, **params: Any
) -> GenerateRequest:
    params = {"max_tokens": num_tokens, "temperature": 0.0, **params}
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, params=params, stream=stream)


async def collect(client: ProcessClient, asked: GenerateRequest) -> dict[int, list[Delta]]:
    """All deltas by choice."""
    result: dict[int, list[Delta]] = {}
    async for deltas in client.generate(asked):
        for delta in deltas:
            result.setdefault(delta.index, []).append(delta)
    return result


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_a_reset_of_the_prefix_cache_is_answered_and_fails_with_a_dead_engine():
    async def scenario():
        async with opened() as client:
            await client.reset_prefix_cache()
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            await client.wait_dead()
            with pytest.raises(EngineDeadError):
                await client.reset_prefix_cache()

    run(scenario)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_deltas_add_up_to_the_answer(stream, n):
    async def scenario():
        async with opened() as client:
            choices = await collect(client, request("a", [5, 6], 20, stream=stream, n=n, logprobs=2))
            assert sorted(choices) == list(range(n))
            for deltas in choices.values():
                expected = expected_answer([5, 6], 20)
                assert tokens_of(deltas) == expected
                assert "".join(d.text for d in deltas) == "".join(f" {t}" for t in expected)
                logprobs = [step for d in deltas for step in d.logprobs]
                assert [step[0].token_id for step in logprobs] == expected
                assert all(len(step) == 3 and step[0].text for step in logprobs)
                assert [d.finish_reason for d in deltas][-1] == "length"
                assert all(d.finish_reason is None for d in deltas[:-1])
                assert len(deltas) == 1 or stream

    run(scenario)


def test_a_thousand_streams_lose_and_mix_nothing():
    async def scenario():
        async with opened(max_queued_requests=2000) as client:

            async def one(i: int) -> None:
                prompt, num_tokens = [i + 1, i], 10 + i % 23
                choices = await collect(client, request(f"r{i}", prompt, num_tokens))
                assert tokens_of(choices[0]) == expected_answer(prompt, num_tokens)

            await asyncio.gather(*(one(i) for i in range(1000)))
            assert client.num_inside == 0
            report = await client.report()
            assert len(report["graphs"]) == 2

    run(scenario)


def test_a_slow_reader_holds_nobody_up_and_misses_nothing():
    async def scenario():
        async with opened() as client:
            slow = client.generate(request("slow", [1], 2000))
            first = await anext(slow)
            quick = await collect(client, request("quick", [2], 500))
            assert tokens_of(quick[0]) == expected_answer([2], 500)
            while client.num_inside:  # the engine has finished the slow one's answer as well
                await asyncio.sleep(0.01)
            rest = [delta async for deltas in slow for delta in deltas]
            assert len(rest) == 1, "what was not taken is merged"
            assert tokens_of([*first, *rest]) == expected_answer([1], 2000)

    run(scenario)


def test_closing_a_stream_aborts_its_request_and_frees_its_blocks():
    async def scenario():
        async with opened(OpenFake(step_s=0.002)) as client:
            stream = client.generate(request("a", list(range(1, 100)), 3000))
            await anext(stream)
            await stream.aclose()
            assert client.num_inside == 0
            await wait_for(lambda: client.stats()["requests_finished"].get("abort") == 1, client)
            stats = client.stats()
            assert (stats["num_running"], stats["kv_usage"]) == (0, 0.0)

    run(scenario)


def test_cancelling_a_reader_aborts_its_request():
    async def scenario():
        async with opened(OpenFake(step_s=0.05)) as client:
            task = asyncio.create_task(collect(client, request("a", [1], 3000)))
            await asyncio.sleep(0.12)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert client.num_inside == 0
            await wait_for(lambda: client.stats()["requests_finished"].get("abort") == 1, client)

    run(scenario)


def test_a_full_queue_refuses_and_says_when_to_come_back():
    async def scenario():
        async with opened(OpenFake(max_num_reqs=2, step_s=0.005), max_queued_requests=3) as client:
            tasks = [asyncio.create_task(collect(client, request(f"r{i}", [i + 1], 40))) for i in range(5)]
            await asyncio.sleep(0)
            with pytest.raises(EngineBusyError, match=r"at most 5 may \(2 running, 3 queued\)") as caught:
                await collect(client, request("late", [9], 5))
            assert 1 <= caught.value.retry_after_s <= 60
            for task in tasks:
                await task
            await collect(client, request("late", [9], 5))  # there is room again

    run(scenario)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty prompt"),
        ([50_001], {}, "must be between 0 and 49999"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"warmth": 1}, "warmth"),
        ([1] * 5000, {}, "maximum model length is 4096"),
        ([1], {"n": 0}, "n=0"),
        (["a"], {}, "Expected `int`"),
        ([1.5], {}, "Expected `int`"),
    ],
)
def test_what_the_engine_refuses_is_the_callers_error(prompt, params, message):
    async def scenario():
        async with opened() as client:
            with pytest.raises(RequestError, match=message):
                await collect(client, request("bad", prompt, 4, **params))
            assert client.num_inside == 0
            assert tokens_of((await collect(client, request("good", [1], 4)))[0]) == expected_answer([1], 4)

    run(scenario)


def test_a_step_that_fails_ends_its_requests_and_nothing_else():
    async def scenario():
        async with opened() as client:
            (deltas,) = (await collect(client, request("bad", [CRASHING_TOKEN], 4))).values()
            assert deltas[-1].finish_reason == "error"
            assert "this prompt breaks its step" in deltas[-1].error
            assert tokens_of((await collect(client, request("good", [1], 4)))[0]) == expected_answer([1], 4)
            assert client.is_healthy

    run(scenario)


def test_steps_that_only_fail_end_the_engine():
    async def scenario():
        async with opened() as client:
            for i in range(MAX_FAILED_STEPS):
                asked = request(f"bad{i}", [CRASHING_TOKEN], 4)
                (deltas,) = (await collect(client, asked)).values()
                assert deltas[-1].finish_reason == "error"
            assert "steps in a row have failed" in str(await client.wait_dead())
            assert await client.close() == 1

    run(scenario)


@pytest.mark.parametrize("how", ["kill", "crash", "loop"])
def test_an_engine_that_dies_fails_every_stream_at_once(how):
    async def scenario():
        client = ProcessClient(OpenFake(step_s=0.002))
        await client.start()
        tasks = [asyncio.create_task(collect(client, request(f"r{i}", [i + 1], 4000))) for i in range(50)]
        embedding = asyncio.create_task(client.embed(EmbedRequest(request_id="e", prompt_token_ids=[1, 2])))
        await embedding
        await asyncio.sleep(0.1)
        start = time.monotonic()
        if how == "kill":
            os.kill(client.pid, signal.SIGKILL)
        else:
            token = KILLING_TOKEN if how == "crash" else LOOP_BREAKING_TOKEN
            tasks.append(asyncio.create_task(collect(client, request("last", [token], 4))))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - start < 2
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert not client.is_healthy
        assert client.num_inside == 0
        with pytest.raises(EngineDeadError):
            await collect(client, request("after", [1], 4))
        with pytest.raises(EngineDeadError):
            await client.report()
        assert await client.close() != 0

    run(scenario)


def test_draining_refuses_new_requests_and_finishes_what_runs():
    async def scenario():
        client = ProcessClient(OpenFake(step_s=0.005))
        await client.start()
        running = asyncio.create_task(collect(client, request("a", [1], 30)))
        await asyncio.sleep(0.02)
        client.begin_drain()
        assert client.is_draining
        assert not client.is_healthy
        with pytest.raises(EngineDrainingError):
            await collect(client, request("b", [2], 4))
        assert await client.wait_idle(10)
        assert tokens_of((await running)[0]) == expected_answer([1], 30)
        assert await client.close() == 0

    run(scenario)


def test_what_outlives_the_drain_is_aborted_and_the_exit_is_clean():
    async def scenario():
        client = ProcessClient(OpenFake(step_s=0.005))
        await client.start()
        endless = asyncio.create_task(collect(client, request("a", [1], 4000)))
        await asyncio.sleep(0.05)
        client.begin_drain()
        assert not await client.wait_idle(0.1)
        assert await client.close(drain_s=0.1) == 0
        (deltas,) = (await endless).values()
        assert deltas[-1].finish_reason == "abort"
        assert tokens_of(deltas) == expected_answer([1], len(tokens_of(deltas)))

    run(scenario)


@pytest.mark.parametrize("dies_first", [False, True])
def test_who_comes_after_the_end_is_told_whether_it_was_a_failure(dies_first):
    async def scenario():
        client = ProcessClient(OpenFake())
        await client.start()
        if dies_first:
            os.kill(client.pid, signal.SIGKILL)
            await client.wait_dead()
        client.begin_drain()
        await client.close()
        with pytest.raises(EngineDeadError if dies_first else EngineDrainingError):
            await collect(client, request("late", [1], 4))

    run(scenario)


def test_a_stopped_engine_is_unhealthy_and_then_killed():
    async def scenario():
        client = ProcessClient(OpenFake(), stalled_after_s=1.5, hung_after_s=3.0)
        await client.start()
        assert client.is_healthy
        os.kill(client.pid, signal.SIGSTOP)
        await asyncio.sleep(2.0)
        assert not client.is_healthy
        assert client.step_age_s() > 1.5
        assert "shown no life" in str(await client.wait_dead())
        assert await client.close() == -signal.SIGKILL

    run(scenario)


def test_progress_is_reported_while_the_engine_opens():
    async def scenario():
        seen = []
        client = ProcessClient(OpenFake())
        await client.start(progress=lambda *step: seen.append(step))
        assert seen == [("weights", 1, 2), ("weights", 2, 2)]
        assert client.info.max_model_len == 4096
        assert await client.close() == 0
        assert await client.close() == 0

    run(scenario)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        ("user", ConfigError, "--max-model-len=1 is too short"),
        ("program", EngineDeadError, "ZeroDivisionError"),
    ],
)
def test_an_engine_that_cannot_start_says_why(error, kind, message):
    async def scenario():
        client = ProcessClient(OpenFake(error=error))
        with pytest.raises(kind, match=message):
            await client.start()

    run(scenario)


def test_a_cancelled_start_leaves_no_process():
    async def scenario():
        client = ProcessClient(OpenFake(open_s=60))
        task = asyncio.create_task(client.start())
        await asyncio.sleep(0.3)
        pid = client.pid
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(scenario)


def test_signals_of_a_terminal_do_not_reach_the_engine():
    async def scenario():
        async with opened() as client:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(client.pid, number)
            assert tokens_of((await collect(client, request("a", [1], 4)))[0]) == expected_answer([1], 4)

    run(scenario)


def test_the_socket_files_are_private_and_go_away():
    async def scenario():
        async with opened() as client:
            folder = Path(client._addresses.folder)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not folder.exists()

    run(scenario)


def test_embeddings_come_back_and_their_errors_too():
    async def scenario():
        async with opened() as client:
            assert await client.embed(EmbedRequest(request_id="e", prompt_token_ids=[3, 4])) == [2.0, 7.0]
            with pytest.raises(RuntimeError, match="this prompt breaks its step"):
                await client.embed(EmbedRequest(request_id="f", prompt_token_ids=[CRASHING_TOKEN]))
            assert client.num_inside == 0

    run(scenario)


def test_a_request_id_in_use_is_refused():
    async def scenario():
        async with opened(OpenFake(step_s=0.01)) as client:
            stream = client.generate(request("a", [1], 100))
            await anext(stream)
            with pytest.raises(RequestError, match="already in use"):
                await collect(client, request("a", [2], 4))
            await stream.aclose()

    run(scenario)


async def wait_for(condition: Callable[[], bool], client: ProcessClient) -> None:
    """Statistics come once a second."""
    deadline = time.monotonic() + 5
    while not (client.stats() and condition()):
        assert time.monotonic() < deadline, client.stats()
        await asyncio.sleep(0.02)
