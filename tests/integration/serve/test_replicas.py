"""Several real engine processes, with fake runners, behind one client."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from engine_process_fakes import KILLING_TOKEN, OpenFake, OpenShowing, expected_answer

from gapless.errors import ConfigError, RequestError
from gapless.serve.client import (
    EngineBusyError,
    EngineDeadError,
    EngineDrainingError,
    EngineRestartingError,
    ReplicaLostError,
)
from gapless.serve.messages import EmbedRequest, GenerateRequest
from gapless.serve.replica import RestartRule
from gapless.serve.replicas import ReplicaSet

NEVER = RestartRule(max_restarts=0)
SOON = RestartRule(first_pause_s=0.01)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


@asynccontextmanager
async def opened(opener: Any = None, *, num: int = 2, **options: Any) -> AsyncIterator[ReplicaSet]:
    options = {"environments": [{}] * num, "restart": NEVER, **options}
    client = ReplicaSet(opener or OpenFake(), **options)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def request(name: str, prompt: list[int], num_tokens: int, **params: Any) -> GenerateRequest:
    params = {"max_tokens": num_tokens, "temperature": 0.0, **params}
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, params=params)


async def tokens_of(client: ReplicaSet, asked: GenerateRequest) -> list[int]:
    tokens: list[int] = []
    async for deltas in client.generate(asked):
        tokens += [token for delta in deltas for token in delta.token_ids]
    return tokens


def kill(client: ReplicaSet, index: int) -> None:
    pid = client.replicas()[index].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def until(condition: Callable[[], Any], limit_s: float = 20) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        await asyncio.sleep(0.01)


def test_one_killed_under_load_loses_no_request_that_had_not_begun_and_comes_back():
    """Six places for forty requests: many wait in the queue of the replica that dies."""

    async def scenario():
        opener = OpenFake(step_s=0.003, max_num_reqs=3)
        async with opened(opener, restart=SOON) as client:
            begun: set[int] = set()
            lost: set[int] = set()

            async def one(number: int) -> None:
                prompt, tokens = [number + 1, 5], []
                try:
                    async for deltas in client.generate(request(f"r{number}", prompt, 40)):
                        begun.add(number)
                        tokens += [token for delta in deltas for token in delta.token_ids]
                except ReplicaLostError:
                    assert number in begun
                    lost.add(number)
                else:
                    assert tokens == expected_answer(prompt, 40)

            tasks = [asyncio.create_task(one(number)) for number in range(40)]
            await until(lambda: len(begun) >= 10)
            before = client.stats().get("generation_tokens", 0)
            kill(client, 1)
            await until(lambda: not client.replicas()[1].is_healthy)
            assert client.is_healthy
            assert client.is_alive
            await asyncio.gather(*tasks)
            assert len(lost) <= 3
            views = client.replicas()
            assert views[1].num_routed.get("retry", 0) == 0
            assert views[0].num_routed["retry"] >= 1  # more, if this process was not kept waiting
            assert client.num_inside == 0
            assert [view.load_tokens for view in views] == [0, 0]

            await until(lambda: client.replicas()[1].is_healthy)
            assert client.replicas()[1].num_restarts == 1
            assert "signal 9" in (client.replicas()[1].last_death or "")
            await asyncio.gather(*(tokens_of(client, request(f"l{i}", [i + 1], 3)) for i in range(6)))
            assert all(view.stats for view in client.replicas())
            assert client.stats()["generation_tokens"] >= before
            assert await client.wait_idle(1)
            assert await client.close() == 0

    run(scenario)


def test_a_request_that_kills_is_tried_twice_and_does_not_take_a_third_replica_along():
    async def scenario():
        async with opened(num=3) as client:
            with pytest.raises(ReplicaLostError, match=r"replica \d, which ran this request, has died"):
                await tokens_of(client, request("poison", [KILLING_TOKEN], 4))
            await until(lambda: [view.state for view in client.replicas()].count("dead") == 2)
            views = client.replicas()
            assert sorted(view.state for view in views) == ["dead", "dead", "ready"]
            assert await tokens_of(client, request("a", [7], 4)) == expected_answer([7], 4)
            assert client.is_healthy

            # The last one dies as well: nothing is left that could come back.
            kill(client, next(view.index for view in views if view.state == "ready"))
            death = await client.wait_dead()
            assert "all 3 replicas have died" in str(death)
            assert not client.is_alive
            assert not client.is_healthy
            for call in (
                lambda: tokens_of(client, request("b", [1], 1)),
                lambda: client.embed(EmbedRequest(request_id="c", prompt_token_ids=[1])),
                client.report,
                client.reset_prefix_cache,
            ):
                with pytest.raises(EngineDeadError):
                    await call()
            assert client.step_age_s() is None

    run(scenario)


def test_while_all_are_started_again_requests_are_told_to_come_back():
    async def scenario():
        async with opened(OpenFake(open_s=0.2), restart=RestartRule(first_pause_s=0.2)) as client:
            running = asyncio.create_task(tokens_of(client, request("a", [1], 4000)))
            await until(lambda: client.num_inside)
            kill(client, 0)
            kill(client, 1)
            with pytest.raises((EngineRestartingError, ReplicaLostError)):
                await running
            await until(lambda: not any(view.is_healthy for view in client.replicas()))
            with pytest.raises(EngineRestartingError, match="started again"):
                await tokens_of(client, request("b", [1], 1))
            assert client.is_alive
            assert not client.is_healthy
            assert {view.state for view in client.replicas()} == {"starting"}
            await until(lambda: client.is_healthy)
            assert await tokens_of(client, request("c", [3], 5)) == expected_answer([3], 5)

    run(scenario)


def test_limits_count_for_all_replicas_together_and_a_drain_lets_what_runs_finish():
    async def scenario():
        async with opened(OpenFake(step_s=0.01, max_num_reqs=2), max_queued_requests=3) as client:
            assert client.info.max_running_requests == 4
            tasks = [asyncio.create_task(tokens_of(client, request(f"r{i}", [i + 1], 20))) for i in range(7)]
            await until(lambda: client.num_inside == 7)
            with pytest.raises(EngineBusyError, match=r"at most 7 may \(4 running, 3 queued\)"):
                await tokens_of(client, request("late", [1], 1))
            client._admission.max_queued = 9
            with pytest.raises(RequestError, match="already in use"):
                await tokens_of(client, request("r3", [1], 1))
            client.begin_drain()
            assert client.is_draining
            assert not client.is_healthy
            with pytest.raises(EngineDrainingError):
                await tokens_of(client, request("later", [1], 1))
            assert not await client.wait_idle(0.01)
            assert await client.wait_idle(20)
            for number, task in enumerate(tasks):
                assert await task == expected_answer([number + 1], 20)
            assert await client.close() == 0
            assert "shut down" in str(await client.wait_dead())
            with pytest.raises(EngineDrainingError):  # the end was no failure
                await tokens_of(client, request("last", [1], 1))

    run(scenario)


def test_prompts_that_begin_alike_go_to_one_replica_until_caches_are_emptied():
    async def scenario():
        async with opened() as client:
            first, second = list(range(1, 65)), list(range(1001, 1065))
            for turn in range(4):
                for name, prompt in (("first", first), ("second", second)):
                    asked = request(f"{name}{turn}", [*prompt, turn, 5], 2)
                    assert await tokens_of(client, asked) == expected_answer(asked.prompt_token_ids, 2)
            views = client.replicas()
            assert [view.num_routed for view in views] == [{"load": 1, "prefix": 3}] * 2

            await client.reset_prefix_cache()
            await tokens_of(client, request("after", [*first, 9], 2))
            assert sum(view.num_routed["load"] for view in client.replicas()) == 3
            report = await client.report()
            assert sorted(report["replicas"]) == ["0", "1"]
            assert report["graphs"] == report["replicas"]["0"]["graphs"]

    run(scenario)


def test_embeddings_are_retried_and_given_up_readers_free_their_place():
    async def scenario():
        async with opened(OpenFake(step_s=0.02)) as client:
            stream = client.generate(request("a", [1], 3000))
            await anext(stream)
            await stream.aclose()
            assert client.num_inside == 0
            asked = [
                asyncio.create_task(client.embed(EmbedRequest(request_id=f"e{i}", prompt_token_ids=[i, 2])))
                for i in range(4)
            ]
            await until(lambda: client.num_inside == 4)
            kill(client, 0)
            assert [await task for task in asked] == [[2.0, i + 2.0] for i in range(4)]
            assert client.num_inside == 0

    run(scenario)


def test_each_process_has_its_environment():
    async def scenario():
        environments = [{"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
        async with opened(OpenShowing(names=("CUDA_VISIBLE_DEVICES",)), environments=environments) as client:
            told = [replica.client.info.config for replica in client._replicas]
            assert told == environments == [view.environment for view in client.replicas()]
        assert "CUDA_VISIBLE_DEVICES" not in os.environ or os.environ["CUDA_VISIBLE_DEVICES"] != "6,7"

    run(scenario)


@pytest.mark.parametrize(("error", "kind"), [("user", ConfigError), ("program", EngineDeadError)])
def test_a_replica_that_cannot_start_ends_the_start_of_all(error, kind):
    async def scenario():
        client = ReplicaSet(OpenFake(error=error), environments=[{}, {}])
        with pytest.raises(kind):
            await client.start()
        assert all(replica.client.pid is None or not replica.is_ready for replica in client._replicas)

    run(scenario)


@pytest.mark.parametrize(("num_deaths", "pause_s"), [(1, 1.0), (2, 2.0), (5, 16.0), (7, 60.0), (500, 60.0)])
def test_pauses_double_up_to_a_minute(num_deaths, pause_s):
    assert RestartRule().pause_s(num_deaths) == pause_s
